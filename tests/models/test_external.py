"""Networks of timm, torchvision and of functions: the contract of two-head networks, and pretrained weights."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedtta import models
from fedtta.models.libraries import CONVERTING
from fedtta.models.vectorized import VectorizedNetwork, is_stackable
from fedtta.tta.modules import differentiable_statistics

#: Feature dimension d; whether features are certain not to be negative; whether there are BatchNorm layers.
NETWORKS: dict[str, tuple[int, bool, bool]] = {
    "timm:test_resnet": (96, True, True),
    "timm:vit_tiny_patch16_224": (192, False, False),
    "timm:test_efficientnet": (256, False, True),
    "torchvision:mobilenet_v3_small": (1024, False, True),
    "torchvision:shufflenet_v2_x0_5": (1024, True, True),
    "tests.models.nets:tied": (6, False, True),
    "tests.models.nets:pair": (5, True, False),
    "tests.models.nets:whole": (7, True, False),
}
#: Options that make a network smaller.
OPTIONS: dict[str, dict[str, Any]] = {"timm:vit_tiny_patch16_224": {"depth": 2}}
X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def build(name: str, num_classes: int = 5, **arguments: Any) -> models.TwoHead:
    return models.build(name, num_classes, **{"seed": 0, **OPTIONS.get(name, {}), **arguments})


@functools.cache
def shared(name: str, seed: int = 0) -> models.TwoHead:
    """A network for tests that do not change it, in evaluation mode."""
    return build(name, seed=seed).eval()


@pytest.fixture(params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# The contract -------------------------------------------------------------------------------------------------------


def test_a_federated_round_trip(name: str, tmp_path: Path) -> None:
    """One step on each of two clients, their average, and a model file; every layer takes part."""
    dim, nonnegative, batchnorm = NETWORKS[name]
    start = copy.deepcopy(shared(name)).train().to(memory_format=torch.channels_last)
    assert (start.feature_dim, start.features_nonnegative) == (dim, nonnegative)
    assert start.features(X).shape == (4, dim)
    assert models.abilities(name, 3, 32, OPTIONS.get(name, {})) == models.registry.Abilities(batchnorm, nonnegative)
    counters = [key for key, value in start.state_dict().items() if not value.is_floating_point()]
    assert not set(counters) & set(start.global_state())
    states = []
    for shift in (0, 1):
        client = copy.deepcopy(start).train()
        optimizer = torch.optim.SGD(client.parameters(), 0.1)
        z = client.features(X)
        loss = nn.functional.cross_entropy(client.head(z) + client.personal_head(z), (torch.arange(4) + shift) % 5)
        loss.backward()
        assert all(value.grad is not None for value in client.parameters())
        optimizer.step()
        states.append({key: value.detach().clone() for key, value in client.global_state().items()})
    mean = {key: (states[0][key] + states[1][key]) / 2 for key in states[0]}
    start.load_global_state(mean)
    for key, value in start.global_state().items():
        assert torch.equal(value, mean[key]), key
    spec = {"name": name, "num_classes": 5, "image_size": 32, **OPTIONS.get(name, {})}
    models.save_model(tmp_path / "m", start, spec)
    loaded, read = models.load_model(tmp_path / "m")
    assert read == spec
    assert torch.allclose(loaded(X), start.eval()(X), atol=1e-5)


def test_equal_seeds_give_equal_networks(name: str) -> None:
    torch.manual_seed(3)
    one, other, third = build(name), shared(name), shared(name, 1)
    assert torch.equal(torch.rand(1), torch.manual_seed(3) and torch.rand(1))  # the global generator is not used
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
    assert not torch.equal(one.head.weight, third.head.weight)


def test_normalization_is_the_first_layer(name: str) -> None:
    moved = build(name, mean=[0.1, 0.2, 0.3], std=0.25).eval()
    shifted = (X - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / 0.25
    assert torch.allclose(moved(X), shared(name)(0.5 + 0.5 * shifted), atol=1e-4)  # 0.5 each without the options


@pytest.mark.parametrize("name", ["timm:test_resnet", "torchvision:shufflenet_v2_x0_5", "tests.models.nets:tied"])
def test_grayscale(name: str) -> None:
    gray = build(name, in_channels=1, mean=[0.3]).eval()
    assert gray(X[:, :1]).shape == (4, 5)
    if ":tied" not in name:  # a library's network sees the image three times
        colour = build(name, mean=[0.3] * 3).eval()
        assert torch.equal(gray(X[:, :1]), colour(X[:, :1].expand(-1, 3, -1, -1)))


def test_rectified_features(name: str) -> None:
    plain, rectified = shared(name), build(name, features="relu").eval()
    assert rectified.features_nonnegative
    assert torch.equal(rectified.features(X), plain.features(X).relu())
    assert list(plain.global_state()) == list(rectified.global_state())


def test_abilities_depend_on_options() -> None:
    name = "tests.models.nets:tied"
    assert not models.abilities(name, 3, 32, {}).features_nonnegative
    assert models.abilities(name, 3, 32, {"features": "relu"}).features_nonnegative


def test_the_classifier_and_the_features_are_the_librarys() -> None:
    import timm  # not above: every worker would import it, for seconds

    ours = build("timm:mobilenetv3_small_050").eval()
    torch.manual_seed(0)
    theirs = timm.create_model("mobilenetv3_small_050", num_classes=5).eval()
    assert torch.allclose(ours.features(X), theirs.forward_head(theirs.forward_features(2 * X - 1), True), atol=1e-5)


def test_batchnorm_with_activation_is_split() -> None:
    """Methods exchange the forward function of BatchNorm layers; an activation inside would be lost."""
    model = shared("timm:test_efficientnet")
    with differentiable_statistics(model):
        exchanged = model(X)
    assert torch.allclose(exchanged, model(X), atol=1e-5)
    balanced = models.balance(model, 5).eval()
    assert torch.allclose(balanced(X), model(X), atol=1e-4)


def test_residual_sums_are_not_taken_for_rectified() -> None:
    assert not build("tests.models.nets:residual").features_nonnegative


# Many networks at once ----------------------------------------------------------------------------------------------


def test_stacked_networks(name: str) -> None:
    """Networks without dropout are trained at once, with the results of single training."""
    model = shared(name)
    if name in ("torchvision:mobilenet_v3_small", "tests.models.nets:tied"):
        # dropout of 0.2; a layer under two names, which `functional_call` exchanges twice
        assert not is_stackable(model)
        return
    assert is_stackable(model)
    both = [copy.deepcopy(shared(name, seed)).train().double() for seed in (0, 1)]
    x = X.double()
    parameters = {
        key: torch.stack([one.get_parameter(key).detach() for one in both]).requires_grad_()
        for key, _ in model.named_parameters()
    }
    buffers = {key: torch.stack([one.get_buffer(key) for one in both]) for key, _ in model.named_buffers()}
    out, _ = VectorizedNetwork(copy.deepcopy(both[0]))(parameters, buffers, torch.stack([x, x]), torch.ones(2, 4))
    out.square().sum().backward()
    for index, one in enumerate(both):
        alone = one(x)
        assert torch.allclose(out[index], alone, atol=1e-6)
        alone.square().sum().backward()
        for key, value in one.named_parameters():
            if value.grad is not None:  # the personal head has no part in it
                stacked = parameters[key].grad
                assert stacked is not None
                assert torch.allclose(value.grad, stacked[index], rtol=1e-4, atol=1e-7), key


def test_dropped_paths_are_not_stacked() -> None:
    assert not is_stackable(build("timm:vit_tiny_patch16_224", drop_path_rate=0.1))
    assert not is_stackable(build("torchvision:convnext_tiny"))  # stochastic depth
    assert not is_stackable(build("tests.models.nets:whole", p=0.5))
    assert is_stackable(build("tests.models.nets:whole"))
    assert not is_stackable(build("tests.models.nets:branching"))  # nothing drawn, but no code for vmap
    assert not is_stackable(build("tests.models.nets:branching", training=False))  # which computes features for heads


@pytest.mark.parametrize("own", [False, True])
def test_networks_with_buffers_that_stacking_would_not_move_are_not_stacked(own: bool) -> None:
    assert not is_stackable(build("tests.models.nets:moving", own=own))
    assert not is_stackable(build("tests.models.nets:counting"))


# Pretrained weights -------------------------------------------------------------------------------------------------

CLASSES = ["a", "b", "c", "d", "e"]


@functools.cache
def make(name: str) -> nn.Module:
    """Return a library's network of 5 classes with running statistics that are not the first ones; none changes it."""
    torch.manual_seed(9)
    library, _, rest = name.partition(":")
    if library == "timm":
        import timm

        network = timm.create_model(rest, num_classes=5)
    else:
        import torchvision

        network = torchvision.models.get_model(rest, num_classes=5)
    network.train()(torch.rand(4, 3, 32, 32))
    return network.eval()


@pytest.mark.parametrize("form", ["safetensors", "state_dict", "module"])
def test_weights_and_head_come_from_a_file(form: str, tmp_path: Path) -> None:
    network = make("timm:test_efficientnet")
    state = network.state_dict()
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file({key: value.contiguous() for key, value in state.items()}, path)
    elif form == "state_dict":
        torch.save({"state_dict": state, "epoch": 4}, path)
    else:
        torch.save({"model": {f"module.{key}": value for key, value in state.items()}, "classes": CLASSES}, path)
    model = build("timm:test_efficientnet", pretrained=str(path), mean=0.0, std=1.0).eval()
    assert torch.allclose(model(X), network(X), atol=1e-4)
    assert any("the pretrained head is kept" in note for note in model.notes)
    assert "not loaded" not in " ".join(model.notes)


@pytest.mark.parametrize("name", ["timm:test_resnet", "timm:test_efficientnet", "torchvision:mobilenet_v3_small"])
def test_the_head_is_kept_for_the_same_classes_only(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = make(name)
    path = tmp_path / "w.pth"
    torch.save({"state_dict": network.state_dict(), "classes": CLASSES}, path)
    options = {"pretrained": str(path), "mean": 0.0, "std": 1.0}
    same = build(name, classes=CLASSES, **options).eval()
    assert torch.allclose(same(X), network(X), atol=1e-4)
    assert any("the pretrained head is kept" in note for note in same.notes)
    assert "not loaded" not in " ".join(same.notes)
    with caplog.at_level(logging.WARNING, "models"):
        for other in (build(name, classes=CLASSES[::-1], **options), build(name, 3, **options)):
            assert "the pretrained head is replaced by a new one" in other.notes[-1]
            assert torch.allclose(other.eval().features(X), same.features(X), atol=1e-4)
            assert not torch.equal(other.head.weight[:3], same.head.weight[:3])
            assert "not loaded, " in other.notes[0]
    assert caplog.text.count("not loaded") == 2


@pytest.mark.parametrize("name", ["timm:test_efficientnet", "tests.models.nets:tied"])
def test_a_model_file_is_a_file_of_pretrained_weights(name: str, tmp_path: Path) -> None:
    source = build(name, seed=5)
    source.train()(X)
    path = tmp_path / "trained.safetensors"
    models.save_model(path, source, {"name": name, "num_classes": 5, "classes": CLASSES})
    model = build(name, classes=CLASSES, pretrained=str(path)).eval()
    assert torch.equal(model(X), source.eval()(X))
    other = build(name, classes=CLASSES[::-1], pretrained=str(path)).eval()
    assert torch.equal(other.features(X), source.features(X))
    assert not torch.equal(other.head.weight, source.head.weight)
    models.save_model(tmp_path / "m", model, {"name": name, "num_classes": 5, "pretrained": str(path)})
    path.unlink()  # not needed again
    assert torch.equal(models.load_model(tmp_path / "m")[0](X), model(X))


def test_what_is_not_loaded_is_said(tmp_path: Path) -> None:
    state = make("timm:test_resnet").state_dict()
    state["layer1.0.bn1.bias"] = torch.zeros(3)
    state["extra"] = state.pop("layer2.0.bn1.bias")
    torch.save(state, tmp_path / "w.pth")
    note = build("timm:test_resnet", pretrained=str(tmp_path / "w.pth")).notes[0]
    assert "not loaded, not in the file: ['layer2.0.bn1.bias']" in note
    assert "not loaded, of another shape: ['layer1.0.bn1.bias']" in note
    assert "not loaded, unknown to the network: ['extra']" in note


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    torch.save(make("torchvision:mobilenet_v3_small").state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match="not the weights of this network: 0 of"):
        build("timm:test_resnet", pretrained=str(tmp_path / "w.pth"))
    state = make("timm:test_resnet").state_dict()
    torch.save({**state, "conv1.0.weight": state["conv1.0.weight"] * torch.nan}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"conv1\.0\.weight holds values that are not finite"):
        build("timm:test_resnet", pretrained=str(tmp_path / "w.pth"))
    with pytest.raises(FileNotFoundError, match="absent"):
        build("timm:test_resnet", pretrained=str(tmp_path / "absent.pth"))


@pytest.mark.parametrize("name", ["timm:test_resnet", "torchvision:shufflenet_v2_x0_5"])
def test_downloads_happen_on_request_only_and_fail_clearly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def offline(*_: object, **__: object) -> None:
        asked.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("timm.models._builder.load_pretrained", offline)
    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", offline)
    build(name)
    models.abilities(name, 3, 32, {"weights": "default", "features": "plain"})
    assert not asked
    with pytest.raises(ValueError, match="could not be downloaded; pretrained=<file> loads a file: no route"):
        build(name, weights="default")
    assert asked
    with pytest.raises(ValueError, match="exclude each other"):
        build(name, weights="default", pretrained="w.pth")


def test_downloaded_weights_keep_their_head(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    torch.manual_seed(2)
    theirs = torchvision.models.get_model("shufflenet_v2_x0_5").eval()
    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", lambda *_, **__: theirs.state_dict())
    names = list(torchvision.models.get_model_weights("shufflenet_v2_x0_5").DEFAULT.meta["categories"])
    options = {"weights": "default", "mean": 0.0, "std": 1.0}
    kept = build("torchvision:shufflenet_v2_x0_5", 1000, **options).eval()
    assert torch.allclose(kept(X), theirs(X), atol=1e-4)
    renamed = build("torchvision:shufflenet_v2_x0_5", 1000, classes=names[::-1], **options)
    assert not torch.equal(renamed.head.weight, kept.head.weight)
    named = build("torchvision:shufflenet_v2_x0_5", 1000, classes=names, **options)
    assert torch.equal(named.head.weight, kept.head.weight)
    few = build("torchvision:shufflenet_v2_x0_5", 4, **options)
    assert few.head.out_features == 4
    assert few.notes[-1].endswith("replaced by a new one")


def test_auxiliary_classifiers_are_taken_off() -> None:
    """With them GoogLeNet returns three logits in training mode; asked for, they are refused before a training."""
    network = models.build("torchvision:googlenet", 3, 3, 64, seed=0).train()
    network(torch.rand(2, 3, 64, 64)).sum().backward()
    assert not any("aux" in name for name in network.global_state())
    with pytest.raises(ValueError, match="in training mode"):
        models.build("torchvision:googlenet", 3, 3, 64, seed=0, aux_logits=True)


def test_a_network_does_not_depend_on_whether_its_weights_were_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchvision's GoogLeNet converts images only with weights; clients and files have the same network without."""
    import torchvision

    torch.manual_seed(2)
    theirs = torchvision.models.get_model("googlenet", init_weights=False, transform_input=True).eval()
    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", lambda *_, **__: theirs.state_dict())
    options = {"weights": "default"}
    mean, std = models.normalization("torchvision:googlenet", options) or ((), ())
    spec = {"name": "torchvision:googlenet", "num_classes": 1000, "image_size": 64, "mean": mean, "std": std}
    network = models.build(**spec, **options).eval()
    x = torch.rand(2, 3, 64, 64)
    imagenet = torchvision.models.get_model_weights("googlenet").DEFAULT.transforms()
    prepared = (x - torch.tensor(imagenet.mean)[:, None, None]) / torch.tensor(imagenet.std)[:, None, None]
    assert torch.allclose(network(x), theirs(prepared), rtol=1e-3, atol=1e-4)
    models.save_model(tmp_path / "model.safetensors", network, {**spec, **options})
    again, _ = models.load_model(tmp_path / "model.safetensors")
    assert torch.equal(again(x), network(x))


def test_normalization_of_torchvision_is_that_of_its_weights() -> None:
    from torchvision import models as networks

    for name in networks.list_models(module=networks):
        prepared = networks.get_model_weights(name).DEFAULT.transforms()
        stated = tuple(prepared.mean), tuple(prepared.std)
        options = {"weights": "default", "transform_input": True} if name in CONVERTING else {"weights": "default"}
        assert models.normalization(f"torchvision:{name}", options) == stated


def test_normalization_follows_pretrained_weights() -> None:
    imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    half = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    given = {"pretrained": "w.pth"}
    assert models.normalization("timm:resnet10t", {}) is None
    assert models.normalization("timm:resnet10t", given) == imagenet
    assert models.normalization("timm:vit_tiny_patch16_224", {"weights": "default"}) == half
    assert models.normalization("torchvision:resnet18", given) == imagenet
    assert models.normalization("resnet18", given) == imagenet
    assert models.normalization("cnn", given) is None
    assert models.normalization("tests.models.nets:tied", given) is None
    mean, std = models.normalization("torchvision:resnet18", given, channels=1) or ((), ())
    assert mean == pytest.approx([0.449])
    assert std == pytest.approx([0.226])


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("timm:resnet10tt", {}, "timm has no such network; similar ones: .*resnet10t"),
        ("timm:hf_hub:someone/net", {}, "timm has no such network"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "torchvision has no such classification network"),
        ("torchvision:squeezenet1_1", {}, "does not end in a linear layer"),
        ("torchvision:resnet18", {"widht": 1}, "widht"),
        ("timm:resnet10t", {"features": "gelu"}, "features='gelu'"),
        ("torchvision:alexnet", {}, r"does not take images \[3, 32, 32\]"),
        ("tests.models.nets:absent", {}, "has no absent"),
        ("tests.models.absent:net", {}, "cannot be imported"),
        ("tests.models.nets:a-b", {}, "a network is timm:<name>"),
        ("tests.models.nets:unmarked", {}, "unmarked.is_network = True"),
        ("os:system", {}, "system.is_network = True"),
        ("tests.models.nets:tied", {"depth": 3}, "no option 'depth'; there are: .*features, in_channels, width"),
        ("tests.models.nets:nothing", {}, "returned NoneType"),
        ("tests.models.nets:no_linear", {}, "does not end in a linear layer"),
        ("tests.models.nets:not_last", {}, "2 is not its last layer"),
        ("tests.models.nets:wrong_width", {}, r"must be \[B, 7\], the network gives \[2, 3072\]"),
        ("tests.models.nets:auxiliary", {}, r"must be \[B, 12\], in training mode the network gives tuple"),
        ("tests.models.nets:own_norm", {}, r"^model 'tests.models.nets:own_norm': 0 \(OwnNorm\) is a BatchNorm layer"),
        ("tests.models.nets:tied", {"weights": "default"}, "a function loads its own"),
        ("vgg", {}, "unknown model 'vgg'; there are: cnn, .*timm:<name>"),
    ],
)
def test_networks_that_do_not_fit_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, **options)


def test_timm_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ImportError, match=r"fedtta\[timm\]"):
        build("timm:resnet10t")
