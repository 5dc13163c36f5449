"""The ClientApp: where a Flower message becomes a call on a `Device`, and back.

torch is imported only when a message asks for work on the device.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from settings import Settings, SettingsError, from_config

if TYPE_CHECKING:
    from client.device import Device
    from client.state import PrivateState
    from client.task import Task

#: Keys of a message's config that are no settings.
ENVELOPE = (
    "server-round", "training", "rule", "objective", "shared-names", "wanted", "run", "labels", "adapters", "options",
    "bases", "shifts-resolved", "variant", "network", "send-normalisation", "send-start", "cell", "mixed",
)  # fmt: skip
#: Settings that a node may set for itself in its node config.
NODE_KEYS = ("data-dir", "device", "state-dir")

app = ClientApp()


@app.query("identify")
def identify(message: Message, context: Context) -> Message:
    """Say which partition this node holds and what its data look like; no label counts."""
    reply = ConfigRecord(_device(message, context).describe())
    return Message(RecordDict({"identity": reply}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do one training round."""
    config: Mapping[str, Any] = message.content.config_records["config"]
    arrays, metrics = _device(message, context).train(
        int(config["server-round"]), _task(config), _unpack(message, "arrays")
    )
    return Message(RecordDict({"arrays": _pack(arrays), "metrics": MetricRecord(metrics)}), reply_to=message)


@app.train("statistics")
def statistics(message: Message, context: Context) -> Message:
    """Personalise on the final model and report statistics under it."""
    config: Mapping[str, Any] = message.content.config_records["config"]
    arrays, metrics = _device(message, context).statistics(
        int(config["server-round"]), _task(config), _unpack(message, "arrays"), list(config["wanted"])
    )
    return Message(RecordDict({"statistics": _pack(arrays), "metrics": MetricRecord(metrics)}), reply_to=message)


@app.train("rates")
def rates(message: Message, context: Context) -> Message:
    """Refine adaptation rates on this client's held-out data (ATP); the network travels once."""
    config: Mapping[str, Any] = message.content.config_records["config"]
    refined, metrics = _device(message, context).refine_rates(
        int(config["server-round"]), _network(message, context), _unpack_rates(message, "rates"), config["variant"]
    )
    record = _pack({name: np.asarray(value, np.float64) for name, value in refined.items()})
    metrics["context-bytes"] = _context_bytes(context)
    return Message(RecordDict({"rates": record, "metrics": MetricRecord(metrics)}), reply_to=message)


@app.train("adapt")
def adapt(message: Message, context: Context) -> Message:
    """Adapt to the next batch of this client's stream, starting from its mixture (test-time rounds)."""
    from client.evaluation import Row

    config: Mapping[str, Any] = message.content.config_records["config"]
    row = Row(config["labels"][0], config["adapters"][0], json.loads(config["options"][0]))
    adapted, metrics = _device(message, context).adapt(
        int(config["server-round"]),
        config["cell"],
        _network(message, context),
        row,
        config["mixed"],
        _unpack(message, "shared") if "shared" in message.content else None,
        float(config["proximal-mu"]),
    )
    content = {"shared": _pack(adapted.shared)}
    if config["send-normalisation"]:
        content["normalisation"] = _pack(adapted.domain)
    if config["send-start"]:
        content["start"] = _pack(adapted.start)
    metrics["context-bytes"] = _context_bytes(context)
    return Message(RecordDict({**content, "metrics": MetricRecord(metrics)}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Run the adapters named in the message on the test streams named in it."""
    from client.evaluation import Row

    config: Mapping[str, Any] = message.content.config_records["config"]
    columns = zip(config["labels"], config["adapters"], config["options"], config["bases"], strict=True)
    rows = [Row(label, adapter, json.loads(options), base) for label, adapter, options, base in columns]
    leak_check, results = _device(message, context).evaluate(
        int(config["server-round"]),
        _task(config),
        _unpack(message, "arrays"),
        _unpack(message, "statistics") if "statistics" in message.content else None,
        rows,
        config["shifts-resolved"],
        {variant: _unpack_rates(message, f"rates.{variant}") for variant in config.get("variant", [])},
    )
    metrics: dict[str, Any] = dict(leak_check)
    for result in results:
        prefix = f"{result.pop('method')}|{result.pop('shift')}|"
        metrics |= {prefix + name: value for name, value in result.items()}
    metrics["num-examples"] = max(leak_check["checked"], 1)
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


class ContextState:
    """Private state in Flower's context, which keeps it for the length of a run (see `PrivateState`)."""

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, key: str, round: int) -> dict[str, NDArray[Any]] | None:
        """Return the newest entry of `key` tagged with `round` or earlier, or None."""
        tags = [tag for tag in self._tags(key) if tag <= round]
        if not tags:
            return None
        entry = self.records.array_records[f"{key}@{max(tags)}"]
        return {name: array.numpy() for name, array in entry.items()}

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store an entry of `key` tagged with `round`; see `PrivateState.save`."""
        from client.state import outdated

        self.records[f"{key}@{round}"] = _pack(arrays)
        for tag in outdated(self._tags(key), round):
            del self.records[f"{key}@{tag}"]

    def _tags(self, key: str) -> list[int]:
        found = (re.fullmatch(re.escape(key) + r"@(\d+)", name) for name in self.records.array_records)
        return [int(match[1]) for match in found if match]


def _task(config: Mapping[str, Any]) -> Task:
    """Return what a message's training asks of this client."""
    from client.task import Task

    joined = frozenset(config["shared-names"]) if "shared-names" in config else None
    return Task(config["training"], config["rule"], config["objective"], joined)


def _device(message: Message, context: Context) -> Device:
    """Build the device that a message is for, from its settings and the node's own."""
    from client.runtime import make_device

    config: dict[str, Any] = dict(message.content.config_records["config"])
    settings = _settings(message, context)
    for key in ("partition-id", "num-partitions"):
        if key not in context.node_config:
            raise SettingsError(f"the node config lacks {key}; start the node with --node-config")
    if (expected := int(context.node_config["num-partitions"])) != settings.clients:
        raise SettingsError(f"clients = {settings.clients}: this node is one of {expected}")
    partition = int(context.node_config["partition-id"])
    role = str(context.node_config["role"]) if "role" in context.node_config else None
    state = _state(settings, config, partition, context)
    return make_device(settings, partition, state, _memory(settings, config, partition), role)


def _settings(message: Message, context: Context) -> Settings:
    """Return a message's settings, with what the node sets for itself."""
    config: dict[str, Any] = dict(message.content.config_records["config"])
    config |= {key: context.node_config[key] for key in NODE_KEYS if key in context.node_config}
    return from_config(config, ignore=ENVELOPE)


def _state(settings: Settings, config: Mapping[str, Any], partition: int, context: Context) -> PrivateState:
    """Choose where private state lives: a folder when one is set, Flower's context otherwise."""
    from client.state import DirectoryState

    if settings.state_dir:
        return DirectoryState(Path(settings.state_dir).expanduser(), config["run"], partition)
    return ContextState(context.state)


def _memory(settings: Settings, config: Mapping[str, Any], partition: int) -> PrivateState:
    """Return where adapters' states live: on disk, since Flower would ship its context with every message."""
    from client.networks import private_folder
    from client.state import DirectoryState

    return DirectoryState(private_folder(settings), config["run"], partition)


def _network(message: Message, context: Context) -> dict[str, NDArray[Any]]:
    """Return the network that a message is about: what it brings, which is kept, or what was kept before."""
    from client.networks import NetworkStore, private_folder

    config = message.content.config_records["config"]
    folder = private_folder(_settings(message, context))
    store, digest = NetworkStore(folder / "networks"), str(config["network"])
    if "arrays" not in message.content:
        return store.load(digest)
    arrays = _unpack(message, "arrays")
    store.keep(digest, arrays)
    return arrays


def _context_bytes(context: Context) -> int:
    """Return the bytes of the arrays that Flower ships with every message because they are in the context."""
    return sum(array.numpy().nbytes for record in context.state.array_records.values() for array in record.values())


def _unpack_rates(message: Message, record: str) -> dict[str, float]:
    """Return adaptation rates by module; finite numbers only."""
    numbers = {name: float(value) for name, value in _unpack(message, record).items()}
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"rates of {', '.join(bad)} are not finite")
    return numbers


def _pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def _unpack(message: Message, record: str) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in message.content.array_records[record].items()}
