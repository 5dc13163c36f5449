"""Flower's messages and grids: the only module that leans on Flower's internals.

What it relies on, and why:
- `Array.__qualname__`: Flower writes a class's name into a message; a subclass of `Array` must be called "Array".
- `HeldArray` keeps the numpy array and makes bytes only where they travel; Ray, which runs Flower's simulation, ships
  it through shared memory (`__reduce__`).
- `TaskIdentity`: `Message(...)` outside a Flower process needs an identity (`allow_messages`).
- An error that the SuperLink makes carries the SuperLink's id: the node is found by `reply_to_message_id`.
- Strategies sample from the grid by the global random generator; `NodesView` shows them exactly the sampled nodes.
- Codes of errors: 3 and 4 for a message or reply that has expired (its time to live is the deadline).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from fedtta.messages.arrays import Arrays, contiguous, from_bytes, restored, to_bytes
from fedtta.messages.record import Record
from fedtta.messages.replies import Reply
from fedtta.messages.requests import REQUESTS, Request
from fedtta.messages.transport import Addressed, Answer, answer_of, late, unknown_node

NUMPY = "numpy.ndarray"  # Flower's name of arrays that numpy wrote
CONTENT = "message"  # the key of a message's values in its config record
EXPIRED = (3, 4)
POLL = 0.05  # seconds between two looks for replies, at least
IDLE = 19  # times as long as a look took: looking at hundreds of messages must not take a core from the clients
REST = 1.0  # seconds at most: a look may be slow because the machine is busy, or because it brings large models
#: What strategies write into a message's config, and the value of the request that it sets.
STRATEGY_KEYS = {
    "server-round": "round",
    "proximal-mu": "proximal-mu",
    "shared-names": "aggregated",
    "network": "network",
    "send-normalisation": "send-normalization",
    "send-start": "send-start",
}

dtype_name = functools.cache(str)  # of numpy's types, which are looked up for every array


class HeldArray(Array):
    """An array that `numpy()` returns as it is, read-only; its bytes are made when they are asked for.

    Parameters
    ----------
    value : ndarray
        Not copied; it must not change afterwards.
    """

    def __init__(self, value: NDArray[Any]) -> None:
        held = np.asarray(value).view()
        held.flags.writeable = False
        self.__dict__.update(dtype=dtype_name(held.dtype), shape=tuple(held.shape), stype=NUMPY, _held=held)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # an attribute there
        """Return the array as Flower would send it, in C order for any layout in memory."""
        return to_bytes(np.asarray(self.__dict__["_held"], order="C"))

    def numpy(self) -> NDArray[Any]:
        """Return the array itself, read-only."""
        held: NDArray[Any] = self.__dict__["_held"]
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        return _shipped, contiguous(self.__dict__["_held"])


HeldArray.__qualname__ = Array.__qualname__


def _shipped(value: NDArray[Any], turned: bool) -> HeldArray:
    """Return the array that `HeldArray.__reduce__` took apart."""
    return HeldArray(restored(value, turned))


def held_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record, by reference."""
    record = ArrayRecord()
    for name, value in arrays.items():
        record[name] = HeldArray(value)
    return record


def bytes_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record of bytes, as Flower's context stores them."""
    record = ArrayRecord()
    for name, value in arrays.items():
        array = np.asarray(value)
        record[name] = Array(dtype=str(array.dtype), shape=array.shape, stype=NUMPY, data=to_bytes(array))
    return record


def read_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record, read-only and in the memory they came in.

    Raises
    ------
    ValueError
        An array cannot be read; the message names it.
    """
    return {name: _read(name, array) for name, array in record.items()}


def _read(name: str, array: Array) -> NDArray[Any]:
    if isinstance(array, HeldArray):
        return array.numpy()
    if array.stype != NUMPY:
        raise ValueError(f"array {name} cannot be read: made by {array.stype!r}; allowed is {NUMPY}")
    try:
        return from_bytes(array.data)
    except Exception as error:  # numpy's parser of headers raises many kinds for bytes that are none of its own
        raise ValueError(f"array {name} cannot be read: {error}") from error


def to_content(record: Record) -> RecordDict:
    """Return a plain message as Flower's records; arrays go by reference."""
    content = RecordDict({name: held_record(arrays) for name, arrays in record.arrays.items()})
    content["config"] = ConfigRecord({CONTENT: json.dumps(record.values)})
    return content


def from_content(kind: str, content: RecordDict, arrays_by_id: dict[int, Arrays] | None = None) -> Record:
    """Return Flower's records as a plain message.

    Parameters
    ----------
    arrays_by_id : dict, optional
        See `request_of`.

    Raises
    ------
    ValueError
        The records are no message, or an array cannot be read.
    """
    config, arrays_by_id = content.config_records.get("config"), {} if arrays_by_id is None else arrays_by_id
    if config is None or not isinstance(config.get(CONTENT), str):
        raise ValueError(f"no {kind}: its config record lacks {CONTENT!r}")
    try:
        values = json.loads(str(config[CONTENT]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no {kind}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"no {kind}: its values are a {type(values).__name__}")
    for record in content.array_records.values():
        if id(record) not in arrays_by_id:
            arrays_by_id[id(record)] = read_arrays(record)
    return Record(kind, values, {name: arrays_by_id[id(record)] for name, record in content.array_records.items()})


def strategy_config(request: Request, settings: Mapping[str, Any]) -> ConfigRecord:
    """Return the config that a strategy configures a round with: the request, and the settings by key.

    Settings that are spelled like one of `STRATEGY_KEYS` are left out: only a strategy sets those.
    """
    read = {key: value for key, value in settings.items() if key not in STRATEGY_KEYS}
    return ConfigRecord({**read, CONTENT: json.dumps(request.to_record().values)})


def requests_of(messages: Iterable[Message]) -> list[Addressed]:
    """Return the requests in messages that a strategy has configured; arrays in common are read once.

    Raises
    ------
    ValueError
        A message is no request, or a strategy wrote something into it that does not fit.
    """
    arrays_by_id: dict[int, Arrays] = {}
    return [Addressed(message.metadata.dst_node_id, request_of(message, arrays_by_id)) for message in messages]


def request_of(message: Message, arrays_by_id: dict[int, Arrays] | None = None) -> Request:
    """Return the request in a message.

    Parameters
    ----------
    arrays_by_id : dict, optional
        Arrays that have been read already, by the identity of their record.

    Raises
    ------
    ValueError
        The message is no request.
    """
    kind = str(message.metadata.message_type)
    if kind not in REQUESTS:
        raise ValueError(f"message type {kind!r}: allowed are {', '.join(REQUESTS)}")
    record = from_content(kind, message.content, arrays_by_id)
    config, fields = (
        message.content.config_records["config"],
        {field.name for field in dataclasses.fields(REQUESTS[kind])},
    )
    written = {name: config[key] for key, name in STRATEGY_KEYS.items() if key in config}
    record.values.update({name: value for name, value in written.items() if name.replace("-", "_") in fields})
    return REQUESTS[kind].from_record(record)


def strategy_reply(node: int, arrays: Mapping[str, Mapping[str, NDArray[Any]]], metrics: Mapping[str, Any]) -> Message:
    """Return a validated reply as a strategy aggregates it.

    Parameters
    ----------
    node : int
        The node that replied.
    arrays : mapping
        Record name → arrays.
    metrics : mapping
        Name → number or list of numbers; "num-examples" is among them.
    """
    content = RecordDict({name: held_record(one) for name, one in arrays.items()})
    content["metrics"] = MetricRecord(dict(metrics))
    request = Message(RecordDict(), dst_node_id=node, message_type="train")
    request.metadata.__dict__["_message_id"] = "answered"
    return Message(content, reply_to=request)


class NodesView(Grid):
    """A grid that shows a strategy the nodes of a round and nothing else; it sends nothing.

    Parameters
    ----------
    node_ids : sequence of int
    """

    def __init__(self, node_ids: Sequence[int]) -> None:
        self._node_ids = list(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of the round."""
        return list(self._node_ids)

    def set_run(self, run: Any) -> None:
        """Refuse: a view belongs to no run."""
        raise RuntimeError("a view of nodes belongs to no run")

    @property
    def run(self) -> Any:
        """Refuse: a view belongs to no run."""
        raise RuntimeError("a view of nodes belongs to no run")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message to a node."""
        return Message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: the round loop sends."""
        raise RuntimeError("strategies configure and aggregate; the round loop sends")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse: the round loop receives."""
        raise RuntimeError("strategies configure and aggregate; the round loop receives")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse: the round loop sends and receives."""
        raise RuntimeError("strategies configure and aggregate; the round loop sends")


class GridTransport:
    """A transport over a Flower grid: Flower's simulation, or SuperNodes over gRPC.

    Parameters
    ----------
    grid : Grid
    window : int or None
        Messages under way at once. Flower's simulation looks at every message under way once per node, ten times a
        second, in the server's process: with 240 messages to 300 nodes that takes a core from the clients.
    clock, sleep : callable
    """

    def __init__(
        self,
        grid: Grid,
        window: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window = {window}: allowed is 1 or more")
        self.grid, self.window, self._clock, self._sleep = grid, window, clock, sleep

    def nodes(self) -> list[int]:
        """Return the nodes that the grid has."""
        return list(self.grid.get_node_ids())

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """See `Transport.exchange`.

        A message lives no longer than the timeout, so that a node that returns later does not work on it; clocks must
        agree to well within it. A message to a node that the grid does not have is not sent.
        """
        end, waiting = self._clock() + timeout, dict[str, Addressed]()
        connected, queued = set(self.grid.get_node_ids()), list(requests)[::-1]
        records: dict[int, ArrayRecord] = {}
        while queued or waiting:
            while queued and (self.window is None or len(waiting) < self.window):
                one = queued.pop()
                if one.node not in connected:
                    yield unknown_node(one)
                    continue
                message = self._message(one, records)
                message.metadata.ttl = timeout
                ticket = next((sent for sent in self.grid.push_messages([message]) if sent), None)
                if ticket is None:
                    yield Answer(one.node, None, "failed", "the message was not accepted for sending")
                else:
                    waiting[ticket] = one
            began = time.perf_counter()
            for reply in self.grid.pull_messages(list(waiting)) if waiting else ():
                yield _answer(waiting.pop(reply.metadata.reply_to_message_id), reply)
            if self._clock() >= end:
                break
            if waiting:
                took = time.perf_counter() - began
                self._sleep(min(max(POLL, min(REST, IDLE * took)), max(0.0, end - self._clock())))
        for one in (*waiting.values(), *queued):
            yield late(one, timeout)

    def _message(self, one: Addressed, records: dict[int, ArrayRecord]) -> Message:
        """Return a request as a message; arrays that requests have in common become one record."""
        plain = one.request.to_record()
        content = RecordDict()
        for name, arrays in plain.arrays.items():
            if id(arrays) not in records:
                records[id(arrays)] = held_record(arrays)
            content[name] = records[id(arrays)]
        content["config"] = ConfigRecord({CONTENT: json.dumps(plain.values)})
        return Message(content, dst_node_id=one.node, message_type=plain.kind)


def _answer(one: Addressed, reply: Message) -> Answer:
    """Return what a message brought."""
    if reply.has_error():
        reason = f"error {reply.error.code}: {_last_line(reply.error.reason)}"
        return Answer(one.node, None, "late" if reply.error.code in EXPIRED else "failed", reason)
    try:
        return answer_of(one, from_content(type(one.request).reply.kind, reply.content))
    except ValueError as error:
        return Answer(one.node, None, "refused", str(error))


def _last_line(reason: str | None) -> str:
    """Return the last line of an error's text, which Ray fills with a coloured traceback."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", reason or "").splitlines() if line.strip()]
    return lines[-1].removesuffix("'>") if lines else "no reason given"


def reply_message(reply: Reply, message: Message) -> Message:
    """Return a client's reply to a message."""
    return Message(to_content(reply.to_record()), reply_to=message)


def allow_messages() -> None:
    """Give this process the identity without which Flower makes no message."""
    for name in ("task_id", "run_id", "node_id"):
        setattr(TaskIdentity, name, 1)
