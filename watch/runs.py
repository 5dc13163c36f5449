"""The runs of a results folder: which there are, and the sections of their pages, drawn when their files change."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote

from fedtta.messages.record import PROSE_LENGTH, printable
from fedtta.server.report import METRICS_FILE, Results, read_results
from fedtta.server.report.journal import COPY
from fedtta.server.report.live import LIVE_FILE, SILENCE, Live, now_section, read_live
from fedtta.server.report.markup import data_table, missing, section, text
from fedtta.server.report.page import MODEL_FILE, build_sections, network_bytes_of
from fedtta.watch.layout import View

LOG = logging.getLogger(__name__)
LISTED = 200  # runs of the first page
KEPT = 8  # runs whose sections are kept
LARGEST = 1 << 28  # bytes of the metrics that are drawn
TAIL = 1 << 16  # bytes of the metrics' end that the first page reads
SHARE = 0.1  # of the time that may go into drawing a run again and again
#: Files of a run that a page shows something of.
FILES = (METRICS_FILE, LIVE_FILE, COPY, MODEL_FILE)

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Drawn:
    """The sections of a run's page but for the first, "now".

    Parameters
    ----------
    signature : tuple
        Of the files that they were drawn from.
    sections : dict
        id → HTML.
    results : Results
    problem : str
        Why the last attempt to draw them failed; the sections are those of the one before.
    running : bool
        Whether a process ran the run.
    again : float
        Monotonic time from which on a change is drawn.
    """

    signature: Signature
    sections: dict[str, str] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    problem: str = ""
    running: bool = False
    again: float = 0.0


@dataclass(frozen=True)
class Now:
    """The section "now" of a run's page, which is empty where no process runs the run, or why there is none.

    Parameters
    ----------
    key : tuple
        What it was drawn from.
    html, problem : str
    done : str
        How much of the run is done.
    """

    key: tuple[int, Signature, Signature] | None = None
    html: str = ""
    problem: str = ""
    done: str = ""


class Runs:
    """The runs of a results folder.

    Parameters
    ----------
    folder : Path
    only : str
        Name of the only run that is shown, which need not have begun; empty: all.
    clock : callable
        Seconds since the epoch.
    """

    def __init__(self, folder: Path, only: str = "", clock: Callable[[], float] = time.time) -> None:
        self.folder, self.only, self.clock = folder, only, clock
        self.drawings = 0  # so far
        self._drawn: OrderedDict[str, Drawn] = OrderedDict()
        self._nows: dict[str, Now] = {}
        self._drawing: dict[str, asyncio.Task[Drawn]] = {}
        self._thread = ThreadPoolExecutor(1, "drawing")  # matplotlib's style is global

    def path(self, name: str) -> Path | None:
        """Return the folder of a run; None if the results have no run of this name."""
        if self.only and name != self.only:
            return None
        if not name.isprintable() or name.startswith(".") or "/" in name or not 0 < len(name.encode()) < 256:
            return None
        folder = self.folder / name
        try:
            return folder if not folder.is_symlink() and _is_run(folder) else None
        except (OSError, RuntimeError):  # not readable, or links in a circle
            return None

    def names(self) -> list[str]:
        """Return the names of the runs, the one that changed last first."""
        if not self.folder.is_dir():
            return []
        found = [(self._changed(folder), one.name) for one in self.folder.iterdir() if (folder := self.path(one.name))]
        return [name for _, name in sorted(found, reverse=True)]

    def index(self) -> View:
        """Return the page of all runs."""
        names = self.names()
        rows = []
        for name in names[:LISTED]:
            folder = self.folder / name
            changed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self._changed(folder)))
            rows.append([f'<a href="/runs/{_quoted(name)}">{escape(name)}</a>', self._state(folder), f"{changed} UTC"])
        more = f" The last {LISTED} of {len(names):,}." if len(names) > LISTED else ""
        caption = f"<strong>Runs</strong>, the one that changed last first.{more}"
        table = data_table(["run", "state", "changed"], rows, caption, kind="cards")
        shown = table if rows else missing("No run has begun in this folder.")
        return View("Runs", {"runs": section("runs", f"<h1>Runs</h1>{shown}")}, seconds=3.0)

    async def page(self, name: str) -> View | None:
        """Return the page of a run; None if there is none."""
        folder = self.path(name)
        if folder is None:
            if name and name == self.only:
                waiting = f"<h1>{escape(name)}</h1>{missing('The run has not begun.')}"
                return View(name, {"summary": section("summary", waiting)})
            return None
        running = (folder / LIVE_FILE).exists()
        drawn = await self._current(name, folder, running)
        now = self._now(name, folder, drawn) if running else Now()
        sections = {"now": section("now", now.html)} if now.html else {}
        if problems := [problem for problem in (now.problem, drawn.problem) if problem]:
            told = "".join(f'<p class="warning">{escape(problem)}</p>' for problem in problems)
            sections["problem"] = section("problem", told)
        ended = not running and drawn.results.end is not None and not drawn.problem
        title = f"{now.done} {name}" if now.done else name
        return View(title, {**sections, **drawn.sections}, ended)

    def _now(self, name: str, folder: Path, drawn: Drawn) -> Now:
        """Return what a run does, read and drawn once a second for all readers."""
        second = int(self.clock())
        key = second, signature_of(folder, (LIVE_FILE,)), drawn.signature
        if name in self._nows and self._nows[name].key == key:
            return self._nows[name]
        try:
            live = read_live(folder)
            now = Now(key)
            if live is not None:
                now = Now(key, now_section(live, drawn.results, second), done=_done(live))
        except (OSError, ValueError) as error:
            now = Now(key, problem=_words(error, folder))
        self._nows = {**{other: self._nows[other] for other in self._nows if other in self._drawn}, name: now}
        return now

    def close(self) -> None:
        """End the thread that draws."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _current(self, name: str, folder: Path, running: bool) -> Drawn:
        """Return the sections of a run; of one that is being drawn, the ones before.

        A run is drawn again when its files have changed, but a busy one not all the time; at most one drawing of a run
        is under way.
        """
        kept = self._drawn.get(name)
        due = kept is None or (
            kept.signature != signature_of(folder) and (time.monotonic() >= kept.again or kept.running != running)
        )
        task = self._drawing.get(name)
        if due and task is None:
            task = asyncio.create_task(self._draw(name, folder, running))
            self._drawing[name] = task
            task.add_done_callback(lambda _: self._drawing.pop(name, None))
        if kept is not None and (task is None or running):
            self._drawn.move_to_end(name)
            return kept
        assert task is not None  # there are no sections, or they are not the last
        return await asyncio.shield(task)

    async def _draw(self, name: str, folder: Path, running: bool) -> Drawn:
        loop = asyncio.get_running_loop()
        drawn = await loop.run_in_executor(self._thread, self._draw_now, name, folder, running)
        self._drawn[name] = drawn
        self._drawn.move_to_end(name)
        while len(self._drawn) > KEPT:
            self._drawn.popitem(last=False)
        return drawn

    def _draw_now(self, name: str, folder: Path, running: bool) -> Drawn:
        """Draw the sections; where that fails, keep the last ones and say why."""
        begin, self.drawings = time.monotonic(), self.drawings + 1
        before = self._drawn.get(name, Drawn(()))
        files = signature_of(folder)  # before reading: what is written meanwhile is a change
        sections, results, problem = before.sections, before.results, ""
        try:
            path = folder / METRICS_FILE
            if path.is_file() and path.stat().st_size > LARGEST:
                raise ValueError(f"{METRICS_FILE}: larger than {LARGEST:,} bytes; `fedtta report` draws it")
            results = read_results(path) if path.is_file() else Results()
            sections = build_sections(results, name, network_bytes_of(folder))
        except Exception as error:  # whatever the file holds, the page goes on
            foreseen = isinstance(error, OSError | ValueError)
            if not foreseen:
                LOG.exception("the page of %s", folder)
            problem = _words(error, folder) if foreseen else f"cannot be drawn: {type(error).__name__}"
            if not sections:
                sections = {"summary": section("summary", f"<h1>{escape(name)}</h1>")}
        end = time.monotonic()
        return Drawn(files, sections, results, problem, running, end + (end - begin) * (1 / SHARE - 1))

    def _changed(self, folder: Path) -> float:
        """Return when a run's metrics changed last, in seconds since the epoch."""
        changed = signature_of(folder)
        return max(nanoseconds for nanoseconds, _, _ in changed) / 1e9

    def _state(self, folder: Path) -> str:
        """Return what a run does, or how it has ended, as HTML, without reading all of it."""
        try:
            live = read_live(folder)
        except (OSError, ValueError) as error:
            return text(_words(error, folder))
        if live is not None:
            if self.clock() - live.written > SILENCE:
                return "stopped without an end"
            phase = f": {escape(live.phase)}" if live.phase else ""
            return f"running, {_done(live)}{phase}"
        try:
            with (folder / METRICS_FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL))
                last = json.loads(file.read().rstrip(b"\n").rpartition(b"\n")[2])
        except (OSError, ValueError, RecursionError):
            last = None
        if isinstance(last, dict) and last.get("event") == "end":
            return escape(printable(str(last.get("status")), 200))
        return "not ended"


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, all of whose files are in it."""
    here = folder.resolve()
    there = [path for name in FILES if (path := folder / name).exists()]
    inside = all(path.is_file() and path.resolve().is_relative_to(here) for path in there)
    return inside and any(path.name in (METRICS_FILE, LIVE_FILE) for path in there)


def _done(live: Live) -> str:
    """Return how much of a run is done: 12 % of its steps."""
    share = 100 * min(live.steps, live.planned) // live.planned if live.planned else 0
    return f"{share}\N{NO-BREAK SPACE}%"


def signature_of(folder: Path, names: Sequence[str] = (METRICS_FILE, COPY, MODEL_FILE)) -> Signature:
    """Return what changes when files of a run change."""
    found = []
    for name in names:
        try:
            status = (folder / name).stat()
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append((0, -1, -1))
    return tuple(found)


def _words(error: Exception, folder: Path) -> str:
    """Return an error as a line for readers, without the path on this machine."""
    return printable(str(error).replace(f"{folder}/", ""), PROSE_LENGTH)


def _quoted(name: str) -> str:
    return escape(quote(name, safe=""))
