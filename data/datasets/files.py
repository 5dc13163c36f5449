"""Files that data sets are read from: arrays, label lists, images, class folders and mosaics.

Every reader reports a damaged file by its name.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedtta.models.preprocessing import Preprocessing

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

#: Errors that numpy, zipfile and Pillow raise for truncated or overwritten files.
_BROKEN = (
    OSError, ValueError, EOFError, SyntaxError, KeyError, MemoryError, OverflowError,
    struct.error, zlib.error, zipfile.BadZipFile, Image.DecompressionBombError,
)  # fmt: skip


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert the errors of reading a damaged file to a ValueError that names the file.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        The file exists but cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        raise ValueError(f"{path} is damaged or has another format: {error or type(error).__name__}") from error


def read_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file; pickled objects are refused.

    Raises
    ------
    ValueError
        The file is damaged, or has no array of one of `names`.
    """
    with reading(path):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("not an .npz archive")
        with archive:
            stored = {name: archive[name] for name in archive.files}
    for name in names:
        if name not in stored:
            raise ValueError(f"{path}: no array {name!r}; there are: {', '.join(sorted(stored))}")
    return stored


def read_array(path: Path) -> np.ndarray:
    """Read an .npy file; pickled objects are refused."""
    with reading(path):
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("not an .npy array")
        return array


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values and numpy arrays; everything else that a pickle can name is refused before it runs."""

    _ALLOWED = frozenset(
        {("numpy", "ndarray"), ("numpy", "dtype")}
        | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")
        # numpy 2 moved `_reconstruct`; the old place warns.
        return super().find_class(module.replace("numpy.core.", "numpy._core."), name)


def read_pickle(path: Path) -> Any:
    """Read a pickle of plain values and numpy arrays, also of Python 2; nothing that it names is run.

    Raises
    ------
    ValueError
        The file is damaged, or contains anything else.
    """
    with reading(path), path.open("rb") as file:
        try:
            return _PlainUnpickler(file, encoding="latin1").load()
        except (pickle.UnpicklingError, AttributeError, IndexError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(str(error) or type(error).__name__) from error


def as_labels(values: np.ndarray, count: int, num_classes: int, path: Path) -> np.ndarray:
    """Check `count` labels of `num_classes` classes and return them as int64 [count].

    Raises
    ------
    ValueError
        Wrong number, not integers (a missing label is often NaN), or out of range; the message names `path`.
    """
    if values.shape != (count,):
        raise ValueError(f"{path}: {count} images but labels of shape {values.shape}")
    if not np.issubdtype(values.dtype, np.number) or np.issubdtype(values.dtype, np.complexfloating):
        raise ValueError(f"{path}: labels must be integers, got {values.dtype}")
    missing = np.flatnonzero(~np.isfinite(values))
    if len(missing):
        raise ValueError(f"{path}: {len(missing)} labels are missing (not finite), the first at {missing[0]}")
    wrong = np.flatnonzero((values != np.floor(values)) | (values < 0) | (values >= num_classes))
    if len(wrong):
        raise ValueError(
            f"{path}: label {values[wrong[0]]} at {wrong[0]} is not an integer from 0 to {num_classes - 1}"
        )
    return values.astype(np.int64)


def class_names(stored: dict[str, np.ndarray], count: int | None, path: Path) -> tuple[str, ...]:
    """Return the array "classes" of `path` as `count` names (None: any); raises ValueError for another number."""
    if stored["classes"].ndim != 1:
        raise ValueError(f"{path}: classes must be a list of names, got an array of shape {stored['classes'].shape}")
    names = tuple(map(as_name, stored["classes"]))
    if count is not None and len(names) != count:
        raise ValueError(f"{path}: {count} class names are expected, got {len(names)}")
    return names


def as_name(value: object) -> str:
    """Return a name of an array as text; h5py and older programs store bytes, which are UTF-8."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


# Images in folders --------------------------------------------------------------------------------------------------


def read_image(path: Path, preprocessing: Preprocessing) -> np.ndarray:
    """Read an image as uint8 [C, S, S]; raises ValueError if it is damaged."""
    with reading(path):
        return preprocessing.apply(preprocessing.decode(path.read_bytes()))


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Read images as uint8 [n, 3, size, size], resized bilinearly."""
    preprocessing = Preprocessing(size)
    return np.stack([read_image(path, preprocessing) for path in paths])


def subfolders(folder: Path) -> list[str]:
    """Return the names of the visible folders in `folder`, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def labelled_files(folders: Sequence[Path | None]) -> tuple[list[Path], np.ndarray]:
    """List the visible image files of one folder per class, in the order of classes and file names.

    Parameters
    ----------
    folders : sequence of Path or None
        The folder of each class; None for a class without images.

    Returns
    -------
    list of Path, ndarray
        Files and int64 labels, n each.

    Raises
    ------
    ValueError
        A folder has no image, or something else than a file that is called like one.
    """
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        if folder is None:
            continue
        visible = (one for one in folder.glob("*") if not one.name.startswith("."))  # macOS puts ._1.png beside 1.png
        found = sorted(one for one in visible if one.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"{folder} contains no image ({', '.join(SUFFIXES)})")
        if other := next((one for one in found if not one.is_file()), None):  # reading from a FIFO would never end
            raise ValueError(f"{other} is not a regular file, nor a link to one")
        files.extend(found)
        labels.extend([label] * len(found))
    return files, np.asarray(labels, np.int64)


# Mosaics ------------------------------------------------------------------------------------------------------------


def read_tiles(path: Path, size: int, channels: int = 3) -> np.ndarray:
    """Cut a mosaic into its tiles, uint8 [N, channels, size, size], in row-major order.

    Raises
    ------
    ValueError
        The file cannot be read, is not RGB (`channels` 3) or grayscale (1), or its sides are no multiples of `size`.
    """
    with reading(path), Image.open(path) as image:
        mosaic = np.asarray(image)
    height, width = mosaic.shape[:2]
    if mosaic.shape[2:] != ((3,) if channels == 3 else ()) or height % size or width % size:
        kind = "RGB" if channels == 3 else "grayscale"
        raise ValueError(f"{path}: a mosaic of {size} x {size} {kind} tiles is expected, got {mosaic.shape}")
    rows, columns = height // size, width // size
    cut = mosaic.reshape(rows, size, columns, size, channels).transpose(0, 2, 4, 1, 3)  # [rows, columns, C, size, size]
    return cut.reshape(rows * columns, channels, size, size)


def read_labelled_tiles(path: Path, labels: np.ndarray, size: int, channels: int = 3) -> np.ndarray:
    """Return the first tiles of a mosaic, one per label; tiles beyond the labels pad its last row.

    Raises
    ------
    ValueError
        As `read_tiles`, or there are fewer tiles than labels.
    """
    pixels = read_tiles(path, size, channels)
    if len(pixels) < len(labels):
        raise ValueError(f"{path}: {len(labels)} labels but only {len(pixels)} tiles")
    return pixels[: len(labels)]
