"""Training in one place: what is trained on and measured on, equal bits, labels, refusals."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rich.console import Console

from fedtta.benchmarks.tables import networks, training
from fedtta.benchmarks.tables.networks import kept_or_trained, network_path, train_network
from fedtta.benchmarks.tables.pretrained import check_pretrained, read_label, unpack_indices
from fedtta.benchmarks.tables.protocol import Network
from fedtta.benchmarks.tables.protocol_file import SOURCE, changed
from fedtta.benchmarks.tables.training import (
    CENTRAL,
    Parts,
    Recipe,
    accuracy,
    source_parts,
    train_centrally,
    train_source,
)
from fedtta.client.resources import federation_of
from fedtta.data import Images, load
from fedtta.models import build, load_model
from fedtta.settings import Settings, SettingsError

QUIET = Console(quiet=True)
CPU = torch.device("cpu")
DIGITS = Settings(dataset="digits", clients=4, image_size=18, model="shallow-cnn", seed=3, device="cpu")
SMALL = changed(
    {**SOURCE, "dataset": "digits", "model": "resnet20-bn", "model-options": "depth=8;width=4", "seed": 3},
    ["image-size=16", "batch-size=16", "fraction=0.6"],
)


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of two epochs, trained and labelled as the engine does it."""
    folder = tmp_path_factory.mktemp("central")
    path = folder / "central.safetensors"
    train_network(Network("central", "central", 2, "central-{seed}.safetensors", DIGITS), 3, path, folder, QUIET)
    return path


@pytest.fixture(scope="module")
def source() -> training.Trained:
    return train_source(SMALL, source_parts(SMALL), 1, QUIET)


def test_central_training_learns_and_is_labelled(central: Path) -> None:
    label, federation = read_label(central), federation_of(DIGITS)
    first, last = label["epochs"]
    assert last["loss"] < first["loss"]
    assert (label["recipe"]["epochs"], label["recipe"]["learning_rate"]) == (2, 0.05)
    assert label["validation_accuracy"] == last["validation_accuracy"] > 0.3
    assert {"seconds", "versions", "load_average"} <= set(label)
    model, spec = load_model(central)
    assert spec["name"] == "shallow-cnn"
    validation = np.concatenate([one.validation for one in federation.splits])
    own = accuracy(model, federation.images, validation, CPU, 100)
    assert own == pytest.approx(label["validation_accuracy"], abs=0.01)
    assert check_pretrained(central, DIGITS, federation)["kind"] == "centrally trained"


def test_it_is_trained_on_the_union_of_the_training_splits(central: Path) -> None:
    federation, label = federation_of(DIGITS), read_label(central)
    trained = set(unpack_indices(label["trained_on"]).tolist())
    assert trained == {int(i) for one in federation.splits for i in one.train}
    assert label["training_samples"] == len(trained)
    others = np.concatenate([part for one in federation.splits for part in (one.validation, one.test)])
    assert trained.isdisjoint(others.tolist())


def test_equal_seeds_equal_bits_and_an_untouched_personal_head() -> None:
    settings = DIGITS.replace(model="cnn", seed=1, fraction=0.3)
    federation = federation_of(settings)
    runs = [train_centrally(settings, federation, 1, QUIET) for _ in range(2)]
    states = [one.model.state_dict() for one in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    fresh = build(**{"seed": 1, **runs[0].spec})
    assert torch.equal(fresh.personal_head.weight, runs[0].model.personal_head.weight)
    assert not torch.equal(fresh.head.weight, runs[0].model.head.weight)
    assert not runs[0].model.training


def test_a_source_model_learns_and_says_how(source: training.Trained) -> None:
    parts, content = source_parts(SMALL), source.content
    index = np.arange(len(parts.validation))
    fresh = build(**{"seed": 3, **source.spec})
    before, after = (accuracy(model, parts.validation, index, CPU, 50) for model in (fresh, source.model))
    assert before is not None
    assert after is not None
    assert after > before + 0.15
    assert content["accuracy"] == pytest.approx(after, abs=0.01)
    recipe = Recipe(1, 16, 0.1, 0.9, 5e-4, nesterov=True)
    assert content["recipe"] == recipe.as_json()
    assert content["measured_on"] == "10% of each class, held out"
    assert (content["training_samples"], content["validation_samples"]) == (len(parts.training), len(parts.validation))


def test_equal_seeds_give_equal_source_models(source: training.Trained) -> None:
    again = train_source(SMALL, source_parts(SMALL), 1, QUIET).model.global_state()
    other = train_source(SMALL.replace(seed=4), source_parts(SMALL.replace(seed=4)), 1, QUIET).model.global_state()
    first = source.model.global_state()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_source_model_goes_on_from_another_at_the_first_learning_rate(tmp_path: Path) -> None:
    """Both are trained where both are missing; its own epochs alone are those of its label."""
    first = Network("first", "source", 1, "first.safetensors", SMALL, half=True)
    again = Network("again", "source", 2, "again.safetensors", SMALL, start=first)
    folder = tmp_path / "folder"
    path = kept_or_trained(again, 1, tmp_path, folder, QUIET)
    assert path == tmp_path / "again.safetensors"
    assert not [*(folder / "midway").iterdir()]
    label, before = read_label(path), tmp_path / "first.safetensors"
    digest = hashlib.sha256(before.read_bytes()).hexdigest()
    assert label["start"] == {"file": "first.safetensors", "sha256": digest}
    assert (label["recipe"]["learning_rate"], len(label["epochs"])) == (0.1, 2)
    expected = train_source(SMALL.replace(init=str(before)), source_parts(SMALL), 2, QUIET).model.global_state()
    alone = train_source(SMALL, source_parts(SMALL), 2, QUIET).model.global_state()
    kept = load_model(path)[0].global_state()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)
    assert not torch.equal(kept["head.weight"], alone["head.weight"])
    with pytest.raises(SettingsError, match=r"again.safetensors was trained with other settings \(from\)"):
        network_path(replace(again, start=replace(first, file="other.safetensors")), 1, tmp_path)
    before.write_bytes(path.read_bytes())
    with pytest.raises(SettingsError, match=r"again.safetensors was trained with other settings \(from\)"):
        network_path(again, 1, tmp_path)
    before.unlink()
    assert network_path(again, 1, tmp_path) == path


def test_half_precision_is_what_is_measured_and_kept(source: training.Trained, tmp_path: Path) -> None:
    network = Network("source", "source", 1, "source.safetensors", SMALL, half=True)
    path = tmp_path / network.file
    train_network(network, 1, path, tmp_path, QUIET)
    kept, _ = load_model(path)
    for name, value in source.model.global_state().items():
        assert torch.equal(kept.state_dict()[name], value.half()), name
    parts = source_parts(SMALL)
    measured = accuracy(kept.float(), parts.validation, np.arange(len(parts.validation)), CPU, 256)
    assert read_label(path)["accuracy"] == measured


def test_a_data_set_with_parts_is_trained_on_one_and_measured_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    pixels = {part: draw.integers(0, 256, (20, 3, 32, 32), np.uint8) for part in ("train", "test")}
    asked: list[dict[str, Any]] = []

    def stand_in(name: str, *_: object, part: str, **options: Any) -> Images:
        asked.append({"name": name, "part": part, **options})
        return Images(name, pixels[part], np.arange(20) % 10, tuple("abcdefghij"))

    monkeypatch.setattr(training, "load", stand_in)
    options = "source=packed;part=train"
    parts = source_parts(SMALL.replace(dataset="cifar10", dataset_options=options, fraction=0.5))
    assert [(one["part"], one["source"], one["fraction"], one["seed"]) for one in asked] == [
        ("train", "packed", 0.5, 3), ("test", "packed", 0.5, 3)
    ]  # fmt: skip
    assert np.array_equal(parts.training.pixels, pixels["train"])
    assert np.array_equal(parts.validation.pixels, pixels["test"])
    assert parts.measured_on == "part=test"


def test_without_parts_no_image_is_on_both_sides() -> None:
    parts, images = source_parts(SMALL), load("digits", image_size=16, fraction=0.6, seed=3)
    assert len(parts.training) + len(parts.validation) == len(images)
    both = np.concatenate([parts.training.pixels, parts.validation.pixels]).reshape(len(images), -1)
    expected = images.pixels.reshape(len(images), -1)
    assert np.array_equal(np.sort(both @ np.arange(768)), np.sort(expected @ np.arange(768)))


@pytest.mark.parametrize(
    "network",
    [
        Network("n", "central", 2, "n", DIGITS.replace(fraction=0.3)),
        Network("n", "source", 2, "n", SMALL.replace(fraction=0.2)),
    ],
    ids=["central", "source"],
)
def test_an_interrupted_training_goes_on_with_the_same_bits(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> None:
        train_network(network, 3, tmp_path / name, tmp_path, QUIET)

    epoch, seen = training._epoch, list[int]()

    def interrupted(*arguments: Any) -> Any:
        seen.append(len(seen))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return epoch(*arguments)

    monkeypatch.setattr(training, "_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("n")
    (kept,) = (tmp_path / "midway").iterdir()
    run("n")
    assert len(seen) == 3
    assert [kept.exists(), len(read_label(tmp_path / "n")["epochs"])] == [False, 2]
    run("other")
    assert len(seen) == 5
    weights = [load_model(tmp_path / name)[0].state_dict() for name in ("n", "other")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [[one["loss"] for one in read_label(tmp_path / name)["epochs"]] for name in ("n", "other")]
    assert losses[0] == losses[1]
    kept.write_bytes(b"no weights")
    with pytest.raises(ValueError, match=f"{kept.name}.*corrupt"):
        run("n")


@pytest.mark.parametrize("train", ["federated", "central"])
@pytest.mark.parametrize("step", ["label", "network"])
def test_a_process_that_ends_between_network_and_label_trains_it_again(
    train: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves is no kept network, whichever of the two files comes first."""
    settings = DIGITS.replace(methods="fedavg", fraction=0.3, rounds=1, engine="vectorised")
    network = Network("n", train, 1, "n.safetensors", settings)
    write = {"label": "write_label", "network": "write_atomically" if train == "federated" else "save_model"}[step]
    with monkeypatch.context() as patch:
        patch.setattr(networks, write, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            kept_or_trained(network, 3, tmp_path, tmp_path / "folder", QUIET)
    path = kept_or_trained(network, 3, tmp_path, tmp_path / "folder", QUIET)
    assert network_path(network, 3, tmp_path) == path
    assert load_model(path)[1]["name"] == read_label(path)["settings"]["model"]


@hypothesis_settings(max_examples=30, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=80), seed=st.integers(0, 100))
def test_a_tenth_of_each_class_is_held_out(labels: list[int], seed: int) -> None:
    array = np.array(labels, np.int64)
    chosen = training.hold_out(array, seed)
    assert np.array_equal(chosen, np.unique(chosen))
    assert np.array_equal(chosen, training.hold_out(array, seed))
    for label in range(5):
        assert int((array[chosen] == label).sum()) == round(0.1 * labels.count(label))


def test_threads_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []

    def stop(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise FloatingPointError("stopped")

    monkeypatch.setattr("fedtta.benchmarks.tables.networks.train_source", stop)
    with pytest.raises(FloatingPointError, match="stopped"):
        train_network(Network("n", "source", 1, "n", SMALL, threads=2), 1, tmp_path / "n", tmp_path, QUIET)
    assert (seen, torch.get_num_threads(), list(tmp_path.iterdir())) == ([2], before, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet21"}, "resnet21"),
        ({"model_options": "depth=9"}, "depth=9"),
        ({"optimizer": "adam", "momentum": 0.0}, "optimizer = 'adam': allowed is sgd"),
        ({"batch_size": 1}, "batch-size = 1.*BatchNorm"),
        ({"dataset": "npz", "data_dir": "/tmp", "dataset_options": "path=no.npz"}, "dataset = 'npz': .*no.npz"),
        ({"dataset_options": "path=x"}, "unknown option 'path'"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    settings = SMALL.replace(**changes)
    with pytest.raises(SettingsError, match=message):
        train_source(settings, source_parts(settings), 1, QUIET)


def test_divergence_is_an_error() -> None:
    federation = federation_of(settings := DIGITS.replace(model="cnn", fraction=0.3))
    with pytest.raises(FloatingPointError, match="training diverged"):
        train_centrally(settings, federation, 2, QUIET, replace(CENTRAL, learning_rate=1e12))
    parts = source_parts(own := SMALL.replace(model="cnn", model_options="", learning_rate=1e12, fraction=0.3))
    with pytest.raises(FloatingPointError, match="training diverged"):
        train_source(own, Parts(parts.training, parts.validation, ""), 2, QUIET)
    assert math.isfinite(CENTRAL.learning_rate)
