"""The fleet: every device with its newest telemetry, from the run folders and from what a SuperLink lists.

The lines of `devices.jsonl` are read with the types of `Telemetry`; one that does not fit is skipped and counted. Only
the newest files are read, once for each change: all lines at their ends, and of those before them each node's last.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedtta.messages.record import Record
from fedtta.messages.replies import LATENCY_BOUNDS, Telemetry
from fedtta.server.observation import DEVICES_FILE, FORMER, MOST_BYTES
from fedtta.settings import name_order
from fedtta.simulation.devices import REMOVED, Device

Status = Literal["online", "offline", "registered", "unknown"]
STATUSES: dict[str, Status] = {"online": "online", "offline": "offline", "registered": "registered"}
TAIL = 4 << 20  # bytes of a file of which all lines are read, from its end
#: A line as `fedtta.server.observation` writes it, with its node.
LINE = re.compile(rb'^\{"at": [^,\n]{1,40}, "node": (\d{1,20}),[^\n]*$', re.MULTILINE)
FILES = 16  # files that are read, the newest ones


@dataclass(frozen=True)
class FleetDevice:
    """A device, as far as it is known.

    Parameters
    ----------
    name : str
        The name in its telemetry. The one that it was enrolled under, if it has told nothing, or another listed
        device was enrolled under that name or tells it, too.
    node_id : int or None
        Flower's id.
    status : "online", "offline", "registered" or "unknown"
        As the SuperLink says; "registered": it has never connected, "unknown": it is not listed.
    last_seen : float or None
        Seconds since 1970 of its last heartbeat or telemetry, whichever is later.
    telemetry : Telemetry or None
        The newest; its name is that of the device.
    telemetry_at : float or None
        Seconds since 1970 at which it arrived.
    """

    name: str
    node_id: int | None
    status: Status
    last_seen: float | None
    telemetry: Telemetry | None
    telemetry_at: float | None

    @property
    def key(self) -> tuple[str, int | None]:
        """Return what tells it from all others: several listed devices may have one name, others change their id."""
        return self.name, None if self.status == "unknown" else self.node_id


@dataclass(frozen=True)
class Heard:
    """Telemetry of a node, and the seconds since 1970 at which it arrived."""

    at: float
    node: int
    telemetry: Telemetry


class _Line(BaseModel):
    """A line of `devices.jsonl`; `Telemetry` checks the values itself."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    at: Annotated[float, Field(ge=0, le=1e11)]
    node: Annotated[int, Field(ge=0, lt=1 << 64)]
    run: Annotated[str, Field(max_length=200)]
    telemetry: dict[str, Any]


@dataclass(frozen=True)
class _Content:
    """What the end of a file holds, and the state of the file (inode, size, time) that it was read in."""

    state: tuple[int, int, int]
    heard: list[Heard]
    damaged: int


def read_fleet(results: Path, listed: Sequence[Device] = ()) -> list[FleetDevice]:
    """Return all devices that a SuperLink lists or that there is telemetry of, in the order of their names.

    A listed device is known by its node id, whatever name its telemetry has: names are what devices say. Telemetry of a
    node that is not listed is a device of its own, unless a listed one has its name.

    Parameters
    ----------
    results : Path
        Folder of run folders; it need not exist.
    listed : sequence of Device
        What `fedtta.simulation.devices.listed` returns; removed devices are left out, with their telemetry.
    """
    heard = sorted((one for content in _contents(results) for one in content.heard), key=lambda one: one.at)
    by_node = {one.node: one for one in heard}  # the last one stays
    enrolled = [one for one in listed if one.status != REMOVED]
    names = _names(enrolled, by_node)
    devices = [_listed_device(one, names[one.node_id], by_node.get(one.node_id)) for one in enrolled]
    nodes, taken = {one.node_id for one in listed}, {one.name for one in devices}
    others = {one.telemetry.name: one for one in heard if one.node not in nodes}
    devices += [
        FleetDevice(name, one.node, "unknown", one.at, one.telemetry, one.at)
        for name, one in others.items()
        if name not in taken
    ]
    return sorted(devices, key=lambda one: (name_order(one.name), one.node_id or 0))


def history(
    results: Path, name: str, most: int | None = None, node_id: int | None = None
) -> list[tuple[float, Telemetry]]:
    """Return a device's last telemetry as (seconds since 1970 at which it arrived, telemetry), oldest first.

    Parameters
    ----------
    name : str
        The name in its telemetry.
    most : int, optional
        Length, at most; None: all that `read_fleet` reads.
    node_id : int, optional
        Take the telemetry of this node instead, whatever its name.
    """
    found = [
        one
        for content in _contents(results)
        for one in content.heard
        if (one.telemetry.name == name if node_id is None else one.node == node_id)
    ]
    found.sort(key=lambda one: one.at)
    last = found if most is None else found[max(0, len(found) - most) :]
    return [(one.at, replace(one.telemetry, name=name)) for one in last]


def damaged_lines(results: Path) -> int:
    """Return how many lines could not be read in what `read_fleet` reads."""
    return sum(content.damaged for content in _contents(results))


def latency(telemetry: Telemetry, share: float) -> float | None:
    """Return a quantile of the seconds of prediction requests, interpolated in its interval of the histogram.

    Parameters
    ----------
    share : float
        In (0, 1]; 0.5 is the median.

    Returns
    -------
    float or None
        At most the last of `LATENCY_BOUNDS`, as in Prometheus; None without requests.
    """
    rank, before = share * sum(telemetry.latency), 0
    if not rank:
        return None
    for count, (low, high) in zip(telemetry.latency, pairwise((0.0, *LATENCY_BOUNDS)), strict=False):
        if count and before + count >= rank:
            return low + (high - low) * (rank - before) / count
        before += count
    return LATENCY_BOUNDS[-1]


def _names(listed: Sequence[Device], by_node: Mapping[int, Heard]) -> dict[int, str]:
    """Return node id → the name in its telemetry, if no other device is called so, or the enrolled one."""
    told = {one.node_id: by_node[one.node_id].telemetry.name for one in listed if one.node_id in by_node}
    claims = Counter(told.values())
    enrolled = {one.name for one in listed}
    return {
        one.node_id: name
        if (name := told.get(one.node_id)) is not None and claims[name] == 1 and name not in enrolled
        else one.name
        for one in listed
    }


def _listed_device(one: Device, name: str, heard: Heard | None) -> FleetDevice:
    """Return a listed device with the newest telemetry of its node."""
    seen = [one.last_seen.timestamp()] if one.last_seen else []
    seen += [heard.at] if heard else []
    status = STATUSES.get(one.status, "unknown")
    telemetry = replace(heard.telemetry, name=name) if heard else None
    return FleetDevice(name, one.node_id, status, max(seen, default=None), telemetry, heard.at if heard else None)


# -- files

_READ: dict[Path, _Content] = {}


def _contents(results: Path) -> list[_Content]:
    """Return what the newest files hold; one that has not changed is not read again."""
    files: dict[Path, tuple[int, int, int]] = {}
    for path in (path for name in (DEVICES_FILE, FORMER) for path in results.glob(f"*/{name}")):
        try:
            about = path.stat()
        except OSError:  # removed meanwhile
            continue
        if stat.S_ISREG(about.st_mode):
            files[path] = about.st_ino, about.st_size, about.st_mtime_ns
    newest = sorted(files, key=lambda path: files[path][2], reverse=True)[:FILES]
    for path in [path for path in list(_READ) if path not in newest and path.parent.parent == results]:
        _READ.pop(path, None)
    found = []
    for path in newest:
        content = _READ.get(path)
        if content is None or content.state != files[path]:
            content = _READ[path] = _read(path, files[path])
        found.append(content)
    return found


def _read(path: Path, state: tuple[int, int, int]) -> _Content:
    """Read the end of a file; one that cannot be read counts as one damaged line."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MOST_BYTES))
            content = file.read(MOST_BYTES)
    except OSError:
        return _Content(state, [], 1)
    cut = len(content) - TAIL
    begin = content.find(b"\n", cut - 1) + 1 if cut > 0 else 0  # a line that is cut is one of those before
    heard = [_heard(line) for line in content[begin:].split(b"\n") if line.strip()]
    found = [one for one in heard if one]
    return _Content(state, [*_before(content, begin, {one.node for one in found}), *found], heard.count(None))


def _before(content: bytes, end: int, known: AbstractSet[int]) -> list[Heard]:
    """Return the last telemetry before `end` of each node that is not known: it has been silent since."""
    last = {int(one[1]): one[0] for one in LINE.finditer(content, 0, end)}
    return [one for node, line in last.items() if node not in known and (one := _heard(line))]


def _heard(line: bytes) -> Heard | None:
    """Return the telemetry of a line; None if it is damaged."""
    try:
        read = _Line.model_validate_json(line)
        return Heard(read.at, read.node, Telemetry.from_record(Record(Telemetry.kind, read.telemetry)))
    except (ValueError, RecursionError):
        return None
