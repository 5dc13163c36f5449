"""What a client is asked for and what it answers, in plain values: neither Flower nor torch is needed to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Work:
    """One message to a client.

    Parameters
    ----------
    phase : str
        A name in `client.phases.PHASES`.
    config : mapping
        All settings of the run, and what this message is about: numbers, texts, truth values and lists of them.
    records : mapping
        record → name → array.
    """

    phase: str
    config: Mapping[str, Any]
    records: Mapping[str, Arrays] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A client's answer.

    Parameters
    ----------
    records : dict
        record → name → array.
    metrics : dict
        Numbers and lists of numbers by name; empty when there are none.
    identity : dict
        What the client says of itself, when that was asked.
    """

    records: dict[str, Arrays] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
