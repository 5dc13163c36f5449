"""Central training: lower loss, a file that loads, splits that are the federated run's, a label that guards them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import central
from benchmarks.__main__ import main
from benchmarks.start import check_start, label_path
from benchmarks.training import spec_of
from client.runtime import federation_of
from client.training import TrainingSet
from models import load_model
from server.run import initial_model
from settings import Settings, SettingsError

CHANGES = ["dataset=digits", "fraction=1.0", "clients=4", "image-size=18", "model=shallow-cnn"]
DIGITS = {"dataset": "digits", "clients": 4, "image_size": 18, "model": "shallow-cnn", "rounds": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("central") / "start.safetensors"
    words = ["central", "--protocol", "brfl-central", "--seed", "3", "--epochs", "2", "--out", str(path)]
    assert main([*words, "--set", *CHANGES]) == 0
    return path


def test_it_learns_and_the_file_starts_a_run(trained: Path) -> None:
    label = json.loads(label_path(trained).read_text())
    first, last = label["epochs"]
    assert last["loss"] < first["loss"]
    assert label["recipe"]["epochs"] == 2
    assert label["recipe"]["learning_rate"] == 0.05
    assert label["validation_accuracy"] == last["validation_accuracy"] > 0.3
    settings = Settings(**DIGITS, seed=3, init=str(trained))
    model, spec = load_model(trained)
    federation = federation_of(settings.replace(init=""))
    assert spec == spec_of(settings, federation.images)
    started = initial_model(settings, spec)
    assert all(torch.equal(value, started.global_state()[name]) for name, value in model.global_state().items())
    accuracy = central.validate(model, federation, torch.device("cpu"), 100)
    assert accuracy == pytest.approx(label["validation_accuracy"], abs=0.01)
    assert label["training_samples"] == sum(len(one.train) for one in federation.splits)


def test_training_set_is_the_union_of_the_training_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**DIGITS, seed=3)
    federation = federation_of(settings)
    seen: list[TrainingSet] = []

    def spy(model: object, data: TrainingSet, *_: object) -> list[object]:
        seen.append(data)
        return []

    monkeypatch.setattr(central, "fit", spy)
    central.train_centrally(settings, federation, 1, Console(quiet=True))
    (data,) = seen
    expected = {int(i) for one in federation.splits for i in one.train}
    assert set(data.index.tolist()) == expected
    assert len(data) == len(expected)
    others = np.concatenate([part for one in federation.splits for part in (one.validation, one.test)])
    assert not np.isin(data.index, others).any()
    assert torch.equal(data.labels, torch.from_numpy(federation.images.labels[data.index]))


def test_equal_seeds_equal_bits_and_personal_head_untouched() -> None:
    settings = Settings(**{**DIGITS, "model": "cnn"}, seed=1, fraction=0.3)
    federation = federation_of(settings)
    runs = [central.train_centrally(settings, federation, 1, Console(quiet=True)) for _ in range(2)]
    states = [model.state_dict() for model, _, _ in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    fresh = initial_model(settings, runs[0][1])
    assert torch.equal(fresh.personal_head.weight, runs[0][0].personal_head.weight)
    assert not torch.equal(fresh.head.weight, runs[0][0].head.weight)


def test_start_fits_only_the_splits_it_was_trained_on(trained: Path) -> None:
    good = Settings(**DIGITS, seed=3, init=str(trained))
    label = check_start(good)
    assert label is not None
    assert label["kind"] == "centrally trained"
    assert check_start(good.replace(learning_rate=0.7, methods="btfl")) == label
    for changes in ({"seed": 4}, {"alpha": 0.5}, {"clients": 5}, {"fraction": 0.5}, {"partition": "iid"}):
        key, value = next(iter(changes.items()))
        with pytest.raises(SettingsError, match=f"{key} = .*, the run has '?{value}"):
            check_start(good.replace(**changes))


def test_start_without_a_label_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    settings = Settings(**DIGITS, init=str(path))
    with pytest.raises(SettingsError, match="cannot be read"):
        check_start(settings)
    for text in ("{", "[]", '{"kind": "downloaded"}'):
        label_path(path).write_text(text)
        with pytest.raises(SettingsError, match=r"model\.safetensors\.json"):
            check_start(settings)
    assert check_start(settings.replace(init="", rounds=1)) is None


def test_bad_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["central", "--protocol", "brfl-central", "--seed", "1", "--out", str(tmp_path / "x"), "--set", *CHANGES]
    assert main([*words, "--epochs", "0"]) == 2
    assert main([*words, "dataset=npz"]) == 2
    assert "dataset = 'npz'" in capsys.readouterr().err
    assert main([*words, "model=transformer"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_divergence_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(central, "RECIPE", replace(central.RECIPE, learning_rate=1e12))
    words = ["central", "--protocol", "brfl-central", "--seed", "1", "--out", str(tmp_path / "x"), "--epochs", "2"]
    assert main([*words, "--set", *CHANGES, "model=cnn", "fraction=0.3"]) == 1
    assert list(tmp_path.iterdir()) == []
