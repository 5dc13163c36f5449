"""Flower's messages; with `fedtta.messages.grid` the only module that leans on Flower's internals.

What it relies on, and why:
- `Array.__qualname__`: Flower writes a class's name into a message; a subclass of `Array` must be called "Array".
- `HeldArray` keeps the numpy array and makes bytes only where they travel; Ray, which runs Flower's simulation, ships
  it through shared memory (`__reduce__`). `ReadArray` reads it whenever a strategy calls `numpy()`: Flower's strategies
  add up one array of one reply after the other.
- `BLOCK`: Flower sends each array as two objects, and every object of every message takes a call at the SuperLink.
  All arrays of a record together are one "array" of a serialization that only this module reads.
- `TaskIdentity`: `Message(...)` outside a Flower process needs an identity (`allow_messages`).
- Strategies sample from the grid by the global random generator; `NodesView` shows them exactly the sampled nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from fedtta.messages.arrays import (
    Arrays,
    LazyArrays,
    contiguous,
    from_block,
    from_bytes,
    restored,
    to_block,
    to_bytes,
)
from fedtta.messages.record import Record, read_values
from fedtta.messages.replies import Reply
from fedtta.messages.requests import REQUESTS, Request
from fedtta.messages.transport import Addressed

NUMPY = "numpy.ndarray"  # Flower's name of arrays that numpy wrote
BLOCK = "fedtta.block"  # ours of all arrays of a record together, see `to_block`
CONTENT = "message"  # the key of a message's values in its config record
SECRET = "secret"  # the key of a message's secret in its config record; a reply has the same
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
        return to_bytes(np.asarray(self.numpy(), order="C"))

    def numpy(self) -> NDArray[Any]:
        """Return the array itself, read-only."""
        held: NDArray[Any] = self.__dict__["_held"]
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        return _shipped, contiguous(self.numpy())


class ReadArray(HeldArray):
    """An array that is not in memory: `numpy()` reads it each time.

    Flower's messages refer to themselves and stay until the garbage collector runs. They do not keep the arrays' file:
    whatever made the message has to keep the arrays while it is used.

    Parameters
    ----------
    arrays : LazyArrays
    name : str
    """

    def __init__(self, arrays: LazyArrays, name: str) -> None:
        shape, dtype = arrays.layout[name]
        self.__dict__.update(dtype=dtype_name(dtype), shape=shape, stype=NUMPY, _arrays=weakref.ref(arrays), _name=name)

    @property
    def arrays(self) -> LazyArrays:
        """Return the arrays that it is one of.

        Raises
        ------
        ValueError
            They are gone: the round is over.
        """
        arrays: LazyArrays | None = self.__dict__["_arrays"]()
        if arrays is None:
            raise ValueError(f"array {self.__dict__['_name']} is of a reply that is gone")
        return arrays

    def numpy(self) -> NDArray[Any]:
        """Return the array, read-only; see `arrays`."""
        return self.arrays[self.__dict__["_name"]]


HeldArray.__qualname__ = ReadArray.__qualname__ = Array.__qualname__


def _shipped(value: NDArray[Any], turned: bool) -> HeldArray:
    """Return the array that `HeldArray.__reduce__` took apart."""
    return HeldArray(restored(value, turned))


def held_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record, by reference; those that are not in memory are not read."""
    record = ArrayRecord()
    for name in arrays:
        record[name] = ReadArray(arrays, name) if isinstance(arrays, LazyArrays) else HeldArray(arrays[name])
    return record


def lazy_arrays(record: ArrayRecord) -> LazyArrays | None:
    """Return the arrays that `held_record` has made a record of if they are not in memory; None if they are."""
    sources = {id(one.arrays): one.arrays for one in record.values() if isinstance(one, ReadArray)}
    if len(sources) != 1:
        return None
    (arrays,) = sources.values()
    return arrays if list(arrays) == list(record) else None


def bytes_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record of bytes, as Flower's context stores them."""
    record = ArrayRecord()
    for name, value in arrays.items():
        array = np.asarray(value)
        record[name] = Array(dtype=str(array.dtype), shape=array.shape, stype=NUMPY, data=to_bytes(array))
    return record


def block_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record of one block, which travels in few objects."""
    data = to_block(arrays)
    return ArrayRecord({"block": Array(dtype="uint8", shape=(len(data),), stype=BLOCK, data=data)})


def in_blocks(content: RecordDict) -> bool:
    """Return whether the arrays of a message travel in blocks; so do those of its reply."""
    return any(array.stype == BLOCK for record in content.array_records.values() for array in record.values())


def read_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record, read-only and in the memory they came in.

    Raises
    ------
    ValueError
        An array cannot be read; the message names it.
    """
    if len(record) == 1 and (array := next(iter(record.values()))).stype == BLOCK:
        return from_block(array.data)
    return {name: _read(name, array) for name, array in record.items()}


def _read(name: str, array: Array) -> NDArray[Any]:
    if isinstance(array, HeldArray):
        return array.numpy()
    if array.stype != NUMPY:
        raise ValueError(f"array {name} cannot be read: made by {array.stype!r}; allowed is {NUMPY}")
    try:
        return from_bytes(array.data)
    except ValueError as error:
        raise ValueError(f"array {name} cannot be read: {error}") from error


def to_content(record: Record, secret: str | None = None, blocks: bool = False) -> RecordDict:
    """Return a plain message as Flower's records; arrays go by reference, or in blocks.

    Parameters
    ----------
    record : Record
    secret : str, optional
        The secret of the request that a reply answers.
    blocks : bool
        Whether each set of arrays becomes one block.
    """
    made = block_record if blocks else held_record
    content = RecordDict({name: made(arrays) for name, arrays in record.arrays.items()})
    content["config"] = config = ConfigRecord({CONTENT: json.dumps(record.values)})
    if secret is not None:
        config[SECRET] = secret
    return content


def secret_of(content: RecordDict) -> str | None:
    """Return the secret of a message; None if it has none."""
    config = content.config_records.get("config")
    secret = None if config is None else config.get(SECRET)
    return secret if isinstance(secret, str) else None


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
    if len(content) > 1 + len(content.array_records):
        raise ValueError(f"no {kind}: it has records beside its config and its arrays")
    values = read_values(f"no {kind}", str(config[CONTENT]))
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


def reply_message(reply: Reply, message: Message) -> Message:
    """Return a client's reply to a message, with the message's secret."""
    content, blocks = message.content, in_blocks(message.content)
    return Message(to_content(reply.to_record(), secret_of(content), blocks), reply_to=message)


def allow_messages() -> None:
    """Give this process the identity without which Flower makes no message."""
    for name in ("task_id", "run_id", "node_id"):
        setattr(TaskIdentity, name, 1)
