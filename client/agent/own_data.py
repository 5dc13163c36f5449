"""The device's own data outside a run: counted at the agent's start and on request, read to check a model file."""

from __future__ import annotations

from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.scans import Scan
from fedtta.client.config import AgentConfig
from fedtta.client.own import role_of, scanning
from fedtta.client.served import ServedModel
from fedtta.data.sources import OwnData, open_source, own_data
from fedtta.models.preprocessing import Preprocessing
from fedtta.settings import parse_class_map

NAMED = 50  # skipped files that are named


def scan(config: AgentConfig, classes: tuple[str, ...], preprocessing: Preprocessing) -> Scan:
    """Scan the device's own data and fill the index that runs use, with or without a model.

    Parameters
    ----------
    classes : tuple of str
        The served model's; empty without one.
    preprocessing : Preprocessing
        The served model's, or the default.

    Raises
    ------
    ValueError
        There are no data of its own, or they cannot be used; the message says why.
    """
    if not config.data:
        raise ValueError("this device has no data of its own: its file says no data = ...")
    found = _own(config, _classes(config, classes), preprocessing)
    named = [f"{name!r}: {reason}" for name, reason in found.skipped.items()]
    more = [f"and {len(named) - NAMED} more"] if len(named) > NAMED else []
    notes = (*found.notes, *named[:NAMED], *more)
    return Scan(found.samples, found.used, found.samples - found.used, notes)


def samples_of(config: AgentConfig, served: ServedModel) -> Samples:
    """Return the samples that a model without a run is checked on; none without data of the device's own."""
    if not config.data:
        return Samples.none(served.shape)
    found = _own(config, served.classes, served.preprocessing)
    return Samples.of_split(found.images, found.split, found.labelled)


def _classes(config: AgentConfig, served: tuple[str, ...]) -> tuple[str, ...]:
    """Return the served model's classes and those of the data, for a scan must not fail where a run would."""
    renamed = parse_class_map(config.class_map)
    own = (renamed.get(name, name) for name in open_source(config.data).classes)
    found = dict.fromkeys((*served, *renamed.values(), *own))
    return tuple(found) or ("unlabelled",)


def _own(config: AgentConfig, classes: tuple[str, ...], preprocessing: Preprocessing) -> OwnData:
    with scanning(config.index) as index:
        return own_data(
            config.data,
            classes=classes,
            class_map=parse_class_map(config.class_map),
            preprocessing=preprocessing,
            max_skipped=1.0,  # told, not refused: that is the run's decision
            max_megapixels=config.max_megapixels,
            role=role_of(config.role),
            index_file=index,
        )
