"""Devices in the terminal, and the standing run behind them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedtta import cli
from fedtta.messages.replies import LATENCY_BOUNDS, Telemetry
from fedtta.server.observation import Kept
from fedtta.simulation import devices as enrolled
from fedtta.simulation import signing, standing
from fedtta.simulation.control import Run
from fedtta.simulation.devices import Device
from fedtta.simulation.standing import Standing
from fedtta.simulation.superlink import FlowerError
from fedtta.watch.devices import BARS, COLUMNS, cells, follow, lines, sparkline, table
from fedtta.watch.fleet import FleetDevice

NOW = 10_000.0
FULL = Telemetry(
    name="site-a", software={"fedtta": "1.2.0", "torch": "2.9"}, model="run/fedavg/3", candidate="shadow run/fedavg/4",
    refused="run/x: too new", adapter="auto[probe=50]", choice="btfl", samples=12_345, unsaved_samples=7,
    saving_fails=True, weight=0.5, weights=[0.0, 0.5, 1.0], estimated_accuracy=0.834, drift=0.25, holding=True,
    guard_events={"collapse": 2, "black": 1, "noise": 0}, disk_used=5_000_000,
    disk_free=7_000_000_000, memory=300_000_000, latency=[0, 0, 100, *[0] * (len(LATENCY_BOUNDS) - 2)],
)  # fmt: skip
DEVICE = FleetDevice("site-a", 1, "online", NOW - 5, FULL, NOW - 600)
SILENT = FleetDevice("site-b", 2, "registered", None, None, None)


def drawn(made: Any, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as text:
        console.print(made)
    return text.get()


def test_every_column_of_a_device() -> None:
    assert cells(DEVICE, NOW) == {
        "name": "site-a", "status": "online", "seen": "5 s ago", "told": "10 min ago", "model": "run/fedavg/3",
        "software": "fedtta 1.2.0 torch 2.9", "candidate": "shadow run/fedavg/4", "refused": "run/x: too new",
        "adapter": "auto[probe=50]: btfl", "samples": "12,345, 7 unsaved (saving fails)", "weight": "0.50",
        "weights": "▁▅█", "accuracy": "83.4 %", "drift": "0.25", "guard": "holding", "events": "black 1, collapse 2",
        "disk": "5.0 MB, 7.0 GB", "memory": "300.0 MB", "p50": "3.8 ms", "p95": "4.9 ms",
    }  # fmt: skip
    silent = cells(SILENT, NOW)
    assert (silent.pop("name"), silent.pop("status")) == ("site-b", "registered")
    assert (silent.pop("seen"), silent.pop("told")) == ("never", "never")
    assert set(silent.values()) == {"-"}


def test_a_table_shows_every_cell_and_stays_within_a_terminal() -> None:
    text = drawn(table([DEVICE, SILENT], NOW))
    words = text.split()
    for cell in cells(DEVICE, NOW).values():
        assert all(word in words for word in cell.split()), cell
    assert "site-b" in words
    assert max(map(len, drawn(table([DEVICE], NOW), 100).splitlines())) <= 100


def test_lines_can_be_searched() -> None:
    full, silent = lines([DEVICE, SILENT], NOW)
    assert full.startswith('site-a status=online seen="5 s ago" told="10 min ago" model=run/fedavg/3 ')
    assert ' guard=holding events="black 1, collapse 2" ' in full
    assert silent == "site-b status=registered seen=never told=never"


HOSTILE = FleetDevice(
    "\x1b[2Jx\n[red]y", 1, "online", None,
    Telemetry(
        name="a", candidate="\x1b]0;title\x07[bold]shout\u202e" + "z" * 4000, adapter='" x="y', model="[/red]"
    ), 1.0,
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 400])
def test_texts_of_devices_move_no_cursor_and_are_cut(width: int) -> None:
    for text in (drawn(table([HOSTILE], NOW), width), *lines([HOSTILE], NOW)):
        assert all(one.isprintable() or one == "\n" for one in text)
        assert "\x1b" not in text
        assert text.count("z") < 100
    text = "".join(drawn(table([HOSTILE], NOW), 400).split())
    assert "[/red]" in text  # markup is text
    (one,) = lines([HOSTILE], NOW)
    assert "\n" not in one
    assert ' x="y' not in one


def test_a_sparkline_has_the_last_values_in_their_range() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0] * 3 + [0.0] * 16) == BARS[0] * 16
    assert sparkline([i / 7 for i in range(8)]) == BARS
    assert len({name for _, column in COLUMNS for name in column}) == 20


# -- following


class Ended(BaseException):
    """The process is interrupted."""


def sleeps(times: int, then: Callable[[int], object] = lambda number: None) -> Callable[[float], None]:
    count = 0

    def sleep(seconds: float) -> None:
        nonlocal count
        count += 1
        then(count)
        if count == times:
            raise Ended

    return sleep


def followed(results: Path, asked: list[Any], terminal: bool = False, times: int = 3, **about: Any) -> str:
    """Return what is shown while the SuperLink answers in turn with devices or an error, and how it ended."""
    text, answers = io.StringIO(), iter(asked)

    def listed() -> list[Device]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    console = Console(file=text, force_terminal=terminal, width=300)
    seconds = iter(range(0, 10_000, 100))
    try:
        follow(
            results, listed, 60.0, console, sleep=sleeps(times, about.pop("then", lambda number: None)),
            clock=lambda: next(seconds), **about,
        )  # fmt: skip
    except Ended:
        text.write("ended")
    return text.getvalue()


def test_lines_are_printed_at_the_interval_where_nothing_can_be_redrawn(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "watch")
    kept.append(1.0, 1, "watch", FULL)
    online = [Device("site-a", 1, "online", None)]
    offline = [Device("site-a", 1, "offline", None)]
    text = followed(tmp_path, [online, FlowerError("no SuperLink\nanswers"), offline])
    said = [line.split(" seen=")[0] for line in text.splitlines()]
    assert said == [
        "site-a status=online",
        "no SuperLink answers",
        "site-a status=online",
        "site-a status=offline",
        "ended",
    ]


def test_a_terminal_gets_a_table_that_follows(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "watch")
    then = lambda number: kept.append(float(number), 1, "watch", Telemetry(name="a", model=f"model-{number}"))  # noqa: E731
    device = [Device("a", 1, "online", None)]
    text = followed(tmp_path, [device, FlowerError("gone away"), device, device], terminal=True, times=4, then=then)
    assert "est. acc." in text
    assert all(f"model-{number}" in text for number in (1, 2, 3))
    assert "gone away" in text


def test_once_asks_once_and_says_what_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "devices.jsonl").write_text("half a li")
    text = followed(tmp_path, [[Device("a", 1, "online", None)]], once=True)
    assert text.startswith("a status=online seen=never told=never\n1 lines of telemetry in ")
    with pytest.raises(FlowerError):
        followed(tmp_path, [FlowerError("no SuperLink")])


# -- the standing run


class SuperLink:
    """The runs of a SuperLink."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[int, Run] = {}
        self.stopped: list[int] = []
        monkeypatch.setattr(standing, "runs", lambda superlink, ca: list(self.runs.values()))
        monkeypatch.setattr(standing, "stop", lambda superlink, ca, number: self.stopped.append(number))

    def begin(self, config: Mapping[str, Any]) -> str:
        number = len(self.runs) + 1
        self.runs[number] = Run(number, config, "running", "")
        return str(number)

    def end(self, number: int, details: str = "") -> None:
        self.runs[number] = Run(number, self.runs[number].config, "finished:failed", details)


def test_a_standing_run_is_started_once_and_only_the_own_one_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = SuperLink(monkeypatch)
    link.begin({"rounds": 3})
    link.begin({standing.KEY: True})
    link.end(2)
    mine, other = (Standing("h:1", None, link.begin, tmp_path, 30.0) for _ in range(2))
    for _ in range(3):
        mine.ensure()
        other.ensure()
    assert link.runs.keys() == {1, 2, 3}
    assert link.runs[3].config == {
        "observe-only": True, "observe-every": 30.0, "results": str(tmp_path), "run-name": "watch",
    }  # fmt: skip
    other.stop()
    assert link.stopped == []
    mine.stop()
    assert link.stopped == [3]
    link.end(3, "killed with its SuperLink")
    other.ensure()
    assert link.runs.keys() == {1, 2, 3, 4}
    link.end(4)
    other.stop()
    assert link.stopped == [3]


def test_a_standing_run_that_fails_is_not_started_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = SuperLink(monkeypatch)
    mine = Standing("h:1", None, link.begin, tmp_path, 30.0)
    mine.ensure()
    link.end(1, "ServerApp failed with exception: [Errno 13] Permission denied: '/results'")
    with pytest.raises(FlowerError, match=r"run 1: .*Permission denied"):
        mine.ensure()
    assert link.runs.keys() == {1}


def test_the_command_stops_its_run_and_that_of_a_signed_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = SuperLink(monkeypatch)
    signed: list[Any] = []

    def start(superlink: str, ca: Path | None, database: Path, bundle: Path, config: Mapping[str, Any]) -> str:
        signed.append((database, bundle))
        return link.begin(config)

    def listed(superlink: str, ca: Path | None) -> list[Device]:
        if len(signed) and link.stopped == []:
            raise KeyboardInterrupt
        return [Device("a", 1, "online", None)]

    monkeypatch.setattr(signing, "start", start)
    monkeypatch.setattr(enrolled, "listed", listed)
    words = ["devices", "--superlink", "h:1", "--insecure", "--results", str(tmp_path)]
    done = CliRunner().invoke(cli.app, [*words, "--watch", "--signed", "app.fab", "--database", "link.db"])
    assert done.exit_code == 130
    assert signed == [(Path("link.db"), Path("app.fab"))]
    assert link.stopped == [1]
    done = CliRunner().invoke(cli.app, [*words, "--once"])
    assert done.output == "a status=online seen=never told=never\n"
    assert link.runs.keys() == {1}


def test_a_signed_bundle_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SuperLink(monkeypatch)
    words = ["--superlink", "h:1", "--insecure", "--signed", str(tmp_path / "app.fab"), "--database", "link.db"]
    done = CliRunner().invoke(cli.app, ["devices", "--watch", *words])
    assert done.exit_code == 2
    assert f"error: {tmp_path / 'app.fab'}, app.fab.sig: " in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--every 30", "allowed are --watch, --once, --check, or a command"),
        ("--watch --signed app.fab", "--signed and --database"),
        ("--watch --every 0", "every"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: str, told: str) -> None:
    done = CliRunner().invoke(cli.app, ["devices", *words.split()])
    assert done.exit_code == 2
    assert told in done.output
