"""Contract of every model: shapes, non-negative features, options, seeds, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedtta import models

#: Feature dimension d, smallest image size, and options that make a network small.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "cnn": (64, 16, {}),
    "resnet20-gn": (64, 4, {}),
    "resnet20-bn": (64, 4, {}),
    "cct-4/3x2": (128, 5, {}),
    "resnet18": (512, 32, {}),
    "resnet50": (2048, 32, {}),
    "wide-resnet": (128, 4, {"depth": 10, "width": 2}),
    "resnext29": (1024, 4, {"cardinality": 4}),
    "shallow-cnn": (64, 18, {}),
}
#: Without resnet50, which takes long to build and shares its code with resnet18.
LIGHT = [name for name in CASES if name != "resnet50"]
NORMS = {"batch": nn.modules.batchnorm._BatchNorm, "group": nn.GroupNorm, "layer": nn.LayerNorm}


def build(name: str, num_classes: int = 10, **arguments: Any) -> models.TwoHead:
    return models.build(name, num_classes, **{"seed": 0, **CASES[name][2], **arguments})


def test_every_model_is_tested() -> None:
    assert set(models.MODELS) == set(CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("in_channels", [1, 3])
def test_shapes_and_sign(name: str, in_channels: int) -> None:
    features, smallest, _ = CASES[name]
    for size in sorted({smallest, 23 if smallest < 23 else 33}):
        model = build(name, 7, in_channels=in_channels, image_size=size).eval()
        x = torch.rand(3, in_channels, size, size, generator=torch.Generator().manual_seed(0))
        z = model.features(x)
        assert z.shape == (3, features)
        assert model.feature_dim == features
        assert bool((z >= 0).all())
        assert model(x).shape == (3, 7)
        assert torch.equal(model(x), model.head(z))
        assert model.personal_head(z).shape == (3, 7)


@pytest.mark.parametrize("name", CASES)
def test_smaller_images_are_rejected(name: str) -> None:
    smallest = CASES[name][1]
    with pytest.raises(
        ValueError, match=f"'{name}': image_size={smallest - 1} is too small; the minimum is {smallest}"
    ):
        build(name, image_size=smallest - 1)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_small_stem_takes_smaller_images(name: str) -> None:
    assert build(name, 4, image_size=8, small_stem=True).eval()(torch.rand(2, 3, 8, 8)).shape == (2, 4)
    with pytest.raises(ValueError, match=f"'{name}'.*the minimum is 8"):
        build(name, image_size=7, small_stem=True)


@pytest.mark.parametrize("name", CASES)
def test_normalization_layers_are_those_declared(name: str) -> None:
    model = build(name)
    found = {kind for kind, cls in NORMS.items() if any(isinstance(module, cls) for module in model.modules())}
    stated = models.MODELS[name].normalisation
    assert found == ({stated} if stated else set())
    assert models.MODELS[name].normalisation_with({}) == stated


def test_cnn_with_batch_norm_declares_it() -> None:
    assert models.MODELS["cnn"].normalisation is None
    assert models.MODELS["cnn"].normalisation_with({"norm": "batch"}) == "batch"
    model = models.build("cnn", 10, norm="batch", seed=0)
    assert [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)] == [32, 64]


@pytest.mark.parametrize("name", LIGHT)
def test_input_normalization_comes_first(name: str) -> None:
    model = build(name, mean=[0.1, 0.2, 0.3], std=(0.5, 1.0, 2.0))
    assert isinstance(model.encoder, nn.Sequential)
    first = model.encoder[0]
    assert isinstance(first, models.Normalise)
    assert torch.allclose(first.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    assert torch.allclose(first.std.flatten(), torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("name", LIGHT)
def test_global_state_holds_weights_and_running_statistics_only(name: str) -> None:
    model = build(name, personal_bias=True)
    shared = {key for key, _ in model.named_parameters() if not key.startswith("personal_head.")}
    running = {key for key, _ in model.named_buffers() if key.endswith(("running_mean", "running_var"))}
    assert set(model.global_state()) == shared | running


@pytest.mark.parametrize("name", LIGHT)
def test_seed_is_reproducible_and_leaves_the_global_generator_alone(name: str) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(name, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)  # another global state
    second, other = build(name, seed=5).state_dict(), build(name, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", LIGHT)
def test_files_restore_every_weight(name: str, tmp_path: Path) -> None:
    spec = {"name": name, "num_classes": 4, **CASES[name][2], "personal_bias": True}
    torch.manual_seed(1)
    model = models.build(**spec)
    for personal in (False, True):
        path = tmp_path / str(personal) / "model.safetensors"  # the folder is created
        models.save_model(path, model, spec, personal=personal)
        before = torch.get_rng_state()
        loaded, read = models.load_model(path)
        assert torch.equal(torch.get_rng_state(), before)
        assert read == spec
        assert not loaded.training
        assert all(torch.equal(loaded.global_state()[key], value) for key, value in model.global_state().items())
        assert torch.equal(loaded.personal_head.weight, model.personal_head.weight) == personal
        assert [one.name for one in path.parent.iterdir()] == ["model.safetensors"]


def test_without_seed_the_callers_generator_decides() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(models.build("cnn", 10).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    models.build("cnn", 10)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_personal_bias_does_not_change_the_global_weights() -> None:
    plain = models.build("cnn", 10, seed=2).global_state()
    biased = models.build("cnn", 10, seed=2, personal_bias=True).global_state()
    assert all(torch.equal(plain[key], biased[key]) for key in plain)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"name": "vgg"},
            ["unknown model 'vgg'", "cnn", "resnet20-gn", "cct-4/3x2", "resnet18", "shallow-cnn"],
        ),
        ({"widht": 2}, ["'cnn'", "no option 'widht'", "bias", "hidden_layers", "mean", "norm", "seed"]),
        ({"bias": 1}, ["bias=1", "true or false"]),
        ({"norm": "group"}, ["norm='group'", "None, 'batch'"]),
        ({"hidden_layers": True}, ["hidden_layers=True", "1, 2"]),
        ({"mean": "0.5"}, ["mean='0.5'", "number"]),
        ({"mean": [0.5, 0.5]}, ["mean", "3 channels"]),
        ({"mean": float("nan")}, ["mean=nan"]),
        ({"std": 0.0}, ["std=0.0", "positive"]),
        ({"std": []}, ["std=[]"]),
        ({"personal_bias": "yes"}, ["personal_bias='yes'"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"seed": 1.0}, ["seed=1.0"]),
        ({"num_classes": 0}, ["num_classes=0", "at least 1"]),
        ({"num_classes": 10.0}, ["num_classes=10.0"]),
        ({"in_channels": True}, ["in_channels=True"]),
        ({"image_size": "32"}, ["image_size='32'"]),
        ({"name": "resnet20-gn", "width": 0}, ["width=0", "at least 1"]),
        ({"name": "resnet20-gn", "width": 1.5}, ["width=1.5"]),
        ({"name": "resnet20-gn", "groups": 3}, ["groups=3", "16"]),
        ({"name": "cct-4/3x2", "stochastic_depth": 1.0}, ["stochastic_depth=1.0", "[0, 1)"]),
        ({"name": "resnet20-bn", "depth": 21}, ["depth=21", "20, 8, 14, 26, 32, 44, 56, 110"]),
        ({"name": "resnet20-bn", "width": 0}, ["width=0", "at least 1"]),
        ({"name": "wide-resnet", "depth": 20}, ["depth=20", "6n + 4: 10, 16, 22"]),
        ({"name": "wide-resnet", "depth": 4}, ["depth=4"]),
        ({"name": "wide-resnet", "width": 2.0}, ["width=2.0"]),
        ({"name": "resnext29", "cardinality": 0}, ["cardinality=0", "at least 1"]),
        ({"name": "resnext29", "base_width": True}, ["base_width=True"]),
        ({"name": "resnet50", "small_stem": 1}, ["small_stem=1", "true or false"]),
        ({"name": "resnet18", "pretrained": 3}, ["pretrained=3"]),
        ({"name": "resnet18", "small_stem": None}, ["small_stem=None"]),
        ({"name": "shallow-cnn", "bias": True}, ["'shallow-cnn'", "no option 'bias'"]),
    ],
)
def test_errors_name_the_option_and_the_allowed_values(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        models.build(**{"name": "cnn", "num_classes": 10, **arguments})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_failed_build_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="too small"):
        models.build("cnn", 10, image_size=8, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=12, deadline=None)
@given(size=st.integers(16, 40), channels=st.integers(1, 4), classes=st.integers(1, 12))
def test_cnn_takes_any_size_from_16(size: int, channels: int, classes: int) -> None:
    model = models.build("cnn", classes, channels, size, seed=0)
    z = model.features(torch.rand(2, channels, size, size))
    assert z.shape == (2, 64)
    assert bool((z >= 0).all())


@pytest.mark.parametrize("name", [name for name, (_, smallest, _) in CASES.items() if smallest <= 18])
def test_per_sample_gradients_can_be_batched(name: str) -> None:
    model = build(name, 5, image_size=18).double().eval()
    weights = dict(model.named_parameters())
    fixed = dict(model.named_buffers())
    x = torch.rand(2, 3, 18, 18, dtype=torch.float64)

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {**weights, **fixed}, (image[None],)).logsumexp(1).sum()

    batched = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for index in range(2):
        single = torch.func.grad(loss)(weights, x[index])
        for key, value in single.items():
            assert torch.allclose(batched[key][index], value, atol=1e-9), key
