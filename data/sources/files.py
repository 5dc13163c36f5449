"""Opening image files that may be hostile: inside one folder, regular files only, and no more pixels than allowed.

Nothing is opened before it is known to be a regular file, so no FIFO blocks and no device is touched. Each component of
a path is opened relative to its folder and never through a symbolic link, so a file that is exchanged after the scan
cannot lead out of the folder either.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from PIL import Image, UnidentifiedImageError

from fedtta.models.preprocessing import FORMATS, check_inflated, has_deep_colours

from .base import composed

#: A larger file is not read; 100 megapixels of 16-bit RGB are 600 MB.
MAX_BYTES = 1 << 30
DAMAGED = "damaged, or of another format"
OUTSIDE = "leads out of the folder"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
}

Parts = tuple[str, ...]


@contextmanager
def folder_beneath(root: str, parts: Parts) -> Iterator[int]:
    """Open a folder below `root`, never through a symbolic link below it; the descriptor is closed at the end.

    Raises
    ------
    OSError
        A folder is missing, not readable, no folder or a symbolic link.
    """
    opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=opened)
            os.close(opened)
            opened = inner
        yield opened
    finally:
        os.close(opened)


def open_beneath(root: str, parts: Parts) -> BinaryIO:
    """Open a regular file below `root` for reading, never through a symbolic link and never blocking.

    Raises
    ------
    ValueError
        It does not exist, is not readable or is no regular file; the message is the reason, without the name.
    """
    try:
        with folder_beneath(root, parts[:-1]) as folder:
            check_regular(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode)
            opened = os.open(parts[-1], _FILE, dir_fd=folder)
        file = os.fdopen(opened, "rb")
    except OSError as error:
        raise ValueError(reason_of(error)) from error
    try:
        check_regular(os.fstat(opened).st_mode)  # it may have been exchanged in between
    except ValueError:
        file.close()
        raise
    return file


def check_regular(mode: int) -> None:
    """Raise ValueError unless a file's mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise ValueError(f"not a regular file: {_KINDS.get(stat.S_IFMT(mode), 'of unknown kind')}")


def stamp_of(status: os.stat_result) -> list[int]:
    """Return what changes when a file's content does: its size, and the times in ns of its content and its entry.

    The time of the content alone is what an archive, or a copy that keeps times, says it is.
    """
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def reason_of(error: OSError) -> str:
    """Return in words why a file cannot be opened or read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "does not exist"
    return f"not readable: {error.strerror or type(error).__name__}"


def read_encoded(file: BinaryIO, max_pixels: int) -> bytes:
    """Return the content of an image file once its header is known to promise no more than `max_pixels`.

    Raises
    ------
    ValueError
        The file is empty, too large, not readable, or has no header of a known format; the message is the reason.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            raise ValueError("empty file")
        if size > MAX_BYTES:
            raise ValueError(f"too large: {size / 1e6:.0f} MB; allowed are {MAX_BYTES / 1e6:.0f}")
        width, height = _header_size(file, max_pixels)
        check_pixels(width, height, max_pixels)
        file.seek(0)
        return file.read(MAX_BYTES)
    except OSError as error:
        raise ValueError(reason_of(error)) from error


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise ValueError for an image of more pixels than are allowed."""
    if width * height > max_pixels:
        raise ValueError(f"too large: {width} x {height} pixels; max-megapixels allows {max_pixels / 1e6:g} million")


def stands_a_window(file: BinaryIO) -> bool:
    """Return whether the header is of DICOM, or of an image without 16-bit colours; another file is an error."""
    if _is_dicom(file):
        return True
    with Image.open(file, formats=FORMATS) as image:
        return not has_deep_colours(image)


def patient_of(file: BinaryIO, max_pixels: int) -> str:
    """Return a hash of the PatientID of a DICOM file; "" for other files, and without a PatientID."""
    if not _is_dicom(file):
        return ""
    patient = composed(str(_dicom_header(file, max_pixels, "PatientID").get("PatientID") or "")).strip(" \0")
    return patient and f"patient {hashlib.sha256(patient.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _is_dicom(file: BinaryIO) -> bool:
    """Return whether a file, which is left at its beginning, is DICOM."""
    file.seek(128)
    dicom = file.read(4) == b"DICM"
    file.seek(0)
    return dicom


def _header_size(file: BinaryIO, max_pixels: int) -> tuple[int, int]:
    """Return (width, height) from the header; no pixel is decoded."""
    dicom = _is_dicom(file)
    try:
        if dicom:
            return _dicom_size(file, max_pixels)
        with Image.open(file, formats=FORMATS) as image:
            return image.size
    except Image.DecompressionBombError as error:
        raise ValueError(f"too large: {error}") from error  # of Pillow (179 megapixels) or `check_inflated`
    except UnidentifiedImageError as error:
        raise ValueError(DAMAGED) from error
    except ImportError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # the error type depends on where a file is damaged
        raise ValueError(f"{DAMAGED}: {error or type(error).__name__}") from error


def _dicom_size(file: BinaryIO, max_pixels: int) -> tuple[int, int]:
    header = _dicom_header(file, max_pixels, "Rows", "Columns", "NumberOfFrames")
    return int(header.Columns), int(header.Rows) * int(header.get("NumberOfFrames", 1) or 1)


def _dicom_header(file: BinaryIO, max_pixels: int, *tags: str) -> Any:
    """Return a `pydicom.FileDataset` of some elements, which are not the pixels."""
    try:
        import pydicom
    except ImportError as error:
        raise ImportError("DICOM files need pydicom: pip install 'fedtta[dicom]'") from error
    check_inflated(file, max_pixels)
    return pydicom.dcmread(file, stop_before_pixels=True, specific_tags=list(tags))
