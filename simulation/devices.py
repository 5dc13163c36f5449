"""The devices enrolled at a SuperLink: list, enrol by public key, remove; and what runs and agents know of them.

All of this asks Flower's Control API; its list has the names that `flwr supernode list` leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedtta.client.names import check_name
from fedtta.settings import SettingsError
from fedtta.simulation.control import FlowerError, client, public_key, register

REMOVED = "unregistered"  # Flower's status of a node that may no longer connect
PATIENCE = 10.0  # seconds for an agent to answer


@dataclass(frozen=True)
class Device:
    """An enrolled node.

    Parameters
    ----------
    name : str
        The name it was enrolled under.
    node_id : int
        Flower's id.
    status : str
        "registered" (has never connected), "online", "offline" or "unregistered".
    last_seen : datetime, optional
        Its last heartbeat, UTC; None: it has never connected.
    key : bytes
        Its public key, PEM.
    """

    name: str
    node_id: int
    status: str
    last_seen: datetime | None
    key: bytes = b""


@dataclass(frozen=True)
class Known:
    """What a run or an agent says of a device; "-" for what it does not say."""

    data: str = "-"
    model: str = "-"


def listed(superlink: str, ca: Path | None) -> list[Device]:
    """Return all devices that were ever enrolled, by name.

    Parameters and errors are those of `control.client`.
    """
    from flwr.common.constant import HEARTBEAT_PATIENCE
    from flwr.proto.control_pb2 import ListNodesRequest

    with client(superlink, ca) as control:
        nodes = control.ListNodes(ListNodesRequest()).nodes_info
    found = []
    for node in nodes:
        seen = None
        if node.last_activated_at:
            # a node is online until so many intervals after its last heartbeat
            seen = datetime.fromtimestamp(node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval, UTC)
        found.append(Device(node.name or "-", node.node_id, node.status, seen, node.public_key))
    return sorted(found, key=lambda device: (device.name, device.node_id))


def enrol(superlink: str, ca: Path | None, key: Path, name: str) -> str:
    """Register a device's public key under a name and return what to tell the user.

    Raises
    ------
    SettingsError
        No device can have this name, another one has it, or the key was removed or is another device's.
    FlowerError
        The file is no public key, or the SuperLink does not answer.
    FileNotFoundError
        There is no such file.
    """
    check_name(name)
    content = public_key(key)
    found = listed(superlink, ca)
    for device in found:
        if device.key == content and device.status == REMOVED:
            raise SettingsError(f"{key} was removed, as {device.name}: such a key stays out, make a new one")
    check_free(found, key, name)
    node = register(superlink, ca, key, name)
    return f"{key} is enrolled already, as {name}" if node is None else f"{name} is enrolled as node {node}"


def check_free(enrolled: Iterable[Device], key: Path, name: str) -> None:
    """Raise SettingsError if a public key is enrolled under another name, or another key under this one."""
    content = public_key(key)
    for device in (one for one in enrolled if one.status != REMOVED):
        if device.name == name and device.key != content:
            raise SettingsError(f"another key is enrolled as {name} (node {device.node_id}): remove it first")
        if device.key == content and device.name != name:
            raise SettingsError(f"{key} is enrolled already, as {device.name}")


def remove(superlink: str, ca: Path | None, device: str) -> str:
    """Unregister a device, given by its name or node id, and return what to tell the user.

    Raises
    ------
    SettingsError
        No device, or more than one, has this name.
    FlowerError
        The SuperLink does not answer, or refuses.
    """
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    enrolled = [one for one in listed(superlink, ca) if one.status != REMOVED]
    found = [one for one in enrolled if device in (one.name, str(one.node_id))]
    if len(found) != 1:
        names = ", ".join(f"{one.name} ({one.node_id})" for one in found or enrolled) or "none"
        why = "several devices are called so, give the node id" if found else "no such device"
        raise SettingsError(f"{device}: {why}; enrolled: {names}")
    with client(superlink, ca) as control:
        control.UnregisterNode(UnregisterNodeRequest(node_id=found[0].node_id))
    return f"{found[0].name} (node {found[0].node_id}) is removed"


def from_run(folder: Path) -> dict[str, Known]:
    """Return name → what the events of a run say: the data at its start or when it joined, the model served at the end.

    Damaged lines, and half a line at the end, are left out.

    Raises
    ------
    SettingsError
        The folder has no events.
    """
    from fedtta.server.report.journal import METRICS_FILE, read_lines

    path = folder / METRICS_FILE
    if not path.is_file():
        raise SettingsError(f"--run {folder}: no {METRICS_FILE} is there")
    data: dict[str, str] = {}
    names: dict[int, str] = {}
    models: dict[str, str] = {}
    for event in (line.event for line in read_lines(path.read_bytes()) if not line.fault):
        if event["event"] == "clients":
            sizes = event["sizes"]
            names = dict(enumerate(event.get("names") or map(str, range(len(sizes)))))
            abouts = event.get("data") or [{}] * len(sizes)
            data |= {names[i]: _data(sizes[i], abouts[i]) for i in range(len(sizes))}
        elif event["event"] == "joined":
            names[event["partition"]] = event["name"]
            data[event["name"]] = _data(event["sizes"], event.get("data") or {})
        elif event["event"] == "served":
            models[names.get(event["partition"], str(event["partition"]))] = event["served"]
    return {name: Known(text, models.get(name, "-")) for name, text in data.items()}


def _data(sizes: Sequence[int], about: Mapping[str, Any]) -> str:
    """Return a summary of a client's data."""
    parts = [f"{about.get('samples') or sum(sizes)} samples"]
    if about.get("skipped"):
        parts.append(f"{about['skipped']} skipped")
    if not about.get("labelled", True):
        parts.append("no labels")
    elif about.get("classes_present"):
        parts.append(f"{about['classes_present']} classes")
    return ", ".join(parts)


def from_agent(address: str) -> Known:
    """Return what an agent on a Unix socket says of itself.

    Raises
    ------
    FlowerError
        It does not answer.
    """
    import grpc

    from fedtta.messages import agent_pb2 as pb
    from fedtta.messages import agent_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            status = agent_pb2_grpc.PredictorStub(channel).Status(pb.StatusRequest(), timeout=PATIENCE)
        except grpc.RpcError as error:
            raise FlowerError(f"no agent answers at {address}: {error.details()}") from error
    skipped = f", {status.data_skipped} skipped" if status.data_skipped else ""
    data = f"{status.data_samples} samples{skipped}" if status.data_samples else "-"
    return Known(data, status.model_version or "none yet")


def table(devices: Sequence[Device], known: Mapping[str, Known], gone: bool = False) -> Table:
    """Return a table of devices; those that were removed only with `gone`."""
    rows = Table(box=None, pad_edge=False)
    for heading in ("name", "node", "status", "last seen", "data", "model"):  # ids and versions are copied: none is cut
        rows.add_column(heading, overflow="fold", no_wrap=heading in ("node", "status"))
    for device in devices:
        if device.status == REMOVED and not gone:
            continue
        about = known.get(device.name, Known())
        seen = device.last_seen.strftime("%Y-%m-%d %H:%M:%SZ") if device.last_seen else "never"
        cells = (device.name, str(device.node_id), device.status, seen, about.data, about.model)
        rows.add_row(*map(Text, cells))
    return rows
