"""The ClientApp: where a Flower message becomes `Work`, and `Done` a reply.

A node config with `agent="unix:/path"` has a resident agent do the work. torch is imported only when this process does
it itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from client.work import Done, Work
from messages.held import held_record, read
from messages.npy import NUMPY, to_bytes
from settings import SettingsError

if TYPE_CHECKING:
    from client.phases import Node

#: Phases whose messages must stay small; their replies say what Flower ships beside them.
COUNTED = ("rates", "adapt")

app = ClientApp()


@app.query("identify")
def identify(message: Message, context: Context) -> Message:
    """Say which partition this node holds and what its data look like."""
    return answer("identify", message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do one training round."""
    return answer("train", message, context)


@app.train("statistics")
def statistics(message: Message, context: Context) -> Message:
    """Personalise on the final model and report statistics under it."""
    return answer("statistics", message, context)


@app.train("rates")
def rates(message: Message, context: Context) -> Message:
    """Refine adaptation rates."""
    return answer("rates", message, context)


@app.train("adapt")
def adapt(message: Message, context: Context) -> Message:
    """Adapt to the next batch of this client's stream."""
    return answer("adapt", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Run adapters on test streams."""
    return answer("evaluate", message, context)


def answer(phase: str, message: Message, context: Context) -> Message:
    """Do what a message asks for, or let the agent that the node config names do it, and reply."""
    work = to_work(phase, message)
    if "agent" in context.node_config:
        from client.relay import relay

        done = relay(work, context.node_config, message.metadata.ttl)
    else:
        from client.phases import perform

        done = perform(work, node_of(context))
    if phase in COUNTED:
        done.metrics["context-bytes"] = _context_bytes(context)
    return Message(to_content(done), reply_to=message)


def to_work(phase: str, message: Message) -> Work:
    """Return a message's config and arrays as plain values."""
    config: dict[str, Any] = dict(message.content.config_records["config"])
    records = {name: _unpack(record) for name, record in message.content.array_records.items()}
    return Work(phase, config, records)


def packed(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record of bytes, which is how Flower keeps them."""
    record = ArrayRecord()
    for name, value in arrays.items():
        array = np.asarray(value)
        record[name] = Array(dtype=str(array.dtype), shape=array.shape, stype=NUMPY, data=to_bytes(array))
    return record


def to_content(done: Done) -> RecordDict:
    """Return an answer as Flower's records, whose bytes are made when they are sent."""
    content = RecordDict({name: held_record(arrays) for name, arrays in done.records.items()})
    if done.metrics:
        content["metrics"] = MetricRecord(done.metrics)
    if done.identity:
        content["identity"] = ConfigRecord(done.identity)
    return content


def node_of(context: Context) -> Node:
    """Return what the node config says of this client.

    Raises
    ------
    SettingsError
        It does not say which client this is.
    """
    from client.phases import NODE_KEYS, Node

    config = context.node_config
    for key in ("partition-id", "num-partitions"):
        if key not in config:
            raise SettingsError(f"the node config lacks {key}; start the node with --node-config")
    return Node(
        int(config["partition-id"]),
        int(config["num-partitions"]),
        ContextState(context.state),
        str(config["role"]) if "role" in config else None,
        {key: config[key] for key in NODE_KEYS if key in config},
    )


class ContextState:
    """Private state in Flower's context, which keeps it for the length of a run (see `PrivateState`).

    No run that is resumed finds it again, so what a server could go back to is not kept: it would travel with every
    message.
    """

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, key: str, round: int) -> dict[str, NDArray[Any]] | None:
        """Return the newest entry of `key` tagged with `round` or earlier, or None."""
        tags = [tag for tag in self.tags().get(key, []) if tag <= round]
        return _unpack(self.records.array_records[f"{key}@{max(tags)}"]) if tags else None

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]], keep: Collection[int] = ()) -> None:
        """Store an entry of `key` tagged with `round`; see `PrivateState.save`. `keep` changes nothing."""
        from client.state import outdated

        self.records[f"{key}@{round}"] = packed(arrays)
        for tag in outdated(self.tags()[key], round):
            del self.records[f"{key}@{tag}"]

    def tags(self) -> dict[str, list[int]]:
        """Return the tags of all entries by key, sorted."""
        from client.state import by_key

        found = (re.fullmatch(r"(.+)@(\d+)", name) for name in self.records.array_records)
        return by_key([(match[1], int(match[2])) for match in found if match])


def _context_bytes(context: Context) -> int:
    """Return the bytes of the arrays that Flower ships with every message because they are in the context."""
    return sum(array.numpy().nbytes for record in context.state.array_records.values() for array in record.values())


def _unpack(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: _read(name, array) for name, array in record.items()}


def _read(name: str, array: Array) -> NDArray[Any]:
    """Return an array, read-only and in the memory it came in; ValueError names one that cannot be read."""
    try:
        return read(array)
    except ValueError as error:
        raise ValueError(f"array {name} cannot be read: {error}") from error
