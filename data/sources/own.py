"""A device's own data: scanned, mapped to the run's classes, split, and read from disk when they are indexed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.domains import Role
from data.images import Images
from data.split import Split
from models.preprocessing import Preprocessing

from .base import SPLITS, notes_of, open_source
from .index import Index
from .pixels import LazyPixels
from .scan import Reader, Sample, Scanned, reasons, scan
from .splits import assign

MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class OwnData:
    """The data of one device in one run.

    Parameters
    ----------
    images : Images
        The samples in use, in the order of their names; pixels are read when indexed. Labels are -1 without labels.
    split : Split
        Without labels all samples are in the test split.
    role : Role
        What the device can be: "target" without labels.
    labelled : bool
    names, identities, groups : tuple of str
        Of each sample in use: its name, the hash of its content, its group ("" without).
    samples, used : int
        Samples of the source, and those in use.
    skipped : dict
        Name → reason of all others. Names stay on the device.
    notes : tuple of str
        What a reader of the run's report has to know: counts and class names, no names of samples.
    classes_present : int or None
        Classes of the run that occur in the training split, or for a target in the test split; None without labels.
    fingerprint : str
        A hash of names, content, labels, splits, classes and preprocessing.
    """

    images: Images
    split: Split
    role: Role
    labelled: bool
    names: tuple[str, ...]
    identities: tuple[str, ...]
    groups: tuple[str, ...]
    samples: int
    skipped: dict[str, str]
    notes: tuple[str, ...]
    classes_present: int | None
    fingerprint: str

    @property
    def used(self) -> int:
        """Samples in use."""
        return len(self.names)


def own_data(
    source_text: str,
    *,
    classes: tuple[str, ...],
    class_map: Mapping[str, str] | None = None,
    preprocessing: Preprocessing,
    max_skipped: float = 0.1,
    max_megapixels: float = 100.0,
    cache_mb: int = 512,
    role: Role | None = None,
    index_file: Path | None = None,
) -> OwnData:
    """Scan a device's data and split them; see `data.sources.splits` for the rule.

    Parameters
    ----------
    source_text : str
        See `open_source`.
    classes : tuple of str
        The run's classes; labels are numbers in it. The device may lack some.
    class_map : mapping of str to str
        The device's class name → the run's.
    preprocessing : Preprocessing
    max_skipped : float
        Largest share of samples that may be unusable.
    max_megapixels : float
        Larger images are unusable, and are not decoded.
    cache_mb : int
        Memory for prepared images, MiB.
    role : Role, optional
        Default: "both" with labels, "target" without.
    index_file : Path, optional
        Remembers the scan, and what was ever in the test split of labelled data: it never trains later. Without a file
        every sample is read, and nothing is remembered.

    Raises
    ------
    ValueError
        The source cannot be opened; it has no samples, or too many that cannot be used (says how many and why); it has
        classes that the run does not have; or samples without labels, or none for training, in a role that trains.
    OSError
        The index file cannot be written.
    """
    max_pixels = int(max_megapixels * 1e6)
    key = {"source": source_text, "preprocessing": preprocessing.to_dict(), "max_pixels": max_pixels}
    index = Index.load(index_file, json.loads(json.dumps(key)))
    source = open_source(source_text)
    reader = Reader(source, preprocessing, max_pixels)
    scanned, entries = scan(reader, index)
    _check_skipped(source_text, scanned, max_skipped)
    role = role or ("both" if scanned.labelled else "target")
    if not scanned.labelled and role != "target":
        raise ValueError(f"data = {source_text!r} have no labels: role = {role!r} is not possible, only 'target'")
    labels = _labels(source_text, scanned.samples, classes, class_map or {})
    if scanned.labelled:
        splits, left_out = assign(scanned.samples, role, index.tested)
    else:
        splits, left_out = ["test"] * len(scanned.samples), {}
    if role != "target" and "train" not in splits:
        raise ValueError(
            f"data = {source_text!r}: none of {len(splits)} samples is in the training split; state the splits in "
            "labels.csv, or use smaller groups"
        )
    # Written before anything is tested, so that a device that fails in its run remembers, too.
    tested = zip(scanned.samples, splits, strict=True) if scanned.labelled else ()
    index.save(entries, {sample.identity for sample, split in tested if split == "test"})

    used = [i for i, split in enumerate(splits) if split]
    samples, splits, labels = [scanned.samples[i] for i in used], [splits[i] for i in used], labels[used]
    shape = (len(samples), preprocessing.channels, preprocessing.image_size, preprocessing.image_size)
    pixels = LazyPixels(_verified(reader, samples), shape, cache_mb * MIB)
    images = Images(source_text, pixels, labels, classes, labelled=scanned.labelled)
    split = Split(*(np.flatnonzero(np.array(splits) == name) for name in SPLITS))
    present = split.test if role == "target" else split.train
    rows = [(one.name, one.identity, one.label, part) for one, part in zip(samples, splits, strict=True)]
    return OwnData(
        images=images,
        split=split,
        role=role,
        labelled=scanned.labelled,
        names=tuple(one.name for one in samples),
        identities=tuple(one.identity for one in samples),
        groups=tuple(one.group for one in samples),
        samples=scanned.total,
        skipped={**scanned.skipped, **left_out},
        notes=_notes(notes_of(source), index.note, scanned, left_out, images, split, present),
        classes_present=len(np.unique(labels[present])) if scanned.labelled else None,
        fingerprint=hashlib.sha256(json.dumps([rows, classes, key]).encode()).hexdigest(),
    )


def _check_skipped(source_text: str, scanned: Scanned, max_skipped: float) -> None:
    """Raise ValueError unless there are samples, and enough of them can be used."""
    count, total = len(scanned.skipped), scanned.total
    if total == 0:
        raise ValueError(f"data = {source_text!r} hold no image")
    if count > max_skipped * total or not scanned.samples:
        raise ValueError(
            f"data = {source_text!r}: {count} of {total} samples cannot be used ({reasons(scanned.skipped)}); "
            f"max-skipped = {max_skipped:g} allows {int(max_skipped * total)}. "
            f"`python -m data.sources {source_text}` names them"
        )


def _labels(
    source_text: str, samples: Sequence[Sample], classes: tuple[str, ...], class_map: Mapping[str, str]
) -> NDArray[np.int64]:
    """Return the samples' class numbers in the run, -1 without labels; ValueError for classes of no number."""
    allowed = ", ".join(classes)
    if unknown := sorted(set(class_map.values()) - set(classes)):
        raise ValueError(f"class-map: the run has no class {', '.join(unknown)}; allowed are {allowed}")
    counts = Counter(one.label for one in samples if one.label is not None)
    numbers = {
        name: classes.index(class_map.get(name, name)) for name in counts if class_map.get(name, name) in classes
    }
    if foreign := sorted(set(counts) - set(numbers)):
        named = ", ".join(f"{name} ({counts[name]} samples)" for name in foreign)
        raise ValueError(
            f"data = {source_text!r} have classes that the run does not have: {named}; allowed are {allowed or 'none'}. "
            f"Map them with class-map = '{foreign[0]}=...', or declare them in the run's classes"
        )
    return np.array([-1 if one.label is None else numbers[one.label] for one in samples], np.int64)


class _verified:
    """Reads the pixels of a sample in use; what has changed since the scan is an error."""

    def __init__(self, reader: Reader, samples: Sequence[Sample]) -> None:
        self._reader = reader
        self._samples = [(one.index, one.name, one.identity) for one in samples]

    def __call__(self, i: int) -> NDArray[np.uint8]:
        index, name, expected = self._samples[i]
        try:
            identity, pixels = self._reader.read(index)
        except ValueError as error:
            raise ValueError(
                f"{name} cannot be read any more: {error}; the data are scanned again in the next run"
            ) from error
        if identity != expected:
            raise ValueError(f"{name} has changed since the scan; the data are scanned again in the next run")
        return pixels


def _notes(
    own: tuple[str, ...],
    index_note: str,
    scanned: Scanned,
    left_out: Mapping[str, str],
    images: Images,
    split: Split,
    present: NDArray[np.int64],
) -> tuple[str, ...]:
    """Return what a reader of the report has to know, a line each."""
    notes = [*own, index_note]
    if scanned.skipped:
        notes.append(f"{len(scanned.skipped)} of {scanned.total} samples cannot be used: {reasons(scanned.skipped)}")
    for reason, count in Counter(left_out.values()).items():
        notes.append(f"{count} samples left out: {reason}")
    if scanned.labelled:
        lacking = set(range(images.num_classes)) - set(images.labels[present].tolist())
        if lacking:
            notes.append(f"no sample of {', '.join(images.classes[one] for one in sorted(lacking))}")
        parts = {"validation": split.validation, "test": split.test} if len(split.train) else {}
        notes += [f"no sample in the {name} split" for name, part in parts.items() if not len(part)]
    else:
        notes.append("no labels: nothing is trained on or measured here")
    return tuple(note for note in notes if note)
