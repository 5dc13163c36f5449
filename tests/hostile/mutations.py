"""Random changes of an honest reply: of its fields, its arrays, its objects and their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, Message
from hypothesis import strategies as st

from fedtta.messages.flower import CONTENT, SECRET, reply_message
from fedtta.messages.replies import Reply
from tests.hostile.cases import failure, loose, withheld
from tests.hostile.superlink import Pushed, made, pushed, rebuilt, reply_to

NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**53, 2**53 + 1, 10**18, 10**400, 0.5, -1e9, 1e30, 1.7e308])
ODD = NUMBERS | st.floats() | st.integers() | st.none() | st.booleans() | st.text(max_size=8)
VALUES = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@dataclass(frozen=True)
class Mutation:
    """One change.

    Parameters
    ----------
    kind : str
        A key of `KINDS`.
    where, position, length : int
        Which field, array or object, and which part of it, modulo how many there are.
    value : object
        What takes its place; any JSON value, NaN included.
    noise : bytes
    """

    kind: str
    where: int
    position: int
    length: int
    value: Any
    noise: bytes

    def __call__(self, message: Message, reply: Reply) -> Reply | Pushed | None:
        """Return the reply with this change, pushed."""
        return KINDS[self.kind](self, message, reply)

    def chosen(self, options: Any) -> Any:
        """Return the option at `where`."""
        options = sorted(options)
        return options[self.where % len(options)]


def _values(change: Callable[[Mutation, dict[str, Any]], Any]) -> Any:
    """Change the values of a reply, as JSON."""

    def apply(self: Mutation, message: Message, reply: Reply) -> Pushed:
        content = reply_message(reply, message).content
        config = content.config_records["config"]
        values = json.loads(str(config[CONTENT]))
        change(self, values)
        config[CONTENT] = json.dumps(values)
        return reply_to(message, content)

    return apply


def _set(self: Mutation, values: dict[str, Any]) -> None:
    values[self.chosen(values)] = self.value


def _inside(self: Mutation, values: dict[str, Any]) -> None:
    """Change one element of a list or of an object in it, or a number to a similar one."""
    key = self.chosen(values)
    inner = values[key]
    if isinstance(inner, list) and inner:
        at = self.position % len(inner)
        if isinstance(inner[at], dict):
            inner[at][self.chosen(inner[at])] = self.value
        else:
            inner[at] = self.value
    elif isinstance(inner, int | float):
        values[key] = inner * (self.position - 100) + self.length


def _texts(self: Mutation, message: Message, reply: Reply) -> Pushed:
    """Replace part of the JSON text."""
    content = reply_message(reply, message).content
    text = str(content.config_records["config"][CONTENT])
    at = self.position % (len(text) + 1)
    content.config_records["config"][CONTENT] = text[:at] + str(self.value) + text[at + self.length :]
    return reply_to(message, content)


def _arrays(self: Mutation, message: Message, reply: Reply) -> Pushed | Reply:
    """Replace, add, remove or rename an array, or change its numbers, type or shape."""
    content = loose(reply, message).content
    if not content.array_records:
        return reply
    record = content.array_records[self.chosen(content.array_records)]
    if not record:
        return reply
    name = self.chosen(record)
    value = np.array(record[name].numpy())
    number = self.value if isinstance(self.value, int | float) and not isinstance(self.value, bool) else np.nan
    with np.errstate(all="ignore"):
        float_ = np.float64(min(number, 10**300) if isinstance(number, int) else number)
        options: list[Callable[[], Any]] = [
            lambda: value.astype(np.float64) * float_,
            lambda: np.where(np.arange(value.size).reshape(value.shape) == 0, float_.astype(value.dtype), value),
            lambda: value.astype(["f2", "f4", "f8", "i8", "u1", "b1"][self.length % 6]),
            lambda: value.reshape(-1)[: self.length],
            lambda: value[None],
            lambda: -value if value.dtype.kind != "b" else ~value,
            lambda: np.zeros((0, self.length), value.dtype),
        ]
        changed = options[self.position % len(options)]()
    if self.position % 5 == 0:
        del record[name]
    target = name if self.position % 3 else str(self.value)[:50]
    record[target] = Array(np.asarray(changed, order="C"))
    return reply_to(message, content)


def _object(self: Mutation, message: Message, reply: Reply) -> Pushed:
    """Replace an object: part of its bytes, its body by JSON, its children, or its class."""
    honest = pushed(reply_message(reply, message))
    name = self.chosen(honest.objects)
    content = honest.objects[name]
    head, _, body = content.partition(b"\0")
    kind, children, _ = head.decode().split(" ")
    listed = children.split(",") if children else []
    at = self.position % (len(content) + 1)
    options: list[Callable[[], bytes]] = [
        lambda: content[:at] + self.noise + content[at + self.length :],
        lambda: made(kind, listed, body[:at] + self.noise + body[at + self.length :]),
        lambda: made(kind, listed, json.dumps(self.value).encode()),
        lambda: made(kind, listed[: self.length % 3], body),
        lambda: made(
            ["Array", "ArrayRecord", "RecordDict", "ConfigRecord", "Message", "x"][self.length % 6], listed, body
        ),
        lambda: made(kind, [*listed, *list(honest.objects)[: self.length % 3]], body),
    ]
    changed = options[self.where // 7 % len(options)]()
    return honest if changed == content else rebuilt(honest, name, changed)


def _header(self: Mutation, message: Message, reply: Reply) -> Pushed | Reply:
    """Replace part of the header of an array."""
    honest = pushed(loose(reply, message))
    chunks = [name for name, one in honest.objects.items() if one.startswith(b"ArrayChunk ")]
    if not chunks:
        return reply
    name = self.chosen(chunks)
    body = honest.objects[name].partition(b"\0")[2]
    at = self.position % 130
    changed = made("ArrayChunk", [], body[:at] + str(self.value).encode() + body[at + self.length :])
    return rebuilt(honest, name, changed)


def _secret(self: Mutation, message: Message, reply: Reply) -> Pushed:
    content = reply_message(reply, message).content
    content.config_records["config"][SECRET] = str(self.value)
    return reply_to(message, content)


KINDS: dict[str, Callable[[Mutation, Message, Reply], Reply | Pushed | None]] = {
    "a field": _values(_set),
    "inside a field": _values(_inside),
    "another field": _values(lambda self, values: values.update({str(self.value): self.value})),
    "no field": _values(lambda self, values: values.pop(self.chosen(values))),
    "the text": _texts,
    "an array": _arrays,
    "an object": _object,
    "a header": _header,
    "the secret": _secret,
    "an error": lambda self, message, reply: failure(str(self.value))(message, reply),
    "withheld": lambda self, message, reply: withheld(message, reply),
    "silent": lambda self, message, reply: None,
}
#: What is drawn most: the others have little that could differ.
OFTEN = [name for name in KINDS if name not in ("the secret", "an error", "withheld", "silent")]
MUTATIONS = st.builds(
    Mutation,
    st.sampled_from([*OFTEN * 3, *KINDS]),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 20),
    VALUES,
    st.binary(max_size=8),
)
