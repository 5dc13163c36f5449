"""The live page of a run: a process of its own that serves the run folder while the run goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 15.0  # seconds that the process has to end; it lets open pages get the final state


class NotServed(RuntimeError):
    """The page cannot be served; the process has said why on stderr."""


@contextmanager
def live_page(folder: Path, listen: str = "") -> Iterator[str]:
    """Serve a run's page until the end of the context, and return its address.

    The process ends with this one, however this one ends.

    Parameters
    ----------
    folder : Path
        The run folder, which need not exist yet.
    listen : str
        HOST:PORT; empty: the default of `fedtta watch`.

    Raises
    ------
    NotServed
        The address cannot be used.
    """
    words = [sys.executable, "-m", "fedtta.watch", str(folder.parent), "--run", folder.name, "--until-stdin-ends"]
    words += ["--listen", listen] if listen else []
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            address = child.stdout.readline().strip()
            if not address:
                raise NotServed
            yield address
        finally:
            child.stdin.close()
            try:
                child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
