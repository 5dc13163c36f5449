"""The audit log: every message of a federation that reached a device, what was decided, and what left it.

    fedtta audit --config device.toml --run 3f2a

One JSON object a line: in `<state-dir>/audit.jsonl` what was answered, synced to disk before the reply leaves, and in
`audit-refused.jsonl` the rest, so that a flood of refused messages displaces nothing that tells what left. Questions
for telemetry, one a minute for years, are in `audit-observed.jsonl` for the same reason, refused ones as well. Of
arrays it has names, shapes, sizes and digests, never values.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from fedtta.client.names import TABLES
from fedtta.client.policy import PolicyError, phase_of
from fedtta.messages.protobuf import to_bytes
from fedtta.messages.record import Record
from fedtta.messages.requests import Observe
from fedtta.settings import SettingsError, from_toml
from fedtta.settings.files import Lines

ANSWERED, REFUSED, OBSERVED = "audit.jsonl", "audit-refused.jsonl", "audit-observed.jsonl"
FILES = 10  # of each that are kept, with the current one
#: Files that are kept of each log, with the current one; of telemetry, which tells little, fewer.
KEPT = {ANSWERED: FILES, REFUSED: FILES, OBSERVED: 2}
HOUR, DAY = 3600.0, 86400.0
DONE = "ok"  # result of a message that was worked on
OBSERVE = phase_of(Observe.kind)
TEXT = 500  # characters of a reason


class Audit:
    """The audit log of a running agent, which also knows how often messages came.

    Parameters
    ----------
    folder : Path
        The state directory.
    limit : int
        Bytes at which a file is renamed to `<name>.1`, and older ones to `.2` and so on.
    clock : callable
        Unix time.

    Raises
    ------
    OSError
        The log of before cannot be read.
    """

    def __init__(self, folder: Path, limit: int, clock: Callable[[], float] = time.time) -> None:
        self.limit, self._clock = limit, clock
        self._files = {name: Lines(folder / name) for name in KEPT}
        self._lock = threading.Lock()
        self._done: list[tuple[float, str]] = []  # time and phase of what was worked on in the last 24 hours
        for line in lines(folder):
            if line.get("result") == DONE and clock() - DAY < (at := _time(line)) <= clock():
                self._done.append((at, line.get("phase", "")))

    def count(self, seconds: float, phase: str = "") -> int:
        """Return how many messages, or those of a phase, were worked on in the last seconds, 24 hours at most."""
        now = self._clock()
        with self._lock:  # messages arrive on two threads
            # after a clock was set back, what lies ahead counts as just done, not until that time comes
            self._done = [(min(at, now), one) for at, one in self._done if at > now - DAY]
            return sum(at > now - seconds and phase in ("", one) for at, one in self._done)

    def write(self, phase: str, result: str, **values: Any) -> None:
        """Append a message.

        Parameters
        ----------
        phase : str
            As `phase_of`.
        result : str
            "ok", or the name of the rule or the exception that ended it.
        values
            What else is known: run, round, training, seconds, received, sent, reason.

        Raises
        ------
        OSError
            It could not be written: what it tells of must not leave.
        """
        now = self._clock()
        at = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        known = {key: value for key, value in values.items() if value not in ("", None)}
        line = json.dumps({"time": at, "phase": phase, "result": result, **known}).encode() + b"\n"
        with self._lock:
            file = self._files[OBSERVED if phase == OBSERVE else ANSWERED if result == DONE else REFUSED]
            self._rotate(file.path, len(line))
            file.append(line)
            if result == DONE:
                self._done.append((now, phase))

    def failed(self, kind: str, error: BaseException, **values: Any) -> None:
        """Append a message that was not answered; raises as `write`."""
        result = f"policy {error.rule}" if isinstance(error, PolicyError) else type(error).__name__
        self.write(phase_of(kind), result, **values, reason=str(error)[:TEXT])

    def _rotate(self, path: Path, size: int) -> None:
        """Rename a file if it would become too large."""
        if not path.exists() or path.stat().st_size + size <= self.limit:
            return
        for older, newer in pairwise(_oldest_first(path)):
            if newer.exists():
                newer.replace(older)


def sent(record: Record) -> list[dict[str, Any]]:
    """Return what a reply tells, without its values: a row for each array, and one for everything else.

    Parameters
    ----------
    record : Record
        The reply's plain form.
    """
    text = json.dumps(record.values, sort_keys=True).encode()
    rows = [{"name": ",".join(sorted(record.values)), "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}]
    for name, arrays in record.arrays.items():
        for key, value in arrays.items():
            digest = hashlib.sha256(to_bytes(value)).hexdigest()
            about = {"shape": list(value.shape), "dtype": str(value.dtype), "bytes": value.nbytes}
            rows.append({"name": f"{name}.{key}", **about, "sha256": digest})
    return rows


def lines(folder: Path, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a state directory's audit log, the oldest first.

    A line that is cut short or otherwise damaged is left out; its file and number are appended to `damaged`.
    """
    return heapq.merge(*(_lines_of(folder / name, [] if damaged is None else damaged) for name in KEPT), key=_time)


def _oldest_first(path: Path) -> list[Path]:
    """Return a file's former files and the file itself."""
    return [*(path.with_name(f"{path.name}.{number}") for number in range(KEPT[path.name] - 1, 0, -1)), path]


def _lines_of(newest: Path, damaged: list[str]) -> Iterator[dict[str, Any]]:
    for path in filter(Path.is_file, _oldest_first(newest)):
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    line = None
                if _is_message(line):
                    yield line
                else:
                    damaged.append(f"{path.name}, line {number}")


def _is_message(line: Any) -> TypeGuard[dict[str, Any]]:
    """Whether what a line has is of the types that `Audit.write` writes: damage may leave valid JSON."""
    texts = ("time", "phase", "result")
    if not isinstance(line, dict) or any(not isinstance(line.get(key, ""), str) for key in texts):
        return False
    left = line.get("sent", [])
    return isinstance(left, list) and all(isinstance(one, dict) and isinstance(one.get("bytes"), int) for one in left)


def _time(line: Mapping[str, Any]) -> float:
    """Return the Unix time of a line, 0 if it has none."""
    try:
        return datetime.fromisoformat(str(line.get("time"))).timestamp()
    except ValueError:
        return 0.0


def text_of(line: Mapping[str, Any]) -> str:
    """Return a line for people."""
    left = line.get("sent", [])
    arrays = [one for one in left if "shape" in one]
    total = sum(int(one.get("bytes", 0)) for one in left)
    what = f"sent {len(arrays)} arrays, {total:,} bytes" if left else str(line.get("reason", ""))
    about = f"run {line.get('run', '-')} round {line.get('round', '-')}"
    return f"{line.get('time')}  {line.get('phase', ''):10}  {line.get('result', ''):28}  {about}  {what}".rstrip()


def folder_of(config: str) -> Path:
    """Return the state directory that a device's file names; SettingsError if it names none, or one of no user."""
    content = from_toml(config, TABLES)
    if not isinstance(content.get("state-dir"), str):
        raise SettingsError(f"{config}: state-dir must be set")
    try:
        return Path(config).parent / Path(content["state-dir"]).expanduser()
    except RuntimeError as error:  # "~" of no user
        raise SettingsError(f"{config}: state-dir = {content['state-dir']!r}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a device's audit log and return the exit status."""
    parser = argparse.ArgumentParser(prog="fedtta audit", description="What a device was asked, and what left it.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--state-dir", metavar="DIR", help="the agent's state directory")
    where.add_argument("--config", metavar="FILE", help="the device's file, which names it")
    parser.add_argument(
        "--run", default="", help="the beginning of a run's identity (not of its run-name): its messages only"
    )
    parser.add_argument("--json", action="store_true", help="lines as they are in the file, with digests")
    chosen = parser.parse_args(arguments)
    try:
        folder = Path(chosen.state_dir) if chosen.state_dir else folder_of(chosen.config)
        if not folder.is_dir():
            raise SettingsError(f"{folder}: no such folder")
        damaged: list[str] = []
        none = True
        for line in lines(folder, damaged):
            if str(line.get("run", "")).startswith(chosen.run):
                print(json.dumps(line) if chosen.json else _printable(text_of(line)))
                none = False
        for line_of_file in damaged:
            print(f"{line_of_file}: damaged, cannot be read", file=sys.stderr)
        if none:
            of_run = f"of a run {chosen.run}...; without --run, lines show the runs that there are"
            what = of_run if chosen.run else "yet"
            print(_printable(f"{folder}: no message {what}"), file=sys.stderr)
    except BrokenPipeError:  # of the reader, such as `head`; the log itself is files
        raise
    except (SettingsError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _printable(text: str) -> str:
    """Return a text without control characters: names come from the server, and a terminal obeys them."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)


if __name__ == "__main__":
    sys.exit(main())
