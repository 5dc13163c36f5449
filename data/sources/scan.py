"""Scan of a source: every sample is read once, or known from the index; the others are named with the reason."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtta.models.deadline import check_deadline
from fedtta.models.preprocessing import Preprocessing, RawImage

from .base import EncodedSource, Source, as_text, asked, composed, escaped, indices, skipped_of, stated_split
from .files import check_pixels, patient_of, read_encoded, stands_a_window
from .index import Entry, Index

#: Hexadecimal digits of an identity: 128 bits of SHA-256.
DIGITS = 32
AGAIN = "the data are scanned again at the start of a run"


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample that can be used; `index` is its number in the source, `identity` the hash of its content."""

    index: int
    name: str
    label: str | None
    group: str
    split: str
    identity: str


@dataclass(frozen=True)
class Scanned:
    """A source's usable samples in the order of their names, and name → reason of all others.

    `by_patient`: the groups are patients of DICOM files.
    """

    samples: list[Sample]
    skipped: dict[str, str]
    labelled: bool
    by_patient: bool = False

    @property
    def total(self) -> int:
        """Number of samples, usable or not."""
        return len(self.samples) + len(self.skipped)


@dataclass(frozen=True)
class Reader:
    """Reads one sample of a source.

    Parameters
    ----------
    source : Source
    preprocessing : Preprocessing
    max_pixels : int
        Larger images are refused before they are decoded.
    """

    source: Source
    preprocessing: Preprocessing
    max_pixels: int

    @property
    def by_patient(self) -> bool:
        """Whether the groups are those of `patient`, and not the source's."""
        return bool(getattr(self.source, "by_patient", False))

    def read(self, index: int) -> tuple[str, NDArray[np.uint8]]:
        """Return the identity and the pixels [C, S, S] of a sample.

        The identity is a hash of the encoded file where the source has one, so that it does not depend on the version
        of a decoder or on the preprocessing; otherwise it is a hash of the array.

        Raises
        ------
        ValueError
            The sample cannot be used, for whatever reason; the message is the reason.
        """
        try:
            if isinstance(self.source, EncodedSource):
                with self.source.open(index) as file:
                    content = read_encoded(file, self.max_pixels)
                identity = hashlib.sha256(content).hexdigest()[:DIGITS]
                return identity, self._prepared(self.preprocessing.decode(content, self.max_pixels))
            image = self._image(index)
            return array_identity(np.asarray(image)), self._prepared(image)
        except ValueError as error:
            raise ValueError(escaped(str(error))) from error
        except Exception as error:  # of a decoder
            raise ValueError(escaped(f"{error or type(error).__name__}")) from error

    def patient(self, index: int) -> str:
        """Return the group of a DICOM file, see `patient_of`; "" where groups are the source's.

        Raises
        ------
        ValueError
            The header cannot be read.
        """
        if not (self.by_patient and isinstance(self.source, EncodedSource)):
            return ""
        try:
            with self.source.open(index) as file:
                return patient_of(file, self.max_pixels)
        except Exception as error:  # of a decoder
            raise ValueError(escaped(f"its PatientID is not readable: {error or type(error).__name__}")) from error

    def stands_a_window(self, index: int) -> bool:
        """Return whether a sample that can be used without a window can be used with one; pixels are not read."""
        if not isinstance(self.source, EncodedSource):
            return True
        try:
            with self.source.open(index) as file:
                return stands_a_window(file)
        except Exception:  # of a class of the user's own, or of a decoder: it is read, which tells why
            return False

    def _image(self, index: int) -> RawImage:
        """Return the image of a source that decodes by itself."""
        try:
            image = self.source.image(index)
            width, height = image.size if isinstance(image, Image.Image) else np.shape(image)[1::-1]
        except Exception as error:  # the source may be a class of the user's own
            raise ValueError(f"not readable: {error or type(error).__name__}") from error
        check_pixels(width, height, self.max_pixels)
        return image

    def _prepared(self, image: RawImage) -> NDArray[np.uint8]:
        """Return the pixels [C, S, S] of an image."""
        try:
            return self.preprocessing.apply(image)
        except ValueError as error:
            raise ValueError(f"cannot be prepared: {error}") from error


@dataclass(frozen=True)
class VerifiedReader:
    """Reads the pixels of the samples in use; one that has changed since the scan is an error that names it."""

    reader: Reader
    samples: Sequence[Sample]

    def __call__(self, i: int) -> NDArray[np.uint8]:
        """Return image i, uint8 [C, S, S].

        Raises
        ------
        ValueError
            It cannot be read any more, or its content is another one.
        """
        sample = self.samples[i]
        try:
            identity, pixels = self.reader.read(sample.index)
        except ValueError as error:
            raise ValueError(f"{sample.name} cannot be read any more: {error}; {AGAIN}") from error
        if identity != sample.identity:
            raise ValueError(f"{sample.name} has changed since the scan; {AGAIN}")
        return pixels


def array_identity(array: NDArray[Any]) -> str:
    """Return a hash of an array's type, shape and values."""
    head = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:DIGITS]


def scan(reader: Reader, index: Index) -> tuple[Scanned, dict[str, Entry]]:
    """Read every sample that the index does not know; return what was found, and the index's new entries.

    Raises
    ------
    ValueError
        Two samples have one name, a stated split is another word, what a source says is no text, or the source fails.
    """
    source = reader.source
    stamp_of = getattr(source, "stamp", lambda i: None)
    with asked("the source of the data"):
        order = list(indices(source))
        labels = [as_text(source.label(i), f"label({i})") or None for i in range(len(source))]
        # one way of writing an accented letter, and no spaces around: a patient's images would be of two groups
        groups = [composed(as_text(source.group(i), f"group({i})")).strip() for i in range(len(source))]
        splits = [stated_split(as_text(source.split(i), f"split({i})"), source.name(i)) for i in range(len(source))]
        stamps = [json.loads(json.dumps(stamp_of(i))) for i in range(len(source))]  # as the index file returns them
    labelled = any(label is not None for label in labels)
    samples, skipped, entries = [], dict(skipped_of(source)), dict[str, Entry]()
    for i in order:
        check_deadline()
        name, stamp = source.name(i), stamps[i]
        if labelled and labels[i] is None:
            skipped[name] = "no label"
            continue
        found = index.find(name, stamp)
        if found is None or (index.windowless and not reader.stands_a_window(i)):
            try:
                found = Entry(stamp, reader.read(i)[0], reader.patient(i))
            except ValueError as error:
                skipped[name] = str(error)
                continue
        if stamp is not None:
            entries[name] = found
        samples.append(Sample(i, name, labels[i], groups[i] or found.patient, splits[i], found.identity))
    return Scanned(samples, dict(sorted(skipped.items())), labelled, reader.by_patient), entries


def reasons(skipped: Mapping[str, str]) -> str:
    """Return how many were skipped for which reason, without names and details: "2 empty file, 1 too large"."""
    counts = Counter(reason.split(":")[0] for reason in skipped.values())
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
