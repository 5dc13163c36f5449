"""Arrays, images, work and predictions as the messages of agent.proto, and back.

What comes from elsewhere is measured before anything of its size is made. Neither Flower nor torch is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from client.agent import agent_pb2 as pb
from client.work import Arrays, Done, Work

VERSION = "fedtta.agent.v1"
#: Element types of arrays.
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
PIXELS = {pb.Images.UINT8: "uint8", pb.Images.FLOAT32: "float32"}
DIMENSIONS = 32  # that an array has at most
SOCKET_PATH = 107  # bytes that the name of a Unix socket has at most


class Predicted(Protocol):
    """What a reply is made of; see `client.agent.core.Prediction`."""

    @property
    def probabilities(self) -> NDArray[Any]:
        """Return probabilities [B, K]."""

    @property
    def weights(self) -> NDArray[Any] | None:
        """Return e [B], or None."""

    @property
    def version(self) -> str:
        """Return the model's version."""

    @property
    def adapted(self) -> bool:
        """Return whether these are the adapter's."""

    @property
    def position(self) -> int:
        """Return how many samples came before."""


def images_to(pixels: NDArray[Any]) -> pb.Images:
    """Return images uint8 or float32 [B, C, H, W] as a message.

    Raises
    ------
    ValueError
        They are of another type.
    """
    for kind, name in PIXELS.items():
        if pixels.dtype == name:
            return pb.Images(kind=kind, shape=pixels.shape, values=_bytes(pixels))
    raise ValueError(f"images of type {pixels.dtype}: allowed are {', '.join(PIXELS.values())}")


def images_from(message: pb.Images) -> NDArray[Any]:
    """Return a message's images [B, C, H, W]; they may be written to.

    Raises
    ------
    ValueError
        No kind is set, the shape has other than four dimensions or a size below one, or the bytes do not fit it.
    """
    if message.kind not in PIXELS:
        raise ValueError(f"images of kind {message.kind}: allowed are UINT8 and FLOAT32")
    shape = list(message.shape)
    if len(shape) != 4 or min(shape) < 1:
        raise ValueError(f"images of shape {shape}: allowed are [B, C, H, W], each 1 or more")
    return _array("images", PIXELS[message.kind], shape, message.values).copy()


def record_to(arrays: Mapping[str, NDArray[Any]]) -> pb.Record:
    """Return named arrays as a message, in their order.

    Raises
    ------
    ValueError
        An array is of a type that does not travel.
    """
    record = pb.Record()
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.name not in DTYPES:
            raise ValueError(f"array {name!r} of type {array.dtype}: allowed are {', '.join(DTYPES)}")
        record.arrays.add(name=name, dtype=array.dtype.name, shape=array.shape, values=_bytes(array))
    return record


def record_from(message: pb.Record) -> Arrays:
    """Return a message's named arrays, in their order; they may be written to.

    Raises
    ------
    ValueError
        A type does not travel, a shape does not fit the bytes, or a name occurs twice.
    """
    arrays: Arrays = {}
    for one in message.arrays:
        if one.name in arrays:
            raise ValueError(f"array {one.name!r} occurs twice")
        arrays[one.name] = _array(f"array {one.name!r}", one.dtype, list(one.shape), one.values).copy()
    return arrays


def work_to(work: Work, partition: int | None = None, num_partitions: int | None = None) -> pb.Work:
    """Return work as a message, with what the node config says of partitions.

    Raises
    ------
    ValueError
        A config value or array cannot travel.
    """
    message = pb.Work(
        phase=work.phase,
        config_json=_to_json("config", work.config),
        partition_id=partition,
        num_partitions=num_partitions,
    )
    _fill(message.records, work.records)
    return message


def work_from(message: pb.Work) -> Work:
    """Return a message's work; ValueError when something in it does not fit."""
    return Work(message.phase, _from_json("config", message.config_json), _records(message.records))


def done_to(done: Done) -> pb.Done:
    """Return an answer as a message; ValueError when a value of it cannot travel."""
    message = pb.Done(metrics_json=_to_json("metrics", done.metrics), identity_json=_to_json("identity", done.identity))
    _fill(message.records, done.records)
    return message


def done_from(message: pb.Done) -> Done:
    """Return a message's answer; ValueError when something in it does not fit."""
    metrics, identity = _from_json("metrics", message.metrics_json), _from_json("identity", message.identity_json)
    return Done(_records(message.records), metrics, identity)


def reply_to(name: str, prediction: Predicted) -> pb.PredictReply:
    """Return a prediction as the reply to the request `name`."""
    probabilities, weights = prediction.probabilities, prediction.weights
    return pb.PredictReply(
        id=name,
        samples=probabilities.shape[0],
        classes=probabilities.shape[1],
        probabilities=_bytes(np.asarray(probabilities, np.float32)),
        weights=b"" if weights is None else _bytes(np.asarray(weights, np.float32)),
        model_version=prediction.version,
        adapted=prediction.adapted,
        position=prediction.position,
    )


def socket_path(address: str) -> Path:
    """Return the path in `unix:/path`.

    Raises
    ------
    ValueError
        It is another kind of address, or its path is relative or too long for a socket.
    """
    path = Path(address.removeprefix("unix:"))
    if not (address.startswith("unix:") and path.is_absolute()):
        raise ValueError(f"address {address!r}: allowed is unix:/path")
    if (size := len(str(path).encode())) > SOCKET_PATH:
        raise ValueError(f"{path}: {size} bytes; the path of a socket has at most {SOCKET_PATH}: choose a shorter one")
    return path


def _bytes(array: NDArray[Any]) -> bytes:
    """Return an array's values, C-contiguous and little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(what: str, dtype: str, shape: Sequence[int], values: bytes) -> NDArray[Any]:
    """Return an array over `values`, which is checked to have the size first."""
    if dtype not in DTYPES:
        raise ValueError(f"{what} of type {dtype!r}: allowed are {', '.join(DTYPES)}")
    if len(shape) > DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError(f"{what} of shape {shape}: allowed are at most {DIMENSIONS} sizes, none negative")
    kind = np.dtype(dtype)
    expected = math.prod(shape) * kind.itemsize
    if len(values) != expected:
        raise ValueError(f"{what}: {len(values)} bytes came, {dtype} of shape {list(shape)} has {expected}")
    if dtype == "bool" and values.strip(b"\0\1"):
        raise ValueError(f"{what}: truth values other than 0 and 1")
    array = np.frombuffer(values, kind.newbyteorder("<")).reshape(shape)
    return array.astype(kind, copy=False)  # of this machine's byte order


def _fill(field: Any, records: Mapping[str, Arrays]) -> None:
    for name, arrays in records.items():
        field[name].CopyFrom(record_to(arrays))


def _records(field: Mapping[str, pb.Record]) -> dict[str, Arrays]:
    """Return record → name → array; a map of a message has no order, so records are sorted by name."""
    return {name: record_from(field[name]) for name in sorted(field)}


def _to_json(what: str, values: Mapping[str, Any]) -> str:
    """Return named values as JSON, which keeps whole and decimal numbers apart, and all bits of the latter."""
    for key, value in values.items():
        _check(what, key, value)
    return json.dumps(dict(values), allow_nan=False)


def _from_json(what: str, text: str) -> dict[str, Any]:
    """Return named values; an empty text has none."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{what}: allowed is a JSON object, not {type(values).__name__}")
    for key, value in values.items():
        _check(what, key, value)
    return values


def _check(what: str, key: str, value: Any) -> None:
    """Refuse what Flower's records could not hold either, and numbers that are not finite."""
    members: Iterable[Any] = value if isinstance(value, list) else [value]
    for member in members:
        if not isinstance(member, bool | int | float | str):
            raise ValueError(f"{what}: {key} = {member!r}: allowed are numbers, texts, truth values and lists of them")
        if isinstance(member, float) and not math.isfinite(member):
            raise ValueError(f"{what}: {key} = {member}: allowed are finite numbers")
