"""A data set of the Hugging Face library `datasets`, as a device's own data."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from .base import SPLITS
from .files import OUTSIDE, open_beneath

#: Names that data sets give to the three splits.
SPLIT_NAMES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation", "testing": "test"}
SPLIT_NAMES |= {name: name for name in SPLITS}
GROUP = "group"  # the column


class HuggingFaceSource:
    """The samples of a data set that was saved with `save_to_disk`, or that `load_dataset` finds by path or name.

    The images are the column of type `Image`. A column "group" holds the groups. The labels are another column of type
    `ClassLabel`, else a column "label" or "labels" of text or numbers. A missing value, NaN and a `ClassLabel`'s -1 are
    no group and no label. In a data set with a test split, its splits are the stated ones; otherwise the hash decides.

    Parameters
    ----------
    text : str
        A folder; or the name of a data set, which the library then takes from its cache or downloads
        (`HF_HUB_OFFLINE=1` forbids that).

    Raises
    ------
    ValueError
        The data set cannot be loaded, it has not exactly one column of images, or a label has no class.
    """

    def __init__(self, text: str) -> None:
        folder = Path(text).expanduser()
        self._folder = os.path.realpath(folder) if folder.exists() else ""
        parts = _load(text)
        named = {name: SPLIT_NAMES.get(name.lower(), "") for name in parts}
        stated = "test" in named.values()
        self._rows: list[tuple[str, Any, int]] = []
        self._labels: list[str | None] = []
        self._splits: dict[str, str] = {}
        self._images: dict[str, str] = {}  # split → column
        self._groups: list[str] = []
        unused: set[str] = set()
        for name, saved in parts.items():  # which may have other columns each
            part = saved.with_format(None)  # a format such as "torch" is saved with the data
            image, label = _columns(part.features, text)
            group = GROUP if GROUP in part.features else ""
            self._images[name] = image
            self._labels += _texts(part, label, text)
            self._groups += [one or "" for one in _texts(part, group, text)]
            self._splits[name] = named[name] if stated else ""
            # alone: a row is read with all its columns, and those of images or sound are decoded
            encoded = part.select_columns(image).cast_column(image, type(part.features[image])(decode=False))
            self._rows += [(name, encoded, i) for i in range(len(encoded))]
            unused |= set(part.features) - {image, label, group}
        self.classes = tuple(sorted({one for one in self._labels if one is not None}))
        divided = [name for name, split in named.items() if stated and not split]
        told = (("columns not used", sorted(unused)), ("splits of other names, divided by hash", divided))
        self.notes = tuple(f"{what}: {', '.join(names)}" for what, names in told if names)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, i: int) -> str:
        """Return the split's name and the row."""
        split, _, row = self._rows[i]
        return f"{split}/{row}"

    def image(self, i: int) -> Any:
        """Return the image as Pillow reads it; `open` is what `own_data` uses."""
        from PIL import Image

        with self.open(i) as file:
            return Image.open(file).copy()

    def open(self, i: int) -> BinaryIO:
        """Open the encoded image, from the table or from the file that it names."""
        name, part, row = self._rows[i]
        stored = part[row][self._images[name]]
        if stored is None or (stored.get("bytes") is None and not stored.get("path")):
            raise ValueError("no image")
        if stored.get("bytes") is not None:
            return io.BytesIO(stored["bytes"])
        path = os.path.realpath(stored["path"])
        if self._folder and os.path.commonpath([self._folder, path]) != self._folder:
            raise ValueError(OUTSIDE)
        return open_beneath("/", tuple(path.split("/")[1:]))

    def label(self, i: int) -> str | None:
        """Return the class name."""
        return self._labels[i]

    def group(self, i: int) -> str:
        """Return the group."""
        return self._groups[i]

    def split(self, i: int) -> str:
        """Return the stated split."""
        return self._splits[self._rows[i][0]]

    def stamp(self, i: int) -> str:
        """Return the library's fingerprint of the data."""
        return str(self._rows[i][1]._fingerprint)


def _load(text: str) -> dict[str, Any]:
    """Return split → data set."""
    try:
        import datasets
    except ImportError as error:  # flwr-datasets brings it
        raise ValueError("Hugging Face data sets need the package datasets: pip install datasets") from error
    path = Path(text).expanduser()
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        load = datasets.load_from_disk if saved else datasets.load_dataset
        loaded = load(str(path) if path.exists() else text)
    except Exception as error:  # the library has no common class of errors
        why = ": ".join(dict.fromkeys(str(one) for one in (error, error.__cause__) if one))
        raise ValueError(f"data = 'hf:{text}' cannot be loaded: {why}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _columns(features: Any, text: str) -> tuple[str, str]:
    """Return the names of the columns of images and of labels, the latter "" without labels."""
    import datasets

    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(images) != 1:
        raise ValueError(f"data = 'hf:{text}': one column of type Image is needed; the columns are {dict(features)}")
    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel) and name != GROUP]
    if len(labels) > 1 and "label" in labels:
        labels = ["label"]
    if len(labels) > 1:
        raise ValueError(
            f"data = 'hf:{text}': several columns of labels: {', '.join(labels)}; call one of them 'label'"
        )
    named = [name for name in ("label", "labels") if name in features]
    return images[0], next(iter([*labels, *named]), "")


def _texts(part: Any, column: str, text: str) -> list[str | None]:
    """Return a column as text, of a `ClassLabel` the names of its numbers; None where there is nothing."""
    if not column:
        return [None] * len(part)
    names = getattr(part.features[column], "names", None)
    values = part[column][:]
    if names is None:
        return [None if value is None or value != value else str(value) or None for value in values]  # NaN != NaN
    if wrong := [value for value in values if value is not None and value >= len(names)]:
        raise ValueError(
            f"data = 'hf:{text}': column {column!r} has the number {wrong[0]}, but there are {len(names)} names"
        )
    return [None if value is None or value < 0 else names[value] for value in values]
