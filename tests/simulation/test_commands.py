"""The commands' exit statuses and what they print, with the run itself replaced."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedtta.server.events import RunError
from fedtta.settings import SettingsError
from fedtta.simulation import __main__ as simulation
from fedtta.simulation import deploy_local, engine, flower_cli, submit
from fedtta.simulation.program import ENDING, show_results, unwind_on_signals
from fedtta.simulation.superlink import FlowerError
from tests.report.runs import evaluation, write_events

Command = Callable[[], int]


@pytest.fixture(params=["simulation", "flower_cli", "submit"])
def command(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Command, Callable[..., None]]:
    """A command for a run in `tmp_path`, and what replaces the function that runs it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    if request.param == "simulation":
        monkeypatch.setattr(sys, "argv", ["simulation", "--seed", "3"])
        return simulation.main, lambda run: monkeypatch.setattr(engine, "simulate", run)
    if request.param == "flower_cli":
        words = ["--set", f"results={tmp_path.parent}", f"run-name={tmp_path.name}"]
        return lambda: flower_cli.main(words), lambda run: monkeypatch.setattr(flower_cli, "run", run)
    (ca := tmp_path / "ca.crt").touch()
    words = ["--superlink", "127.0.0.1:1", "--root-certificates", str(ca), "run", "--set", "seed=3"]
    monkeypatch.setattr(submit.superlink, "start", lambda home, config: "1")
    return lambda: submit.main(words), lambda run: monkeypatch.setattr(submit.superlink, "finish", run)


def test_a_run_that_completed(command: tuple[Command, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, replace = command
    write_events(tmp_path, [evaluation("tent", "fog", 0, 1, 2)])
    replace(lambda *_, **__: tmp_path)
    assert main() == 0
    assert "failed" not in capsys.readouterr().err


@pytest.mark.parametrize(("program", "runs"), [(flower_cli, "run"), (deploy_local, "deploy")])
def test_a_resumed_run_is_shown_from_its_own_folder(
    program: Any, runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(tmp_path / "r", [evaluation("tent", "fog", 0, 1, 2)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(program, runs, lambda plan: "")
    assert program.main(["--set", f"results={tmp_path}", "run-name=r", f"resume={tmp_path / 'r'}"]) == 0
    assert program.main(["--set", f"resume={tmp_path / 'r'}"]) == 0
    assert capsys.readouterr().out.count("50.0") == 4  # of tent, and on average


def test_a_run_that_failed(command: tuple[Command, Any], capsys: pytest.CaptureFixture[str]) -> None:
    main, replace = command

    def run(*_: Any, **__: Any) -> Path:
        raise FlowerError("no node came")

    replace(run)
    assert main() == 1
    assert "failed: no node came" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(SettingsError, 2), (FileExistsError, 2), (RunError, 1), (OSError, 1)])
def test_errors_of_a_simulation(error: type[Exception], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(*_: Any) -> Path:
        raise error("why")

    monkeypatch.setattr(engine, "simulate", simulate)
    monkeypatch.setattr(sys, "argv", ["simulation"])
    assert simulation.main() == status


def test_the_table_of_a_simulation_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(tmp_path, [evaluation("tent", "fog", 0, 1, 2)])
    monkeypatch.setattr(engine, "simulate", lambda settings: tmp_path)
    monkeypatch.setattr(sys, "argv", ["simulation"])
    assert simulation.main() == 0
    printed = capsys.readouterr().out
    assert "tent" in printed
    assert "50.0" in printed


def test_the_folder_of_the_results_is_told_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ("long" * 30) / "fedthe[beta=1]"
    write_events(folder, [evaluation("tent", "fog", 0, 1, 2)])
    show_results(folder)
    assert f"Results: {folder}/ (open {folder}/report.html)\n" in capsys.readouterr().out


def test_a_hang_up_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in ((signal.SIG_DFL, {*ENDING}), (signal.SIG_IGN, {signal.SIGINT, signal.SIGTERM})):
        handled = set[int]()
        monkeypatch.setattr(signal, "getsignal", lambda number, before=before: before)
        monkeypatch.setattr(signal, "signal", lambda number, handler, handled=handled: handled.add(number))
        unwind_on_signals()
        assert handled == after


@pytest.fixture
def hang_up() -> Iterator[None]:
    """SIGHUP with its usual effect, also in tests that run under `nohup`, as they may in a CI service."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
def test_a_terminal_that_is_gone_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of writing to it would have been that of a connection, after which programs try again."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(sys, "stderr", Gone())
    unwind_on_signals()
    with pytest.raises(SystemExit):
        handlers[signal.SIGHUP](signal.SIGHUP, None)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_simulation_that_is_ended_by_a_signal_leaves_no_private_state(number: int, tmp_path: Path) -> None:
    """SIGTERM is what service managers send; the clients' state is in a temporary folder until the run ends."""
    words = ["--engine", "vectorised", "--rounds", "1000", "--clients", "2", "--methods", "fedavg", "--fraction", "0.1"]
    command = [sys.executable, "-m", "fedtta.simulation", *words, "--results", str(tmp_path / "r"), "--run-name", "a"]
    temporary = tmp_path / "t"
    temporary.mkdir()
    with subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            assert any("round 1" in line for line in process.stderr)
            assert list(temporary.glob("fedtta-*"))
            process.send_signal(number)
            said = process.stderr.read()
            assert process.wait(60) == 128 + number
        finally:
            process.kill()
    assert "interrupted" in said
    assert "Traceback" not in said
    assert list(temporary.glob("fedtta-*")) == []
