"""Labels of pretrained networks, and the check that a network fits the data split of the cells that start from it.

A network trained on one split has seen test samples of another. Its label, a JSON file beside the weights, therefore
holds every setting of the run that trained it and the indices of its training samples. A cell must have the same data
settings, and none of its test samples may be among these indices.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.benchmarks.provenance import differing, write_json
from fedtta.data import Federation, Images
from fedtta.settings import Settings, SettingsError, words

#: Kind of training → what a label calls it.
KINDS = {"federated": "federated", "central": "centrally trained", "source": "source model"}
MEASURED_ON = "part=test"  # of a source model that was trained on part=train


def label_path(model: Path) -> Path:
    """Return the path of a network's label: the model file's name with .json added."""
    return model.with_name(model.name + ".json")


def write_label(
    model: Path,
    train: str,
    settings: Settings,
    content: Mapping[str, Any],
    trained_on: tuple[Images, NDArray[np.int64]] | None = None,
) -> Path:
    """Write the label of a network.

    Parameters
    ----------
    train : str
        One of `KINDS`.
    settings : Settings
        Of the training.
    content : mapping
        Further JSON values, such as accuracy and provenance.
    trained_on : (Images, ndarray of int64 [n]), optional
        The data set and the indices of all samples that weights were trained on.
    """
    label: dict[str, Any] = {"kind": KINDS[train], "settings": settings.flat(), **content}
    if trained_on is not None:
        label["trained_on"] = pack_indices(*trained_on)
    return write_json(label_path(model), label)


def read_label(model: Path) -> dict[str, Any]:
    """Return the label of a network; SettingsError, naming the file, if it is missing or not a label."""
    path = label_path(model)
    try:
        label = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"init = '{model}': its label {path} cannot be read: {error}") from error
    has_settings = isinstance(label, dict) and isinstance(label.get("settings"), dict)
    if not has_settings or label.get("kind") not in KINDS.values():
        raise SettingsError(f"init = '{model}': {path} is not the label of a pretrained network")
    return dict(label)


def check_pretrained(model: Path, settings: Settings, federation: Federation | None = None) -> dict[str, Any]:
    """Return the label of a network that a run may start from.

    Parameters
    ----------
    settings : Settings
        Of the run.
    federation : Federation, optional
        The run's data split, to compare its test samples with the indices that the network was trained on.

    Raises
    ------
    SettingsError
        The label is missing, or test samples of the run may have been trained on.
    """
    label = read_label(model)
    if label["kind"] == KINDS["source"]:
        _check_part(model, label, settings)
        return label
    data = settings.select("data")
    recorded = {key: value for key, value in label["settings"].items() if key in data}
    if other := differing(recorded, settings, ignored=[key for key in settings.flat() if key not in data]):
        key = other[0]
        raise SettingsError(
            f"init = '{model}': was trained with {key} = {recorded.get(key)!r}, the run has {data[key]!r}; "
            "its training samples may be test samples of the run"
        )
    if federation is not None and settings.split == "once":
        check_disjoint(model, label, federation)
    return label


def check_disjoint(model: Path, label: Mapping[str, Any], federation: Federation) -> None:
    """Raise SettingsError if a network was trained on a test sample; a label without indices passes."""
    if "trained_on" not in label:
        return
    if label["trained_on"]["data"] != _digest(federation.images):
        raise SettingsError(f"init = '{model}': was trained on other images than the run's")
    test = np.concatenate([one.test for one in federation.splits])
    if leaked := int(np.isin(test, unpack_indices(label["trained_on"])).sum()):
        raise SettingsError(f"init = '{model}': {leaked} of the run's {len(test)} test samples were trained on")


def pack_indices(images: Images, index: NDArray[np.int64]) -> dict[str, Any]:
    """Return sample indices as JSON values: a compressed bit per sample of the data set, and a digest of its labels."""
    mask = np.zeros(len(images), dtype=bool)
    mask[index] = True
    bits = base64.b64encode(zlib.compress(np.packbits(mask).tobytes(), 9)).decode("ascii")
    return {"data": _digest(images), "samples": len(images), "bits": bits}


def unpack_indices(packed: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the indices [n] that `pack_indices` packed, sorted."""
    bits = np.frombuffer(zlib.decompress(base64.b64decode(packed["bits"])), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, count=packed["samples"]))


def _digest(images: Images) -> str:
    """Return a digest of what decides which image an index means: the data set's name, order of classes and shape."""
    text = f"{images.name} {images.shape} {len(images)} {','.join(images.classes)}".encode()
    return hashlib.sha256(text + images.labels.tobytes()).hexdigest()[:16]


def _check_part(model: Path, label: Mapping[str, Any], settings: Settings) -> None:
    """Raise SettingsError unless a source model was trained on part=train and the run uses part=test of its data."""
    if label.get("measured_on") != MEASURED_ON:
        raise SettingsError(f"init = '{model}': its label does not say that {MEASURED_ON} was left out of its training")
    part = words(settings.dataset_options, "dataset-options").get("part")
    if label["settings"].get("dataset") != settings.dataset or part != "test":
        raise SettingsError(
            f"init = '{model}': a source model of {label['settings'].get('dataset')!r}; allowed is the same data set "
            f"with {MEASURED_ON} in dataset-options, not {settings.dataset!r} with {settings.dataset_options!r}"
        )
