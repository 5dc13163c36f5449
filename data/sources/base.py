"""The protocol of a source of samples, and what all sources share."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import BinaryIO, Protocol, runtime_checkable

from fedtta.models.preprocessing import RawImage

#: The stated split of a sample; "" leaves it to the hash.
SPLITS = ("train", "validation", "test")


class UnusableData(ValueError):
    """Too much of a source cannot be used; `skipped` maps names, which the message does not tell, to the reasons."""

    def __init__(self, message: str, skipped: Mapping[str, str]) -> None:
        super().__init__(message)
        self.skipped = dict(skipped)


class Source(Protocol):
    """A device's own samples; i runs from 0 to len - 1.

    A source may also have these, which are optional:

    - ``skipped``: mapping of name → reason, of what is known to be unusable without reading an image. The reason up to
      its first colon is what the run's report counts; it leaves the device.
    - ``notes``: tuple of str, what a reader of the run's report has to know; it leaves the device.
    - ``open(i)``: the encoded image file, see `EncodedSource`; `image` is not called then.
    - ``by_patient``: bool, whether `group` says none, and a DICOM file's (`open`) is its patient; default: False.
    - ``stamp(i)``: a JSON value that changes when the sample changes, such as size and modification time. With it, the
      result of a scan is kept in the device's index file, and unchanged samples are not read again.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that occur here; () without labels."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str:
        """Return a stable and unique name of a sample, such as its path in the folder."""

    def image(self, i: int) -> RawImage:
        """Return the image as an array [H, W] or [H, W, 3], uint8, uint16 or float, or a Pillow image.

        Raises
        ------
        ValueError
            The image cannot be used; the message says why.
        """

    def label(self, i: int) -> str | None:
        """Return the class name, or None without a label."""

    def group(self, i: int) -> str:
        """Return what must stay in one split, such as the patient or the scanner; "" without."""

    def split(self, i: int) -> str:
        """Return "train", "validation" or "test" where the split is stated, else ""."""


@runtime_checkable
class EncodedSource(Protocol):
    """A source of encoded image files; `Preprocessing.decode` reads them, and their bytes identify the samples."""

    def open(self, i: int) -> BinaryIO:
        """Open the file of a sample, at its beginning.

        Raises
        ------
        ValueError
            It cannot be opened; the message says why.
        """


@contextmanager
def asked(what: str) -> Iterator[None]:
    """Turn what a class of the user's own raises into a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def as_text(value: object, what: str) -> str:
    """Return what a source says, "" for None; TypeError for a number: its 0 would count as no label or no group."""
    if value is None or isinstance(value, str):
        return value or ""
    raise TypeError(f"{what} is {value!r}; it has to be text")


def skipped_of(source: Source) -> Mapping[str, str]:
    """Return name → reason of what the source itself skipped."""
    return getattr(source, "skipped", {})


def notes_of(source: Source) -> tuple[str, ...]:
    """Return the notes of the source."""
    return tuple(getattr(source, "notes", ()))


def indices(source: Source) -> Iterator[int]:
    """Return the indices of the samples in the order of their names, which no order of reading a folder changes.

    Raises
    ------
    ValueError
        Two samples have one name.
    TypeError
        A name is no text.
    """
    names = [as_text(source.name(i), f"name({i})") for i in range(len(source))]
    order = sorted(range(len(names)), key=names.__getitem__)
    for before, after in pairwise(order):
        if names[before] == names[after]:
            raise ValueError(f"two samples are called {names[before]!r}")
    return iter(order)


def stated_split(value: str, where: str) -> str:
    """Return a stated split, "" without one; ValueError for another word."""
    value = value.strip().lower()
    if value and value not in SPLITS:
        raise ValueError(f"{where}: split {value!r}; allowed are {', '.join(SPLITS)}, or nothing")
    return value


def composed(name: str) -> str:
    """Return a name with each accented letter as one character; macOS writes two, which look the same."""
    return unicodedata.normalize("NFC", name)


def escaped(name: str) -> str:
    r"""Return a name on one printable line: other characters, and the backslash, as `\n`, `\x1b`, `\udcff`."""
    if name.isprintable() and "\\" not in name:
        return name
    parts = (one if one.isprintable() and one != "\\" else one.encode("unicode_escape").decode() for one in name)
    return "".join(parts)
