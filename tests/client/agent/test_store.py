"""The state directory: one owner, nothing half-written, damage named and stepped over."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from dataclasses import replace
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from fedtta.client.agent import store as store_module
from fedtta.client.agent.store import SCHEMA, StateInUse, Store
from fedtta.client.served import Baseline
from fedtta.client.serving import Served
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow
from fedtta.models import build
from fedtta.settings import SettingsError
from tests.client.agent.world import fork, killed, said


@lru_cache(maxsize=8)
def model(seed: int = 1) -> Served:
    spec = {"name": "cnn", "num_classes": 2, "in_channels": 1, "image_size": 16, "seed": seed}
    return Served(AdapterRow("none", "none"), build(**spec), spec, {"seed": seed}, ("a", "b"), Baseline.unknown(2))


def state(value: float) -> Arrays:
    return {"adapter.history": np.full(100, value), "adapter.known": np.array(True)}


def opened(folder: Path, kept: int = 3, models: int = 3) -> tuple[Store, list[str]]:
    notes: list[str] = []
    return Store(folder, kept, notes.append, models), notes


def filled(folder: Path, saves: int = 4, kept: int = 3) -> None:
    store, _ = opened(folder, kept)
    store.add(model(), "served")
    for i in range(1, saves + 1):
        store.save(state(i), 10 * i, model().digest())
    store.close()


def newest(store: Store) -> tuple[str, int, float] | None:
    found = store.load(model().digest())
    return None if found is None else (found[0].name, found[0].samples, float(found[1]["adapter.history"][0]))


def test_the_last_snapshots_and_the_model_come_back(tmp_path: Path) -> None:
    filled(tmp_path, saves=4, kept=3)
    store, notes = opened(tmp_path)
    assert store.names == ["000002", "000003", "000004"]
    assert newest(store) == ("000004", 40, 4.0)
    served = store.load_model()
    assert served is not None
    assert served.digest() == model().digest()
    assert not notes
    assert sorted(path.stem for path in (tmp_path / "snapshots").iterdir()) == store.names
    store.close()


@pytest.mark.parametrize("name", ["file", "file/s"])
def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=rf"state-dir = '{tmp_path / name}': allowed is a folder .* can write: "):
        opened(tmp_path / name)


def test_a_second_owner_is_refused_by_folder_and_process(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "s")
    with pytest.raises(StateInUse, match=rf"s is in use by the agent with process id {os.getpid()}"):
        opened(tmp_path / "s")
    store.close()
    opened(tmp_path / "s")[0].close()


def test_a_new_folder_is_for_this_user_alone(tmp_path: Path) -> None:
    opened(tmp_path / "s")[0].close()
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "half":
        path.write_bytes(content[: len(content) // 2])
    elif how == "bit":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif how == "other":  # whole, but not the file that was saved
        path.write_bytes(path.with_name("000002.safetensors").read_bytes())
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["half", "bit", "other", "gone"])
def test_a_damaged_snapshot_is_named_and_the_one_before_used(tmp_path: Path, how: str) -> None:
    filled(tmp_path)
    damage(tmp_path / "snapshots" / "000004.safetensors", how)
    store, notes = opened(tmp_path)
    assert newest(store) == ("000003", 30, 3.0)
    assert len(notes) == 1
    assert "000004.safetensors" in notes[0]
    with pytest.raises(ValueError, match=r"000004\.safetensors"):
        store.load(model().digest(), "000004")
    store.close()


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    store, _ = opened(tmp_path)
    with pytest.raises(ValueError, match=r"no snapshot '000004'; there are: none"):
        store.load(model(2).digest(), "000004")
    store.close()


def test_a_name_that_is_none_is_refused_with_those_there_are(tmp_path: Path) -> None:
    filled(tmp_path)
    store, _ = opened(tmp_path)
    with pytest.raises(ValueError, match=r"no snapshot '\.\./x'; there are: 000002, 000003, 000004"):
        store.load(model().digest(), "../x")
    store.close()


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 1, "model": "1"', '{"schema": 0}', None])
def test_an_unreadable_manifest_is_rebuilt_from_the_files(tmp_path: Path, content: str | None) -> None:
    filled(tmp_path)
    damage(tmp_path / "snapshots" / "000004.safetensors", "half")
    if content is None:
        (tmp_path / "manifest.json").unlink()
    else:
        (tmp_path / "manifest.json").write_text(content)
    store, notes = opened(tmp_path)
    assert store.names == ["000002", "000003"]
    assert newest(store) == ("000003", 30, 3.0)
    assert store.load_model() is not None
    assert "manifest.json" in notes[0]
    assert "000004.safetensors" in notes[1]
    store.close()


@pytest.mark.parametrize(
    ("of", "field", "value", "told"),
    [
        ("models", "name", 1, "a model: name = 1"),
        ("models", "name", "\u00b2", "a model: name = '\u00b2'"),  # a digit, but no number
        ("models", "digest", None, "a model: digest = None"),
        ("models", "origin", ["run"], "a model: origin = ['run']"),
        ("models", "state", ["served"], "a model: state = ['served']"),
        ("models", "time", "now", "a model: time = 'now'"),
        ("models", "served_at", None, "a model: served_at = None"),
        ("models", "served_at", float("nan"), "a model: served_at = nan"),
        ("models", "served_at", 10**310, f"a model: served_at = {10**310}"),
        ("models", "reason", 0, "a model: reason = 0"),
        ("models", "check", {"lost": "0.1"}, "a model: check = {'lost': '0.1'}"),
        ("models", "check", [["lost", 0.1]], "a model: check = [['lost', 0.1]]"),
        ("models", "check", {"lost": True}, "a model: check = {'lost': True}"),
        ("snapshots", "samples", "40", "a snapshot: samples = '40'"),
        ("snapshots", "name", "\u00b2", "a snapshot: name = '\u00b2'"),
        ("", "models", {"1": {}}, "models: allowed is a list of objects"),
        ("", "snapshots", ["000004"], "snapshots: allowed is a list of objects"),
        ("", "file", None, "file = None: allowed is a text"),
    ],
)
def test_a_manifest_of_wrong_types_is_rebuilt_and_its_field_named(
    tmp_path: Path, of: str, field: str, value: object, told: str
) -> None:
    filled(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    (content[of][-1] if of else content)[field] = value
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    store, notes = opened(tmp_path)
    assert notes == [f"{tmp_path}/manifest.json cannot be read ({told}); rebuilt from the intact files"]
    assert newest(store) == ("000004", 40, 4.0)
    store.add(model(2), "served")
    store.close()


def test_a_manifest_of_a_newer_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "schema": SCHEMA + 1, "new": True}))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"manifest\.json: schema {SCHEMA + 1} is newer"):
        opened(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    opened(tmp_path)[0].close()  # the lock was released


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    filled(tmp_path)
    damage(tmp_path / "models" / "1" / "network.safetensors", "bit")
    store, notes = opened(tmp_path)
    assert store.load_model() is None
    assert "network.safetensors" in notes[0]
    store.add(model(), "served")  # and life goes on
    assert store.load_model() is not None
    store.close()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    stray = ["snapshots/.000005.safetensors.ab.tmp", "snapshots/000005.safetensors", ".manifest.json.cd.tmp"]
    stray += ["models/1/.network.safetensors.ef.tmp", "models/2/network.safetensors"]
    for name in stray:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    store, notes = opened(tmp_path)
    assert not [name for name in stray if (tmp_path / name).exists()]
    assert newest(store) == ("000004", 40, 4.0)
    assert not notes
    store.close()


def test_snapshots_are_kept_by_number_beyond_a_million(tmp_path: Path) -> None:
    filled(tmp_path)
    store, _ = opened(tmp_path)
    (tmp_path / "snapshots/999997.safetensors").touch()  # the next one has the next number
    for value in (1, 2, 3, 4):
        store.save(state(value), value, model().digest())
    assert store.names == ["999999", "1000000", "1000001"]
    store.close()
    (tmp_path / "manifest.json").unlink()
    store, _ = opened(tmp_path)
    assert newest(store) == ("1000001", 4, 4.0)
    store.close()


@pytest.mark.parametrize("fails", ["fedtta.models.arrays", "fedtta.client.agent.store"])  # the file; the manifest
def test_a_full_disk_changes_nothing(tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    store, _ = opened(tmp_path)

    def full(path: Path, *content: bytes, **_: bool) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    with monkeypatch.context() as patched:
        patched.setattr(f"{fails}.write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            store.save(state(5), 50, model().digest())
        with pytest.raises(OSError, match="No space"):
            store.add(model(2), "served")
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before
    assert newest(store) == ("000004", 40, 4.0)
    assert store.save(state(5), 50, model().digest()).name == "000005"
    store.close()


def save_for_ever(pipe: Connection, folder: Path) -> None:
    """Save as fast as it goes; say what is durable."""
    store = Store(folder, 2, lambda text: None)
    if store.load_model() is None:
        store.add(model(), "served")
    found = newest(store)
    count = 0 if found is None else found[1]
    while True:
        count += 1
        if count % 10 == 0:
            store.add(model(), "served")
        store.save(state(count), count, model().digest())
        pipe.send(count)


def test_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    draw = random.Random(1)
    model().digest()
    for _ in range(8):
        process, pipe = fork(save_for_ever, tmp_path)
        last = said(pipe, draw.randrange(1, 12))
        time.sleep(draw.random() / 100)
        last = killed(process, pipe) or last
        store, notes = opened(tmp_path, 2)
        found = newest(store)
        assert not notes
        assert store.load_model() is not None
        if found is None:  # killed between a new model and its first snapshot
            assert (last + 1) % 10 == 0
        else:
            assert found[1] - last in (0, 1)  # 1: saved, and killed before it could say so
            assert found[2] == found[1]
        store.close()


class Killed(BaseException):
    """Ends a process at a write."""


def change_models(store: Store) -> None:
    """A new model is tried, promoted and withdrawn, another one is refused; each with snapshots."""
    store.save(state(1), 10, model().digest())
    new = store.add(model(2), "shadow", {"agreement": 0.5})
    store.promote(new.name, check={"shadow_agreement": 0.9})
    store.save(state(2), 20, model(2).digest())
    store.refuse(model(3).digest(), "run/ce/1", "it predicts 'a' for 100% of 60 samples")
    store.promote(store.models[0].name, "rolled back")
    store.save(state(3), 30, model().digest())
    store.add(model(4), "candidate")
    store.refuse(model(4).digest(), "run/ce/2", "rejected")


@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_ends_at_any_write_leaves_one_served_model(
    tmp_path: Path, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`after`: the file is in its place, what comes next does not happen."""
    reached, write = 0, store_module.write_atomically
    while True:
        folder, left = tmp_path / str(reached), reached

        def counted(path: Path, *content: bytes, **private: bool) -> Path:
            nonlocal left
            left -= 1
            if left < 0 and not after:
                raise Killed
            written = write(path, *content, **private)
            if left < 0:
                raise Killed
            return written

        filled(folder, saves=1)
        store, _ = opened(folder)
        ended = False
        with monkeypatch.context() as patched:
            patched.setattr("fedtta.models.arrays.write_atomically", counted)
            patched.setattr("fedtta.client.agent.store.write_atomically", counted)
            try:
                change_models(store)
                ended = True
            except Killed:
                store.close()
        store.close()
        again, notes = opened(folder)
        states = [one.state for one in again.models]
        assert (states.count("served"), notes) == (1, [])
        assert again.load_model() is not None
        assert all(again.load_model(one) for one in again.models if one.state != "refused")
        assert again.served is not None
        if again.names:
            assert again.load(again.served.digest) is not None
        assert notes == []
        again.close()
        reached += 1
        if ended:
            break
    assert reached > 10
    assert states == ["served", "kept", "refused", "refused"]


def test_models_are_kept_up_to_a_number_with_their_snapshots(tmp_path: Path) -> None:
    store = Store(tmp_path, 2, lambda text: None, models=3)
    for seed in (1, 2, 3, 4):
        store.add(model(seed), "served")
        for turn in (1, 2, 3):
            store.save(state(turn), turn, model(seed).digest())
    assert [one.digest for one in store.models] == [model(seed).digest() for seed in (2, 3, 4)]
    assert [len(store.snapshots(one.digest)) for one in store.models] == [2, 2, 2]
    assert len(list((tmp_path / "models").iterdir())) == 3
    assert len(list((tmp_path / "snapshots").iterdir())) == 6
    store.promote(store.models[1].name, "rolled back")  # 3 is served, 4 withdrawn
    store.add(model(5), "served")
    assert [(one.state, one.reason) for one in store.models] == [
        ("kept", ""), ("kept", ""), ("refused", "rolled back"), ("served", ""),
    ]  # fmt: skip
    assert store.snapshots(model(4).digest()) == []
    store.close()


@pytest.mark.parametrize("other", [{}, {"chosen": {"beta": 0.3}}])  # the model as it is; with another adapter
def test_a_model_that_is_not_the_served_one_keeps_its_record_when_it_is_stored_again(
    tmp_path: Path, other: dict[str, dict[str, float]]
) -> None:
    store, _ = opened(tmp_path)
    for seed, origin in ((1, "r/t/1"), (2, "r/t/2")):
        store.add(replace(model(seed), origin=origin), "served", {"accuracy": seed / 10})
    store.refit(replace(model(1), origin="r/t/1", **other))
    assert [(one.name, one.origin, one.state, one.check, one.reason) for one in store.models] == [
        ("2", "r/t/2", "kept", {"accuracy": 0.2}, "its files cannot be read"),
        ("3", "r/t/1", "served", {"accuracy": 0.1}, ""),
    ]
    assert store.load_model() is not None
    store.close()


@pytest.mark.parametrize("before", [0, 1, 2])  # models that were served before one waits
def test_without_a_manifest_a_model_that_was_never_served_waits_again(tmp_path: Path, before: int) -> None:
    store, _ = opened(tmp_path)
    for seed in range(before):
        store.add(model(seed), "served")
        store.save(state(1), 10, model(seed).digest())
    store.add(model(9), "candidate")
    store.close()
    (tmp_path / "manifest.json").unlink()
    store, notes = opened(tmp_path)
    assert [one.state for one in store.models] == ["kept", "served", "shadow"][2 - before :]
    assert store.candidate is not None
    assert store.candidate.digest == model(9).digest()
    assert "manifest.json is missing" in notes[0]
    store.close()


def test_without_a_manifest_the_order_of_service_is_that_of_the_newest_snapshots(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, models=4)
    for seed in range(3):
        store.add(model(seed), "served")
        if seed:  # the first one's snapshots are lost
            store.save(state(1), 10, model(seed).digest())
    store.promote("2")
    store.save(state(2), 20, model(1).digest())
    store.add(model(4), "served")
    store.save(state(1), 10, model(4).digest())
    store.add(model(9), "candidate")
    store.close()
    (tmp_path / "manifest.json").unlink()
    store, _ = opened(tmp_path, models=4)
    assert [one.state for one in store.models] == ["kept", "kept", "kept", "served", "shadow"]
    assert [one.name for one in sorted(store.models, key=lambda one: one.served_at)] == ["5", "1", "3", "2", "4"]
    store.promote("2")
    assert max(store.models, key=lambda one: one.served_at).name == "2"
    store.close()
