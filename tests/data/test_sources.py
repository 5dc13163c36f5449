"""Sources of a device's data: layouts, formats, hostile files, npz, Hugging Face, DICOM, classes of one's own."""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import socket
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedtta.data.sources import OwnData, UnusableData, files, open_source, own_data
from fedtta.data.sources.base import escaped, notes_of
from fedtta.data.sources.folder import read_table
from fedtta.data.sources.huggingface import HuggingFaceSource
from fedtta.data.sources.index import Index
from fedtta.data.sources.scan import Reader, scan
from fedtta.models.preprocessing import Preprocessing
from tests.data.memory_source import Item, source

PREPARED = Preprocessing(image_size=8, channels=1)


def png(path: Path, value: Any = 0, size: tuple[int, int] = (8, 8), **options: Any) -> Path:
    """Write an image of one value, or an array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = value if isinstance(value, np.ndarray) else np.full(size[::-1], value, np.uint8)
    Image.fromarray(array).save(path, **options)
    return path


def scanned(folder: Path, max_pixels: int = 10_000) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return name → label of the usable samples, and name → reason of the others."""
    found, _ = scan(Reader(open_source(f"folder:{folder}"), PREPARED, max_pixels), Index(None, {}))
    return {one.name: one.label for one in found.samples}, found.skipped


# Layouts ------------------------------------------------------------------------------------------------------------


def test_class_folders_at_any_depth(tmp_path: Path) -> None:
    for i, name in enumerate(("covid/a.JPG", "covid/x/y/b.png", "normal/c.Bmp", "normal/d.tif", "normal/2024/e.webp")):
        png(tmp_path / name, i)
    (tmp_path / "empty").mkdir()
    png(tmp_path / ".hidden/f.png")
    png(tmp_path / "covid/._g.png")
    (tmp_path / "covid/notes.txt").write_text("no image")
    png(tmp_path / "loose.png")
    made = open_source(f"folder:{tmp_path}")
    assert made.classes == ("covid", "normal")
    labels, skipped = scanned(tmp_path)
    assert labels == {
        "covid/a.JPG": "covid",
        "covid/x/y/b.png": "covid",
        "normal/2024/e.webp": "normal",
        "normal/c.Bmp": "normal",
        "normal/d.tif": "normal",
    }
    assert skipped == {"loose.png": "in no class folder"}
    assert made.notes == ("not images by their names: 1 files",)  # type: ignore[attr-defined]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    png(tmp_path / "a.png")
    made = open_source(f"folder:{tmp_path}")
    assert (made.classes, made.label(0), made.group(0), made.split(0)) == ((), None, "", "")
    assert scanned(tmp_path) == ({"a.png": None}, {})


def test_a_table_names_labels_groups_and_splits(tmp_path: Path) -> None:
    for name in ("x/1.png", "x/2", "3.png", "unlisted.png"):
        png(tmp_path / name, format="png")
    (tmp_path / "labels.csv").write_bytes(
        b"\xef\xbb\xbfLabel,path,split,group,age\r\n"
        b'"a, b",./x/1.png,Train,p1,3\r\n\r\n'
        b"c,x/2,,p2,4\r\n,3.png,test,,5\r\n"
        b"c,gone.png,,,\r\nc,../out.png,,,\r\nc,/etc/hostname,,,\r\nc,fifo,,,\r\nc,linked/1.png,,,\r\n"
        b"c,x/.y/4.png,,,\r\n"
    )
    png(tmp_path / "x/.y/4.png")
    for name in ("fifo", "unlisted fifo"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / "x")
    made = open_source(f"folder:{tmp_path}")
    rows = [(made.name(i), made.label(i), made.group(i), made.split(i)) for i in range(len(made))]
    assert rows == [("3.png", None, "", "test"), ("x/1.png", "a, b", "p1", "train"), ("x/2", "c", "p2", "")]
    assert made.classes == ("a, b", "c")
    outside = "leads out of the folder"
    _, skipped = scanned(tmp_path)
    assert skipped == {
        "../out.png": outside,
        "/etc/hostname": outside,
        "3.png": "no label",
        "fifo": "not a regular file: FIFO",
        "gone.png": "does not exist",
        "linked/1.png": "symbolic link: folders are not followed",
        "x/.y/4.png": "hidden: a name in its path begins with a dot",
    }
    assert made.notes == (  # type: ignore[attr-defined]
        "labels.csv: columns not used: age",
        "not in labels.csv: 1 image files",
    )


def test_a_table_may_have_paths_of_windows(tmp_path: Path) -> None:
    for name in ("x/1.png", "x/y\\2.png", "x/3.png"):
        png(tmp_path / name)
    rows = ("path,label", r"x\1.png,a", r"x/y\2.png,b", r"..\out.png,a", r".\x\3.png,b")
    (tmp_path / "labels.csv").write_text("\n".join(rows), encoding="utf-8")
    samples, skipped = scanned(tmp_path)
    assert samples == {"x/1.png": "a", r"x/y\\2.png": "b", "x/3.png": "b"}
    assert skipped == {"../out.png": "leads out of the folder"}
    assert open_source(f"folder:{tmp_path}").notes == ()  # type: ignore[attr-defined]


def test_a_table_may_write_an_accented_letter_as_one_character_or_two(tmp_path: Path) -> None:
    """As one of Excel for files from macOS, where both look alike."""
    one, two = (unicodedata.normalize(form, "Zoë") for form in ("NFC", "NFD"))
    for name in (f"{two}/1.png", f"{one}2.png"):
        png(tmp_path / name)
    (tmp_path / "labels.csv").write_text(f"path,label\n{one}/1.png,a\n{two}2.png,b\n", encoding="utf-8")
    assert scanned(tmp_path) == ({f"{two}/1.png": "a", f"{one}2.png": "b"}, {})
    assert open_source(f"folder:{tmp_path}").notes == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: a header is required"),
        (b"path;label\na.png;covid\n", "line 1: a header with a column path is required, separated by commas"),
        (b"a.png,covid\n", "line 1: a header with a column path is required"),
        (b"path,label,path\n", "line 1: a column stands twice"),
        (b"path,label\na.png,x\nb.png\n", "line 3: 1 cells; the header has 2"),
        (b"path,label\na.png,x\n,x\n", "line 3: the path is empty"),
        (b"path\na.png\n./a.png\n", "line 3: a.png stands twice"),
        (b"path,split\na.png,training\n", "line 2: split 'training'; allowed are train, validation, test"),
        (b"path\na.png\n\xff.png\n", "line 3: not UTF-8"),
        (b'path\n"a.png\n', "line 2: unexpected end of data"),
    ],
)
def test_a_bad_table_names_the_line(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"labels.csv, {message}"):
        read_table(content, "labels.csv")


def test_the_order_of_the_listing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(30):
        png(tmp_path / f"{'ab'[i % 2]}/{i % 3}/{i}.png", i)
    (tmp_path / "a/fifo.png").write_bytes(b"")
    real, results = os.scandir, []

    class Shuffled:
        def __init__(self, where: Any) -> None:
            with real(where) as listing:
                self.entries = [Kept(one) for one in listing]
            random.Random(len(results)).shuffle(self.entries)

        def __enter__(self) -> Any:
            return iter(self.entries)

        def __exit__(self, *_: object) -> None: ...

    class Kept:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self._stat = entry.name, entry.stat(follow_symlinks=False)

        def stat(self, follow_symlinks: bool) -> os.stat_result:
            return self._stat

    with monkeypatch.context() as listing:
        listing.setattr(os, "scandir", Shuffled)
        for _ in range(5):
            made = open_source(f"folder:{tmp_path}")
            results.append(([(made.name(i), made.label(i)) for i in range(len(made))], made.skipped))  # type: ignore[attr-defined]
    assert len(results[0][0]) == 31
    assert all(one == results[0] for one in results)


# Formats ------------------------------------------------------------------------------------------------------------


def test_16_bits_keep_their_values(tmp_path: Path) -> None:
    deep = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    png(tmp_path / "a.png", deep)
    png(tmp_path / "b.tif", deep)
    made = open_source(f"folder:{tmp_path}")
    for i in range(2):
        np.testing.assert_array_equal(np.asarray(made.image(i)), deep)
        _, pixels = Reader(made, PREPARED, 100).read(i)
        np.testing.assert_array_equal(pixels[0], np.rint(deep / 65535 * 255))


def test_palette_alpha_and_rotation(tmp_path: Path) -> None:
    half = np.zeros((8, 8, 4), np.uint8)
    half[:, :4] = (255, 0, 0, 255)  # the right half is transparent: white
    png(tmp_path / "alpha.png", half)
    Image.fromarray(half[:, :, :3]).quantize(4).save(tmp_path / "palette.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: the left becomes the top
    png(tmp_path / "turned.png", half[:, :, :3], exif=exif)
    reader = Reader(open_source(f"folder:{tmp_path}"), Preprocessing(image_size=8), 100)
    alpha, palette, turned = (reader.read(i)[1] for i in range(3))
    assert alpha[:, 0, 0].tolist() == [255, 0, 0]
    assert alpha[:, 0, 7].tolist() == [255, 255, 255]
    assert (palette[:, 0, 0].tolist(), palette[:, 0, 7].tolist()) == ([255, 0, 0], [0, 0, 0])
    assert (turned[:, 0, 7].tolist(), turned[:, 7, 0].tolist()) == ([255, 0, 0], [0, 0, 0])


def dicom(path: Path, raw: np.ndarray, **values: Any) -> None:
    """Write a small grayscale DICOM file."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = pydicom.dataset.FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = pydicom.dataset.FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = raw.shape
    file.SamplesPerPixel, file.BitsAllocated, file.BitsStored, file.HighBit = 1, 16, 12, 11
    file.PixelRepresentation, file.PhotometricInterpretation = 0, values.pop("photometric", "MONOCHROME2")
    for name, value in values.items():
        setattr(file, name, value)
    file.PixelData = raw.astype(np.uint16).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)


def test_dicom_files_use_their_window_or_that_of_the_run(tmp_path: Path) -> None:
    raw = np.arange(0, 4096, 64).reshape(8, 8)
    dicom(tmp_path / "a.dcm", raw)
    dicom(tmp_path / "b.dcm", raw, photometric="MONOCHROME1")
    window = {"WindowCenter": 40, "WindowWidth": 400, "RescaleSlope": 1, "RescaleIntercept": -1024}
    dicom(tmp_path / "c.dcm", raw, **window)
    made = open_source(f"folder:{tmp_path}")
    plain, inverted, windowed = (Reader(made, PREPARED, 64).read(i)[1][0] for i in range(3))
    np.testing.assert_array_equal(plain, np.rint(raw / 4095 * 255))
    np.testing.assert_allclose(inverted.astype(int), 255 - plain.astype(int), atol=1)
    shown = np.clip((raw - 1024 - 39.5) / 399 + 0.5, 0, 1)  # DICOM PS3.3, C.11.2.1.2.1
    np.testing.assert_array_equal(windowed, np.rint(shown * 255))
    stated = Reader(made, Preprocessing(image_size=8, channels=1, window=(-1000, 1000)), 64).read(2)[1][0]
    np.testing.assert_array_equal(stated, np.rint(np.clip((raw - 1024 + 1000) / 2000, 0, 1) * 255))
    with pytest.raises(ValueError, match="too large: 8 x 8 pixels"):
        Reader(made, PREPARED, 63).read(0)


def test_a_patient_of_dicom_files_is_in_one_split(tmp_path: Path) -> None:
    folder, index = tmp_path / "site", tmp_path / "index.json"
    for k in range(60):
        patient = {"PatientID": f"Müller {k % 12} "} if k < 48 else {}
        dicom(folder / f"{'ab'[k % 2]}/{k:02}.dcm", np.full((8, 8), k), SpecificCharacterSet="ISO_IR 192", **patient)

    def opened() -> OwnData:
        return own_data(f"folder:{folder}", classes=("a", "b"), preprocessing=PREPARED, index_file=index)

    found = opened()
    parts = {
        name: part
        for part in ("train", "validation", "test")
        for name in np.array(found.names)[getattr(found.split, part)]
    }
    of_patients = [{parts[f"{'ab'[k % 2]}/{k:02}.dcm"] for k in range(patient, 48, 12)} for patient in range(12)]
    assert [len(one) for one in of_patients] == [1] * 12
    assert set.union(*of_patients) == {"train", "validation", "test"}
    assert len(set(found.groups) - {""}) == 12
    assert found.notes[0] == "48 DICOM files of 12 patients by their PatientID: each patient is in one split"
    assert "ller" not in index.read_text()  # no name or number of a patient is written
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reader, "patient", lambda *_: pytest.fail("known from the index"))
        assert opened().fingerprint == found.fingerprint

    rows = [f"{name},{name[0]}" for name in found.names]
    for header, more, groups in (
        ("path,label", "", 12),
        ("path,label,group", ",", 0),
        ("path,label,split", ",train", 0),
    ):
        (folder / "labels.csv").write_text("\n".join([header, *(row + more for row in rows)]))
        assert len(set(opened().groups) - {""}) == groups
    (folder / "labels.csv").unlink()
    again, before = opened(), dict(zip(found.names, found.groups, strict=True))
    assert again.groups == tuple(before[name] for name in again.names)  # the table's scan knew of no patients


def test_dicom_files_of_one_patient_for_all_say_why_nothing_is_trained_on(tmp_path: Path) -> None:
    for k in range(9):
        dicom(tmp_path / f"a/{k}.dcm", np.full((8, 8), k), PatientID="ANON")  # whose hash is in the test split
    with pytest.raises(ValueError, match=r"the training split \(9 DICOM files of 1 patient by their PatientID"):
        own_data(f"folder:{tmp_path}", classes=("a",), preprocessing=PREPARED)


def test_dicom_files_without_pydicom_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dicom(tmp_path / "a.dcm", np.zeros((8, 8)))
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    assert "fedtta[dicom]" in scanned(tmp_path)[1]["a.dcm"]


# Hostile files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of everything that is opened with `os.open`."""
    found: list[str] = []
    real = os.open

    def recorded(path: Any, *arguments: Any, **options: Any) -> int:
        found.append(os.fspath(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", recorded)
    return found


def test_hostile_files_are_named_and_nothing_else_is_read(tmp_path: Path, opened: list[str]) -> None:
    folder, outside = tmp_path / "site", tmp_path / "outside"
    png(outside / "secret.png", 7)
    png(tmp_path / "site of others/secret.png", 7)  # whose path begins as the folder's
    png(folder / "a/good.png", 1)
    png(folder / "b/line\nbreak.png", 2)
    png(folder / "b/large.png", size=(16_000, 16_000), compress_level=1)
    (folder / "a/zero.png").touch()
    (folder / "a/text.png").write_text("not an image")
    (folder / "a/script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    png(folder / "a/cut.jpg", np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8))
    content = (folder / "a/cut.jpg").read_bytes()
    (folder / "a/cut.jpg").write_bytes(content[: len(content) // 2])
    os.mkfifo(folder / "a/pipe.png")
    (folder / "a/out.png").symlink_to(outside / "secret.png")
    (folder / "a/beside.png").symlink_to(tmp_path / "site of others/secret.png")
    (folder / "a/gone.png").symlink_to(folder / "nothing.png")
    (folder / "a/loop.png").symlink_to(folder / "a/loop.png")
    (folder / "a/device.png").symlink_to("/dev/zero")
    (folder / "a/inside.png").symlink_to("../b/line\nbreak.png")
    (folder / "all").symlink_to(outside, target_is_directory=True)
    (folder / "again").symlink_to(folder / "a", target_is_directory=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "a/s"))
        labels, skipped = scanned(folder, 100_000_000)
    assert labels == {"a/good.png": "a", r"b/line\nbreak.png": "b", "a/inside.png": "a"}
    link = "symbolic link: "
    assert skipped.pop("a/cut.jpg").startswith("damaged, or of another format: ")
    assert skipped.pop("b/large.png").startswith("too large: Image size (256000000 pixels)")
    assert skipped == {
        "a/beside.png": link + "leads out of the folder",
        "a/device.png": link + "leads out of the folder",
        "a/gone.png": link + "does not exist",
        "a/loop.png": "not a regular file: symbolic link",
        "a/out.png": link + "leads out of the folder",
        "a/pipe.png": "not a regular file: FIFO",
        "a/s": "not a regular file: socket",
        "a/script.jpg": "damaged, or of another format",
        "a/text.png": "damaged, or of another format",
        "a/zero.png": "empty file",
        "again": link + "folders are not followed",
        "all": link + "leads out of the folder",
    }
    assert not {"pipe.png", "secret.png", "out.png", "/dev/zero", "all", "outside"} & set(opened)


def test_large_images_are_refused_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    png(tmp_path / "a.png", size=(101, 100))
    png(tmp_path / "b.png", size=(100, 100))

    def decode(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Preprocessing, "decode", decode)
    labels, skipped = scanned(tmp_path)
    assert labels == {}
    assert skipped["a.png"].startswith("too large: 101 x 100 pixels")
    assert skipped["b.png"] == "decoded"  # which shows that decoding would have been seen
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    assert scanned(tmp_path)[1]["b.png"].startswith("too large: 0 MB")


def test_what_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    png(tmp_path / "a/secret.png")
    png(tmp_path / "closed/b.png")
    real = os.open

    def denied(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if path in ("secret.png", "closed"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", denied)  # the tests may run as root, whom no permission stops
    with pytest.raises(UnusableData, match=r"1 folders in it cannot be listed \(not readable: Permission d") as closed:
        open_source(f"folder:{tmp_path}")
    assert closed.value.skipped == {"closed/": "not readable: Permission denied"}
    (tmp_path / "labels.csv").write_text("path\na/secret.png\nclosed/b.png\n")
    assert scanned(tmp_path)[1] == {
        "a/secret.png": "not readable: Permission denied",
        "closed/b.png": "not readable: Permission denied",
    }


@pytest.mark.parametrize("name", [".writing.tmp", "gone.png"])
def test_a_file_that_vanishes_while_the_folder_is_listed_is_no_part_of_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("a/1.png", f"a/{name}", "b/2.png", "lost+found/3.png"):
        png(tmp_path / path, format="png")
    real = os.scandir

    @contextmanager
    def vanishing(where: int) -> Iterator[list[os.DirEntry[str]]]:
        with real(where) as listing:
            entries = list(listing)
        (tmp_path / "a" / name).unlink(missing_ok=True)
        yield entries

    monkeypatch.setattr(os, "scandir", vanishing)
    assert scanned(tmp_path) == ({"a/1.png": "a", "b/2.png": "b"}, {})


@pytest.mark.timeout(60)  # a FIFO that is waited for never ends
@pytest.mark.parametrize(
    ("other", "reason"), [("link", "not readable: Too many levels of symbolic links"), ("fifo", "not a regular file")]
)
def test_a_file_exchanged_between_the_look_at_it_and_its_opening_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, reason: str
) -> None:
    secret, path = png(tmp_path / "outside/secret.png", 7), png(tmp_path / "site/a/x.png", 1)
    made, look = open_source(f"folder:{tmp_path / 'site'}"), os.stat

    def exchanged(*arguments: Any, **options: Any) -> os.stat_result:
        found = look(*arguments, **options)
        path.unlink()
        path.symlink_to(secret) if other == "link" else os.mkfifo(path)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", exchanged)
        with pytest.raises(ValueError, match=reason):
            made.open(0)  # type: ignore[attr-defined]


def test_a_file_exchanged_after_the_scan_leads_nowhere(tmp_path: Path, opened: list[str]) -> None:
    folder = tmp_path / "site"
    png(tmp_path / "outside/a.png", 7)
    png(folder / "x/a.png", 1)
    png(folder / "y/b.png", 2)
    png(folder / "z/c.png", 3)
    made = open_source(f"folder:{folder}")
    (folder / "x/a.png").unlink()
    (folder / "x").rmdir()
    (folder / "x").symlink_to(tmp_path / "outside")
    (folder / "y/b.png").unlink()
    os.mkfifo(folder / "y/b.png")
    (folder / "z/c.png").unlink()
    (folder / "z/c.png").symlink_to(tmp_path / "outside/a.png")
    for i, reason in enumerate(("does not exist|not readable", "not a regular file: FIFO", "regular file: symbolic")):
        with pytest.raises(ValueError, match=reason):
            made.image(i)
    assert "a.png" not in opened


def test_a_table_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("path\na.png\n")
    png(tmp_path / "site/a.png")
    (tmp_path / "site/labels.csv").symlink_to(tmp_path / "labels.csv")
    with pytest.raises(ValueError, match="labels\\.csv: symbolic link: leads out of the folder"):
        open_source(f"folder:{tmp_path / 'site'}")


def test_a_table_may_be_a_link_to_a_file_in_the_folder(tmp_path: Path) -> None:
    png(tmp_path / "x.png")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/v2.csv").write_text("path,label\nx.png,a\n")
    (tmp_path / "labels.csv").symlink_to("tables/v2.csv")
    assert scanned(tmp_path)[0] == {"x.png": "a"}


def test_names_are_escaped_and_stay_different() -> None:
    names = ["a b.png", "ä.png", "a\nb", "a\\nb", "a\x1b[2J", os.fsdecode(b"\xff.png"), "a\u202eb"]
    shown = [escaped(name) for name in names]
    assert shown == ["a b.png", "ä.png", r"a\nb", r"a\\nb", r"a\x1b[2J", r"\udcff.png", r"a\u202eb"]


# Other sources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["hw", "hwc", "chw", "hw1"])
def test_npz(tmp_path: Path, layout: str) -> None:
    x = np.random.default_rng(0).integers(0, 65536, (4, 6, 5, 3)).astype(np.uint16)
    stored = {"hw": x[..., 0], "hwc": x, "chw": x.transpose(0, 3, 1, 2), "hw1": x[..., :1]}[layout]
    more = {"y": np.array([0, 2, 0, 2]), "classes": np.array(["a", "b", "c"]), "group": np.array(list("ppqq"))}
    np.savez(tmp_path / "data.npz", x=stored, split=np.array(["train", "", "test", ""]), **more)
    made = open_source(f"npz:{tmp_path / 'data.npz'}")
    np.testing.assert_array_equal(made.image(2), x[2] if "wc" in layout or "ch" in layout else x[2, ..., 0])
    assert made.image(2).dtype == np.uint16
    assert made.classes == ("a", "c")
    rows = [(made.name(i), made.label(i), made.group(i), made.split(i)) for i in range(4)]
    assert rows == [("0", "a", "p", "train"), ("1", "c", "p", ""), ("2", "a", "q", "test"), ("3", "c", "q", "")]


def test_images_of_an_npz_whose_group_is_nan_have_none(tmp_path: Path) -> None:
    """As a column of numbers has it where nothing is known: they would be one group, all in one split."""
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((3, 4, 4), np.uint8), group=np.array([np.nan, 17, np.nan]))
    made = open_source(f"npz:{path}")
    assert [made.group(i) for i in range(3)] == ["", "17.0", ""]


def test_arrays_of_an_npz_that_are_not_used_are_noted(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((1, 4, 4), np.uint8), groups=np.array(["p"]), split=np.array([""]))
    source = open_source(f"npz:{tmp_path / 'data.npz'}")
    assert notes_of(source) == ("arrays not used: groups",)


def test_texts_of_an_npz_may_be_bytes(tmp_path: Path) -> None:
    text = {"y": [b"cat", b"dog"], "group": [b"p1", b""], "split": [b"train", b"test"]}
    np.savez(
        tmp_path / "data.npz", x=np.zeros((2, 4, 4), np.uint8), **{key: np.array(one) for key, one in text.items()}
    )
    made = open_source(f"npz:{tmp_path / 'data.npz'}")
    assert made.classes == ("cat", "dog")
    assert [(made.group(i), made.split(i)) for i in range(2)] == [("p1", "train"), ("", "test")]


def test_npz_without_labels_and_bad_ones(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    x = np.zeros((2, 4, 4), np.uint8)
    np.savez(path, x=x)
    made = open_source(f"npz:{path}")
    assert (made.classes, made.label(0)) == ((), None)
    np.savez(path, x=x, y=np.array(["b", ""]))
    assert [open_source(f"npz:{path}").label(i) for i in range(2)] == ["b", None]
    for arrays, message in (
        ({"y": np.zeros(3)}, "2 images but y of shape"),
        ({"y": np.array([1, 0.5])}, r"y holds 0\.5; allowed are class names, or whole numbers"),
        ({"y": np.array([0j, 1])}, "whole numbers"),
        ({"y": np.array([0, np.inf])}, "whole numbers"),
        ({"y": np.zeros(2), "classes": np.array("a")}, r"data\.npz: classes must be a list"),
        ({"y": np.array([0, 3]), "classes": np.array(["a"])}, "label 3, but there are 1 class names"),
        ({"split": np.array(["train", "tset"])}, "image 1: split 'tset'"),
        ({"x": np.zeros((2, 4, 4, 2))}, "x must be"),
        ({"x": np.zeros((2, 1, 9, 3))}, r"x \(2, 1, 9, 3\) is \[N, H, W, C\] or \[N, C, H, W\]"),
        ({"x": np.zeros((2, 3, 9, 1))}, r"store grayscale as"),
        ({"x": np.zeros((2, 3, 9, 3))}, r"x \(2, 3, 9, 3\) is"),
    ):
        np.savez(path, **{"x": x, **arrays})
        with pytest.raises(ValueError, match=message):
            open_source(f"npz:{path}")
    os.mkfifo(tmp_path / "fifo.npz")
    with pytest.raises(ValueError, match="there is no file"):
        open_source(f"npz:{tmp_path / 'fifo.npz'}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library keep its copies in a folder of the test."""
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)


def encoded(value: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(buffer, "png")
    return {"bytes": buffer.getvalue(), "path": None}


def hugging_face(values: list[int], **columns: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    features = {"picture": datasets.Image()}
    for name, column in columns.items():
        named = name == "kind"
        features[name] = datasets.ClassLabel(names=["cat", "dog"]) if named else datasets.Value("string")
        assert len(column) == len(values)
    rows = {"picture": [encoded(value) for value in values], **columns}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_hugging_face_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    hugging_face([1, 2, 3], kind=[0, 1, -1], group=["p", "q", None]).save_to_disk(tmp_path / "one")
    made = open_source(f"hf:{tmp_path / 'one'}")
    assert (len(made), made.classes, made.name(1)) == (3, ("cat", "dog"), "train/1")
    rows = [(made.label(i), made.group(i), made.split(i)) for i in range(3)]
    assert rows == [("cat", "p", ""), ("dog", "q", ""), (None, "", "")]
    assert np.asarray(made.image(1)).tolist() == [[2] * 8] * 8
    assert (Reader(made, PREPARED, 100).read(2)[1] == 3).all()

    parts = {"train": hugging_face([1, 2]), "val": hugging_face([3]), "test": hugging_face([4])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "three")
    made = open_source(f"hf:{tmp_path / 'three'}")
    assert [made.split(i) for i in range(4)] == ["train", "train", "validation", "test"]
    assert (made.classes, made.label(0)) == ((), None)

    # a test split without labels takes none from the others, nor the other way round
    for name, parts in (
        ("last", {"train": hugging_face([1, 2], kind=[0, 1]), "test": hugging_face([3])}),
        ("first", {"test": hugging_face([3]), "train": hugging_face([1, 2], kind=[0, 1])}),
    ):
        datasets.DatasetDict(parts).save_to_disk(tmp_path / name)
        made = open_source(f"hf:{tmp_path / name}")
        labels = {made.name(i): made.label(i) for i in range(3)}
        assert labels == {"train/0": "cat", "train/1": "dog", "test/0": None}


@pytest.mark.usefixtures("cache")
def test_hugging_face_by_path(tmp_path: Path) -> None:
    hugging_face([5, 6], label=["x", "y"]).to_parquet(tmp_path / "files" / "a.parquet")
    made = open_source(f"hf:{tmp_path / 'files'}")
    assert [made.label(i) for i in range(2)] == ["x", "y"]
    assert (Reader(made, PREPARED, 100).read(1)[1] == 6).all()


@pytest.mark.usefixtures("cache")
def test_a_hugging_face_data_set_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    outside = png(tmp_path / "secret.png")
    features = datasets.Features({"image": datasets.Image(decode=False)})
    rows = {"image": [{"bytes": None, "path": str(outside)}]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "files" / "a.parquet")
    with pytest.raises(ValueError, match="leads out of the folder"):
        Reader(open_source(f"hf:{tmp_path / 'files'}"), PREPARED, 100).read(0)


def table(folder: Path, features: dict[str, Any], form: str | None = None, **columns: list[Any]) -> HuggingFaceSource:
    """Save images and other columns in a format; return them as a source."""
    datasets = pytest.importorskip("datasets")
    rows = {"image": [encoded(value) for value in range(len(next(iter(columns.values()))))], **columns}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image(), **features}))
    made.with_format(form).save_to_disk(folder)
    return HuggingFaceSource(str(folder))


def test_hugging_face_groups_are_no_labels(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    patients, text = datasets.ClassLabel(names=["p", "q"]), datasets.Value("string")
    made = table(tmp_path, {"label": text, "group": patients}, label=["a", "b", "a"], group=[1, 0, -1])
    assert [(made.label(i), made.group(i)) for i in range(3)] == [("a", "q"), ("b", "p"), ("a", "")]


def test_hugging_face_nan_is_no_label_and_no_group(tmp_path: Path) -> None:
    number = pytest.importorskip("datasets").Value("float64")
    made = table(tmp_path, {"label": number, "group": number}, label=[1, math.nan], group=[math.nan, 7])
    assert [(made.label(i), made.group(i)) for i in range(2)] == [("1.0", ""), (None, "7.0")]


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_hugging_face_in_the_format_of_another_program(form: str, tmp_path: Path) -> None:
    number = pytest.importorskip("datasets").Value("int64")
    made = table(tmp_path, {"label": number}, form, label=[3, 4])
    assert [made.label(i) for i in range(2)] == ["3", "4"]
    assert (Reader(made, PREPARED, 100).read(1)[1] == 1).all()


def test_hugging_face_columns_not_used_are_noted_and_not_decoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    damaged = {"scan": {"bytes": b"no image", "path": None}}
    features = {"patient": datasets.Value("string"), "more": {"scan": datasets.Image()}}
    made = table(tmp_path, features, patient=["p", "q"], more=[damaged, damaged])
    assert made.notes == ("columns not used: more, patient",)
    assert (Reader(made, PREPARED, 100).read(1)[1] == 1).all()


@pytest.mark.usefixtures("cache")
def test_hugging_face_a_row_without_bytes_and_path_has_no_image(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from pyarrow import parquet

    made = datasets.Dataset.from_list([{"image": {"bytes": None, "path": None}}, {"image": encoded(1)}]).data.table
    features = datasets.Features({"image": datasets.Image()})
    (tmp_path / "site").mkdir()
    parquet.write_table(made.cast(features.arrow_schema), tmp_path / "site" / "train.parquet")
    reader = Reader(open_source(f"hf:{tmp_path / 'site'}"), PREPARED, 100)
    with pytest.raises(ValueError, match="no image"):
        reader.read(0)
    assert (reader.read(1)[1] == 1).all()


def test_hugging_face_a_number_without_a_class_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table(tmp_path, {"label": datasets.Value("int64")}, label=[0, 7])
    info = tmp_path / "dataset_info.json"
    stored = json.loads(info.read_text())
    stored["features"]["label"] = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    info.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="column 'label' has the number 7, but there are 2 names"):
        HuggingFaceSource(str(tmp_path))


def test_hugging_face_names_of_splits_may_have_capitals(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        "Training": hugging_face([1]),
        "Val": hugging_face([2]),
        "Testing": hugging_face([3]),
        "extra": hugging_face([4]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "one")
    made = open_source(f"hf:{tmp_path / 'one'}")
    assert [(made.name(i), made.split(i)) for i in range(4)] == [
        ("Training/0", "train"), ("Val/0", "validation"), ("Testing/0", "test"), ("extra/0", "")
    ]  # fmt: skip
    assert notes_of(made) == ("splits of other names, divided by hash: extra",)


@pytest.mark.usefixtures("cache")
def test_hugging_face_that_cannot_be_loaded_tells_the_cause(tmp_path: Path) -> None:
    png(tmp_path / "src" / "cat" / "0.png")
    png(tmp_path / "src" / "dog" / "0.png")
    shutil.make_archive(str(tmp_path / "site" / "train"), "zip", tmp_path / "src")
    with pytest.raises(ValueError, match=r"cannot be loaded: An error occurred .*: Invalid string class label"):
        open_source(f"hf:{tmp_path / 'site'}")


def test_hugging_face_without_an_image_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "one")
    with pytest.raises(ValueError, match="one column of type Image is needed"):
        open_source(f"hf:{tmp_path / 'one'}")


def test_a_class_of_ones_own() -> None:
    made = open_source(source([Item("x", 5, "a", "p", "test")]))
    assert (made.name(0), made.label(0), made.group(0), made.split(0)) == ("x", "a", "p", "test")
    assert (Reader(made, PREPARED, 1).read(0)[1] == round(5 / 65535 * 255)).all()
    with pytest.raises(ValueError, match="too large"):
        Reader(made, PREPARED, 0).read(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tests.data.memory_source:Incomplete", r"lacks image\(\), label\(\), group\(\), split\(\)"),
        ("tests.data.memory_source:Broken", "memory_source:Broken': KeyError: 'no such key'"),
        ("tests.data.memory_source:Nothing", "cannot be imported"),
        ("tests.data.no_module:Nothing", "cannot be imported"),
        ("folder:/no/such/folder", "there is no folder"),
        ("npz:/no/such/file", "there is no file"),
        ("folder:", "allowed are folder:PATH"),
        ("/data/site", "allowed are folder:PATH"),
    ],
)
def test_sources_that_cannot_be_opened(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(text)


@pytest.mark.parametrize(
    ("code", "message"),
    [("class Own(:", "SyntaxError: invalid syntax"), ("1 / 0", "ZeroDivisionError: division by zero")],
)
def test_a_module_with_a_bug_is_named(code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "buggy.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"data = 'buggy:Own' cannot be imported: {message}"):
        open_source("buggy:Own")


def test_a_stamp_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_source(source([Item("x", 5)]))
    monkeypatch.setattr(type(made), "stamp", lambda self, i: {}["gone"], raising=False)
    with pytest.raises(ValueError, match="the source of the data: KeyError: 'gone'"):
        scan(Reader(made, PREPARED, 100), Index(None, {}))


@pytest.mark.parametrize(
    ("method", "value"), [("name", 0), ("label", 0), ("group", 0), ("split", 1), ("group", float("nan"))]
)
def test_what_a_class_of_ones_own_says_is_text(method: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # A group called 0 would be none, and its samples in several splits; a label 0 would be no label.
    made = open_source(source([Item("x", 5, "a", "p"), Item("y", 6, "a", "p")]))
    monkeypatch.setattr(type(made), method, lambda self, i: value)
    with pytest.raises(ValueError, match=rf"{method}\(0\) is {value!r}; it has to be text"):
        scan(Reader(made, PREPARED, 100), Index(None, {}))


def test_a_class_of_ones_own_may_say_none_where_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_source(source([Item("x", 5, "a", "p", "test")]))
    for method in ("group", "split"):
        monkeypatch.setattr(type(made), method, lambda self, i: None)
    (found,) = scan(Reader(made, PREPARED, 100), Index(None, {}))[0].samples
    assert (found.group, found.split) == ("", "")


def test_classes_of_ones_own_class_are_text() -> None:
    with pytest.raises(ValueError, match="a name in classes is 0; it has to be text"):
        open_source("tests.data.memory_source:Numbered")


def test_a_stamp_is_compared_as_the_index_file_returns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_source(source([Item("x", 5)]))
    monkeypatch.setattr(type(made), "stamp", lambda self, i: (1, 2.5), raising=False)
    index = Index.load(tmp_path / "index.json", {})
    index.save(scan(Reader(made, PREPARED, 100), index)[1], set())
    monkeypatch.setattr(type(made), "image", lambda self, i: 1 / 0)  # it would be skipped if it were read again
    assert len(scan(Reader(made, PREPARED, 100), Index.load(tmp_path / "index.json", {}))[0].samples) == 1
    monkeypatch.setattr(type(made), "stamp", lambda self, i: np.int64(1))
    with pytest.raises(ValueError, match="the source of the data: TypeError: Object of type int64 is not JSON"):
        scan(Reader(made, PREPARED, 100), index)
