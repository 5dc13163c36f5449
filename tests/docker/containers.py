"""Containers of the images that `make images` built with buildah: commands, volumes, and ends that are real.

Nothing separates their processes from this machine's: `--isolation chroot` works without rights that a machine without
an engine lacks. They share its network, too. Where one is emulated, it would read of this machine's processor, which
onnxruntime for arm64 does not survive: it gets another /proc/cpuinfo, in a mount namespace of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fedtta.simulation.superlink import PROJECT

USER = 1000  # UID and GID of the images
CPUINFO = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd07
CPU revision\t: 0
"""  # of a Cortex-A57
MOUNTED = 'mount --bind "$0" /proc/cpuinfo && exec "$@"'  # for sh -c


def builder() -> list[str]:
    """Return the command of the program that built the images, with its options."""
    script = ["sh", str(PROJECT / "docker" / "builder.sh")]
    words = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    if words[0] != "buildah":
        pytest.skip("an engine runs the images by itself: docker compose (docker/README.md)")
    return words


def buildah(*words: str) -> str:
    """Run the builder and return what it prints; its errors stay visible."""
    return subprocess.run([*builder(), *words], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def handed_over(folder: Path) -> Path:
    """Make a folder, and give it and what is in it to the user of the images; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    return folder


class Container:
    """A container of an image, its root file system included; `volumes` are folders here → absolute paths inside.

    `prefix` is a command that runs the builder.
    """

    def __init__(self, name: str, logs: Path, prefix: Sequence[str] = ()) -> None:
        self.name, self._logs, self._prefix = name, logs, prefix
        self._started: list[subprocess.Popen[bytes]] = []

    def _command(self, words: list[str], volumes: Mapping[Path, str]) -> list[str]:
        mounts = [word for here, inside in volumes.items() for word in ("--volume", f"{here}:{inside}")]
        return [*self._prefix, *builder(), "run", "--isolation", "chroot", *mounts, self.name, "--", *words]

    def run(self, words: list[str], volumes: Mapping[Path, str], timeout: float) -> str:
        """Run a command to its end and return what it prints, errors among it.

        Raises
        ------
        AssertionError
            Its exit status is not 0; the message has what it printed.
        """
        done = subprocess.run(
            self._command(words, volumes), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def start(self, words: list[str], volumes: Mapping[Path, str], log: str) -> subprocess.Popen[bytes]:
        """Start a command, and return the process of the builder that waits for it."""
        with (self._logs / log).open("ab") as file:
            process = subprocess.Popen(
                self._command(words, volumes), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        self._started.append(process)
        return process

    def stop(self) -> None:
        """Kill all that was started, and what it has started."""
        for process in self._started:
            kill(process)
        self._started.clear()


def descendants(pid: int) -> list[int]:
    """Return the ids of a process' children, and of theirs."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def kill(process: subprocess.Popen[bytes], chosen: Callable[[bytes], bool] = lambda command: True) -> list[int]:
    """kill -9 of what the builder runs, its own processes last; return the ids of those whose command is chosen."""
    pids = descendants(process.pid)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if Path(f"/proc/{pid}").exists()}
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()
    return [pid for pid, command in commands.items() if chosen(command)]


@contextlib.contextmanager
def container(image: str, logs: Path) -> Iterator[Container]:
    """Make a container, and remove it with all that runs in it."""
    prefix = []
    if architecture(image) == "arm64" and platform.machine() != "aarch64":
        (logs / "cpuinfo").write_text(CPUINFO)
        prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNTED, str(logs / "cpuinfo")]
    made = Container(buildah("from", "--pull-never", f"localhost/{image}"), logs, prefix)
    try:
        yield made
    finally:
        made.stop()
        buildah("rm", made.name)


def architecture(image: str) -> str:
    """Return the architecture that an image states, such as amd64."""
    return str(json.loads(buildah("inspect", "--type", "image", f"localhost/{image}"))["OCIv1"]["architecture"])
