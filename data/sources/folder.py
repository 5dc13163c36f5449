"""Image files in a folder: class folders, a table `labels.csv`, or a flat folder without labels.

- `labels.csv` in the folder: columns path (relative to the folder), and label, group and split where there are any.
  Only files in the table are samples; their names may have any ending.
  Without the columns group and split, and without a table, the group of a DICOM file is its patient.
- Otherwise class folders: a file belongs to the class of the first folder on its path, at any depth below it.
- Otherwise files directly in the folder, without labels.

Hidden files and folders are no part of the data, nor is what vanishes while the folder is listed. Symbolic links to
folders are not followed; those to files are where the file is in the folder, too. Everything else that cannot be a
sample is named in `skipped`. Without a table, a folder that cannot be listed is an error: what it holds is not known.
"""

from __future__ import annotations

import csv
import io
import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fedtta.data.datasets.files import SUFFIXES
from fedtta.models.preprocessing import MAX_PIXELS, Preprocessing, RawImage

from .base import UnusableData, composed, escaped, stated_split
from .files import OUTSIDE, Parts, check_regular, folder_beneath, open_beneath, read_encoded, reason_of, stamp_of

TABLE = "labels.csv"
COLUMNS = ("path", "label", "group", "split")
ENDINGS = (*SUFFIXES, ".dcm")
HIDDEN = "hidden: a name in its path begins with a dot"
RECOVERED = "lost+found"  # of a file system's root, which only its administrator may list


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file of a folder: the path it is read from, and its `stamp_of`."""

    parts: Parts
    stamp: list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a folder; see `Source`."""

    name: str
    entry: Entry
    label: str | None = None
    group: str = ""
    split: str = ""


class FolderSource:
    """The images of a folder, as found when it is opened; see the module for the three layouts.

    Parameters
    ----------
    folder : Path
        May itself be a symbolic link.

    Raises
    ------
    ValueError
        There is no such folder, or `labels.csv` is not of the described form (names the line).
    UnusableData
        A folder in it cannot be listed, and there is no table.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        self.root = os.path.realpath(folder)
        self.skipped: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self.by_patient = True
        files = dict(self._walk())
        table = files.pop(TABLE, None)
        if table is None and TABLE in self.skipped:
            raise ValueError(f"{folder / TABLE}: {self.skipped[TABLE]}")
        self._samples = self._from_folders(files) if table is None else self._from_table(files, table)
        self._samples.sort(key=lambda sample: sample.name)
        self.classes = tuple(sorted({one.label for one in self._samples if one.label is not None}))

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, i: int) -> str:
        """Return the path in the folder, with `/`, on one printable line (`escaped`)."""
        return self._samples[i].name

    def label(self, i: int) -> str | None:
        """Return the class name."""
        return self._samples[i].label

    def group(self, i: int) -> str:
        """Return the group that `labels.csv` states."""
        return self._samples[i].group

    def split(self, i: int) -> str:
        """Return the split that `labels.csv` states."""
        return self._samples[i].split

    def stamp(self, i: int) -> list[int]:
        """Return the file's `stamp_of`."""
        return self._samples[i].entry.stamp

    def open(self, i: int) -> BinaryIO:
        """Open the file; ValueError if it is not there any more or is no regular file inside the folder."""
        return open_beneath(self.root, self._samples[i].entry.parts)

    def image(self, i: int) -> RawImage:
        """Return the decoded image of at most 100 megapixels; ValueError if it cannot be used."""
        with self.open(i) as file:
            return Preprocessing().decode(read_encoded(file, MAX_PIXELS), MAX_PIXELS)

    # Walking --------------------------------------------------------------------------------------------------------

    def _walk(self) -> Iterator[tuple[str, Entry]]:
        """Yield path → entry of every regular file below the folder that is not hidden; name what is skipped."""
        folders: list[Parts] = [()]
        while folders:
            parts = folders.pop()
            for path, status in self._listed(parts):
                if stat.S_ISDIR(status.st_mode):
                    folders.append(path)
                    continue
                try:
                    if stat.S_ISLNK(status.st_mode):
                        yield "/".join(path), self._target(path)
                    else:
                        check_regular(status.st_mode)
                        yield "/".join(path), Entry(path, stamp_of(status))
                except ValueError as error:
                    self._skip(path, str(error))

    def _listed(self, parts: Parts) -> list[tuple[Parts, os.stat_result]]:
        """Return path and status of what is in a folder and not hidden; name what cannot be listed."""
        found = []
        try:
            with folder_beneath(self.root, parts) as opened, os.scandir(opened) as listing:
                for entry in listing:
                    path = (*parts, entry.name)
                    if entry.name.startswith(".") or path == (RECOVERED,):
                        continue
                    try:
                        found.append((path, entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:  # it was removed or renamed meanwhile
                        continue
                    except OSError as error:
                        self._skip(path, reason_of(error))
        except OSError as error:
            if not parts:
                raise ValueError(f"{self.root}: {reason_of(error)}") from error
            if not isinstance(error, FileNotFoundError | NotADirectoryError):  # otherwise it is gone, as above
                self._skip((*parts, ""), reason_of(error))
        return found

    def _target(self, path: Parts) -> Entry:
        """Return the regular file in the folder that a symbolic link leads to; ValueError for another target."""
        target = os.path.realpath(Path(self.root, *path))
        if os.path.commonpath([self.root, target]) != self.root:
            raise ValueError(f"symbolic link: {OUTSIDE}")
        try:
            status = Path(target).lstat()
        except OSError as error:
            raise ValueError(f"symbolic link: {reason_of(error)}") from error
        if stat.S_ISDIR(status.st_mode):
            raise ValueError("symbolic link: folders are not followed")
        check_regular(status.st_mode)
        return Entry(tuple(os.path.relpath(target, self.root).split("/")), stamp_of(status))

    def _skip(self, path: Parts, reason: str) -> None:
        self.skipped[escaped("/".join(path))] = reason

    # Layouts --------------------------------------------------------------------------------------------------------

    def _from_folders(self, files: dict[str, Entry]) -> list[Sample]:
        """Return the samples of class folders, or of a flat folder without labels."""
        if closed := {name: reason for name, reason in self.skipped.items() if name.endswith("/")}:
            reasons = "; ".join(sorted(set(closed.values())))
            raise UnusableData(
                f"{self.root}: {len(closed)} folders in it cannot be listed ({reasons}). "
                f"`fedtta data folder:{self.root}` names them",
                closed,
            )
        images = {path: entry for path, entry in files.items() if path.lower().endswith(ENDINGS)}
        if len(files) > len(images):
            self.notes += (f"not images by their names: {len(files) - len(images)} files",)
        nested = {path: entry for path, entry in images.items() if "/" in path}
        if not nested:
            return [Sample(escaped(path), entry) for path, entry in images.items()]
        for path in images.keys() - nested.keys():
            self._skip((path,), "in no class folder")
        return [Sample(escaped(path), entry, escaped(path.split("/")[0])) for path, entry in nested.items()]

    def _from_table(self, files: dict[str, Entry], table: Entry) -> list[Sample]:
        """Return the samples of `labels.csv`."""
        where = str(Path(self.root, TABLE))
        try:
            with open_beneath(self.root, table.parts) as file:
                content = file.read()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        rows, columns = read_table(content, where)
        self.by_patient = not {"group", "split"} & set(columns)
        if unused := [column for column in columns if column not in COLUMNS]:
            self.notes += (f"{TABLE}: columns not used: {', '.join(unused)}",)
        walked, self.skipped = self.skipped, {}  # what is not in the table is no sample
        samples, alike = [], {composed(path): path for path in files}
        for written, label, group, split in rows:
            path = written if written in files else posixpath.normpath(written.replace("\\", "/"))  # as of Windows
            path = path if path in files else alike.get(composed(path), path)
            if path in files:
                samples.append(Sample(escaped(path), files[path], label or None, group, split))
            elif posixpath.isabs(path) or path.split("/")[0] == "..":
                self._skip((path,), OUTSIDE)
            else:
                self._skip((path,), _reason_in(walked, path))
        listed = {sample.name for sample in samples}
        unlisted = sum(escaped(path) not in listed and path.lower().endswith(ENDINGS) for path in files)
        if unlisted:
            self.notes += (f"not in {TABLE}: {unlisted} image files",)
        return samples


def _reason_in(walked: dict[str, str], path: str) -> str:
    """Return why a path or a folder above it was skipped, or is not looked at."""
    parts = path.split("/")
    above = ("/".join(parts[: i + 1]) for i in range(len(parts)))
    found = (walked.get(escaped(one)) or walked.get(escaped(f"{one}/")) for one in above)
    hidden = any(part.startswith(".") for part in parts)
    return next(filter(None, found), HIDDEN if hidden else "does not exist")


def read_table(content: bytes, where: str) -> tuple[list[tuple[str, str, str, str]], list[str]]:
    """Parse a table of samples.

    Parameters
    ----------
    content : bytes
        A comma-separated table in UTF-8 whose first line names the columns; "path" is required.
    where : str
        The file, for messages.

    Returns
    -------
    list of (path, label, group, split)
        Paths are normalized; what is not given is "".
    list of str
        The columns, in lower case.

    Raises
    ------
    ValueError
        A line is not of this form (names the line).
    """
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{where}, line {line}: not UTF-8") from error
    rows: dict[str, tuple[str, str, str, str]] = {}
    header: list[str] = []
    try:
        for cells in reader:
            at = f"{where}, line {reader.line_num}"
            if not header:
                header = _header(cells, at)
                continue
            if not any(cells):
                continue
            if len(cells) != len(header):
                raise ValueError(f"{at}: {len(cells)} cells; the header has {len(header)}")
            row = dict(zip(header, cells, strict=True))
            if not row["path"]:
                raise ValueError(f"{at}: the path is empty")
            path = posixpath.normpath(row["path"])
            if path in rows:
                raise ValueError(f"{at}: {escaped(path)} stands twice in the table")
            label, group = row.get("label", "").strip(), row.get("group", "").strip()
            rows[path] = (path, label, group, stated_split(row.get("split", ""), at))
    except csv.Error as error:
        raise ValueError(f"{where}, line {reader.line_num}: {error}") from error
    if not header:
        raise ValueError(f"{where}, line 1: a header is required: {','.join(COLUMNS)}")
    return list(rows.values()), header


def _header(cells: list[str], at: str) -> list[str]:
    """Return the columns' names in lower case; ValueError without "path" or with a name that stands twice."""
    header = [cell.strip().lower() for cell in cells]
    if "path" not in header:
        raise ValueError(
            f"{at}: a header with a column path is required, separated by commas, such as {','.join(COLUMNS)}"
        )
    if len(set(header)) != len(header):
        raise ValueError(f"{at}: a column stands twice in the header")
    return header
