"""The ClientApp: a Flower message becomes a request, and the client's reply a message.

A node config with `agent="unix:/path"` passes requests on to a resident agent. torch is imported only when this process
answers them itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedtta.messages.arrays import array_bytes
from fedtta.messages.flower import bytes_record, read_arrays, reply_message, request_of
from fedtta.messages.replies import Adapted, RefinedRates
from fedtta.settings import Settings, SettingsError, from_json, keys_in, parse_class_map

if TYPE_CHECKING:
    from fedtta.client.node import Node

#: Keys of a node config beside those that override settings; Flower's simulation sets the last two.
NODE_KEYS = ("name", "data", "class-map", "role", "partition-id", "num-partitions")

app = ClientApp()


def answer(message: Message, context: Context) -> Message:
    """Answer a message, in this process or by the agent that the node config names.

    Raises
    ------
    ValueError, FloatingPointError
        As `fedtta.client.node.perform`; Flower sends the reason as an error reply.
    """
    request = request_of(message)
    if "agent" in context.node_config:
        from fedtta.client.relay import relay

        reply = relay(request, context.node_config, message.metadata.ttl)
    else:
        from fedtta.client.node import perform

        reply = perform(request, node_of(context, from_json(request.settings)))
    if isinstance(reply, RefinedRates | Adapted):  # small replies: what Flower ships beside them counts
        reply = replace(reply, context_bytes=_context_bytes(context))
    return reply_message(reply, message)


app.query("identify")(answer)
app.query("share_keys")(answer)
app.query("unmask")(answer)
app.query("observe")(answer)
app.train()(answer)
app.train("statistics")(answer)
app.train("rates")(answer)
app.train("adapt")(answer)
app.evaluate()(answer)


def node_of(context: Context, settings: Settings) -> Node:
    """Return the node's own facts from its node config; in Flower's simulation they follow from the run's settings.

    Raises
    ------
    SettingsError
        The node config has no name, or something in it is not allowed; or as `fedtta.client.sites.simulated_nodes`.
    """
    from fedtta.client.node import Node
    from fedtta.client.sites import simulated_nodes

    config = context.node_config
    known = (*NODE_KEYS, *keys_in("node"))
    if unknown := [key for key in config if key not in known]:
        raise SettingsError(f"the node config has {', '.join(unknown)}; allowed are {', '.join(known)}")
    if "name" not in config and "partition-id" not in config:
        raise SettingsError("the node config lacks name; start the node with --node-config")
    if "name" not in config and settings.devices:
        node = simulated_nodes(settings)[int(config["partition-id"])]
        return replace(node, state=ContextState(context.state))
    return Node(
        str(config.get("name", config.get("partition-id"))),
        ContextState(context.state),
        str(config.get("data", "")),
        str(config["role"]) if "role" in config else None,
        {key: config[key] for key in keys_in("node") if key in config},
        class_map=parse_class_map(str(config.get("class-map", ""))),
    )


class ContextState:
    """Private state in Flower's context, which keeps it for the length of a run (see `PrivateState`).

    A resumed run does not find it again, so entries that a server could resume from are not kept: they would travel
    with every message.
    """

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, key: str, round: int) -> dict[str, NDArray[Any]] | None:
        """Return the newest entry of `key` tagged with `round` or earlier, or None."""
        tags = [tag for tag in self.tags().get(key, []) if tag <= round]
        return read_arrays(self.records.array_records[f"{key}@{max(tags)}"]) if tags else None

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]], keep: Collection[int] = ()) -> None:
        """Store an entry of `key` tagged with `round`; see `PrivateState.save`. `keep` changes nothing."""
        from fedtta.client.state import outdated

        self.records[f"{key}@{round}"] = bytes_record(arrays)
        for tag in outdated(self.tags()[key], round):
            del self.records[f"{key}@{tag}"]

    def tags(self) -> dict[str, list[int]]:
        """Return the tags of all entries by key, sorted."""
        from fedtta.client.state import by_key

        found = (re.fullmatch(r"(.+)@(\d+)", name) for name in self.records.array_records)
        return by_key([(match[1], int(match[2])) for match in found if match])


def _context_bytes(context: Context) -> int:
    """Return the bytes of the arrays in the context, which Flower ships with every message."""
    return sum(array_bytes(read_arrays(record)) for record in context.state.array_records.values())
