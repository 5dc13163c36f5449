"""Residual networks: five families, one file.

- `resnet20-gn`: ResNet-20 for CIFAR with GroupNorm (FedTHE, appendix C.1; BTFL, appendix B). `width` is the papers'
  scaling factor: 1 for CIFAR-10 (d = 64), 4 for ImageNet-32 (d = 256); two groups per GroupNorm.
- `resnet20-bn`: ResNet-8 to ResNet-110 for CIFAR with BatchNorm (K. He et al., "Deep Residual Learning for Image
  Recognition", CVPR 2016, section 4.2). `depth` = 6n + 2, `width` counts the maps of the first stage, d = 4 width.
- `wide-resnet`: WRN-28-10, WRN-16-2, ... (S. Zagoruyko and N. Komodakis, "Wide Residual Networks", BMVC 2016, table 1).
  `depth` = 6n + 4, d = 64 width; B(3, 3) blocks without dropout.
- `resnext29`: ResNeXt-29 for CIFAR, 32x4d, 8x64d, ... (S. Xie et al., "Aggregated Residual Transformations for Deep
  Neural Networks", CVPR 2017, section 5.3). `cardinality` groups of `base_width` channels in the first stage, doubled
  with each stage; d = 1024.
- `resnet18`, `resnet50`: torchvision's networks (ATP, section 6; FedICON, appendix A.4), d = 512 and 2048, with the
  ImageNet stem (7x7, stride 2, max pooling) for images from 32x32 upwards. `small_stem=True` uses a 3x3 convolution of
  stride 1 without pooling instead, as is usual for 32x32 images and training from scratch. Published ImageNet weights
  expect `mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)`; nothing is downloaded.

The CIFAR networks have a 3x3 stem, three stages of n blocks with maps doubled from stage to stage, and an average over
positions. The first block of the second and of the third stage halves the map. Convolutions have no bias and start from
He's normal initialization by fan-out. The network ends with a ReLU before the average, so z ≥ 0. `pretrained` names a
file of weights with the network's own parameter names (see `load_weights`).

Shortcuts of blocks that change the shape. He et al. use the parameter-free option A on CIFAR (every second position,
zeros for the new maps, placed last); so does `resnet20-bn`. The published federated code of `resnet20-gn` uses option
B, a 1x1 convolution and a norm; so does ResNeXt. Wide ResNet has a 1x1 convolution of the activated input.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from fedtta.models.info import ModelInfo, Option, choice, flag, is_whole, optional_path, require_image_size, whole
from fedtta.models.weights import load_weights

#: Number of channels → normalization layer.
Norm = Callable[[int], nn.Module]
#: (input maps, stage 1 to 3, stride) → block and its output maps.
BlockFactory = Callable[[int, int, int], tuple[nn.Module, int]]


def he_normal(network: nn.Module) -> None:
    """Draw the weights of all convolutions from He's normal distribution by fan-out (He et al. 2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


# Blocks -------------------------------------------------------------------------------------------------------------


class PaddedShortcut(nn.Module):
    """Option A of He et al.: every `stride`-th position, and `new_maps` maps of zeros."""

    def __init__(self, stride: int, new_maps: int) -> None:
        super().__init__()
        self.stride, self.new_maps = stride, new_maps

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C + new_maps, H/stride, W/stride]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_maps))


def projection(fan_in: int, maps: int, stride: int, norm: Norm) -> nn.Module:
    """Return option B of He et al.: a 1x1 convolution followed by a norm."""
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(fan_in, maps, 1, stride=stride, bias=False), norm=norm(maps)))


class BasicBlock(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv x))))): [B, fan_in, H, W] → [B, maps, H/stride, W/stride].

    A block that changes the shape has option B as its shortcut if `project`, else option A.
    """

    def __init__(self, fan_in: int, maps: int, stride: int, norm: Norm, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, maps, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(maps)
        self.conv2 = nn.Conv2d(maps, maps, 3, padding=1, bias=False)
        self.norm2 = norm(maps)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != maps:
            self.shortcut = projection(fan_in, maps, stride, norm) if project else PaddedShortcut(stride, maps - fan_in)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, non-negative."""
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(self.shortcut(x) + residual)


class WideBlock(nn.Module):
    """Pre-activated block: a = relu(BN(x)), y = shortcut + conv(relu(BN(conv a))).

    [B, fan_in, H, W] → [B, maps, H/stride, W/stride]. The shortcut is x, or a 1x1 convolution of a where the block
    changes the shape.
    """

    def __init__(self, fan_in: int, maps: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(fan_in)
        self.conv1 = nn.Conv2d(fan_in, maps, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(maps)
        self.conv2 = nn.Conv2d(maps, maps, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or fan_in != maps:
            self.shortcut = nn.Conv2d(fan_in, maps, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of either sign."""
        active = F.relu(self.norm1(x))
        residual = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return (x if self.shortcut is None else self.shortcut(active)) + residual


class GroupedBlock(nn.Module):
    """Bottleneck with a grouped 3x3 convolution: [B, fan_in, H, W] → [B, maps, H/stride, W/stride].

    relu(shortcut + BN(conv1x1(relu(BN(conv3x3 in groups(relu(BN(conv1x1 x)))))))), `inner` maps inside.
    """

    def __init__(self, fan_in: int, inner: int, maps: int, groups: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, maps, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(maps)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != maps:
            self.shortcut = projection(fan_in, maps, stride, nn.BatchNorm2d)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, non-negative."""
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = F.relu(self.norm2(self.conv2(residual)))
        residual = self.norm3(self.conv3(residual))
        return F.relu(self.shortcut(x) + residual)


# Networks for CIFAR -------------------------------------------------------------------------------------------------


def three_stages(
    in_channels: int, stem: int, norm: Norm, blocks: int, block: BlockFactory, *, activate_last: bool = False
) -> tuple[nn.Sequential, int]:
    """Return a CIFAR network [B, C, S, S] → [B, d] and d.

    The norm and ReLU follow the stem, or with `activate_last` (pre-activated blocks) the last stage.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv"] = nn.Conv2d(in_channels, stem, 3, padding=1, bias=False)
    if not activate_last:
        layers["norm"], layers["relu"] = norm(stem), nn.ReLU()
    maps = stem
    for stage in (1, 2, 3):
        for number in range(1, blocks + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            layers[f"stage{stage}_block{number}"], maps = block(maps, stage, stride)
    if activate_last:
        layers["norm"], layers["relu"] = norm(maps), nn.ReLU()
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()  # [B, d]
    network = nn.Sequential(layers)
    he_normal(network)
    return network, maps


def resnet_gn(in_channels: int, image_size: int, *, width: int, groups: int) -> tuple[nn.Module, int]:
    """Return ResNet-20 with GroupNorm and d = 64 width; `groups` must divide 16 width."""
    require_image_size("model 'resnet20-gn'", image_size, 4)
    stem = 16 * width
    if stem % groups:
        raise ValueError(f"model 'resnet20-gn': groups={groups} must divide 16 width = {stem} channels")
    norm = partial(nn.GroupNorm, groups)

    def block(fan_in: int, stage: int, stride: int) -> tuple[nn.Module, int]:
        maps = stem * 2 ** (stage - 1)
        return BasicBlock(fan_in, maps, stride, norm, project=True), maps

    return three_stages(in_channels, stem, norm, 3, block)


def resnet_bn(
    in_channels: int, image_size: int, *, depth: int, width: int, pretrained: str | None
) -> tuple[nn.Module, int]:
    """Return ResNet-`depth` with BatchNorm and d = 4 width."""
    require_image_size("model 'resnet20-bn'", image_size, 4)

    def block(fan_in: int, stage: int, stride: int) -> tuple[nn.Module, int]:
        maps = width * 2 ** (stage - 1)
        return BasicBlock(fan_in, maps, stride, nn.BatchNorm2d, project=False), maps

    network, features = three_stages(in_channels, width, nn.BatchNorm2d, (depth - 2) // 6, block)
    load_pretrained(network, pretrained, f"resnet20-bn (depth={depth}, width={width})")
    return network, features


def wide_resnet(
    in_channels: int, image_size: int, *, depth: int, width: int, pretrained: str | None
) -> tuple[nn.Module, int]:
    """Return WRN-`depth`-`width` and d = 64 width."""
    require_image_size("model 'wide-resnet'", image_size, 4)

    def block(fan_in: int, stage: int, stride: int) -> tuple[nn.Module, int]:
        maps = 16 * width * 2 ** (stage - 1)
        return WideBlock(fan_in, maps, stride), maps

    network, features = three_stages(in_channels, 16, nn.BatchNorm2d, (depth - 4) // 6, block, activate_last=True)
    load_pretrained(network, pretrained, f"wide-resnet (depth={depth}, width={width})")
    return network, features


def resnext29(
    in_channels: int, image_size: int, *, cardinality: int, base_width: int, pretrained: str | None
) -> tuple[nn.Module, int]:
    """Return ResNeXt-29 and d = 1024."""
    require_image_size("model 'resnext29'", image_size, 4)

    def block(fan_in: int, stage: int, stride: int) -> tuple[nn.Module, int]:
        growth = 2 ** (stage - 1)
        maps = 256 * growth
        return GroupedBlock(fan_in, cardinality * base_width * growth, maps, cardinality, stride), maps

    network, features = three_stages(in_channels, 64, nn.BatchNorm2d, 3, block)
    load_pretrained(network, pretrained, f"resnext29 (cardinality={cardinality}, base_width={base_width})")
    return network, features


def load_pretrained(network: nn.Module, path: str | None, name: str) -> None:
    """Load the file of pretrained weights if one is given; raises as `load_weights`."""
    if path is not None:
        load_weights(network, Path(path), name)


# torchvision's networks ---------------------------------------------------------------------------------------------


class TorchvisionBlock(nn.Module):
    """Basic block or bottleneck with torchvision's names: [B, fan_in, H, W] → [B, maps, H/stride, W/stride].

    relu(shortcut(x) + residual); a bottleneck has `inner` maps inside and maps = 4 inner, a basic block maps = inner.
    """

    def __init__(self, fan_in: int, inner: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        maps = 4 * inner if bottleneck else inner
        downsample: nn.Module = nn.Identity()
        if stride != 1 or fan_in != maps:  # drawn first, listed last, as torchvision does
            downsample = nn.Sequential(nn.Conv2d(fan_in, maps, 1, stride=stride, bias=False), nn.BatchNorm2d(maps))
        if bottleneck:
            shapes = [(fan_in, inner, 1, 1), (inner, inner, 3, stride), (inner, maps, 1, 1)]
        else:
            shapes = [(fan_in, inner, 3, stride), (inner, maps, 3, 1)]
        for number, (before, after, kernel, step) in enumerate(shapes, 1):
            convolution = nn.Conv2d(before, after, kernel, stride=step, padding=kernel // 2, bias=False)
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", nn.BatchNorm2d(after))
        self.depth, self.downsample = len(shapes), downsample

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, non-negative."""
        residual = x
        for number in range(1, self.depth + 1):
            residual = self.get_submodule(f"conv{number}")(residual)
            residual = self.get_submodule(f"bn{number}")(residual)
            if number < self.depth:
                residual = F.relu(residual)
        return F.relu(self.downsample(x) + residual)


def torchvision_resnet(
    in_channels: int,
    image_size: int,
    *,
    name: str,
    blocks: Sequence[int],
    bottleneck: bool,
    pretrained: str | None,
    small_stem: bool,
) -> tuple[nn.Module, int]:
    """Return torchvision's network `name` without its classifier, and d.

    Names, initial weights (of an equal state of the generator) and outputs are those of torchvision, of which the
    import alone takes 170 MB: it loads PyTorch's compiler.

    Raises
    ------
    FileNotFoundError
        There is no file `pretrained`.
    ValueError
        `image_size` is below 32 (8 with the small stem), the weights' stem does not fit the options, or the file does
        not hold this network's weights.
    """
    require_image_size(f"model {name!r}", image_size, 8 if small_stem else 32)
    if pretrained is not None and (small_stem or in_channels != 3):
        raise ValueError(
            f"model {name!r}: pretrained={pretrained!r} has the ImageNet stem for 3 channels; it does "
            f"not go with in_channels={in_channels}, small_stem={small_stem}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    layers["bn1"], layers["relu"] = nn.BatchNorm2d(64), nn.ReLU()
    layers["maxpool"] = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
    maps = 64
    for stage, count in enumerate(blocks):
        inner, made = 64 * 2**stage, []
        for number in range(count):
            stride = 2 if stage and not number else 1
            made.append(TorchvisionBlock(maps, inner, stride, bottleneck))
            maps = 4 * inner if bottleneck else inner
        layers[f"layer{stage + 1}"] = nn.Sequential(*made)
    nn.Linear(maps, 1000)  # torchvision's classifier: its draw comes before those of the convolutions
    layers["avgpool"], layers["flatten"] = nn.AdaptiveAvgPool2d(1), nn.Flatten()  # [B, d]
    network = nn.Sequential(layers)
    he_normal(network)
    if small_stem or in_channels != 3:
        kernel, stride, padding = (3, 1, 1) if small_stem else (7, 2, 3)
        network.conv1 = nn.Conv2d(in_channels, 64, kernel, stride=stride, padding=padding, bias=False)
        he_normal(network.conv1)
    load_pretrained(network, pretrained, name)
    return network, maps


# What the registry knows --------------------------------------------------------------------------------------------

RESNET_GN = ModelInfo(
    "ResNet-20 with GroupNorm, d = 64 width (FedTHE, BTFL)",
    resnet_gn,
    {"width": whole(1, minimum=1), "groups": whole(2, minimum=1)},
    normalisation="group",
)
RESNET_BN = ModelInfo(
    "CIFAR ResNet-8 to -110 with BatchNorm, d = 4 width (pFedBBN)",
    resnet_bn,
    {"depth": choice(20, 8, 14, 26, 32, 44, 56, 110), "width": whole(16, minimum=1), "pretrained": optional_path()},
    normalisation="batch",
)
WIDE_RESNET = ModelInfo(
    "Wide ResNet-28-10, -16-2, ... with BatchNorm, d = 64 width (pFedBBN)",
    wide_resnet,
    {
        "depth": Option(28, "6n + 4: 10, 16, 22, 28, ...", lambda value: is_whole(value, 10) and value % 6 == 4),
        "width": whole(10, minimum=1),
        "pretrained": optional_path(),
    },
    normalisation="batch",
)
RESNEXT29 = ModelInfo(
    "ResNeXt-29 32x4d with BatchNorm, d = 1024 (pFedBBN)",
    resnext29,
    {"cardinality": whole(32, minimum=1), "base_width": whole(4, minimum=1), "pretrained": optional_path()},
    normalisation="batch",
)
RESNET18 = ModelInfo(
    "torchvision's ResNet-18 with BatchNorm, d = 512 (ATP, FedICON)",
    partial(torchvision_resnet, name="resnet18", blocks=(2, 2, 2, 2), bottleneck=False),
    {"pretrained": optional_path(), "small_stem": flag(False)},
    normalisation="batch",
)
RESNET50 = ModelInfo(
    "torchvision's ResNet-50 with BatchNorm, d = 2048",
    partial(torchvision_resnet, name="resnet50", blocks=(3, 4, 6, 3), bottleneck=True),
    RESNET18.own_options,
    normalisation="batch",
)
