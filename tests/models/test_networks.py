"""Networks against independent formulas on the same weights, and parameter counts against the papers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta import models
from fedtta.models.cct import CompactTransformer, DropResidual, EncoderLayer

EPS = 1e-5


class Written:
    """The weights of a network by name, and its layers as formulas; records which weights are used."""

    def __init__(self, model: models.TwoHead) -> None:
        self.state = {name.removeprefix("encoder.body."): value for name, value in model.state_dict().items()}
        self.used = {name for name in self.state if name.startswith(("head.", "personal_head."))}

    def get(self, name: str) -> Tensor:
        self.used.add(name)
        return self.state[name]

    def conv(self, name: str, x: Tensor, stride: int = 1, groups: int = 1, padded: bool = True) -> Tensor:
        weight = self.get(f"{name}.weight")
        padding = weight.shape[-1] // 2 if padded else 0
        parts = zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
        y = torch.cat([F.conv2d(a, w, stride=stride, padding=padding) for a, w in parts], 1)
        return y + self.get(f"{name}.bias")[:, None, None] if f"{name}.bias" in self.state else y

    def batch_norm(self, name: str, x: Tensor) -> Tensor:
        parts = (self.get(f"{name}.{part}") for part in ("running_mean", "running_var", "weight", "bias"))
        mean, var, scale, shift = (part[:, None, None] if x.ndim == 4 else part for part in parts)
        return (x - mean) / (var + EPS).sqrt() * scale + shift

    def group_norm(self, name: str, x: Tensor, groups: int = 2) -> Tensor:
        """Normalize over the channels and positions of each group, as Wu & He define it."""
        parts = [part - part.mean((1, 2, 3), keepdim=True) for part in x.chunk(groups, dim=1)]
        y = torch.cat([p / (p.square().mean((1, 2, 3), keepdim=True) + EPS).sqrt() for p in parts], dim=1)
        return y * self.get(f"{name}.weight")[:, None, None] + self.get(f"{name}.bias")[:, None, None]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.get(f"{name}.weight").T + self.get(f"{name}.bias")

    def unused(self) -> set[str]:
        return {name for name in self.state if name not in self.used and not name.endswith("num_batches_tracked")}


def randomised(name: str, **options: Any) -> models.TwoHead:
    """Build a network whose running statistics, scales and shifts differ from the initial ones."""
    model = models.build(name, 3, seed=0, **options).double().eval()
    draw = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm):
            layer.bias.data.copy_(torch.randn(len(layer.bias), generator=draw))
            layer.weight.data.copy_(0.5 + torch.rand(len(layer.weight), generator=draw))
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.copy_(torch.randn(layer.num_features, generator=draw))
            layer.running_var.copy_(0.5 + torch.rand(layer.num_features, generator=draw))
    return model


def random_images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def cnn(w: Written, y: Tensor, hidden_layers: int = 1, norm: str | None = None) -> Tensor:
    for index in (1, 2):
        y = w.conv(f"conv{index}", y, padded=False)
        y = F.max_pool2d(F.relu(w.batch_norm(f"norm{index}", y) if norm else y), 2)
    y = y.flatten(1)
    for index in range(1, hidden_layers + 1):
        y = F.relu(w.linear(f"fc{index}", y))
    return y


def shallow_cnn(w: Written, y: Tensor) -> Tensor:
    for index in (1, 2, 3):
        y = F.relu(w.batch_norm(f"norm{index}", w.conv(f"conv{index}", y, padded=False)))
        y = F.max_pool2d(y, 2) if index < 3 else y
    return F.relu(w.batch_norm("norm4", w.linear("fc4", y.flatten(1))))


def blocks(count: int) -> list[tuple[str, int]]:
    """Name and stride of each block of three stages."""
    return [
        (f"stage{stage}_block{block}", 2 if stage > 1 and block == 1 else 1)
        for stage in (1, 2, 3)
        for block in range(1, count + 1)
    ]


def resnet_bn(w: Written, y: Tensor, depth: int, width: int) -> Tensor:
    """Shortcuts have no parameters: every second position, then zeros for the new maps."""
    y = F.relu(w.batch_norm("norm", w.conv("conv", y)))
    for name, stride in blocks((depth - 2) // 6):
        inner = F.relu(w.batch_norm(f"{name}.norm1", w.conv(f"{name}.conv1", y, stride)))
        inner = w.batch_norm(f"{name}.norm2", w.conv(f"{name}.conv2", inner))
        shortcut = torch.zeros_like(inner)
        for row in range(inner.shape[2]):
            for column in range(inner.shape[3]):
                shortcut[:, : y.shape[1], row, column] = y[:, :, stride * row, stride * column]
        y = F.relu(shortcut + inner)
    return y.mean((2, 3))


def resnet_gn(w: Written, y: Tensor) -> Tensor:
    """Shortcuts that change the shape are a 1x1 convolution and a norm."""
    y = F.relu(w.group_norm("norm", w.conv("conv", y)))
    for name, stride in blocks(3):
        inner = F.relu(w.group_norm(f"{name}.norm1", w.conv(f"{name}.conv1", y, stride)))
        inner = w.group_norm(f"{name}.norm2", w.conv(f"{name}.conv2", inner))
        if stride == 2:
            y = w.group_norm(f"{name}.shortcut.norm", w.conv(f"{name}.shortcut.conv", y, stride))
        y = F.relu(y + inner)
    return y.mean((2, 3))


def wide_resnet(w: Written, y: Tensor, depth: int, width: int) -> Tensor:
    """Blocks are pre-activated."""
    y = w.conv("conv", y)
    for name, stride in blocks((depth - 4) // 6):
        active = F.relu(w.batch_norm(f"{name}.norm1", y))
        inner = F.relu(w.batch_norm(f"{name}.norm2", w.conv(f"{name}.conv1", active, stride)))
        inner = w.conv(f"{name}.conv2", inner)
        same = stride == 1 and y.shape[1] == inner.shape[1]
        y = inner + (y if same else w.conv(f"{name}.shortcut", active, stride))
    return F.relu(w.batch_norm("norm", y)).mean((2, 3))


def resnext29(w: Written, y: Tensor, cardinality: int, base_width: int) -> Tensor:
    y = F.relu(w.batch_norm("norm", w.conv("conv", y)))
    for number, (name, stride) in enumerate(blocks(3)):
        inner = F.relu(w.batch_norm(f"{name}.norm1", w.conv(f"{name}.conv1", y)))
        inner = F.relu(w.batch_norm(f"{name}.norm2", w.conv(f"{name}.conv2", inner, stride, groups=cardinality)))
        assert inner.shape[1] == cardinality * base_width * 2 ** (number // 3)
        inner = w.batch_norm(f"{name}.norm3", w.conv(f"{name}.conv3", inner))
        if number % 3 == 0:
            y = w.batch_norm(f"{name}.shortcut.norm", w.conv(f"{name}.shortcut.conv", y, stride))
        y = F.relu(y + inner)
    return y.mean((2, 3))


@pytest.mark.parametrize(
    ("name", "formula", "size", "options"),
    [
        ("cnn", cnn, 20, {}),
        ("cnn", cnn, 20, {"hidden_layers": 2}),
        ("cnn", cnn, 20, {"norm": "batch"}),
        ("shallow-cnn", shallow_cnn, 20, {}),
        ("resnet20-gn", resnet_gn, 9, {}),
        ("resnet20-bn", resnet_bn, 12, {"depth": 8, "width": 4}),
        ("resnet20-bn", resnet_bn, 9, {"depth": 14, "width": 2}),
        ("wide-resnet", wide_resnet, 12, {"depth": 10, "width": 2}),
        ("wide-resnet", wide_resnet, 9, {"depth": 16, "width": 1}),
        ("resnext29", resnext29, 9, {"cardinality": 4, "base_width": 2}),
    ],
)
def test_features_follow_the_written_formula(name: str, formula: Any, size: int, options: dict[str, Any]) -> None:
    model = randomised(name, image_size=size, **options)
    w, x = Written(model), random_images(3, 3, size, size)
    torch.testing.assert_close(model.features(x), formula(w, x * 2 - 1, **options), atol=1e-9, rtol=0)
    assert w.unused() == set()


# Sizes --------------------------------------------------------------------------------------------------------------


def count(name: str, num_classes: int, **arguments: Any) -> int:
    return sum(p.numel() for p in models.build(name, num_classes, seed=0, **arguments).parameters())


CCT_LAYER = 2 * 256 + (128 * 384 + 128 * 128 + 128) + 2 * (128 * 128 + 128)  # norms, attention, MLP


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        # 3*32*25+32 = 2,432; 32*64*25+64 = 51,264; 1,600*64+64 = 102,464; heads 650 + 640
        ("cnn", {}, 2_432 + 51_264 + 102_464 + 650 + 640),
        ("cnn", {"hidden_layers": 2}, 2_432 + 51_264 + 102_464 + 4_160 + 650 + 640),
        ("cnn", {"bias": False}, 2_400 + 51_200 + 102_400 + 650 + 640),  # the global head keeps its bias
        ("cnn", {"norm": "batch"}, 2_432 + 51_264 + 102_464 + 64 + 128 + 650 + 640),
        ("cnn", {"personal_bias": True}, 2_432 + 51_264 + 102_464 + 650 + 650),
        ("cnn", {"in_channels": 1}, 832 + 51_264 + 102_464 + 650 + 640),
        ("cnn", {"image_size": 28}, 2_432 + 51_264 + 65_600 + 650 + 640),  # 64 maps of 4x4
        # 27*32 + 32*64*9 + 64*64*9; norms 2*(32+64+64+64); 64 maps of 4x4, 3x3
        ("shallow-cnn", {}, 864 + 18_432 + 36_864 + 448 + 1_024 * 64 + 64 + 650 + 640),
        ("shallow-cnn", {"image_size": 28}, 864 + 18_432 + 36_864 + 448 + 576 * 64 + 64 + 650 + 640),
        # 3*16*9+32 = 464; stage 1: 3*(2*2,304+64); stage 2: 4,608+9,216+128 + 512+64 + 2*(2*9,216+128);
        # stage 3: 18,432+36,864+256 + 2,048+128 + 2*(2*36,864+256)
        ("resnet20-gn", {}, 464 + 14_016 + 51_648 + 205_696 + 650 + 640),
        ("resnet20-gn", {"groups": 16, "image_size": 28}, 464 + 14_016 + 51_648 + 205_696 + 650 + 640),
        # tokenizer, positions of 64 or 81 tokens, layers, norm, pool, heads
        ("cct-4/3x2", {}, 75_456 + 64 * 128 + 4 * CCT_LAYER + 256 + 129 + 1_290 + 1_280),
        ("cct-4/3x2", {"image_size": 33}, 75_456 + 81 * 128 + 4 * CCT_LAYER + 256 + 129 + 1_290 + 1_280),
        # torchvision publishes 11,689,512 and 25,557,032 parameters for 1,000 classes; heads of 10 classes instead
        ("resnet18", {}, 11_689_512 - 513_000 + 5_130 + 5_120),
        ("resnet18", {"in_channels": 1}, 11_689_512 - 513_000 + 5_130 + 5_120 - 2 * 64 * 49),
        ("resnet18", {"small_stem": True}, 11_689_512 - 513_000 + 5_130 + 5_120 - 3 * 64 * (49 - 9)),
        ("resnet50", {}, 25_557_032 - 2_049_000 + 20_490 + 20_480),
        # Zagoruyko and Komodakis: 36.5 M and 0.69 M; without their head of 10 classes and ours
        ("wide-resnet", {}, 36_479_194 + 6_400),
        ("wide-resnet", {"depth": 16, "width": 2}, 691_674 + 1_280),
    ],
)
def test_parameter_counts(name: str, arguments: dict[str, Any], expected: int) -> None:
    assert count(name, 10, **arguments) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "personal_head", "millions"),
    [
        *(("resnet20-bn", {"depth": depth}, 640, m) for depth, m in
          ((20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85"), (110, "1.7"))),  # He et al. 2016, table 6
        ("wide-resnet", {"depth": 16, "width": 4}, 2_560, "2.75"),
        ("resnext29", {"cardinality": 8, "base_width": 64}, 10_240, "34.4"),  # Xie et al. 2017
        ("resnext29", {}, 10_240, "4.8"),
    ],
)  # fmt: skip
def test_parameter_counts_of_the_papers(
    name: str, arguments: dict[str, Any], personal_head: int, millions: str
) -> None:
    digits = len(millions.partition(".")[2])
    assert f"{(count(name, 10, **arguments) - personal_head) / 1e6:.{digits}f}" == millions


@pytest.mark.parametrize(
    ("name", "options", "layers"),
    [
        ("resnet20-gn", {"width": 2}, 20),
        ("resnet20-bn", {}, 20),
        ("resnet20-bn", {"depth": 56, "width": 2}, 56),
        ("wide-resnet", {"depth": 28, "width": 1}, 28),
        ("resnext29", {"cardinality": 4}, 29),
    ],
)
def test_layers_on_the_path_are_the_number_in_the_name(name: str, options: dict[str, int], layers: int) -> None:
    model = models.build(name, 10, seed=0, **options)
    path = [key for key, m in model.named_modules() if isinstance(m, nn.Conv2d) and "shortcut" not in key]
    # He and Xie count the head; Zagoruyko instead the three shortcuts, of which width 1 needs two.
    assert len(path) + (3 if name == "wide-resnet" else 1) == layers


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("name", "options"), [("cnn", {}), ("cnn", {"norm": "batch"}), ("shallow-cnn", {})])
def test_pooling_before_the_relu_has_the_bits_of_the_papers_order(
    name: str, options: dict[str, Any], memory_format: torch.memory_format
) -> None:
    ours = models.build(name, num_classes=10, in_channels=3, image_size=32, seed=0, **options)
    theirs = models.build(name, num_classes=10, in_channels=3, image_size=32, seed=0, **options)
    layers = dict(theirs.encoder.body.named_children())
    names = list(layers)
    for index in (1, 2):
        pool, relu = names.index(f"pool{index}"), names.index(f"relu{index}")
        assert pool + 1 == relu
        names[pool], names[relu] = names[relu], names[pool]
    theirs.encoder.body = nn.Sequential(OrderedDict((key, layers[key]) for key in names))
    # flat areas and few levels: equal maxima, whose gradient goes to the first
    images = torch.randint(0, 3, (8, 3, 32, 32), generator=torch.Generator().manual_seed(0)).float() / 2
    images[:, :, :16] = 0.5
    for network in (ours, theirs):
        network.to(memory_format=memory_format).train()
        F.cross_entropy(network(images.contiguous(memory_format=memory_format)), torch.arange(8)).backward()
    for (key, one), other in zip(ours.shared_parameters().items(), theirs.shared_parameters().values(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.abs().sum() > 0 or key.endswith("bias")
        assert torch.equal(one.grad, other.grad), key
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(one, other)


def test_convolutions_start_with_he_normal() -> None:
    model = models.build("wide-resnet", 10, depth=10, width=4, seed=0)
    weight = model.state_dict()["encoder.body.stage3_block1.conv2.weight"]
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)


# CCT ----------------------------------------------------------------------------------------------------------------


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def test_cct_layer_normalizes_the_sum_before_the_mlp() -> None:
    layer = EncoderLayer(0.1, 0.1).double().eval()
    x = random_images(2, 5, 128) * 3
    query, key, value = (layer_norm(x) @ layer.attention.qkv.weight.T).chunk(3, dim=-1)
    parts = []
    for head in (slice(0, 64), slice(64, 128)):
        scores = query[..., head] @ key[..., head].transpose(1, 2) / 8  # sqrt(64)
        parts.append(torch.softmax(scores, -1) @ value[..., head])
    attended = F.linear(torch.cat(parts, -1), layer.attention.project.weight, layer.attention.project.bias)
    y = layer_norm(x + attended)
    w = layer.mlp.state_dict()
    expected = y + F.linear(F.gelu(F.linear(y, w["fc1.weight"], w["fc1.bias"])), w["fc2.weight"], w["fc2.bias"])
    assert torch.allclose(layer(x), expected, atol=1e-10)


def test_cct_pools_the_sequence() -> None:
    body = models.build("cct-4/3x2", 3, image_size=12, seed=0).double().eval().encoder[1]
    assert isinstance(body, CompactTransformer)
    x = random_images(2, 3, 12, 12)
    y = x
    for convolution in (body.tokenizer.conv1, body.tokenizer.conv2):
        y = F.max_pool2d(F.relu(F.conv2d(y, convolution.weight, padding=1)), 3, 2, 1)
    tokens = y.flatten(2).transpose(1, 2) + body.position  # [2, 9, 128]
    for layer in body.layers:
        tokens = layer(tokens)
    tokens = layer_norm(tokens)
    weight = torch.softmax(tokens @ body.pool.weight[0] + body.pool.bias, 1)  # [2, 9]
    assert tokens.shape == (2, 9, 128)
    assert torch.allclose(body(x), torch.einsum("bt,btd->bd", weight, tokens).clamp(min=0), atol=1e-10)


def test_cct_drops_in_training_only() -> None:
    model = models.build("cct-4/3x2", 10, image_size=16, seed=0)
    x = torch.rand(4, 3, 16, 16)
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(x), model(x))
    plain = models.build("cct-4/3x2", 10, image_size=16, attention_dropout=0, stochastic_depth=0, seed=0)
    assert torch.equal(plain.train()(x), model.eval()(x))


def test_cct_depth_rates_grow_linearly() -> None:
    model = models.build("cct-4/3x2", 10, seed=0, stochastic_depth=0.3, attention_dropout=0.2)
    shares = [m.share for m in model.modules() if isinstance(m, DropResidual)]
    assert shares == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.2] * 4


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    out = DropResidual(0.25)(torch.ones(4000, 3, 2))
    per_sample = out[:, 0, 0]
    assert torch.equal(out, per_sample[:, None, None].expand_as(out))
    assert per_sample.unique().tolist() == pytest.approx([0, 4 / 3])
    assert out.mean().item() == pytest.approx(1, abs=0.05)


def test_cct_rejects_images_of_another_size() -> None:
    model = models.build("cct-4/3x2", 10, image_size=32, seed=0)
    with pytest.raises(ValueError, match="49 tokens; this network has 64 positions"):
        model(torch.rand(1, 3, 28, 28))
