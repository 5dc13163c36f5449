"""What a backbone declares: its encoder, its normalization layers, and its typed options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Normalisation = Literal["batch", "group", "layer"]


@dataclass(frozen=True)
class Option:
    """An option of a model.

    Parameters
    ----------
    default : Any
        Value used when the option is not given.
    allowed : str
        Description of the allowed values, for error messages and help.
    accepts : Callable
        Value → whether its type and value are allowed.
    """

    default: Any
    allowed: str
    accepts: Callable[[Any], bool]


def is_whole(value: object, minimum: int) -> bool:
    """Return whether `value` is an int (a bool is none) of at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_number(value: object) -> bool:
    """Return whether `value` is a finite int or float (a bool is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flag(default: bool) -> Option:
    """Return an option that is true or false."""
    return Option(default, "true or false", lambda value: isinstance(value, bool))


def whole(default: int, minimum: int) -> Option:
    """Return a whole-number option of at least `minimum`."""
    return Option(default, f"a whole number of at least {minimum}", lambda value: is_whole(value, minimum))


def rate(default: float) -> Option:
    """Return an option in [0, 1): a drop probability."""
    return Option(default, "a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)


def choice(default: object, *others: object) -> Option:
    """Return an option with a fixed list of values."""
    values = (default, *others)
    # Types are compared as well, because True == 1.
    return Option(
        default,
        "one of " + ", ".join(repr(value) for value in values),
        lambda value: any(type(value) is type(candidate) and value == candidate for candidate in values),
    )


def per_channel(default: float, positive: bool = False) -> Option:
    """Return an option that is one number, or a list with one number per channel."""

    def accepts(value: object) -> bool:
        numbers: list[Any] = [value] if not isinstance(value, Sequence) or isinstance(value, str) else list(value)
        return bool(numbers) and all(is_number(n) and (not positive or n > 0) for n in numbers)

    kind = "positive number" if positive else "number"
    return Option(default, f"a {kind}, or a list with one {kind} per channel", accepts)


def optional_seed() -> Option:
    """Return an option that is None or a seed in [0, 2^63)."""
    return Option(None, "None or a whole number in [0, 2^63)", lambda v: v is None or (is_whole(v, 0) and v < 2**63))


def optional_path() -> Option:
    """Return an option that is None or the path of a file."""
    return Option(None, "None or the path of a file", lambda v: v is None or (isinstance(v, str) and v != ""))


def complete(owner: str, table: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check `given` against `table` and return the value of every option, defaults included.

    Raises
    ------
    ValueError
        An option is unknown or its value is not allowed; the message names `owner`, the option, the value and the
        allowed values.
    """
    for key, value in given.items():
        if key not in table:
            raise ValueError(f"{owner} has no option {key!r}; there are: {', '.join(sorted(table))}")
        if not table[key].accepts(value):
            raise ValueError(f"{owner}: {key}={value!r} is not allowed; it must be {table[key].allowed}")
    return {key: given.get(key, option.default) for key, option in table.items()}


def require_image_size(owner: str, image_size: int, minimum: int) -> None:
    """Raise ValueError if images of `image_size` x `image_size` pixels are too small for the network."""
    if image_size < minimum:
        raise ValueError(f"{owner}: image_size={image_size} is too small; the minimum is {minimum}")


#: Options that every model has.
COMMON_OPTIONS: Mapping[str, Option] = {
    "mean": per_channel(0.5),
    "std": per_channel(0.5, positive=True),
    "personal_bias": flag(False),
    "rotation_head": flag(False),
    "seed": optional_seed(),
}


@dataclass(frozen=True)
class ModelInfo:
    """A backbone as the registry knows it.

    Parameters
    ----------
    summary : str
        One-line description.
    encoder : Callable
        (in_channels, image_size, **own options) → (encoder without input normalization, d).
    own_options : Mapping
        Options specific to this backbone.
    normalisation : "batch", "group", "layer" or None
        Its normalization layers with default options.
    normalisation_option : str or None
        Option whose value replaces `normalisation`, if there is one.
    """

    summary: str
    encoder: Callable[..., tuple[nn.Module, int]]
    own_options: Mapping[str, Option]
    normalisation: Normalisation | None
    normalisation_option: str | None = None

    @property
    def options(self) -> Mapping[str, Option]:
        """All options of this model, common ones included."""
        return {**COMMON_OPTIONS, **self.own_options}

    def normalisation_with(self, options: Mapping[str, Any]) -> Normalisation | None:
        """Return the normalization layers of a model built with `options`.

        Methods that adapt BatchNorm layers require "batch".
        """
        if self.normalisation_option is None:
            return self.normalisation
        return options.get(self.normalisation_option, self.normalisation)
