"""The device's own data as the agent sees them outside a run: counted on request, and read to check a model file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedtta.client.agent.candidate import Samples, spaced
from fedtta.client.agent.config import AgentConfig
from fedtta.client.names import parse_class_map
from fedtta.client.serving import Served

if TYPE_CHECKING:
    from fedtta.data.sources import OwnData

NAMED = 50  # skipped files that are named
INDEX = "scan.json"  # in `state-dir`: what the last scan has read


@dataclass(frozen=True)
class Scan:
    """What a scan of the device's own data has found.

    Parameters
    ----------
    samples, used, skipped : int
        Samples, those in use, and all others.
    notes : tuple of str
        Counts by reason, then the skipped samples by name.
    """

    samples: int = 0
    used: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()


def scan(config: AgentConfig, served: Served | None) -> Scan:
    """Scan the device's own data, with the classes and the preprocessing of the served model, if there is one.

    Raises
    ------
    ValueError
        There are no data of its own, or they cannot be used; the message says why.
    """
    found = _own(config, served)
    named = [f"{name!r}: {reason}" for name, reason in found.skipped.items()]
    more = [f"and {len(named) - NAMED} more"] if len(named) > NAMED else []
    notes = (*found.notes, *named[:NAMED], *more)
    return Scan(found.samples, found.used, found.samples - found.used, notes)


def samples_of(config: AgentConfig, served: Served) -> Samples:
    """Return the samples that a model without a run is checked on; none without data of the device's own."""
    if not config.data:
        return Samples.none(served.shape)
    found = _own(config, served)
    choices = ((found.split.validation, found.labelled), (found.split.train, found.labelled), (found.split.test, False))
    for index, known in choices:
        if len(index):
            chosen = spaced(index)
            labels = np.asarray(found.images.labels[chosen]) if known else None
            return Samples(np.asarray(found.images.pixels[chosen]), labels)
    return Samples.none(served.shape)


def _own(config: AgentConfig, served: Served | None) -> OwnData:
    if not config.data:
        raise ValueError("this device has no data of its own: its file says no data = ...")
    from fedtta.data.sources import open_source, own_data
    from fedtta.models.preprocessing import Preprocessing

    class_map = parse_class_map(config.class_map)
    if served is None:
        known = dict.fromkeys(class_map.get(name, name) for name in open_source(config.data).classes)
        classes = tuple(known) or ("unlabelled",)  # only counted
    else:
        classes = served.classes
    return own_data(
        config.data,
        classes=classes,
        class_map=class_map,
        preprocessing=Preprocessing() if served is None else served.preprocessing,
        max_skipped=1.0,  # told, not refused: that is the run's decision
        max_megapixels=config.max_megapixels,
        role="target" if config.role == "target" else None,
        index_file=config.state_folder / INDEX,
    )
