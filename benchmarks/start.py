"""A centrally trained network to start from: the label beside its file, and the check that it fits a run.

A network trained on one seed's training splits has seen test samples of every other seed. The label says what it was
trained on, so that no protocol reports such a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import write_json
from settings import Settings, SettingsError

#: Settings that decide which samples are trained on.
SPLIT_KEYS = (
    "dataset", "dataset-options", "fraction", "image-size", "clients", "partition", "alpha", "seed",
)  # fmt: skip
KIND = "centrally trained"


def label_path(model: Path) -> Path:
    """Return where the label of a model file stands: its name with .json added."""
    return model.with_name(model.name + ".json")


def write_label(model: Path, settings: Settings, content: Mapping[str, Any]) -> Path:
    """Write the label of a network trained on the training splits of `settings`."""
    return write_json(label_path(model), {"kind": KIND, "settings": settings.flat(), **content})


def read_label(model: Path) -> dict[str, Any]:
    """Return the label of a model file; SettingsError, naming the file, if there is none or it is not one."""
    path = label_path(model)
    try:
        label = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"init = '{model}': its label {path} cannot be read: {error}") from error
    if not isinstance(label, dict) or label.get("kind") != KIND or not isinstance(label.get("settings"), dict):
        raise SettingsError(f"init = '{model}': {path} is no label of a centrally trained network")
    return label


def check_start(settings: Settings) -> dict[str, Any] | None:
    """Return the label of the network that a run starts from, None if it starts from a random one.

    Raises
    ------
    SettingsError
        Nothing would be trained at all, the label is missing, or the network was trained on other splits.
    """
    if not settings.init:
        if settings.rounds == 0:
            raise SettingsError(
                "rounds = 0 and init = '': no network would be trained; allowed is --set init=PATH of one made by "
                "python -m benchmarks central ({seed} stands for the seed)"
            )
        return None
    label = read_label(Path(settings.init))
    flat = settings.flat()
    for key in SPLIT_KEYS:
        if label["settings"].get(key) != flat[key]:
            raise SettingsError(
                f"init = {settings.init!r}: was trained with {key} = {label['settings'].get(key)!r}, the run has "
                f"{flat[key]!r}; its training samples may be the run's test samples"
            )
    return label
