"""`live.json` of a run folder, which says what the run is doing at the moment, and the section "Now" that shows it.

The file is there while a process runs the run, and is replaced about once a second
(`fedtta.server.live`). It is for people: no result is read from it, and none is lost with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from fedtta.server.report.markup import breakable, counted, duration
from fedtta.server.report.results import Results
from fedtta.settings import name_order

LIVE_FILE = "live.json"
LISTED = 50  # clients in the table
LARGEST = 1 << 24  # bytes of the file, at most
SILENCE = 30.0  # seconds without a new file after which a run counts as stopped; it is replaced every few seconds

State = Literal["failed", "refused", "late", "gone", "limited", "asked", "answered", "idle"]
#: In the order of the table: what needs attention comes first.
STATES: tuple[State, ...] = get_args(State)
#: First word of a phase's name → what a client does that has been asked and has not answered.
BUSY = {"train": "training", "evaluate": "evaluating", "statistics": "computing statistics", "rates": "learning rates"}

Count = Annotated[int, Field(ge=0, le=2**53)]
Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # seconds since the epoch


@dataclass(frozen=True)
class ClientState:
    """The state of a client, and since when it has it."""

    state: State
    since: Moment


@dataclass(frozen=True)
class Live:
    """What a run is doing at a moment. Moments are seconds since the epoch.

    Parameters
    ----------
    written : float
        The moment.
    started : float
        When this process began or resumed the run.
    phase : str
        Name of the exchange that is under way, or was last; empty before the first.
    since : float
        When the phase began.
    total, answered : int
        Requests of the phase, and how many of them have been answered.
    round : int, optional
        Of the phase.
    steps, planned : int
        Rounds of all kinds that are done, and that the run has; `planned` is None before it is known.
    end : float, optional
        When the run will have ended, by the pace of its last steps; None before the first step.
    clients : dict
        Partition → state. A client is in exactly one.
    """

    written: Moment
    started: Moment
    phase: Annotated[str, Field(max_length=500)] = ""
    since: Moment = 0.0
    total: Count = 0
    answered: Count = 0
    round: Count | None = None
    steps: Count = 0
    planned: Count | None = None
    end: Moment | None = None
    clients: dict[Count, ClientState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.answered > self.total:
            raise ValueError(f"'answered' must be at most 'total' = {self.total}, not {self.answered}")

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return _ADAPTER.dump_json(self)

    @classmethod
    def from_json(cls, content: bytes) -> Live:
        """Read the content of the file.

        Raises
        ------
        ValueError
            It is not what `to_json` returns.
        """
        try:
            return _ADAPTER.validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{part}: " for part in first["loc"])
            raise ValueError(f"{where}{first['msg']}"[:300]) from error


_ADAPTER = TypeAdapter(Live)


def read_live(folder: Path) -> Live | None:
    """Return what a run is doing; None where no process runs it.

    Raises
    ------
    ValueError, OSError
        The file cannot be read.
    """
    try:
        with (folder / LIVE_FILE).open("rb") as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        return None
    if len(content) > LARGEST:
        raise ValueError(f"{LIVE_FILE}: larger than {LARGEST:,} bytes")
    try:
        return Live.from_json(content)
    except ValueError as error:
        raise ValueError(f"{LIVE_FILE}: {error}") from error


def now_section(live: Live, results: Results, now: float) -> str:
    """Return the section on what a run is doing, as HTML without its frame.

    Parameters
    ----------
    live : Live
    results : Results
        Names of the clients.
    now : float
        Seconds since the epoch.
    """
    silent = now - live.written
    warning = ""
    if silent > SILENCE:
        words = f"The run has not been heard of for {duration(silent)}; its process may have been stopped."
        warning = f'<p class="warning" id="now-silent">{words}</p>'
    return f"<h2>Now</h2>{warning}{_phase(live, now)}{_steps(live, now)}{_clients(live, results, now)}"


def _phase(live: Live, now: float) -> str:
    if not live.phase:
        return '<p id="now-phase">Waiting for clients.</p>'
    where = f", round {live.round:,}" if live.round is not None else ""
    words = f"{live.answered:,} of {counted(live.total, 'client')} answered"
    return (
        f'<p id="now-phase"><strong>{escape(live.phase)}</strong>{where}, '
        f"for {_ago(live.since, now)}: {words}</p>"
        + _bar("now-answered", live.answered, live.total, f"Clients that answered: {words}")
    )


def _steps(live: Live, now: float) -> str:
    lasting = f"running for {_ago(live.started, now)}"
    if live.planned is None:
        return f'<p id="now-steps-done">{lasting[0].upper()}{lasting[1:]}.</p>'
    done = f"{min(live.steps, live.planned):,} of {counted(live.planned, 'step')} done"
    left = "time left not known yet"
    if live.end is not None:
        left = f"about {_ago(now, live.end)} left" if live.end > now else "nearly done"
    return f'<p id="now-steps-done">{done}, {lasting}, {left}</p>' + _bar(
        "now-steps", min(live.steps, live.planned), live.planned, f"Steps of the run: {done}"
    )


def _bar(name: str, value: int, most: int, label: str) -> str:
    return (
        f'<progress id="{name}" value="{value}" max="{max(most, 1)}" aria-valuemin="0" aria-valuenow="{value}" '
        f'aria-valuemax="{max(most, 1)}" aria-label="{escape(label)}"></progress>'
    )


def _clients(live: Live, results: Results, now: float) -> str:
    """Return how many clients are in each state, and a table of the first ones."""
    if not live.clients:
        return ""
    busy = BUSY.get(live.phase.partition(" ")[0], "working")
    counts = Counter(one.state for one in live.clients.values())
    words = {state: busy if state == "asked" else state for state in STATES}
    summary = "".join(
        f'<li class="state-{state}"><strong>{counts[state]:,}</strong> {words[state]}</li>'
        for state in STATES
        if counts[state]
    )

    def order(partition: int) -> tuple[int, tuple[int, int, str]]:
        return STATES.index(live.clients[partition].state), name_order(results.name(partition))

    chosen = sorted(live.clients, key=order)[:LISTED]
    rows = "".join(
        f'<tr><th scope="row">{breakable(results.name(partition))}</th>'
        f'<td class="state-{one.state}">{words[one.state]}</td><td>{_ago(one.since, now)}</td></tr>'
        for partition in chosen
        for one in (live.clients[partition],)
    )
    more = f"The first {LISTED} of {len(live.clients):,} clients. " if len(live.clients) > LISTED else ""
    return (
        f'<ul class="states" id="now-states">{summary}</ul>'
        f'<details id="now-clients" open><summary>{counted(len(live.clients), "client")}</summary>'
        f'<p class="small">{more}What needs attention comes first.</p>'
        '<div class="scroll"><table class="now">'
        '<thead><tr><th scope="col">client</th><th scope="col">state</th><th scope="col">for</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _ago(moment: float, now: float) -> str:
    """Format the whole seconds since a moment: a clock that goes backwards is none of the reader's business."""
    seconds = int(max(0.0, now - moment))
    return f"{seconds} s" if seconds < 60 else duration(seconds)
