"""torchvision's ResNet-18 with BatchNorm (He et al. 2016; ATP, section 6; FedICON, appendix A.4).

d = 512; the last block ends with a ReLU and the average over positions keeps its sign, so z ≥ 0. The network
is torchvision's as it is, ImageNet stem (7x7, stride 2, max pooling) included, from 32x32 images upwards: ATP
uses it so, with ImageNet weights. `small_stem=True` replaces the stem by a 3x3 convolution of stride 1
without pooling, usual for 32x32 images and trained from scratch. `pretrained` names a file of torchvision's
resnet18 weights that the user has; nothing is downloaded. Those weights expect `mean=(0.485, 0.456, 0.406),
std=(0.229, 0.224, 0.225)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.options import Option, flag, optional_path, require_image_size

OPTIONS: Mapping[str, Option] = {"pretrained": optional_path(), "small_stem": flag(False)}

FEATURES = 512  # d
COUNTER = "num_batches_tracked"  # older weight files have none


def encoder(in_channels: int, image_size: int, *, pretrained: str | None, small_stem: bool) -> tuple[nn.Module, int]:
    """Return the encoder [B, C, S, S] → [B, 512], and d = 512.

    Raises
    ------
    FileNotFoundError
        There is no file `pretrained`.
    ValueError
        `image_size` is below 32 (8 with the small stem), the weights' stem is not the one asked for, or the
        file is not one of resnet18 weights.
    """
    # Imported here: torchvision takes a second to load, and only this backbone needs it.
    from torchvision.models import resnet18

    require_image_size("model 'resnet18'", image_size, 8 if small_stem else 32)
    if pretrained is not None and (small_stem or in_channels != 3):
        raise ValueError(
            f"model 'resnet18': pretrained={pretrained!r} has the ImageNet stem for 3 channels; it does "
            f"not go with in_channels={in_channels}, small_stem={small_stem}"
        )
    network = resnet18(weights=None)
    network.fc = nn.Identity()
    if small_stem or in_channels != 3:
        network.conv1 = _stem(in_channels, small_stem)
    if small_stem:
        network.maxpool = nn.Identity()
    if pretrained is not None:
        load_weights(network, Path(pretrained))
    return network, FEATURES


def _stem(in_channels: int, small: bool) -> nn.Conv2d:
    """Return the first convolution, initialised as torchvision does."""
    kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    conv = nn.Conv2d(in_channels, 64, kernel, stride=stride, padding=padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def load_weights(network: nn.Module, path: Path) -> None:
    """Copy the resnet18 weights of a .safetensors or .pth file into `network`; the file's `fc` is ignored.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file cannot be read, its names or shapes are not resnet18's, or a value is not finite; the message
        names the file, and nothing is loaded then.
    """
    weights = {name: value for name, value in _read(path).items() if not name.startswith("fc.")}
    mine = network.state_dict()
    needed = {name for name in mine if not name.endswith(COUNTER)}
    missing, unknown = sorted(needed - set(weights)), sorted(set(weights) - set(mine))
    if missing or unknown:
        raise ValueError(f"{path}: not resnet18's weights: missing {missing}, unknown {unknown}")
    for name, value in weights.items():
        if value.shape != mine[name].shape:
            raise ValueError(f"{path}: {name} has shape {tuple(value.shape)}, expected {tuple(mine[name].shape)}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{path}: {name} holds values that are not finite")
    network.load_state_dict({**mine, **weights})


def _read(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a .safetensors, .pth or .pt file, on the CPU; no code in it is run."""
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise ValueError(f"{path}: unknown kind of weights {path.suffix!r}; there are: .safetensors, .pth, .pt")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of pretrained weights at {path}")
    content: object
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises whatever its parser meets first
        raise ValueError(f"{path}: cannot be read as weights: {error}") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path}: holds no mapping from names to tensors")
    return dict(content)
