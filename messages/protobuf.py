"""Messages in plain form, and images, as the protobuf messages of the agent's protocol (agent.proto), and back.

Sizes are checked before memory of that size is allocated. Neither Flower nor torch is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.messages import agent_pb2 as pb
from fedtta.messages.arrays import DIMENSIONS, DTYPES, Arrays
from fedtta.messages.record import Record, read_values

#: Package of the protocol, with its version.
PROTOCOL = pb.DESCRIPTOR.package
PIXELS = {pb.Images.UINT8: "uint8", pb.Images.FLOAT32: "float32"}
FILES = 1024  # encoded files of a request, at most


def to_work(record: Record, name: str | None = None) -> pb.Work:
    """Return a request as a message.

    Parameters
    ----------
    record : Record
        The request's plain form.
    name : str, optional
        The client's name in the SuperNode's node config; the agent refuses requests to another client.

    Raises
    ------
    ValueError
        A value or an array cannot be sent.
    """
    message = pb.Work(phase=record.kind, config_json=_to_json(record), name=name)
    _fill(message.records, record)
    return message


def from_work(message: pb.Work) -> Record:
    """Return a message as a request's plain form; ValueError names what does not fit."""
    return Record(message.phase, read_values(message.phase, message.config_json or "{}"), _arrays(message.records))


def to_done(record: Record) -> pb.Done:
    """Return a reply as a message; ValueError names a value or array that cannot be sent."""
    message = pb.Done(metrics_json=_to_json(record))
    _fill(message.records, record)
    return message


def from_done(kind: str, message: pb.Done) -> Record:
    """Return a message as the plain form of a reply of this kind; ValueError names what does not fit."""
    return Record(kind, read_values(kind, message.metrics_json or "{}"), _arrays(message.records))


def to_images(pixels: NDArray[Any]) -> pb.Images:
    """Return images [B, C, H, W], uint8 or float32, as a message.

    Raises
    ------
    ValueError
        The images have another type.
    """
    for kind, name in PIXELS.items():
        if pixels.dtype == name:
            return pb.Images(kind=kind, shape=pixels.shape, values=to_bytes(pixels))
    raise ValueError(f"images of type {pixels.dtype}: allowed are {', '.join(PIXELS.values())}")


def to_files(files: Sequence[bytes]) -> pb.Images:
    """Return encoded image files (JPEG, PNG, TIFF, DICOM ...) as a message."""
    return pb.Images(kind=pb.Images.ENCODED, files=files)


def from_files(message: pb.Images) -> tuple[bytes, ...]:
    """Return a message's encoded files.

    Raises
    ------
    ValueError
        There is none or there are too many, or the message has pixels beside them.
    """
    if not 1 <= len(message.files) <= FILES:
        raise ValueError(f"{len(message.files)} encoded files: allowed are 1 to {FILES}")
    if message.values or message.shape:
        raise ValueError("encoded files beside shape or values: allowed is one of them")
    return tuple(message.files)


def from_images(message: pb.Images) -> NDArray[Any]:
    """Return a message's images [B, C, H, W], writable.

    Raises
    ------
    ValueError
        No type is set, the shape does not have four positive sizes, or the bytes do not fit it.
    """
    if message.kind not in PIXELS or message.files:
        raise ValueError(f"images of kind {message.kind}: allowed are UINT8 and FLOAT32, and files with ENCODED")
    shape = list(message.shape)
    if len(shape) != 4 or min(shape) < 1:
        raise ValueError(f"images of shape {shape}: allowed are [B, C, H, W], each 1 or more")
    return _array("images", PIXELS[message.kind], shape, message.values).copy()


def to_record(arrays: Mapping[str, NDArray[Any]]) -> pb.Record:
    """Return named arrays as a message, in their order.

    Raises
    ------
    ValueError
        The type of an array is not one of `DTYPES`.
    """
    record = pb.Record()
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.name not in DTYPES:
            raise ValueError(f"array {name!r} of type {array.dtype}: allowed are {', '.join(DTYPES)}")
        record.arrays.add(name=name, dtype=array.dtype.name, shape=array.shape, values=to_bytes(array))
    return record


def from_record(message: pb.Record) -> Arrays:
    """Return a message's named arrays, in their order and read-only.

    Raises
    ------
    ValueError
        The type of an array is not one of `DTYPES`, its shape does not fit the bytes, or a name occurs twice.
    """
    arrays: Arrays = {}
    for one in message.arrays:
        if one.name in arrays:
            raise ValueError(f"array {one.name!r} occurs twice")
        arrays[one.name] = _array(f"array {one.name!r}", one.dtype, list(one.shape), one.values)
        arrays[one.name].flags.writeable = False
    return arrays


def to_bytes(array: NDArray[Any]) -> bytes:
    """Return an array's values in C order, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(what: str, dtype: str, shape: Sequence[int], values: bytes) -> NDArray[Any]:
    """Return an array in the memory of `values`, whose size is checked first."""
    if dtype not in DTYPES:
        raise ValueError(f"{what} of type {dtype!r}: allowed are {', '.join(DTYPES)}")
    if len(shape) > DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError(f"{what} of shape {shape}: allowed are at most {DIMENSIONS} sizes, none negative")
    kind = np.dtype(dtype)
    expected = math.prod(shape) * kind.itemsize
    if len(values) != expected:
        raise ValueError(f"{what}: {len(values)} bytes, but {dtype} of shape {list(shape)} has {expected}")
    if dtype == "bool" and values.strip(b"\0\1"):
        raise ValueError(f"{what}: truth values other than 0 and 1")
    array = np.frombuffer(values, kind.newbyteorder("<")).reshape(shape)
    return array.astype(kind, copy=False)  # this machine's byte order


def _fill(field: Any, record: Record) -> None:
    for name, arrays in record.arrays.items():
        field[name].CopyFrom(to_record(arrays))


def _arrays(field: Mapping[str, pb.Record]) -> dict[str, Arrays]:
    """Return record name → arrays, sorted by name: a protobuf map has no order."""
    return {name: from_record(field[name]) for name in sorted(field)}


def _to_json(record: Record) -> str:
    try:
        return json.dumps(record.values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{record.kind}: a value cannot be sent: {error}") from error
