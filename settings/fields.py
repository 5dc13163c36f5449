"""Fields of classes of settings: how one is declared, checked, and found by its key."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, get_type_hints

#: In place of a default: the key must be set.
REQUIRED: Any = dataclasses.MISSING


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type or impossible.

    The message names the key, the value and what is allowed.
    """


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    group: str | tuple[str, ...] = (),
    published: tuple[Any, ...] | None = None,
) -> Any:
    """Declare a field for `check_fields`.

    Parameters
    ----------
    default : Any
        `REQUIRED` when the key must be set.
    help : str
        One line for people.
    choices, low, high, above
        What is allowed: one of `choices`, `low <= value <= high`, or `value > above`.
    group : str or tuple of str
        The groups that the setting belongs to, of `fedtta.settings.GROUPS`; the first is its section.
    published : tuple, optional
        The values allowed with split = "published", which is defined only where all clients train in every round and
        all of them test.
    """
    groups = (group,) if isinstance(group, str) else group
    limits = {"choices": choices, "low": low, "high": high, "above": above}
    return dataclasses.field(
        default=default, metadata={"help": help, **limits, "groups": groups, "published": published}
    )


def key_of(name: str) -> str:
    """Return the key of a field name."""
    return name.replace("_", "-")


@cache
def types_of_fields(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a class; found once, since every message has settings."""
    return get_type_hints(kind)


def check_fields(values: Any) -> None:
    """Check every field of an object that `setting` declares; an integer for a decimal number becomes one.

    Raises
    ------
    SettingsError
        A value has the wrong type or lies outside what is allowed.
    """
    kind: type = type(values)
    kinds = types_of_fields(kind)
    for field in dataclasses.fields(values):
        if "groups" in field.metadata:
            object.__setattr__(values, field.name, _check(field, kinds[field.name], getattr(values, field.name)))


def _check(field: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """Return `value` as `kind` if it is allowed for `field`; raise SettingsError otherwise."""
    key = key_of(field.name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if type(value) is not kind:
        raise SettingsError(f"{key} = {value!r}: allowed is a value of type {kind.__name__}")
    rule = field.metadata
    if rule["choices"] is not None and value not in rule["choices"]:
        raise SettingsError(f"{key} = {value!r}: allowed are {', '.join(rule['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{key} = {value!r}: allowed is a finite number")
    if rule["low"] is not None and value < rule["low"]:
        raise SettingsError(f"{key} = {value!r}: allowed is {rule['low']} or more")
    if rule["above"] is not None and value <= rule["above"]:
        raise SettingsError(f"{key} = {value!r}: allowed is more than {rule['above']}")
    if rule["high"] is not None and value > rule["high"]:
        raise SettingsError(f"{key} = {value!r}: allowed is at most {rule['high']}")
    return value


def by_field(cls: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of hyphenated keys by the field's name of a class of settings.

    Raises
    ------
    SettingsError
        A key is unknown, or a required one is missing.
    """
    known = {key_of(field.name): field for field in dataclasses.fields(cls)}
    for key in content:
        if key not in known:
            raise SettingsError(f"unknown key {key!r}{near(key, known)}; there are: {', '.join(sorted(known))}")
    required = [
        key
        for key, field in known.items()
        if field.default is REQUIRED and field.default_factory is dataclasses.MISSING
    ]
    if missing := [key for key in required if key not in content]:
        raise SettingsError(f"{', '.join(missing)}: must be set")
    return {known[key].name: value for key, value in content.items()}


def near(word: str, known: Iterable[str]) -> str:
    """Return the question after an unknown word whether a similar one was meant; empty if there is none."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
