"""The plain form of a message, which every transport carries, and the codec between it and a frozen dataclass.

A field of type `Arrays` becomes a set of named arrays, a field of type `dict[str, Arrays]` one set per key; all other
fields become values that JSON can hold. Their types, ranges and sizes are those of the annotations; pydantic checks
them when a message is read. Every number, text and list of a reply has an upper bound: sums over clients stay finite,
and what people read stays short and cannot move a terminal's cursor.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from fedtta.messages.arrays import Arrays

MOST = 2**53  # of a count: the largest up to which float64 counts exactly
LARGEST = 1e30  # of a number: products with counts, and their sums, are finite
VALUES = 1 << 22  # characters of a message's values as JSON, at most
ARRAYS = 100_000  # arrays under one name of a message, at most
NAME_LENGTH = 200  # characters of the name of an array, a class, a row or a test distribution, at most
PROSE_LENGTH = 4000  # characters of a text for people; longer ones are cut
LINE_LENGTH = 500  # characters of a reason


def printable(text: str, most: int = LINE_LENGTH) -> str:
    """Return a text of at most `most` characters without those that control a terminal or the direction of writing.

    A node chooses the texts of its replies, and people read them in a terminal.
    """
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def _identifier(text: str) -> str:
    if not text.isprintable():
        raise ValueError("allowed are printable characters")
    return text


Count = Annotated[int, Field(ge=0, le=MOST)]
Number = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
#: A name that must be the same at several clients, or that the server looks up.
Identifier = Annotated[str, Field(max_length=NAME_LENGTH), AfterValidator(_identifier)]
#: A text for people.
Prose = Annotated[str, AfterValidator(lambda text: printable(text, PROSE_LENGTH))]
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Record:
    """A message without its type.

    Parameters
    ----------
    kind : str
        Which request or reply it is.
    values : dict
        Key → number, text, truth value, list or JSON object.
    arrays : dict
        Record name → array name → array, in the order of definition.
    """

    kind: str
    values: dict[str, Any]
    arrays: dict[str, Arrays] = field(default_factory=dict)


class Typed:
    """Base of the frozen dataclasses of requests and replies.

    Attributes
    ----------
    kind : str
        Its name on the wire.
    """

    kind: ClassVar[str]

    def to_record(self) -> Record:
        """Return the plain form; fields that are None are left out, arrays go by reference."""
        values: dict[str, Any] = {}
        arrays: dict[str, Arrays] = {}
        cls: Any = type(self)
        for name, how in _layout(cls).items():
            value = getattr(self, name)
            if value is None:
                continue
            if how == "arrays":
                arrays[name] = value
            elif how == "sets":
                arrays |= {f"{name}.{key}": one for key, one in value.items()}
            else:
                values[_key(name)] = _plain(value)
        return Record(self.kind, values, arrays)

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Return the message of a plain form.

        Raises
        ------
        ValueError
            A field is missing, unknown, of the wrong type or out of range, or there are arrays that the message does
            not have; the message names it.
        """
        kind: Any = cls
        layout = _layout(kind)
        found: dict[str, Any] = {name: {} for name, how in layout.items() if how == "sets"}
        for name, arrays in record.arrays.items():
            field_name, _, key = name.partition(".")
            how = layout.get(field_name)
            _check_names(cls.kind, name, arrays)
            if how == "sets" and key:
                found[field_name][key] = arrays
            elif how == "arrays" and not key:
                found[field_name] = arrays
            else:
                raise ValueError(f"{cls.kind}: unknown arrays {name!r}")
        if missing := [name for name in _required_arrays(kind) if name not in found]:
            raise ValueError(f"{cls.kind}: arrays {missing} are missing")
        return cls(**_checked(cls, record.values), **found)


TypedT = TypeVar("TypedT", bound=Typed)


def read_values(kind: str, text: str) -> dict[str, Any]:
    """Return a message's values from JSON.

    Raises
    ------
    ValueError
        The text is too long or no JSON object, or holds a number that is not finite.
    """
    if len(text) > VALUES:
        raise ValueError(f"{kind}: values of {len(text)} characters; allowed are at most {VALUES}")
    try:
        values = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{kind}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{kind}: allowed is a JSON object, not {type(values).__name__}")
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}: allowed are finite numbers")


def _check_names(kind: str, record: str, arrays: Arrays) -> None:
    """Refuse too many arrays, and names that are too long or not printable: messages to people quote them."""
    if len(arrays) > ARRAYS:
        raise ValueError(f"{kind}: {len(arrays)} arrays in {printable(record)}; allowed are at most {ARRAYS}")
    for name in (record, *arrays):
        if len(name) > NAME_LENGTH or not name.isprintable():
            raise ValueError(f"{kind}: array {printable(name, 40)!r}: allowed are {NAME_LENGTH} printable characters")


def read_only(message: TypedT, views: dict[int, tuple[Arrays, Arrays]] | None = None) -> TypedT:
    """Return a message whose arrays are read-only views.

    Parameters
    ----------
    message : Typed
    views : dict, optional
        Views that have been made already, by the identity of the named arrays; messages that share arrays share the
        views.
    """
    views = {} if views is None else views

    def view(arrays: Arrays) -> Arrays:
        if id(arrays) not in views:
            views[id(arrays)] = arrays, {name: _read_only(value) for name, value in arrays.items()}
        return views[id(arrays)][1]

    return with_arrays(message, view)


def with_arrays(message: TypedT, change: Callable[[Arrays], Any]) -> TypedT:
    """Return a message with what a function makes of its arrays, field by field and set by set."""
    changes: dict[str, Any] = {}
    message_: Any = message
    kind: Any = type(message)
    for name, how in _layout(kind).items():
        value = getattr(message, name)
        if how == "arrays" and value is not None:
            changes[name] = change(value)
        elif how == "sets":
            changes[name] = {key: change(one) for key, one in value.items()}
    replaced: TypedT = dataclasses.replace(message_, **changes)
    return replaced


def _read_only(value: NDArray[Any]) -> NDArray[Any]:
    seen = np.asarray(value).view()
    seen.flags.writeable = False
    return seen


@functools.cache
def _layout(cls: type) -> dict[str, str]:
    """Return field → "arrays", "sets" (of arrays) or "value"."""
    layout = {}
    for name, hint in typing.get_type_hints(cls).items():
        if name not in {one.name for one in dataclasses.fields(cls)}:
            continue
        options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        layout[name] = "arrays" if Arrays in options else "sets" if dict[str, Arrays] in options else "value"
    return layout


@functools.cache
def _required_arrays(cls: type) -> list[str]:
    """Return the fields that hold arrays and have no default."""
    nothing = dataclasses.MISSING
    fields = [one for one in dataclasses.fields(cls) if one.default is nothing and one.default_factory is nothing]
    return [one.name for one in fields if _layout(cls)[one.name] == "arrays"]


@functools.cache
def _validator(cls: type) -> TypeAdapter[Any]:
    """Return pydantic's validator of a dataclass's values, by key."""
    hints = typing.get_type_hints(cls, include_extras=True)
    definitions: dict[str, Any] = {}
    for one in dataclasses.fields(cls):
        if _layout(cls)[one.name] == "value":
            if one.default_factory is not dataclasses.MISSING:
                how = Field(default_factory=one.default_factory, alias=_key(one.name))
            else:
                how = Field(... if one.default is dataclasses.MISSING else one.default, alias=_key(one.name))
            definitions[one.name] = (hints[one.name], how)
    return TypeAdapter(create_model(cls.__name__, __config__=_STRICT, **definitions))


def _checked(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return field → checked value."""
    if unknown := values.keys() - {_key(name) for name, how in _layout(cls).items() if how == "value"}:
        raise ValueError(f"{cls.__name__}: unknown field {_short(min(unknown))}")
    try:
        model = _validator(cls).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where} = {_short(first['input'])}: {first['msg']}") from None
    return {name: getattr(model, name) for name in type(model).model_fields}


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


def _key(name: str) -> str:
    return name.replace("_", "-")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
