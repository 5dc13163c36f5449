"""`metrics.jsonl`: the events of a run, one JSON object a line, each with a digest that damage does not fit.

The last field of a line, "digest", is the beginning of a SHA-256 over the digest of the line before and the line
without the field: a line that was changed, lost or inserted is named by its number. Lines of earlier versions have no
digest; the first line with one covers them. With each checkpoint the lines so far are copied to
`checkpoints/metrics.jsonl`, from which damaged ones are restored. Digests protect against damage, not against forgery.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtta.settings.files import Lines

METRICS_FILE = "metrics.jsonl"
COPY = "checkpoints/metrics.jsonl"
_SIGNED = re.compile(rb'(\{.*), "digest": "([0-9a-f]{16})"\}')


@dataclass(frozen=True)
class Line:
    """A line of a journal.

    Parameters
    ----------
    number : int
        From 1.
    end : int
        Bytes of the file up to its end.
    digest : str
        As the line states it; computed for a line that states none.
    event : dict
        Empty if the line is faulty.
    fault : str
        What is wrong with it; empty: it is intact.
    """

    number: int
    end: int
    digest: str
    event: dict[str, Any]
    fault: str = ""


def line_of(event: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """Return an event's line and its digest; `before` is the digest of the line before, "" for the first.

    Raises
    ------
    ValueError
        A number is not finite.
    """
    body = json.dumps(event, allow_nan=False).encode()
    digest = _digest(before, body)
    return body[:-1] + f', "digest": "{digest}"}}\n'.encode(), digest


def read_lines(content: bytes, before: str | None = "") -> list[Line]:
    """Return the complete lines of a journal, without empty ones; a killed run may have left half a line at the end.

    Parameters
    ----------
    before : str or None
        Digest of the line before; None: unknown, as of a tail that was cut off, so that the first line is not checked.
    """
    found: list[Line] = []
    signed = False
    for number, end, raw in _raw_lines(content):
        body, stated = _parts(raw)
        computed = stated if stated and before is None else _digest(before or "", body)
        before = stated or computed
        event, fault = _event(body)
        if stated and stated != computed:
            fault = "damaged: its digest does not fit it and the line before it"
        elif signed and not stated:
            fault = "damaged: it has no digest"
        found.append(Line(number, end, before, {} if fault else event, fault))
        signed = signed or bool(stated)
    return found


class Journal:
    """A run's journal, to be written.

    Parameters
    ----------
    path : Path
        The file; a line is added after those it has when the first event is written.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._before = Lines(path), ""
        self._begun = False

    def append(self, event: Mapping[str, Any]) -> None:
        """Write an event durably.

        Raises
        ------
        ValueError
            A number is not finite.
        OSError
            It could not be written; the file is as before.
        """
        if not self._begun:
            path = self._file.path
            lines = read_lines(path.read_bytes()) if path.exists() else []
            self._before, self._begun = lines[-1].digest if lines else "", True
        line, digest = line_of(event, self._before)
        self._file.append(line)
        self._before = digest


class Copy:
    """The copy of a run folder's journal beside its checkpoints.

    Parameters
    ----------
    folder : Path
        The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._journal, self.path = folder / METRICS_FILE, folder / COPY
        self._lines = Lines(self.path)
        self._size: int | None = None

    def update(self) -> int:
        """Copy what the journal has gained, and return its size; raises OSError."""
        if not self._journal.exists():
            return 0
        if self._size is None:
            there = self.path.read_bytes() if self.path.exists() else b""
            whole = not there or there.endswith(b"\n")
            if not (whole and self._journal.read_bytes().startswith(there)):  # of another run, or damaged
                self.path.unlink()
                there = b""
            self._size = len(there)
        with self._journal.open("rb") as file:
            file.seek(self._size)
            gained = file.read()
        if gained:
            self._lines.append(gained)
            self._size += len(gained)
        return self._size


def restored(folder: Path) -> tuple[bytes, str]:
    """Return the content of a run's journal, with what the copy can restore, and in words what that is.

    No file is changed. Without damage that the copy can repair, the content is that of the file, and the text is empty.

    Raises
    ------
    FileNotFoundError
        There is neither a journal nor a copy.
    """
    path, copy = folder / METRICS_FILE, folder / COPY
    kept = copy.read_bytes() if copy.exists() else b""
    kept = kept[: kept.rfind(b"\n") + 1]  # a killed run may have left half a line
    if not kept:
        return path.read_bytes(), ""
    content, good = path.read_bytes() if path.exists() else b"", read_lines(kept)
    if content.startswith(kept) or not good or any(line.fault for line in good):
        return content, ""
    faults = [f"line {line.number} is {line.fault}" for line in read_lines(content) if line.fault]
    what = faults[0] if faults else "lines were lost"
    return kept + _following(content, good[-1].digest), f"{METRICS_FILE}: {what}; restored from {COPY}"


def _following(content: bytes, digest: str) -> bytes:
    """Return what follows the line with this digest in a journal, which itself may be damaged or lost."""
    for _, end, raw in _raw_lines(content):
        body, stated = _parts(raw)
        if stated and stated == _digest(digest, body):
            return content[end - len(raw) - 1 :]
    return b""


def _raw_lines(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, end and bytes of the complete lines that are not empty."""
    end = 0
    for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
        end += len(raw) + 1
        if raw.strip():
            yield number, end, raw


def _parts(raw: bytes) -> tuple[bytes, str]:
    """Return a line without its digest, and the digest that it states, if any."""
    signed = _SIGNED.fullmatch(raw)
    return (signed[1] + b"}", signed[2].decode()) if signed else (raw, "")


def _event(body: bytes) -> tuple[dict[str, Any], str]:
    """Return the event of a line, or what is wrong with it."""
    try:
        event = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return {}, str(error)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return {}, "expected a JSON object with a field 'event'"
    return event, ""


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:16]
