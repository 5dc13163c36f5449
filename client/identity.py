"""What a client says of itself before a run: sizes and kinds of its data, no label counts."""

from __future__ import annotations

from typing import Any

from client.state import PrivateState
from client.streams import streams_of
from data import CORRUPTIONS, DATASETS, Federation, Role, resolve
from settings import Settings


def identity(
    federation: Federation, partition: int, role: Role, settings: Settings, has_natural: bool
) -> dict[str, Any]:
    """Return what the server may know; see `server.world.World` for what it does with it.

    Raises
    ------
    ValueError
        A test distribution that the settings ask for does not exist, or its streams cannot be made.
    """
    split, images = federation.splits[partition], federation.images
    shifts, note = resolve(settings.shifts, has_natural)
    if "unseen_domain" in shifts and not len(federation.unseen):
        raise ValueError("shifts: unseen_domain is a test distribution with unseen-domain only")
    if " without " in images.name:  # some of its domains are not at hand
        note = "; ".join(filter(None, (note, f"pictures: {images.name}")))
    channels = int(images.pixels.shape[1])
    mean, std = DATASETS[settings.dataset].normalisation(channels)
    in_rounds = bool(settings.collaborations)  # test-time rounds over streams, which shifts play no part in
    return {
        "partition-id": partition,
        "num-partitions": federation.num_clients,
        "classes": list(images.classes),
        "channels": channels,
        "mean": list(mean),
        "std": list(std),
        "sizes": [len(split.train), len(split.validation), len(split.test)],
        "shifts": list(shifts),
        "note": "" if in_rounds else note or "",
        "role": role,
        "corruptions": list(CORRUPTIONS) if in_rounds else [],
        "stream-rounds": streams_of(settings, federation).rounds if in_rounds else 0,
    }


def kept(*states: PrivateState) -> dict[str, Any]:
    """Return what private states hold of a run, as two lists: `kept-keys` and, for each, a tag in `kept-tags`.

    A server that goes on with a run learns from it whether this client can go on too; no contents are told.
    """
    found = sorted({(key, tag) for state in states for key, tags in state.tags().items() for tag in tags})
    return {"kept-keys": [key for key, _ in found], "kept-tags": [tag for _, tag in found]}
