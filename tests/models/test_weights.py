"""Files of weights: read into the network they belong to, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedtta import models

OWN: list[dict[str, Any]] = [
    {"name": "resnet20-bn", "depth": 8, "width": 4},
    {"name": "wide-resnet", "depth": 10, "width": 1},
    {"name": "resnext29", "cardinality": 4, "base_width": 2},
]

X = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def moved(network: nn.Module) -> nn.Module:
    """Give the network running statistics that are not the fresh ones."""
    network.train()(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    return network.eval()


def stand_in(name: str) -> nn.Module:
    """Return torchvision's network with random weights, as a stand-in for the published ones."""
    from torchvision import models as library  # not above: every worker would import it, for seconds

    torch.manual_seed(4)
    return moved(getattr(library, name)(weights=None))


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return stand_in("resnet18")


@pytest.mark.parametrize(("name", "suffix"), [("resnet18", "pth"), ("resnet18", "safetensors"), ("resnet50", "pt")])
def test_it_is_torchvisions_network_with_its_weights(name: str, suffix: str, tmp_path: Path) -> None:
    from torchvision.transforms.functional import normalize

    network = stand_in(name)
    path = tmp_path / f"weights.{suffix}"
    state = network.state_dict()
    if suffix == "pth":  # torchvision's older files have no counters
        torch.save({k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}, path)
    elif suffix == "pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    model = models.build(name, 5, pretrained=str(path), mean=mean, std=std).eval()
    x = torch.rand(2, 3, 40, 40)
    trunk = nn.Sequential(*list(network.children())[:-1], nn.Flatten())
    normalised = normalize(x, mean, std)
    assert torch.allclose(model.features(x), trunk(normalised), atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("resnet18", {}), ("resnet50", {}), ("resnet18", {"in_channels": 1})])
def test_torchvisions_networks_have_its_names_initial_weights_and_gradients(name: str, options: dict[str, Any]) -> None:
    """The same bits in training, where its ReLU works in place."""
    from torchvision import models as library

    channels = options.get("in_channels", 3)
    torch.manual_seed(7)
    network = getattr(library, name)(weights=None)
    network.fc = nn.Identity()
    if channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    torch.manual_seed(7)
    own, features = models.MODELS[name].encoder(channels, 32, pretrained=None, small_stem=False)
    assert list(own.state_dict()) == list(network.state_dict())
    assert all(torch.equal(value, own.state_dict()[key]) for key, value in network.state_dict().items())
    x = torch.rand(4, channels, 40, 40, generator=torch.Generator().manual_seed(0))
    one, other = own.train()(x), network.train()(x)
    assert one.shape == (4, features)
    assert torch.equal(one, other)
    for out in (one, other):
        out.square().sum().backward()
    pairs = zip(own.named_parameters(), network.parameters(), strict=True)
    assert all(torch.equal(mine.grad, its.grad) for (_, mine), its in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", OWN, ids=lambda spec: spec["name"])
@pytest.mark.parametrize(
    "kind", ["body.pt", "whole.pth", "global.safetensors", "saved.safetensors", "turned.safetensors"]
)
def test_own_networks_read_their_own_names(spec: dict[str, Any], kind: str, tmp_path: Path) -> None:
    whole = {**spec, "num_classes": 10, "rotation_head": kind.startswith("turned")}
    source = moved(models.build(**whole, seed=1))
    assert isinstance(source, models.TwoHead)
    path = tmp_path / kind
    if kind == "body.pt":
        torch.save(source.encoder[1].state_dict(), path)
    elif kind == "whole.pth":
        torch.save(source.state_dict(), path)
    elif kind == "global.safetensors":
        save_file({name: value.contiguous() for name, value in source.global_state().items()}, path)
    else:
        models.save_model(path, source, whole)
    model = models.build(**spec, num_classes=3, seed=2, pretrained=str(path)).eval()
    assert not torch.equal(model.features(X), models.build(**spec, num_classes=3, seed=2).eval().features(X))
    assert torch.equal(model.features(X), source.features(X))


@pytest.mark.parametrize("spec", OWN, ids=lambda spec: spec["name"])
def test_weights_of_another_size_are_refused(spec: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    state = models.build(**spec, num_classes=10, seed=1).state_dict()
    for change in ({"in_channels": 1}, {"depth": 110} if spec["name"] == "resnet20-bn" else {"in_channels": 4}):
        torch.save(state, path)
        with pytest.raises(ValueError, match=r"weights\.pt: (conv\.weight has shape|not resnet20-bn \(depth=110)"):
            models.build(**{**spec, **change}, num_classes=10, pretrained=str(path))
    torch.save({f"other.{name}": value for name, value in state.items()}, path)
    with pytest.raises(ValueError, match=rf"not {spec['name']} .*missing \[.*\] and \d+ more, unknown \['other"):
        models.build(**spec, num_classes=10, pretrained=str(path))
    for content in ({"epoch": 3, "weights": state}, {}, [state], {"state_dict": {"a": 1}}):
        torch.save(content, path)
        with pytest.raises(ValueError, match="no mapping from names to tensors"):
            models.build(**spec, num_classes=10, pretrained=str(path))
    with pytest.raises(FileNotFoundError, match=r"absent\.pt"):
        models.build(**spec, num_classes=10, pretrained=str(tmp_path / "absent.pt"))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}, "epoch": 3},
        lambda state: {"model": state, "args": argparse.Namespace(lr=0.1)},
        lambda state: {"state_dict": {f"model._orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {"epoch": 1, "model": {"state_dict": state}},
    ],
)
def test_usual_wrappings_are_taken_off(wrap: Callable[[dict[str, Tensor]], object], tmp_path: Path) -> None:
    source = moved(models.build(**OWN[0], num_classes=10, seed=1))
    assert isinstance(source, models.TwoHead)
    torch.save(wrap(source.encoder[1].state_dict()), tmp_path / "w.ckpt")
    model = models.build(**OWN[0], num_classes=3, seed=2, pretrained=str(tmp_path / "w.ckpt")).eval()
    assert torch.equal(model.features(X), source.features(X))


def test_a_plain_file_of_weights_is_no_saved_model(tmp_path: Path) -> None:
    model = models.build(**OWN[0], num_classes=10, seed=1)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    with pytest.raises(ValueError, match=r"plain\.pt: corrupt"):
        models.load_model(tmp_path / "plain.pt")
    save_file({name: value.contiguous() for name, value in model.global_state().items()}, tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match=r"p\.safetensors: .*not written by this program"):
        models.load_model(tmp_path / "p.safetensors")


def test_a_file_of_heads_alone_is_refused(tmp_path: Path) -> None:
    state: dict[str, Tensor] = {"head.weight": torch.zeros(10, 16), "head.bias": torch.zeros(10)}
    save_file(state, tmp_path / "heads.safetensors")
    with pytest.raises(ValueError, match="not resnet20-bn"):
        models.build(**OWN[0], num_classes=10, pretrained=str(tmp_path / "heads.safetensors"))


def test_pretrained_refusals(reference: nn.Module, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in reference.state_dict().items()}

    def build(path: Path, **options: object) -> None:
        models.build("resnet18", 5, pretrained=str(path), **options)

    with pytest.raises(FileNotFoundError, match=r"missing\.pth"):
        build(tmp_path / "missing.pth")
    with pytest.raises(ValueError, match=r"unknown kind of weights '\.onnx'.*\.safetensors, \.pth"):
        build(tmp_path / "weights.onnx")
    whole, short = tmp_path / "whole.pth", tmp_path / "short.pth"
    torch.save(state, whole)
    short.write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"short\.pth: cannot be read"):
        build(short)
    for option in ({"small_stem": True}, {"in_channels": 1}):
        with pytest.raises(ValueError, match="ImageNet stem"):
            build(whole, **option)
    path = tmp_path / "bad.safetensors"
    for change, words in (
        (
            {"conv1.weight": torch.full((64, 3, 7, 7), torch.nan)},
            "conv1.weight holds values that are not finite",
        ),
        ({"conv1.weight": torch.zeros(64, 3, 3, 3)}, r"conv1.weight has shape \(64, 3, 3, 3\)"),
        ({"extra": torch.zeros(1)}, r"unknown \['extra'\]"),
    ):
        save_file({**state, **change}, path)
        with pytest.raises(ValueError, match=rf"bad\.safetensors: .*{words}"):
            build(path)
    save_file({name: value for name, value in state.items() if name != "bn1.bias"}, path)
    with pytest.raises(ValueError, match=r"missing \['bn1.bias'\]"):
        build(path)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.pth"
    torch.save({"conv1.weight": Path("somewhere")}, path)
    with pytest.raises(ValueError, match=r"evil\.pth: cannot be read"):
        models.build("resnet18", 5, pretrained=str(path))
