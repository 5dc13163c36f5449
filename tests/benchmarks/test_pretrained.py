"""The check of pretrained networks: a network must not have been trained on test samples of the cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.benchmarks.tables.pretrained import (
    check_disjoint,
    check_pretrained,
    label_path,
    pack_indices,
    read_label,
    unpack_indices,
    write_label,
)
from fedtta.client.resources import federation_of
from fedtta.data import Federation
from fedtta.settings import Settings, SettingsError

DIGITS = Settings(dataset="digits")


def train_indices(federation: Federation) -> np.ndarray:
    return np.concatenate([one.train for one in federation.splits])


def labelled(folder: Path, settings: Settings, train: str = "central", **content: Any) -> Path:
    """Write the label of a network trained on the training splits of `settings`; return the network's path."""
    federation, path = federation_of(settings), folder / "network.safetensors"
    write_label(path, train, settings, content, (federation.images, train_indices(federation)))
    return path


@pytest.mark.parametrize(
    ("trained", "run", "leaked", "tested"),
    [
        ({"partition": "step", "step_ratio": 1.0}, {"partition": "step", "step_ratio": 16.0}, 210, 360),
        ({"target_fraction": 0.0}, {"target_fraction": 0.5}, 535, 895),
    ],
)
def test_other_data_settings_are_refused_and_would_leak(
    trained: dict[str, Any], run: dict[str, Any], leaked: int, tested: int, tmp_path: Path
) -> None:
    path, own = labelled(tmp_path, DIGITS.replace(**trained)), DIGITS.replace(**run)
    federation = federation_of(own)
    test = np.concatenate([one.test for one in federation.splits])
    assert (np.isin(test, unpack_indices(read_label(path)["trained_on"])).sum(), len(test)) == (leaked, tested)
    key = next(name for name in run if name != "partition").replace("_", "-")
    with pytest.raises(SettingsError, match=f"was trained with {key} = .*may be test samples of the run"):
        check_pretrained(path, own)
    with pytest.raises(SettingsError, match=f"{leaked} of the run's {tested} test samples were trained on"):
        check_disjoint(path, read_label(path), federation)


def test_every_data_setting_counts_and_no_other(tmp_path: Path) -> None:
    path = labelled(tmp_path, DIGITS)
    for key, value in DIGITS.select("data").items():
        label = read_label(path)
        label["settings"][key] = f"not {value}"
        label_path(path).write_text(json.dumps(label))
        with pytest.raises(SettingsError, match=f"was trained with {key} = "):
            check_pretrained(path, DIGITS)
        label["settings"][key] = value
        label_path(path).write_text(json.dumps(label))
    other = DIGITS.replace(learning_rate=0.7, methods="btfl", data_dir="elsewhere", workers=1, severity=1)
    assert check_pretrained(path, other)["kind"] == "centrally trained"


def test_test_samples_are_compared_by_index_even_where_settings_agree(tmp_path: Path) -> None:
    path, federation = labelled(tmp_path, DIGITS), federation_of(DIGITS)
    check_pretrained(path, DIGITS, federation)
    index = np.append(train_indices(federation), federation.splits[3].test[:2])
    write_label(path, "central", DIGITS, {}, (federation.images, index))
    with pytest.raises(SettingsError, match="2 of the run's"):
        check_pretrained(path, DIGITS, federation)
    images = federation.images.subset(np.arange(len(federation.images) - 1))
    write_label(path, "central", DIGITS, {}, (images, index[:1]))
    with pytest.raises(SettingsError, match="was trained on other images"):
        check_pretrained(path, DIGITS, federation)


def test_a_setting_younger_than_the_label_had_its_default(tmp_path: Path) -> None:
    path = labelled(tmp_path, DIGITS)
    label = read_label(path)
    del label["settings"]["test-part"]
    label_path(path).write_text(json.dumps(label))
    check_pretrained(path, DIGITS)
    with pytest.raises(SettingsError, match="test-part = None"):
        check_pretrained(path, DIGITS.replace(test_part=0.5))


def test_labels_that_are_missing_or_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(SettingsError, match="cannot be read"):
        check_pretrained(path, DIGITS)
    for text in ("{", "[]", '{"kind": "downloaded"}', '{"kind": "source model"}'):
        label_path(path).write_text(text)
        with pytest.raises(SettingsError, match=r"model\.safetensors\.json"):
            check_pretrained(path, DIGITS)


def test_a_source_model_serves_the_other_part_of_its_data_set_only(tmp_path: Path) -> None:
    path = tmp_path / "source.safetensors"
    cifar = Settings(dataset="cifar10", dataset_options="part=train")
    write_label(path, "source", cifar, {"measured_on": "part=test"})
    test = cifar.replace(dataset_options="part=test")
    assert check_pretrained(path, test)["kind"] == "source model"
    for other in (cifar, cifar.replace(dataset_options=""), test.replace(dataset="cifar100")):
        with pytest.raises(SettingsError, match="a source model of 'cifar10'"):
            check_pretrained(path, other)
    write_label(path, "source", cifar, {"measured_on": "10% of each class, held out"})
    with pytest.raises(SettingsError, match="part=test was left out"):
        check_pretrained(path, test)


@given(st.sets(st.integers(0, 1796)))
def test_packed_indices_are_the_indices(index: set[int]) -> None:
    images = federation_of(DIGITS).images
    packed = json.loads(json.dumps(pack_indices(images, np.array(sorted(index), np.int64))))
    assert unpack_indices(packed).tolist() == sorted(index)
