"""A device's own data: splits by hash, index, classes, skipped samples, lazy reading, and the command's table."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import unicodedata
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from fedtta.data.domains import Role
from fedtta.data.sources import OwnData, own_data
from fedtta.data.sources.__main__ import main
from fedtta.data.sources.base import SPLITS
from fedtta.data.sources.pixels import LazyPixels
from fedtta.data.sources.scan import Reader, Sample
from fedtta.data.sources.splits import SHARES, TESTED, TWICE, assign, unit_hash
from fedtta.models.preprocessing import Preprocessing
from tests.data.memory_source import Item, source

PREPARED = Preprocessing(image_size=4, channels=1)
#: Samples enough that some are in every split.
MANY = [Item(f"{i:04}", i, "ab"[i % 2]) for i in range(60)]


def data_of(items: list[Item] | str, **options: Any) -> OwnData:
    text = items if isinstance(items, str) else source(items)
    options = {"classes": ("a", "b"), "preprocessing": PREPARED, **options}
    return own_data(text, **options)


def splits(data: OwnData) -> dict[str, str]:
    """Return name → split."""
    parts = {name: getattr(data.split, name) for name in ("train", "validation", "test")}
    return {data.names[i]: name for name, part in parts.items() for i in part}


def folder(path: Path, values: dict[str, int]) -> str:
    """Write images of one value each; return the text of the source."""
    for name, value in values.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), value, np.uint8)).save(path / name)
    return f"folder:{path}"


# Splits -------------------------------------------------------------------------------------------------------------

#: Group → the split that some of its samples state, which is not that of its hash.
STATED = {"q": "train", "r": "validation", "s": "test"}
#: Groups and contents repeat; the hashes of the groups are in all splits.
samples = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["", "p", "l", "n", *STATED]), st.booleans()),
    min_size=1,
    max_size=40,
)


def items_of(drawn: list[tuple[int, str, bool]], first: int = 0) -> list[Item]:
    return [
        Item(f"{first + i:03}", content, "a", group, STATED[group] if stated and group in STATED else "")
        for i, (content, group, stated) in enumerate(drawn)
    ] + [Item("always", 999, "a", "", "train")]


@settings(max_examples=150, deadline=None)
@given(drawn=samples)
def test_groups_and_equal_content_are_in_one_split(drawn: list[tuple[int, str, bool]]) -> None:
    items = items_of(drawn)
    data = data_of(items)
    found = splits(data)
    by_group: dict[str, set[str]] = {}
    by_content: dict[int, set[str]] = {}
    for item in items:
        if item.name in found:
            by_content.setdefault(item.content, set()).add(found[item.name])
            if item.group:
                by_group.setdefault(item.group, set()).add(found[item.name])
            if item.split:
                assert found[item.name] == item.split
    assert all(len(one) == 1 for one in [*by_group.values(), *by_content.values()])
    assert set(data.skipped.values()) <= {TWICE}
    assert found.keys() | data.skipped.keys() == {item.name for item in items}
    assert by_content.keys() == {item.content for item in items}  # some copy of everything is used


@settings(max_examples=60, deadline=None)
@given(drawn=samples, more=samples)
def test_new_samples_never_move_old_ones(drawn: list[Any], more: list[Any]) -> None:
    new = [(content + 100, group, False) for content, group, _ in more]  # other content
    old = [(content, group, False) for content, group, _ in drawn]
    before = splits(data_of(items_of(old)))
    after = splits(data_of(items_of(old) + items_of(new, 500)[:-1]))
    assert before.items() <= after.items()


@settings(max_examples=50, deadline=None)
@given(drawn=samples, order=st.randoms())
def test_the_order_of_a_source_changes_nothing(drawn: list[Any], order: Any) -> None:
    items = items_of(drawn)
    shuffled = order.sample(items, len(items))
    one, other = data_of(items), data_of(shuffled)
    assert (one.names, one.identities, one.fingerprint, one.skipped) == (
        other.names,
        other.identities,
        other.fingerprint,
        other.skipped,
    )
    assert splits(one) == splits(other)
    np.testing.assert_array_equal(one.images.pixels[:], other.images.pixels[:])


@pytest.mark.parametrize("role", ["both", "source", "target"])
def test_shares_of_the_splits(role: Role) -> None:
    assigned, _ = assign([Sample(i, f"{i:05}", "a", "", "", f"{i:x}") for i in range(10_000)], role, set())
    shares = [assigned.count(name) / 10_000 for name in SPLITS]
    np.testing.assert_allclose(shares, SHARES[role], atol=0.015)  # 3 standard deviations
    data = data_of(MANY, role=role)
    scanned = [Sample(i, name, "a", "", "", data.identities[i]) for i, name in enumerate(data.names)]
    assert splits(data) == dict(zip(data.names, assign(scanned, role, set())[0], strict=True))


def test_hashes_are_between_0_and_1() -> None:
    values = [unit_hash("group", str(i)) for i in range(10_000)]
    assert min(values) >= 0
    assert max(values) < 1
    assert values != [unit_hash("content", str(i)) for i in range(10_000)]


def test_a_source_keeps_the_training_split_of_a_device_that_trains_and_tests() -> None:
    both, only = splits(data_of(MANY)), splits(data_of(MANY, role="source"))
    assert {name for name, one in both.items() if one == "train"} <= {n for n, one in only.items() if one == "train"}
    assert {name for name, one in only.items() if one == "validation"} == {
        name for name, one in both.items() if one == "test"
    }


def test_the_stated_split_of_a_group_is_that_of_all_its_samples() -> None:
    stated = [Item("x", 1000, "a", "p", "test"), *(Item(f"p{i}", 2000 + i, "a", "p") for i in range(9))]
    found = splits(data_of([*MANY, *stated]))
    assert {found[item.name] for item in stated} == {"test"}
    with pytest.raises(ValueError, match="group 'p': x is in test and y in train; a group has one split"):
        data_of([*MANY, *stated, Item("y", 1001, "a", "p", "train")])


def test_a_group_may_be_written_in_several_ways() -> None:
    written = [[f"Müller {i}", unicodedata.normalize("NFD", f"Müller {i}"), f" Müller {i} "] for i in range(20)]
    items = [Item(f"{i}-{k}", 3 * i + k, group=group) for i, ways in enumerate(written) for k, group in enumerate(ways)]
    found = splits(data_of(items))
    for i in range(20):
        assert len({found[f"{i}-{k}"] for k in range(3)}) == 1


def test_content_of_two_splits_is_tested() -> None:
    items = [Item("a", 1, split="train"), Item("b", 1, split="validation"), Item("c", 1, split="test")]
    data = data_of([*items, Item("d", 2, split="train"), Item("e", 2, split="validation"), Item("f", 3, split="train")])
    assert splits(data) == {"c": "test", "e": "validation", "f": "train"}
    assert data.skipped == {"a": TWICE, "b": TWICE, "d": TWICE}
    assert f"3 samples left out: {TWICE}" in data.notes
    assert (data.samples, data.used) == (6, 3)


# Index --------------------------------------------------------------------------------------------------------------


def test_what_was_tested_never_trains(tmp_path: Path) -> None:
    index = tmp_path / "state" / "index.json"
    first = data_of([Item("a", 1, split="test"), Item("b", 2, split="train")], index_file=index)
    assert splits(first) == {"a": "test", "b": "train"}
    changed = [Item("renamed", 1, split="train"), Item("v", 1, split="validation"), Item("b", 2, split="train")]
    second = data_of(changed, index_file=index)
    assert splits(second) == {"b": "train"}
    assert second.skipped == {"renamed": TESTED, "v": TESTED}
    assert f"2 samples left out: {TESTED}" in second.notes
    gone = data_of([Item("b", 2, split="train")], index_file=index)  # it is remembered while the sample is away
    assert gone.skipped == {}
    # nor does another scan forget it, of which nothing else that the index knows holds
    windowed = Preprocessing(image_size=4, channels=1, window=(0, 255))
    assert data_of(changed, index_file=index, preprocessing=windowed).skipped == second.skipped
    assert data_of(changed, index_file=index, max_megapixels=50).skipped == second.skipped
    assert data_of(source(changed, "moved"), index_file=index).skipped == second.skipped
    assert splits(data_of([Item("t", 1, split="test"), *changed[2:]], index_file=index))["t"] == "test"
    assert splits(data_of(changed))["v"] == "validation"  # without an index nothing is remembered


def test_a_device_whose_samples_were_all_tested_says_why_none_trains(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    assert len(data_of(MANY, role="target", index_file=index).split.test) == len(MANY)
    with pytest.raises(ValueError, match=rf"training split \(\d+ samples left out: {TESTED}\); add samples"):
        data_of(MANY, role="both", index_file=index)


def test_samples_without_labels_were_never_tested(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    unlabelled = [Item(item.name, item.content, None) for item in MANY]
    assert data_of(unlabelled, index_file=index).skipped == {}
    assert splits(data_of(MANY, index_file=index)) == splits(data_of(MANY))


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = folder(tmp_path / "site", {f"{'ab'[i % 2]}/{i}.png": i for i in range(30)})
    read: list[str] = []
    real = Reader.read

    def counted(self: Reader, i: int) -> Any:
        read.append(self.source.name(i))
        return real(self, i)

    monkeypatch.setattr(Reader, "read", counted)
    index = tmp_path / "index.json"
    first = data_of(text, index_file=index)
    assert len(read) == 30
    content = index.read_bytes()
    read.clear()
    second = data_of(text, index_file=index)
    assert read == []
    assert (second.identities, second.fingerprint) == (first.identities, first.fingerprint)
    assert index.read_bytes() == content
    folder(tmp_path / "site", {"a/0.png": 200, "a/new.png": 201})
    (tmp_path / "site/b/1.png").write_bytes(b"")
    third = data_of(text, index_file=index)
    assert sorted(read) == ["a/0.png", "a/new.png", "b/1.png"]
    assert third.skipped == {"b/1.png": "empty file"}
    read.clear()
    data_of(text, index_file=index)
    assert read == ["b/1.png"]  # whatever could not be used may be better now
    for prepared, count in (
        (Preprocessing(image_size=8, channels=1), 1),
        (Preprocessing(window=(0, 9)), 1),  # what can be used without a window can be with one, but 16-bit colours
        (Preprocessing(), 1),
    ):
        read.clear()
        data_of(text, index_file=index, preprocessing=prepared)
        assert len(read) == count
    index.unlink()
    data_of(text, index_file=index, preprocessing=Preprocessing(window=(0, 9)))
    for prepared, count in ((Preprocessing(window=(1, 5)), 1), (Preprocessing(), 31)):
        read.clear()
        data_of(text, index_file=index, preprocessing=prepared)
        assert len(read) == count


def test_a_file_in_anothers_place_is_read_again_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    """As after an archive has been unpacked, whose files all have one time: otherwise no scan would ever read it."""
    text = folder(tmp_path / "site", {f"{'ab'[i % 2]}/{i}.bmp": i for i in range(20)})
    for path in (tmp_path / "site").rglob("*.bmp"):
        os.utime(path, (1e9, 1e9))
    one, other, index = tmp_path / "site/a/0.bmp", tmp_path / "site/b/1.bmp", tmp_path / "index.json"
    before = data_of(text, index_file=index)
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    after = data_of(text, index_file=index)
    assert [before.identities[before.names.index(name)] for name in ("b/1.bmp", "a/0.bmp")] == [
        after.identities[after.names.index(name)] for name in ("a/0.bmp", "b/1.bmp")
    ]
    assert len(after.images.pixels[:]) == 20  # which names a file that is not what the scan says


def test_an_index_without_a_window_does_not_know_16_bit_colours_with_one(tmp_path: Path) -> None:
    """They cannot be used with a window; known from the index, they would stop the device when they are read."""
    colours = bytes.fromhex("100020003000") * 64  # 8 x 8 pixels of 16 bits
    rows = b"".join(b"\0" + colours[i : i + 48] for i in range(0, len(colours), 48))
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    body = [struct.pack(">I", len(of)) + kind + of + struct.pack(">I", zlib.crc32(kind + of)) for kind, of in chunks]
    text = folder(tmp_path / "site", {f"{label}/{i}.png": 10 * i for label in "ab" for i in range(9)})
    (tmp_path / "site/a/deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(body))
    index = tmp_path / "index.json"
    assert data_of(text, index_file=index).skipped == {}
    windowed = data_of(text, index_file=index, preprocessing=Preprocessing(window=(0, 4095)))
    assert list(windowed.skipped) == ["a/deep.png"]
    assert windowed.images.pixels[:].shape == (18, 3, 32, 32)
    assert data_of(text, index_file=index).skipped == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 2}', b'{"schema": 1, "tested": [1]}', b"\xff"])
def test_a_damaged_index_is_rebuilt_and_said(tmp_path: Path, content: bytes) -> None:
    index = tmp_path / "index.json"
    index.write_bytes(content)
    data = data_of(MANY, index_file=index)
    assert any("the index of the data was damaged and is rebuilt" in note for note in data.notes)
    assert json.loads(index.read_bytes())["schema"] == 1
    assert data_of(MANY, index_file=index).notes == ()
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_an_index_whose_writing_fails_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index.json"
    data_of(MANY, index_file=index)
    before = index.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        data_of([*MANY, Item("new", 77, split="test")], index_file=index)
    assert index.read_bytes() == before


# Classes and labels -------------------------------------------------------------------------------------------------


def test_labels_are_numbers_of_the_runs_classes() -> None:
    items = [*(Item(f"p{i}", i, "pneumo") for i in range(9)), *(Item(f"n{i}", 20 + i, "normal") for i in range(9))]
    data = data_of(items, classes=("covid", "normal", "pneumonia"), class_map={"pneumo": "pneumonia"})
    assert data.images.labels.tolist() == [1] * 9 + [2] * 9
    assert data.images.classes == ("covid", "normal", "pneumonia")
    assert data.classes_present == 2
    assert "no sample of covid in the training split" in data.notes
    with pytest.raises(ValueError, match=r"run does not have: pneumo \(9 samples\); allowed are covid, normal, pneu"):
        data_of(items, classes=("covid", "normal", "pneumonia"))
    with pytest.raises(ValueError, match="class-map: the run has no class flu; allowed are covid"):
        data_of(items, classes=("covid",), class_map={"pneumo": "flu"})


def test_an_accented_letter_may_be_one_character_or_two() -> None:
    """Folders from macOS have two, what is typed elsewhere one: both look alike, in an error, too."""
    one, two = (unicodedata.normalize(form, "Läsion") for form in ("NFC", "NFD"))
    for ours, theirs in ((one, two), (two, one)):
        items = [*(Item(f"l{i}", i, ours) for i in range(9)), *(Item(f"n{i}", 20 + i, "normal") for i in range(9))]
        data = data_of(items, classes=("normal", theirs))
        assert data.images.labels.tolist() == [1] * 9 + [0] * 9
        assert data.images.classes == ("normal", theirs)
        mapped = data_of(items, classes=("normal", theirs, "ill"), class_map={theirs: "ill", "normal": ours})
        assert mapped.images.labels.tolist() == [2] * 9 + [1] * 9


def test_the_run_has_to_declare_its_classes() -> None:
    with pytest.raises(ValueError, match="has to declare its classes"):
        data_of(MANY, classes=())


def test_without_labels_everything_is_test() -> None:
    data = data_of([Item(item.name, item.content, None, split="train") for item in MANY])
    assert (data.labelled, data.role, data.classes_present) == (False, "target", None)
    assert set(data.images.labels.tolist()) == {-1}
    assert data.split.test.tolist() == list(range(60))
    assert data.images.subset([3]).labels.tolist() == [-1]
    for role in ("both", "source"):
        with pytest.raises(ValueError, match="have no labels: role = "):
            data_of([Item("x", 1, None)], role=role)


def test_a_target_counts_the_classes_of_its_test_split() -> None:
    data = data_of(MANY, role="target")
    assert (data.labelled, len(data.split), data.classes_present) == (True, len(data.split.test), 2)


def test_a_class_with_test_samples_alone_is_said_to_be_none_of_the_training_split() -> None:
    notes = data_of([*MANY, Item("c", 99, "c", split="test")], classes=("a", "b", "c")).notes
    assert notes == ("no sample of c in the training split",)
    notes = data_of(MANY, classes=("a", "b", "c"), role="target").notes
    assert notes == ("no sample of c in the test split",)


def test_a_device_that_trains_needs_training_samples() -> None:
    with pytest.raises(ValueError, match="none of 1 samples is in the training split; add samples, state the splits"):
        data_of([Item("x", 1, split="test")])
    notes = data_of([Item("x", 1, split="train")]).notes
    assert notes == (
        "no sample of b in the training split", "no sample in the validation split", "no sample in the test split"
    )  # fmt: skip


# Skipped samples ----------------------------------------------------------------------------------------------------


def test_too_many_unusable_samples_are_refused_with_the_reasons(tmp_path: Path) -> None:
    text = folder(tmp_path, {f"{'ab'[i % 2]}/{i}.png": i for i in range(18)})
    (tmp_path / "a/empty patient Smith.png").touch()
    data = data_of(text, max_skipped=0.06)
    assert data.skipped == {"a/empty patient Smith.png": "empty file"}
    assert (data.samples, data.used) == (19, 18)
    assert data.notes[0] == "1 of 19 samples cannot be used: 1 empty file"
    (tmp_path / "b/text.png").write_text("text")
    data = data_of(text, max_skipped=0.1)
    assert data.notes[0] == "2 of 20 samples cannot be used: 1 empty file, 1 damaged, or of another format"
    refused = r"2 of 20 samples cannot be used \(1 empty file, 1 damaged, or of another format\); max-skipped = 0.09"
    with pytest.raises(ValueError, match=refused + " allows 1") as error:
        data_of(text, max_skipped=0.09)
    assert "Smith" not in str(error.value) + str(data.notes)  # names stay on the device


def test_limits_in_decimals_are_exact(tmp_path: Path) -> None:
    """As floats, 0.29 x 100 is 28.999999999999996, and 0.000249 x 1,000,000 is below 249, too."""
    text = source([Item(f"{i:03}", -1 if i < 29 else i, "ab"[i % 2]) for i in range(100)])
    assert len(data_of(text, max_skipped=0.29).skipped) == 29
    with pytest.raises(ValueError, match=r"29 of 100 samples .* max-skipped = 0.28 allows 28"):
        data_of(text, max_skipped=0.28)
    assert shown(text, "--max-skipped", "0.29")[0] == 0
    for i in range(10):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.new("L", (249, 1), i).save(tmp_path / "ab"[i % 2] / f"{i}.png")
    assert data_of(f"folder:{tmp_path}", max_megapixels=0.000249).skipped == {}


def test_samples_that_are_left_out_are_no_damage() -> None:
    twice = [Item("x", 0, split="test"), Item("y", 0, split="train"), Item("z", 1, split="train")]
    assert data_of(twice, max_skipped=0.0).skipped == {"y": TWICE}


def test_an_empty_source_and_one_of_nothing_usable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hold no image"):
        data_of(f"folder:{tmp_path}")
    (tmp_path / "IM0001").touch()
    with pytest.raises(ValueError, match="hold no image; not images by their names: 1 files"):
        data_of(f"folder:{tmp_path}")
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match=r"1 of 1 samples cannot be used \(1 empty file\)"):
        data_of(f"folder:{tmp_path}", max_skipped=1.0)


def test_a_bug_of_a_users_class_is_named() -> None:
    assert data_of([*MANY, Item("bad", -1)]).skipped == {"bad": "not readable: a bug of the user's class"}
    with pytest.raises(ValueError, match="two samples are called 'x'"):
        data_of([Item("x", 1), Item("x", 2)])
    with pytest.raises(ValueError, match=r"the source of the data: TypeError: split\(0\) is 1; it has"):
        data_of([Item("x", 1, split=1)])  # type: ignore[arg-type]


def test_a_split_that_is_none_is_refused_with_the_sample_in_a_users_class_too() -> None:
    assert splits(data_of([*MANY, Item("x", 1000, split=" Test ")]))["x"] == "test"
    with pytest.raises(ValueError, match="x: split 'val'; allowed are train, validation, test"):
        data_of([*MANY, Item("x", 1000, split="val")])


def test_what_cannot_be_prepared_is_known_at_the_scan(tmp_path: Path) -> None:
    x = np.zeros((40, 4, 4), np.float32)
    x[7] = 5.0
    x[8] = np.nan
    np.savez(tmp_path / "x.npz", x=x, y=np.repeat(["a"], 40))
    skipped = data_of(f"npz:{tmp_path / 'x.npz'}").skipped
    assert skipped["7"].startswith("cannot be prepared: float32 values from 5 to 5 need a window")
    assert skipped["8"] == "cannot be prepared: values of the image are not finite"
    window = Preprocessing(image_size=4, channels=1, window=(0, 10))
    data = data_of(f"npz:{tmp_path / 'x.npz'}", preprocessing=window)
    assert (data.images.pixels[data.names.index("7")] == 128).all()


# Reading ------------------------------------------------------------------------------------------------------------


def test_pixels_are_read_when_they_are_indexed(tmp_path: Path) -> None:
    text = folder(tmp_path, {f"{'ab'[i % 2]}/{i:02}.png": 5 * i for i in range(40)})
    data = data_of(text)
    values = [5 * int(Path(name).stem) for name in data.names]
    assert data.images.shape == (1, 4, 4)
    chosen = data.split.train[::-1]
    np.testing.assert_array_equal(data.images.pixels[chosen][:, 0, 0, 0], np.array(values)[chosen])
    np.testing.assert_allclose(data.images.batch([3, 0])[:, 0, 0, 0].numpy() * 255, [values[3], values[0]])
    (tmp_path / data.names[1]).unlink()
    (tmp_path / data.names[2]).write_bytes(b"")
    folder(tmp_path, {data.names[4]: 255})
    data = OwnData(**{**vars(data), "images": fresh(data)})
    for i, reason in ((1, "cannot be read any more: does not exist"), (2, "any more: empty file"), (4, "has changed")):
        with pytest.raises(ValueError, match=f"{data.names[i]} {'.*' if i == 2 else ''}{reason}"):
            data.images.batch([0, i])
    assert data.images.pixels[0][0, 0, 0] == values[0]


def fresh(data: OwnData) -> Any:
    """Return the images with an empty cache."""
    from dataclasses import replace

    pixels: Any = data.images.pixels
    return replace(data.images, pixels=LazyPixels(pixels._read, pixels.shape, 1))


@settings(max_examples=50, deadline=None)
@given(order=st.lists(st.integers(-5, 4), max_size=30), capacity=st.integers(0, 4))
def test_the_cache_is_bounded_and_changes_nothing(order: list[int], capacity: int) -> None:
    whole = np.arange(5 * 3 * 4, dtype=np.uint8).reshape(5, 3, 2, 2)
    read: Counter[int] = Counter()

    def one(i: int) -> np.ndarray:
        read[i] += 1
        return whole[i].copy()

    pixels = LazyPixels(one, whole.shape, capacity * 12)
    np.testing.assert_array_equal(pixels[order] if order else pixels[[]], whole[np.array(order, np.int64)])
    for i in order:
        pixels[i][:] = 77  # the caller's own copy
        np.testing.assert_array_equal(pixels[i], whole[i])
        assert len(pixels._kept) <= max(1, capacity)
    assert (pixels.shape, pixels.dtype, pixels.ndim, len(pixels)) == (whole.shape, whole.dtype, 4, 5)


def test_the_cache_keeps_what_was_used_last() -> None:
    read: list[int] = []

    def one(i: int) -> np.ndarray:
        read.append(i)
        return np.full((1, 2, 2), i, np.uint8)

    pixels = LazyPixels(one, (5, 1, 2, 2), 8)
    pixels[[0, 1, 0, 2, 0, 1]]
    assert read == [0, 1, 2, 1]
    read.clear()
    np.testing.assert_array_equal(pixels[np.array([True, False, False, True, False])][:, 0, 0, 0], [0, 3])
    np.testing.assert_array_equal(pixels[3:][:, 0, 0, 0], [3, 4])
    with pytest.raises(IndexError):
        pixels[5]


def test_the_fingerprint_says_whether_anything_differs() -> None:
    base = data_of(MANY).fingerprint
    assert data_of(list(MANY)).fingerprint == base
    others = [
        data_of([*MANY, Item("new", 999)]),
        data_of([Item("0000", 777), *MANY[1:]]),
        data_of([Item("0000", 0, "b"), *MANY[1:]]),
        data_of(MANY, classes=("b", "a")),
        data_of(MANY, role="source"),
        data_of(MANY, preprocessing=Preprocessing(image_size=5)),
    ]
    assert len({base, *(one.fingerprint for one in others)}) == 7


# The command --------------------------------------------------------------------------------------------------------


def test_the_command_names_what_it_cannot_use_at_all(tmp_path: Path) -> None:
    (tmp_path / "only.png").touch()
    status, output = shown(f"folder:{tmp_path}")
    assert status == 2
    assert "only.png" in output
    words = " ".join(output.split())
    assert f"1 of 1 samples cannot be used (1 empty file). `fedtta data folder:{tmp_path}` names them" in words


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("max-megapixels", "nan", "a finite number"),
        ("max-megapixels", "-1", "more than 0"),
        ("max-skipped", "2", "at most 1"),
    ],
)
def test_the_command_refuses_limits_that_no_run_can_have(tmp_path: Path, option: str, value: str, allowed: str) -> None:
    status, output = shown(folder(tmp_path, {"a/1.png": 1}), f"--{option}", value)
    assert status == 2
    assert f"error: {option} = {float(value)}: allowed" in output
    assert allowed in output


def shown(*words: str) -> tuple[int, str]:
    """Return the exit status, and stdout; with the one line of stderr, if what it shows is refused."""
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = main(words, console)
    assert (stderr.getvalue().count("\n"), stderr.getvalue()[:7]) == ((1, "error: ") if status else (0, ""))
    return status, console.export_text() + stderr.getvalue()


def test_the_command_shows_what_a_device_holds(tmp_path: Path) -> None:
    text = folder(tmp_path, {f"{'ab'[i % 2]}/{i:02}.png": 5 * i for i in range(40)})
    (tmp_path / "a/[red]\n.png").touch()
    for i in range(25):
        (tmp_path / f"b/empty{i:02}.png").touch()
    data = data_of(text, max_skipped=1.0)
    status, output = shown(text)
    assert status == 2
    assert "a run with max-skipped = 0.1 refuses these data" in output
    assert shown(text, "--max-skipped", "0.4")[0] == 0
    assert "40 of 66 samples are used, role both" in output
    train = np.bincount(data.images.labels[data.split.train])
    row = next(line for line in output.splitlines() if line.split()[1:2] == ["a"])
    assert next(cell for cell in row.split() if cell.isdigit()) == str(train[0])
    assert r"[red]\n.png" in output
    assert "empty17.png" in output
    assert "empty20.png" not in output
    assert "6 more with --all" in output
    assert "empty20.png" in shown(text, "--all")[1]


def test_the_command_names_foreign_classes(tmp_path: Path) -> None:
    text = folder(tmp_path, {f"{'ab'[i % 2]}/{i:02}.png": 5 * i for i in range(40)})
    status, output = shown(text, "--classes", "a,c")
    assert status == 2
    assert "b (20 samples); allowed are a, c" in output
    assert shown(text, "--classes", "a,c", "--class-map", "b=c")[0] == 0
    (tmp_path / ".classes").write_text("a\nb\n\nc\n")
    status, output = shown(text, "--classes", str(tmp_path / ".classes"))
    assert (status, "no sample of c" in output) == (0, True)
    status, output = shown(text, "--classes", "nowhere.txt")
    assert (status, "classes = 'nowhere.txt': no such file" in output) == (2, True)
    status, output = shown(text, "--class-map", "b")
    assert status == 2
    assert "class-map: 'b' is not of the form own=run's" in output
    assert shown("folder:/no/such/folder")[0] == 2


def test_the_command_shows_unlabelled_data(tmp_path: Path) -> None:
    status, output = shown(folder(tmp_path, {f"{i}.png": i for i in range(3)}))
    assert status == 0
    assert "without labels" in output
    assert "role target" in output
