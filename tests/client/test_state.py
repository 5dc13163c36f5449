"""Private state: three backends, one behaviour; files that are whole or refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedtta.client.app import ContextState
from fedtta.client.state import (
    FORGOTTEN,
    DirectoryState,
    MemoryState,
    PrivateState,
    ResumableState,
    forget_runs,
    outdated,
)
from fedtta.models import save_arrays

#: Where a backend keeps things; a second call is the same device after a restart (or in its next message).
Open = Callable[[], PrivateState]


def entry(value: float) -> dict[str, np.ndarray]:
    return {
        "head": np.full((2, 3), value, np.float32),
        "seen": np.array([int(value)]),
        "nothing": np.empty(0, np.int64),
    }


def value_of(state: PrivateState, round: int, key: str = "t") -> float | None:
    found = state.load(key, round)
    return None if found is None else float(found["head"][0, 0])


@pytest.fixture(params=["memory", "directory", "context"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    if request.param == "memory":
        entries: dict = {}
        yield lambda: MemoryState(entries)
    elif request.param == "directory":
        yield lambda: DirectoryState(tmp_path, "run1", "7")
    else:
        records = RecordDict()
        yield lambda: ContextState(records)


class TestEveryBackend:
    def test_nothing_is_there_at_first(self, backend: Open) -> None:
        assert backend().load("t", 10) is None

    def test_arrays_come_back_with_names_shapes_dtypes_and_bits(self, backend: Open) -> None:
        strided = np.arange(24, dtype=np.float64).reshape(2, 3, 4).transpose(2, 0, 1)[::2]
        saved = {"a.b": strided, "scalar": np.array(3), "empty": np.empty(0, np.int64), "half": np.float32([[-0.0]])}
        backend().save("t", 1, saved)
        loaded = backend().load("t", 1)
        assert loaded is not None
        assert set(loaded) == set(saved)
        for name, value in saved.items():
            assert loaded[name].dtype == value.dtype
            assert loaded[name].shape == value.shape
            assert loaded[name].tobytes() == value.tobytes()

    def test_the_newest_tag_up_to_the_round_is_loaded(self, backend: Open) -> None:
        state = backend()
        state.save("t", 2, entry(2))
        state.save("t", 10, entry(10))
        assert [value_of(backend(), round) for round in (0, 1, 2, 3, 9, 10, 11)] == [None, None, 2, 2, 2, 10, 10]

    def test_the_last_two_tags_are_kept(self, backend: Open) -> None:
        for round in (1, 3, 9, 10):
            backend().save("t", round, entry(round))
        assert [value_of(backend(), round) for round in (8, 9, 10)] == [None, 9, 10]

    def test_saving_an_earlier_round_forgets_later_ones(self, backend: Open) -> None:
        state = backend()
        for round in (3, 4):
            state.save("t", round, entry(round))
        state.save("t", 2, entry(20))
        assert [value_of(backend(), round) for round in (1, 2, 3, 99)] == [None, 20, 20, 20]

    def test_a_step_back_by_one_round_finds_the_round_before(self, backend: Open) -> None:
        for round in (1, 2, 3):
            backend().save("t", round, entry(round))
        assert value_of(backend(), 2) == 2
        backend().save("t", 3, entry(33))
        assert [value_of(backend(), round) for round in (2, 3)] == [2, 33]

    def test_the_same_tag_is_replaced_whole(self, backend: Open) -> None:
        backend().save("t", 1, {**entry(1), "more": np.ones(2)})
        backend().save("t", 1, entry(5))
        loaded = backend().load("t", 1)
        assert loaded is not None
        assert set(loaded) == {"head", "seen", "nothing"}
        assert value_of(backend(), 1) == 5

    def test_keys_do_not_see_each_other(self, backend: Open) -> None:
        keys = ("t", "tt", "t.t", "t-1", "balanced_softmax")
        for number, key in enumerate(keys):
            for round in range(1, 4):
                backend().save(key, round, entry(10 * number + round))
        assert [value_of(backend(), 3, key) for key in keys] == [3, 13, 23, 33, 43]
        backend().save("t", 1, entry(100))
        assert value_of(backend(), 3, "tt") == 13

    def test_tags_are_told_by_key_in_order(self, backend: Open) -> None:
        assert backend().tags() == {}
        for key, round in (("t", 9), ("t", 10), ("bbn_pfedbbn.x-1", 2)):
            backend().save(key, round, entry(1))
        assert backend().tags() == {"bbn_pfedbbn.x-1": [2], "t": [9, 10]}
        assert list(backend().tags()) == ["bbn_pfedbbn.x-1", "t"]

    def test_what_was_saved_or_loaded_may_be_written_to(self, backend: Open) -> None:
        mine = entry(1)
        backend().save("t", 1, mine)
        mine["head"][:] = 9
        loaded = backend().load("t", 1)
        assert loaded is not None
        loaded.pop("seen")
        if loaded["head"].flags.writeable:
            loaded["head"][:] = 9
        assert value_of(backend(), 1) == 1
        assert "seen" in (backend().load("t", 1) or {})


@examples(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), max_size=25))
def test_all_backends_agree_on_any_history(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    folder = tmp_path_factory.mktemp("state")
    states: list[PrivateState] = [MemoryState(), DirectoryState(folder, "r", "0"), ContextState(RecordDict())]
    model: dict[int, int] = {}  # what the documentation says, in four lines
    for number, (save_at, look_at) in enumerate(steps):
        for state in states:
            state.save("t", save_at, entry(number))
        model = {tag: value for tag, value in model.items() if tag < save_at} | {save_at: number}
        model = dict(sorted(model.items())[-2:])
        known = [tag for tag in model if tag <= look_at]
        expected = model[max(known)] if known else None
        assert [value_of(state, look_at) for state in states] == [expected] * 3
    shutil.rmtree(folder)


@examples(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 30))
def test_outdated_leaves_the_newest_two_up_to_the_round(tags: list[int], newest: int) -> None:
    kept = set(tags) - set(outdated(tags, newest))
    assert kept == set(sorted(tag for tag in tags if tag <= newest)[-2:])


@pytest.mark.parametrize("make", [lambda folder: MemoryState(), lambda folder: DirectoryState(folder, "r", "0")])
class TestKeep:
    def test_a_server_that_goes_back_finds_what_belongs_to_each_of_its_checkpoints(
        self, make: Callable[[Path], PrivateState], tmp_path: Path
    ) -> None:
        """A checkpoint every three rounds, two of them kept: at any moment either may be gone back to."""
        state = make(tmp_path)
        for round in range(1, 20):
            checkpoints = list(range(3, round, 3))[-2:]
            ResumableState(state, checkpoints).save("t", round, entry(round))
            assert [value_of(state, one) for one in checkpoints] == checkpoints
            assert value_of(state, round) == round
            if round > 1:
                assert value_of(state, round - 1) == round - 1  # a round that is done again
            assert len(state.tags()["t"]) <= 4

    def test_of_rounds_without_this_client_the_newest_before_is_kept(
        self, make: Callable[[Path], PrivateState], tmp_path: Path
    ) -> None:
        state = make(tmp_path)
        for round in (1, 2, 5, 6, 7):  # not drawn in 3 and 4
            state.save("t", round, entry(round), keep=[0, 4])
        assert ResumableState(state, []).tags() == {"t": [2, 6, 7]}
        assert value_of(ResumableState(state, []), 4) == 2
        state.save("t", 4, entry(40), keep=[3])  # gone back
        assert state.tags() == {"t": [2, 4]}


def test_flowers_context_keeps_two_whatever_the_server_could_go_back_to() -> None:
    state = ContextState(RecordDict())
    for round in range(1, 8):
        ResumableState(state, [2]).save("t", round, entry(round))
    assert state.tags() == {"t": [6, 7]}


@examples(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 30), st.lists(st.integers(-1, 30), max_size=4))
def test_outdated_leaves_what_each_round_would_find(tags: list[int], newest: int, keep: list[int]) -> None:
    left = set(tags) - set(outdated(tags, newest, keep))
    before = [tag for tag in tags if tag <= newest]
    for round in keep:
        known = [tag for tag in before if tag <= round]
        assert max((tag for tag in left if tag <= round), default=None) == max(known, default=None)
    assert len(left) <= 2 + len(set(keep))
    assert set(sorted(before)[-2:]) <= left <= set(before)


class TestDirectory:
    def test_files_lie_where_the_documentation_says_and_nothing_else_does(self, tmp_path: Path) -> None:
        state = DirectoryState(tmp_path / "deep" / "er", "run-1.a_b", "12")
        for round in range(5):
            state.save("cross_entropy", round, entry(round))
        files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
        assert files == [f"deep/er/run-1.a_b/12/cross_entropy@{round}.safetensors" for round in (3, 4)]

    def test_runs_and_partitions_do_not_see_each_other(self, tmp_path: Path) -> None:
        places = [("a", 1), ("a", 11), ("b", 1), ("1", 1)]
        for number, (run, partition) in enumerate(places):
            DirectoryState(tmp_path, run, str(partition)).save("t", 1, entry(number))
        DirectoryState(tmp_path, "a", "1").save("t", 0, entry(50))
        found = [value_of(DirectoryState(tmp_path, run, str(partition)), 1) for run, partition in places]
        assert found == [50, 1, 2, 3]
        assert DirectoryState(tmp_path, "c", "1").load("t", 1) is None

    def test_all_but_the_last_runs_are_forgotten(self, tmp_path: Path) -> None:
        for number, run in enumerate(["d", "a", "c", "b"]):
            DirectoryState(tmp_path, run, "1").save("t", 1, entry(number))
            os.utime(tmp_path / run / "1", (number, number))
        (tmp_path / "networks").mkdir()
        (tmp_path / "networks" / "0a.safetensors").touch()
        (tmp_path / f"x{FORGOTTEN}" / "1").mkdir(parents=True)  # left by one that was killed
        assert forget_runs(tmp_path, "d", 4) == []
        assert forget_runs(tmp_path, "d", 3) == ["a"]  # the oldest but for the current one
        assert forget_runs(tmp_path, "new", 2) == ["d", "c"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "networks"]
        assert value_of(DirectoryState(tmp_path, "b", "1"), 1) == 3
        assert forget_runs(tmp_path, "b", 1) == []
        assert forget_runs(tmp_path / "nothing", "b", 1) == []

    @pytest.mark.parametrize("run", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "ä/ö", "a\0"])
    def test_a_run_that_is_no_plain_name_is_refused(self, tmp_path: Path, run: str) -> None:
        with pytest.raises(ValueError, match="run identity"):
            DirectoryState(tmp_path, run, "0")

    @pytest.mark.parametrize("key", ["../t", "a/b", "..", ""])
    def test_a_key_cannot_lead_out_of_the_folder(self, tmp_path: Path, key: str) -> None:
        state = DirectoryState(tmp_path, "run", "0")
        with pytest.raises(ValueError, match="key"):
            state.save(key, 1, entry(1))
        assert state.load(key, 1) is None
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def saved(self, folder: Path) -> Path:
        DirectoryState(folder, "run", "0").save("t", 1, entry(1))
        (path,) = folder.rglob("*.safetensors")
        return path

    def refused(self, folder: Path, path: Path) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what is tested)
            DirectoryState(folder, "run", "0").load("t", 1)
        assert str(path) in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("keep", [0, 4, 7, 8, 100, -1])
    def test_a_truncated_file_is_refused_by_name(self, tmp_path: Path, keep: int) -> None:
        path = self.saved(tmp_path)
        path.write_bytes(path.read_bytes()[:keep])
        self.refused(tmp_path, path)

    def test_any_flipped_byte_is_refused_by_name(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path)
        whole = path.read_bytes()
        for at in range(0, len(whole), 5):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            self.refused(tmp_path, path)

    def test_a_file_under_another_rounds_name_is_refused(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path)
        other = path.with_name("t@0.safetensors")
        path.rename(other)
        assert "tagged 1 inside, 0 in its name" in self.refused(tmp_path, other)

    @pytest.mark.parametrize("metadata", [{}, {"round": "x"}, {"round": "null"}])
    def test_a_file_without_a_good_tag_is_refused(self, tmp_path: Path, metadata: dict[str, str]) -> None:
        path = self.saved(tmp_path)
        save_arrays(path, entry(1), metadata)
        self.refused(tmp_path, path)

    @pytest.mark.parametrize("how", ["half", "empty", "another round's"])
    def test_of_a_damaged_file_the_older_one_is_used_and_that_is_noted(self, tmp_path: Path, how: str) -> None:
        notes: list[str] = []
        state = DirectoryState(tmp_path, "run", "0", notes.append)
        for round in (1, 2, 3):
            state.save("t", round, entry(round))
        path = tmp_path / "run" / "0" / "t@3.safetensors"
        other = path.with_name("t@2.safetensors").read_bytes()
        path.write_bytes({"half": path.read_bytes()[:90], "empty": b"", "another round's": other}[how])
        assert value_of(state, 3) == 2
        assert len(notes) == 1
        assert notes[0].startswith(f"private state refused: {path}: ")
        assert notes[0].endswith("; that of round 2 is used")
        assert path.exists()  # it is left for inspection
        path.with_name("t@2.safetensors").write_bytes(b"")
        with pytest.raises(ValueError, match=r"t@3\.safetensors: .*; .*t@2\.safetensors: "):
            state.load("t", 3)  # never as if there had been nothing
        state.save("t", 4, entry(4))
        assert value_of(state, 4) == 4

    @pytest.mark.parametrize("place", [("run2", "0"), ("run", "1")])
    def test_a_file_of_another_run_or_client_is_refused(self, tmp_path: Path, place: tuple[str, str]) -> None:
        path = self.saved(tmp_path)
        run, name = place
        (tmp_path / run / name).mkdir(parents=True)
        shutil.copy(path, tmp_path / run / name / path.name)
        what, other, own = ("run", "run", "run2") if run != "run" else ("client", "0", "1")
        with pytest.raises(ValueError, match=f"private state of {what} '{other}', not '{own}'"):
            DirectoryState(tmp_path, run, name).load("t", 1)

    def test_a_file_of_an_earlier_version_is_read(self, tmp_path: Path) -> None:
        save_arrays(self.saved(tmp_path), entry(7), {"round": "1"})
        assert value_of(DirectoryState(tmp_path, "run", "0"), 1) == 7

    def test_a_failed_save_changes_nothing_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = self.saved(tmp_path)

        def full(*_: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space"):
            DirectoryState(tmp_path, "run", "0").save("t", 2, entry(2))
        monkeypatch.undo()
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
        assert value_of(DirectoryState(tmp_path, "run", "0"), 2) == 1

    def test_other_files_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path)
        others = [path.with_name(name) for name in ("notes.txt", ".t@9.safetensors.ab12.tmp", "t@x.safetensors")]
        for other in others:
            other.write_text("hello")
        for round in (2, 3, 4):
            DirectoryState(tmp_path, "run", "0").save("t", round, entry(round))
        assert value_of(DirectoryState(tmp_path, "run", "0"), 99) == 4
        assert all(other.read_text() == "hello" for other in others)
