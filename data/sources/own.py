"""A device's own data: opened, scanned, mapped to the run's classes, split, and read from disk when indexed."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.data.domains import Role
from fedtta.data.images import Images
from fedtta.data.split import Split
from fedtta.models.preprocessing import Preprocessing
from fedtta.settings import exactly
from fedtta.settings.names import SOURCE_CLASS, check_source

from .arrays import NpzSource
from .base import SPLITS, Source, UnusableData, as_text, asked, composed, notes_of
from .folder import FolderSource
from .huggingface import HuggingFaceSource
from .index import Index
from .pixels import LazyPixels
from .scan import Reader, Sample, Scanned, VerifiedReader, reasons, scan
from .splits import assign

MIB = 1 << 20
_KINDS: dict[str, Callable[[str], Source]] = {
    "folder": lambda rest: FolderSource(Path(rest).expanduser()),
    "npz": lambda rest: NpzSource(Path(rest).expanduser()),
    "hf": HuggingFaceSource,
}


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
    samples, used, unusable : int
        Samples of the source, those in use, and those that cannot be used.
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
    unusable: int
    skipped: dict[str, str]
    notes: tuple[str, ...]
    classes_present: int | None
    fingerprint: str

    @property
    def used(self) -> int:
        """Samples in use."""
        return len(self.names)


def open_source(text: str) -> Source:
    """Open a device's data.

    Parameters
    ----------
    text : str
        "folder:/path" (`FolderSource`), "npz:/path/file.npz" (`NpzSource`), "hf:path-or-name" (`HuggingFaceSource`),
        or a class of one's own that has the methods of `Source`: "package.module:Class", called without arguments,
        or "package.module:Class(text)", called with the text.

    Raises
    ------
    ValueError
        The text has another form, the class lacks a method of the protocol, or the data cannot be opened.
    """
    kind, _, rest = check_source(text).partition(":")
    if kind in _KINDS:
        return _KINDS[kind](rest)
    match: Any = SOURCE_CLASS.fullmatch(text)
    return _own_class(text, match["module"], match["name"], match["text"])


def _own_class(text: str, module: str, name: str, argument: str | None) -> Source:
    """Import a class, create it and check that it is a source."""
    try:
        made = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module may have a bug
        what = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"data = {text!r} cannot be imported: {what}") from error
    methods = ("__len__", "name", "image", "label", "group", "split")
    with asked(f"data = {text!r}"):
        source: Source = made() if argument is None else made(argument)
        lacking = [f"{one}()" for one in methods if not callable(getattr(source, one, None))]
        if not hasattr(source, "classes"):
            lacking.insert(0, "classes")
        else:
            for one in source.classes:
                as_text(one, "a name in classes")
    if lacking:
        raise ValueError(f"data = {text!r} is no source: it lacks {', '.join(lacking)} (see data.sources.base.Source)")
    return source


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
    """Scan a device's data and split them; see `fedtta.data.sources.splits` for the rule.

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
        There are no classes; the source cannot be opened; it has no samples, or too many that cannot be used (says how
        many and why); it has classes that the run does not have; or samples without labels, or none for training, in a
        role that trains.
    OSError
        The index file cannot be written.
    """
    if not classes:
        raise ValueError(
            f"data = {source_text!r}: the run has to declare its classes, such as classes = 'covid,normal'"
        )
    max_pixels = round(max_megapixels * 1e6)
    key = {"source": source_text, "preprocessing": preprocessing.to_dict(), "max_pixels": max_pixels}
    # Of the preprocessing, only the window decides whether a sample can be used; contents are hashed before it.
    known = {"source": source_text, "windowed": preprocessing.window is not None, "max_pixels": max_pixels}
    reader = Reader(open_source(source_text), preprocessing, max_pixels)
    index = Index.load(index_file, known | ({"by_patient": True} if reader.by_patient else {}))
    scanned, entries = scan(reader, index)
    if scanned.total == 0:
        raise ValueError("; ".join((f"data = {source_text!r} hold no image", *notes_of(reader.source))))
    _check_skipped(source_text, scanned, max_skipped)
    labels = _labels(source_text, scanned.samples, classes, class_map or {})
    role = role or ("both" if scanned.labelled else "target")
    splits, left_out = _splits(source_text, scanned, role, index)
    # Written before anything is tested, so that a device whose run fails remembers, too.
    tested = zip(scanned.samples, splits, strict=True) if scanned.labelled else ()
    index.save(entries, {sample.identity for sample, split in tested if split == "test"})

    used = [i for i, split in enumerate(splits) if split]
    samples = [scanned.samples[i] for i in used]
    shape = (len(samples), preprocessing.channels, preprocessing.image_size, preprocessing.image_size)
    pixels = LazyPixels(VerifiedReader(reader, samples), shape, cache_mb * MIB)
    images = Images(source_text, pixels, labels[used], classes, labelled=scanned.labelled)
    notes = [*notes_of(reader.source), index.note, *_patients(scanned), *_counts(scanned, left_out)]
    return _assembled(images, samples, [splits[i] for i in used], role, scanned, left_out, notes, key)


def _assembled(
    images: Images,
    samples: Sequence[Sample],
    splits: Sequence[str],
    role: Role,
    scanned: Scanned,
    left_out: Mapping[str, str],
    notes: Sequence[str],
    key: Mapping[str, Any],
) -> OwnData:
    """Return the data of a device, given the samples in use."""
    split = Split(*(np.flatnonzero(np.array(splits) == name) for name in SPLITS))
    present = np.unique(images.labels[split.test if role == "target" else split.train])
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
        unusable=len(scanned.skipped),
        skipped={**scanned.skipped, **left_out},
        notes=tuple(note for note in (*notes, *_gaps(images, split, present)) if note),
        classes_present=len(present) if scanned.labelled else None,
        fingerprint=hashlib.sha256(json.dumps([rows, images.classes, key]).encode()).hexdigest(),
    )


def skippable(max_skipped: float, samples: int) -> int:
    """Return how many of the samples may be unusable: 29 of 100 for 0.29, where a product of floats is below 29."""
    return int(exactly(max_skipped) * samples)


def _check_skipped(source_text: str, scanned: Scanned, max_skipped: float) -> None:
    """Raise an error unless enough samples can be used."""
    count, total = len(scanned.skipped), scanned.total
    most = skippable(max_skipped, total)
    if count > most or not scanned.samples:
        limit = f"; max-skipped = {max_skipped:g} allows {most}" if scanned.samples else ""
        raise UnusableData(
            f"data = {source_text!r}: {count} of {total} samples cannot be used ({reasons(scanned.skipped)}){limit}. "
            f"`fedtta data {source_text}` names them",
            scanned.skipped,
        )


def _labels(
    source_text: str, samples: Sequence[Sample], classes: tuple[str, ...], class_map: Mapping[str, str]
) -> NDArray[np.int64]:
    """Return the samples' class numbers in the run, -1 without labels; ValueError for classes of no number."""
    allowed, known = ", ".join(classes) or "none", {composed(name): i for i, name in enumerate(classes)}
    if unknown := sorted(name for name in set(class_map.values()) if composed(name) not in known):
        raise ValueError(f"class-map: the run has no class {', '.join(unknown)}; allowed are {allowed}")
    renamed = {composed(own): composed(name) for own, name in class_map.items()}
    counts = Counter(one.label for one in samples if one.label is not None)
    wanted = {name: renamed.get(composed(name), composed(name)) for name in counts}
    numbers = {name: known[one] for name, one in wanted.items() if one in known}
    if foreign := sorted(set(counts) - set(numbers)):
        named = ", ".join(f"{name} ({counts[name]} samples)" for name in foreign)
        raise ValueError(
            f"data = {source_text!r} have classes that the run does not have: {named}; allowed are {allowed}. "
            f"Map them with class-map = '{foreign[0]}=...', or declare them in the run's classes"
        )
    return np.array([-1 if one.label is None else numbers[one.label] for one in samples], np.int64)


def _splits(source_text: str, scanned: Scanned, role: Role, index: Index) -> tuple[list[str], dict[str, str]]:
    """Return the split of every sample and who is left out, see `assign`; ValueError if the role does not fit them."""
    if not scanned.labelled:
        if role != "target":
            raise ValueError(f"data = {source_text!r} have no labels: role = {role!r} is not possible, only 'target'")
        return ["test"] * len(scanned.samples), {}
    splits, left_out = assign(scanned.samples, role, index.tested)
    if role != "target" and "train" not in splits:
        why = "; ".join((*_patients(scanned), *_left_out(left_out)))
        raise ValueError(
            f"data = {source_text!r}: none of {len(splits)} samples is in the training split{why and f' ({why})'}; add "
            "samples, state the splits in labels.csv, or use smaller groups"
        )
    return splits, left_out


def _patients(scanned: Scanned) -> Iterator[str]:
    """Yield a note on the samples whose group is their patient."""
    if scanned.by_patient and (groups := [one.group for one in scanned.samples if one.group]):
        patients = f"{len(set(groups))} patient{'s' * (len(set(groups)) > 1)}"
        yield f"{len(groups)} DICOM files of {patients} by their PatientID: each patient is in one split"


def _counts(scanned: Scanned, left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield notes on samples that are not used, by reason."""
    if scanned.skipped:
        yield f"{len(scanned.skipped)} of {scanned.total} samples cannot be used: {reasons(scanned.skipped)}"
    yield from _left_out(left_out)


def _left_out(left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield how many samples are left out, by reason."""
    for reason, count in Counter(left_out.values()).items():
        yield f"{count} samples left out: {reason}"


def _gaps(images: Images, split: Split, present: NDArray[np.int64]) -> Iterator[str]:
    """Yield notes on labels, classes and splits that there are not."""
    if not images.labelled:
        yield "no labels: nothing is trained on or measured here"
        return
    if lacking := sorted(set(range(images.num_classes)) - set(present.tolist())):
        part = "training" if len(split.train) else "test"
        yield f"no sample of {', '.join(images.classes[one] for one in lacking)} in the {part} split"
    if len(split.train):
        parts = {"validation": split.validation, "test": split.test}
        yield from (f"no sample in the {name} split" for name, part in parts.items() if not len(part))
