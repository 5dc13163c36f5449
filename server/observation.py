"""Telemetry of the connected clients: asked for beside a run's rounds, and kept in `devices.jsonl` of its folder."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from fedtta.messages.record import printable
from fedtta.messages.replies import Telemetry
from fedtta.messages.requests import Observe
from fedtta.messages.transport import Addressed, Answer, Transport, reason_of
from fedtta.settings import Settings, to_json
from fedtta.settings.files import Lines

#: Telemetry in a run folder, one JSON object a line: "at" (seconds since 1970), "node" (id), "run" and "telemetry".
DEVICES_FILE = "devices.jsonl"
STANDING = "watch"  # folder of a run with observe-only = true
FORMER = "devices.1.jsonl"  # the lines before them, one file at most
MOST_BYTES = 16 << 20  # of `DEVICES_FILE`, before it becomes `FORMER`
WAIT = 5.0  # seconds that are waited for answers where nothing else can go on meanwhile
#: Otherwise a question lives for so many intervals, and so many seconds at least. Then a node that trains is asked
#: again; one that was restarted after it took the question would never answer.
INTERVALS, PATIENCE = 4, 120.0
LOOK = 1.0  # seconds between two looks at the connected nodes
RAREST = 16  # intervals between two questions to a node that does not answer


class Kept:
    """Telemetry on the disk, bounded: a file that is full replaces the one before it.

    Parameters
    ----------
    folder : Path
        The run folder.
    most : int
        Bytes of a file.
    """

    def __init__(self, folder: Path, most: int = MOST_BYTES) -> None:
        self._file, self._former, self._most = Lines(folder / DEVICES_FILE, sync=False), folder / FORMER, most

    def append(self, at: float, node: int, run: str, telemetry: Telemetry) -> None:
        """Write one line.

        Raises
        ------
        OSError
            It could not be written.
        """
        values = {"at": round(at, 3), "node": node, "run": run, "telemetry": telemetry.to_record().values}
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        path = self._file.path
        if path.exists() and path.stat().st_size + len(line) > self._most:
            path.replace(self._former)
        self._file.append(line)


@dataclass
class Observation:
    """Asks nodes for telemetry at an interval; no round waits for an answer, and none ends the run.

    A node is not asked again before it has answered or the question has expired: Flower's SuperNode works on one
    message after the other, of all runs, so the answer of one that trains comes after its training. A node that refuses
    or fails is asked more rarely from then on: for each question a process is started there.

    Parameters
    ----------
    transport : Transport
        If it can have only one exchange at a time, answers are waited for, at most `WAIT` seconds.
    folder : Path
        The run folder.
    request : Observe
    every : float
        Seconds between two questions.
    note : callable
        Called by `tell` with what went wrong, once for each kind of failure.
    clock, now : callable
        Seconds of a clock that runs evenly, and since 1970.
    """

    transport: Transport
    folder: Path
    request: Observe
    every: float
    note: Callable[[str], object]
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._kept, self._next = Kept(self.folder), -math.inf
        self._asked: set[int] = set()
        self._names: dict[int, str] = {}  # node → the name that its first telemetry had
        self._failed: dict[int, int] = {}  # node → failures in a row
        self._skip: dict[int, int] = {}  # node → questions that it is spared
        self._wrong: dict[str, str] = {}  # kind of failure → what is to be said; empty: it has been said
        self._lock, self._closed = Lock(), False

    def ask(self, clients: Mapping[int, str | None]) -> None:
        """Ask connected nodes if the interval is over.

        Parameters
        ----------
        clients : mapping
            Node id → the client's name, which its telemetry must have; None: the name is not known, and one that no
            other of these nodes has is taken.
        """
        if self.clock() < self._next:
            return
        self._next = self.clock() + self.every
        with self._lock:
            self._names = {node: name for node, name in self._names.items() if node in clients}
            due = [node for node in clients if node not in self._asked and not self._skip.get(node)]
            self._skip = {node: left - 1 for node, left in self._skip.items() if left > 1 and node in clients}
            self._asked.update(due)
        if not due:
            return
        if not getattr(self.transport, "concurrent", False):
            self._exchange(due, clients, WAIT)
            return
        patience = max(INTERVALS * self.every, PATIENCE)
        Thread(target=self._exchange, args=(due, clients, patience), name="observation", daemon=True).start()

    def tell(self) -> None:
        """Report what went wrong since the last time."""
        with self._lock:
            found = [text for text in self._wrong.values() if text]
            self._wrong = dict.fromkeys(self._wrong, "")
        for text in found:
            self.note(text)

    def close(self) -> None:
        """Drop the answers that are still to come: the folder is not written any more."""
        with self._lock:
            self._closed = True

    def _exchange(self, nodes: Sequence[int], clients: Mapping[int, str | None], timeout: float) -> None:
        left = set(nodes)
        try:
            for answer in self.transport.exchange([Addressed(node, self.request) for node in nodes], timeout):
                with self._lock:
                    left.discard(answer.node)
                    self._asked.discard(answer.node)
                    self._take(answer, clients[answer.node])
        except Exception as error:  # such as a SuperLink that is gone, which the run notices itself
            with self._lock:
                self._wrong.setdefault("exchange", printable(f"telemetry: {reason_of(error)}"))
        finally:
            with self._lock:
                self._asked -= left

    def _take(self, answer: Answer, name: str | None) -> None:
        """Keep an answer, or note why not."""
        if self._closed:
            return
        reply = answer.reply
        if answer.kind in ("failed", "refused"):
            self._spare(answer.node)
        if answer.kind in ("failed", "late"):
            return  # it has no agent that answers, tells nothing, or is gone: the run reports what matters to it
        reason = self._refusal(answer.node, name, reply.name) if isinstance(reply, Telemetry) else answer.reason
        if reason or not isinstance(reply, Telemetry):
            text = f"telemetry of node {answer.node} is refused: {reason}; further refusals are not reported"
            self._wrong.setdefault("refused", printable(text))
            return
        self._failed.pop(answer.node, None)
        try:
            self._kept.append(self.now(), answer.node, self.folder.name, reply)
        except OSError as error:
            text = f"telemetry is lost: {DEVICES_FILE}: {error}; further losses are not reported"
            self._wrong.setdefault("disk", printable(text))

    def _refusal(self, node: int, client: str | None, name: str) -> str:
        """Return why telemetry with this name is not that of the node's client; empty if it is."""
        if client is None:
            holder = next((other for other, held in self._names.items() if held == name and other != node), None)
            if holder is not None:
                return f"name = {name!r}: node {holder} has this name, too, and came first"
            client = self._names.setdefault(node, name)
        return "" if name == client else f"name = {name!r}: allowed is {client!r}"

    def _spare(self, node: int) -> None:
        """Ask a node more rarely, after each failure in a row: after 2, 4, ... intervals, at most `RAREST`."""
        self._failed[node] = self._failed.get(node, 0) + 1
        self._skip[node] = min(RAREST, 2 ** min(self._failed[node], 10)) - 1


def observe(
    transport: Transport,
    settings: Settings,
    folder: Path,
    note: Callable[[str], object],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask every connected node at an interval and train nothing, until the process is stopped.

    Parameters
    ----------
    transport : Transport
    settings : Settings
        `observe_every` is the interval.
    folder : Path
        The run folder; telemetry of an earlier run is added to.
    note : callable
        Called with what went wrong, once for each kind of failure.
    """
    request = Observe(settings=to_json(settings), run=secrets.token_hex(8))
    observation = Observation(patient(transport), folder, request, settings.observe_every, note, clock)
    try:
        while True:
            observation.ask(dict.fromkeys(transport.nodes()))
            observation.tell()
            sleep(min(LOOK, settings.observe_every))
    finally:
        observation.close()


def patient(transport: Transport) -> Transport:
    """Return a transport that looks for answers more rarely, if there is one: nothing waits for telemetry."""
    made: Callable[[], Transport] | None = getattr(transport, "patient", None)
    return transport if made is None else made()
