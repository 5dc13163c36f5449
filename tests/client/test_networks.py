"""Networks on a device's disk: kept by digest, forgotten when old, never believed when damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedtta.client.state import NETWORKS_KEPT, NetworkStore, private_folder
from fedtta.messages.arrays import digest
from fedtta.models import load_arrays, save_arrays
from fedtta.settings import Settings
from tests.client.tiny import same

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "running_var": np.ones(2, np.float64), "n": np.array(3)}
NAME = digest(ARRAYS)


def aged(store: NetworkStore, name: str, seconds: int) -> None:
    """Let a network have been used last that many seconds after the epoch."""
    os.utime(store.folder / f"{name}.safetensors", (seconds, seconds))


def names(store: NetworkStore) -> set[str]:
    return {path.stem for path in store.folder.iterdir()}


def test_what_is_kept_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = NetworkStore(tmp_path / "state" / "networks")
    store.keep(NAME, ARRAYS)
    back = NetworkStore(tmp_path / "state" / "networks").load(NAME)  # another client of this machine
    assert same(back, ARRAYS)
    assert {name: value.dtype for name, value in back.items()} == {name: value.dtype for name, value in ARRAYS.items()}
    assert digest(back) == NAME
    assert names(store) == {NAME}


def test_a_network_that_is_here_is_not_written_again(tmp_path: Path) -> None:
    store = NetworkStore(tmp_path)
    store.keep(NAME, ARRAYS)
    inode = (tmp_path / f"{NAME}.safetensors").stat().st_ino
    store.keep(NAME, ARRAYS)
    assert (tmp_path / f"{NAME}.safetensors").stat().st_ino == inode


def test_only_the_last_networks_used_are_kept(tmp_path: Path) -> None:
    store = NetworkStore(tmp_path)
    for number in range(NETWORKS_KEPT):
        store.keep(f"net{number}", {"w": np.array([number])})
        aged(store, f"net{number}", 1000 + number)
    store.load("net0")  # the oldest has just been used
    store.keep("new", ARRAYS)
    assert names(store) == {"net0", "new", *(f"net{number}" for number in range(2, NETWORKS_KEPT))}
    aged(store, "net0", 1)
    aged(store, "new", 2)
    store.keep("new", ARRAYS)  # asked to keep again is used, too
    store.keep("newer", ARRAYS)
    assert names(store) == {"new", "newer", *(f"net{number}" for number in range(2, NETWORKS_KEPT))}
    with pytest.raises(ValueError, match="network net0 is not here; it must be sent again"):
        store.load("net0")
    assert store.load("net2")["w"].tolist() == [2]


def test_a_network_that_never_came(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"network {NAME[:12]} is not here; it must be sent again"):
        NetworkStore(tmp_path / "nothing").load(NAME)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[:-2] + b"\x07\x07", lambda raw: b"junk"])
def test_a_damaged_file_is_removed_and_has_to_be_sent_again(tmp_path: Path, damage) -> None:
    store = NetworkStore(tmp_path)
    store.keep(NAME, ARRAYS)
    path = tmp_path / f"{NAME}.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{NAME}.safetensors.*; it must be sent again"):
        store.load(NAME)
    assert names(store) == set()
    store.keep(NAME, ARRAYS)
    assert same(store.load(NAME), ARRAYS)


def test_a_file_under_the_name_of_another_network_is_removed(tmp_path: Path) -> None:
    store = NetworkStore(tmp_path)
    store.keep("other", ARRAYS)
    (tmp_path / "other.safetensors").rename(tmp_path / f"{NAME}.safetensors")
    with pytest.raises(ValueError, match="holds network other; it must be sent again"):
        store.load(NAME)
    assert names(store) == set()


def test_a_file_that_names_no_network_is_removed(tmp_path: Path) -> None:
    save_arrays(tmp_path / f"{NAME}.safetensors", ARRAYS)
    with pytest.raises(ValueError, match="holds network None"):
        NetworkStore(tmp_path).load(NAME)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../up", "a/b", "..", ".", "", "/etc/passwd", "a b"])
def test_a_name_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    store = NetworkStore(tmp_path / "networks")
    for act in (lambda: store.keep(name, ARRAYS), lambda: store.load(name)):
        with pytest.raises(ValueError, match=r"network digest .*: allowed are letters, digits"):
            act()
    assert not list(tmp_path.iterdir())


def test_a_network_that_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    store = NetworkStore(tmp_path)
    with pytest.raises(ValueError, match="w holds values that are not finite"):
        store.keep(NAME, {"w": np.array([1.0, np.nan])})
    assert names(store) == set()


def test_the_file_is_named_and_tagged_with_the_digest(tmp_path: Path) -> None:
    NetworkStore(tmp_path).keep(NAME, ARRAYS)
    _, notes = load_arrays(tmp_path / f"{NAME}.safetensors")
    assert notes == {"digest": NAME}


def test_where_a_device_keeps_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    assert private_folder(Settings(state_dir=str(tmp_path / "s"))) == tmp_path / "s"
    assert private_folder(Settings(state_dir="~/s")) == tmp_path / "home" / "s"
    folder = private_folder(Settings())
    assert folder == tmp_path / "fedtta-ada"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ValueError, match="fedtta-ada is another user's; set state-dir"):
        private_folder(Settings())
