"""A source of small arrays for tests: `tests.data.memory_source:Memory(key)` opens `HELD[key]`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Item:
    """A sample: its content is a number."""

    name: str
    content: int
    label: str | None = "a"
    group: str = ""
    split: str = ""


HELD: dict[str, list[Item]] = {}


class Memory:
    def __init__(self, key: str) -> None:
        self.items = HELD[key]
        self.classes = tuple(sorted({one.label for one in self.items if one.label}))

    def __len__(self) -> int:
        return len(self.items)

    def name(self, i: int) -> str:
        return self.items[i].name

    def image(self, i: int) -> np.ndarray:
        if self.items[i].content < 0:
            raise RuntimeError("a bug of the user's class")
        return np.array([[self.items[i].content]], np.uint16)

    def label(self, i: int) -> str | None:
        return self.items[i].label

    def group(self, i: int) -> str:
        return self.items[i].group

    def split(self, i: int) -> str:
        return self.items[i].split


class Broken:
    """A class with a bug."""

    def __init__(self) -> None:
        self.classes = {}["no such key"]


class Numbered(Memory):
    """Classes that are numbers instead of names."""

    def __init__(self) -> None:
        self.items = []
        self.classes = (0, 1)  # type: ignore[assignment]


class Incomplete:
    classes = ()
    label = "a"

    def __len__(self) -> int:
        return 0

    def name(self, i: int) -> str:
        return ""


def source(items: list[Item], key: str = "one") -> str:
    """Return the text of a source of these samples."""
    HELD[key] = items
    return f"{__name__}:Memory({key})"
