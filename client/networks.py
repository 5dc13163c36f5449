"""Networks that a device keeps on disk by the hash of their contents, so that each travels to it once."""

from __future__ import annotations

import contextlib
import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from client.state import Arrays, plain_name
from models import load_arrays, save_arrays
from settings import Settings

KEPT = 4  # networks kept on a device, the last ones used


def private_folder(settings: Settings) -> Path:
    """Return the folder for what a device keeps on disk: `state-dir`, or one in the machine's temporary folder.

    The latter is the user's alone; nothing but the machine empties it.

    Raises
    ------
    ValueError
        Somebody else has made it.
    """
    if settings.state_dir:
        return Path(settings.state_dir).expanduser()
    folder = Path(tempfile.gettempdir()) / f"fedtta-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} is another user's; set state-dir")
    return folder


class NetworkStore:
    """Named arrays by digest, `<folder>/<digest>.safetensors`.

    Parameters
    ----------
    folder : Path
        Made when needed. Clients of one machine may share it: a network has the same name for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, digest: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store a network, unless it is here, and forget all but the last ones used.

        Raises
        ------
        ValueError
            The digest is no plain name, or a value is not finite.
        """
        path = self._path(digest)
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            save_arrays(path, dict(arrays), {"digest": digest})
        _use(path)
        files = sorted(self.folder.glob("*.safetensors"), key=_last_used)
        for old in files[:-KEPT]:
            old.unlink(missing_ok=True)

    def load(self, digest: str) -> Arrays:
        """Return a network.

        Raises
        ------
        ValueError
            It is not here, or its file is damaged (which is then removed): the server will send it again.
        """
        path = self._path(digest)
        try:
            arrays, notes = load_arrays(path)
        except FileNotFoundError:
            raise ValueError(f"network {digest[:12]} is not here; it must be sent again") from None
        except ValueError as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{error}; it must be sent again") from error
        if notes.get("digest") != digest:
            path.unlink(missing_ok=True)
            raise ValueError(f"{path} holds network {notes.get('digest')}; it must be sent again")
        _use(path)
        return arrays

    def _path(self, digest: str) -> Path:
        return self.folder / f"{plain_name('network digest', digest)}.safetensors"


def _use(path: Path) -> None:
    """Note that a file was used; one that another client has just removed stays removed."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)


def _last_used(path: Path) -> float:
    """Return when a file was last used; one that another client has just removed counts as old."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
