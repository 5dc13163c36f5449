"""A run whose SuperLink or ServerApp died is submitted again with `resume`; other failures end it."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedtta.server.events import RunError
from fedtta.server.report import METRICS_FILE
from fedtta.server.resume import find_checkpoint
from fedtta.settings import Settings, SettingsError
from fedtta.simulation import control, deployment, flower_cli, submit, superlink
from fedtta.simulation.control import Run
from fedtta.simulation.superlink import FlowerError, RunLostError, Scalar

LOST = "finished:failed: No heartbeat received from the task"
CONFIG: dict[str, Scalar] = {"run-name": "r", "results": "/srv/results"}


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """What the next runs end with; None: they complete."""
    made: list[Exception | None] = []

    def finish(*_: Any, **__: Any) -> None:
        error = made.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(superlink, "finish", finish)
    return made


def supervised(config: Mapping[str, Scalar], resumes: int) -> list[Mapping[str, Scalar]]:
    """Return the configs of the runs that are submitted."""
    begun: list[Mapping[str, Scalar]] = []

    def begin(config: Mapping[str, Scalar]) -> str:
        begun.append(config)
        return "1"

    try:
        submit.supervise(Path("/home"), config, 60.0, resumes, begin)
    except FlowerError as error:
        begun.append({"error": str(error)})
    return begun


def test_a_lost_run_is_resumed_in_its_own_folder(
    outcomes: list[Exception | None], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes += [RunLostError(LOST), RunLostError(LOST), None]
    resumed = {**CONFIG, "resume": "/srv/results/r"}
    assert supervised(CONFIG, 2) == [CONFIG, resumed, resumed]
    assert capsys.readouterr().err.count("No heartbeat") == 2  # each time with the reason


def test_a_run_without_a_name_gets_one_that_its_resumption_names(outcomes: list[Exception | None]) -> None:
    outcomes += [RunLostError(LOST), None]
    first, second = supervised({}, 1)
    assert second["resume"] == f"{Settings().results}/{first['run-name']}"


def test_it_is_resumed_no_more_than_so_often(outcomes: list[Exception | None]) -> None:
    outcomes += [RunLostError(LOST)] * 3
    *begun, end = supervised(CONFIG, 2)
    assert len(begun) == 3
    assert end == {"error": LOST}


@pytest.mark.parametrize(
    "text",
    ["finished:failed: ServerApp failed with exception: no quorum", "finished:stopped: ", "not finished after 60 s"],
)
def test_a_run_that_failed_by_itself_or_was_stopped_is_not_resumed(text: str, outcomes: list[Exception | None]) -> None:
    outcomes += [FlowerError(text)]
    assert supervised(CONFIG, 5) == [CONFIG, {"error": text}]


def test_a_run_lost_before_its_first_checkpoint_begins_once_more(
    outcomes: list[Exception | None], tmp_path: Path
) -> None:
    """The reasons are the server's own words."""
    reasons = []
    (tmp_path / METRICS_FILE).write_text(json.dumps({"event": "run"}) + "\n")
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises((SettingsError, RunError)) as raised:
            find_checkpoint(Settings(resume=str(folder)))
        reasons.append(f"finished:failed: {superlink.APP_FAILED}: {raised.value}")
    for reason in reasons:
        outcomes += [RunLostError(LOST), FlowerError(reason), None]
        *_, last = supervised(CONFIG, 2)
        assert last == {**CONFIG, "run-name": "r-again"}
        outcomes += [FlowerError(reason)]  # a `resume` of the user's own is an error of the user's own
        assert len(supervised({**CONFIG, "resume": str(tmp_path)}, 2)) == 2


def test_a_standing_run_that_is_lost_begins_once_more_in_its_folder(outcomes: list[Exception | None]) -> None:
    """It has no checkpoints, and without a name it writes to the folder of all standing runs."""
    config: dict[str, Scalar] = {"observe-only": True, "observe-every": 60.0, "results": "/srv/results"}
    outcomes += [RunLostError(LOST), RunLostError(LOST), None]
    assert supervised(config, 2) == [config] * 3


def test_a_run_resumed_from_an_older_checkpoint_goes_on_from_its_last_one(outcomes: list[Exception | None]) -> None:
    outcomes += [RunLostError(LOST), RunLostError(LOST), None]
    older = {**CONFIG, "resume": "/srv/results/r/checkpoints/000003.safetensors"}
    last = {**CONFIG, "resume": "/srv/results/r"}
    assert supervised(older, 2) == [older, last, last]


# The end of a run, as its SuperLink tells it


class Asked:
    """A SuperLink with given answers to the question how a run is; the last one stays."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.stopped, self.answers = 0, list[int](), list[Run | FlowerError]()
        superlink.write_connection(folder, "h:1", None)
        monkeypatch.setattr(superlink, "ASKED", 0.01)
        monkeypatch.setattr(control, "runs", self.runs)
        monkeypatch.setattr(control, "stop", lambda address, ca, number: self.stopped.append(number))
        monkeypatch.setattr(control, "log", lambda address, ca, number: f"log of {number} at {address}")

    def runs(self, address: str, ca: Path | None, number: int) -> list[Run]:
        assert (address, ca, number) == ("h:1", None, 1)
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, FlowerError):
            raise answer
        return [answer]


def run_is(status: str, details: str = "") -> Run:
    return Run(1, {}, status, details)


AWAY = FlowerError("no SuperLink answers")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(tmp_path, monkeypatch)


def test_a_superlink_that_is_away_for_a_while_ends_no_run(asked: Asked, tmp_path: Path) -> None:
    asked.answers = [AWAY, run_is("running"), AWAY, run_is("finished:completed")]
    superlink.finish(tmp_path, "1", 60.0)
    assert asked.asked == 4


def test_a_log_that_breaks_off_ends_no_run(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "flwr"
    program.write_text("#!/bin/sh\necho a line; exit 1\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(superlink, "program", lambda name: str(tmp_path / name))
    asked.answers = [run_is("running"), run_is("finished:completed")]
    superlink.finish(tmp_path, "1", 60.0, show=True)
    assert asked.asked == 2


def test_an_interruption_reaches_no_log(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower would answer it with a traceback."""
    program = tmp_path / "flwr"
    told = tmp_path / "group"
    code = f"import os, pathlib; pathlib.Path({str(told)!r}).write_text(str(os.getpgrp()))"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(superlink, "program", lambda name: str(tmp_path / name))
    asked.answers = [run_is("finished:completed")]
    superlink.finish(tmp_path, "1", 60.0, show=True)
    assert int(told.read_text()) != os.getpgrp()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (run_is("finished:failed", "No heartbeat received from the task"), RunLostError, "No heartbeat.*\nlog of 1"),
        (run_is("finished:failed", f"{superlink.APP_FAILED}: no quorum"), FlowerError, "no quorum\nlog of 1 at h:1$"),
        (run_is("finished:stopped"), FlowerError, "finished:stopped"),
        (AWAY, RunLostError, "has not answered"),
        (FlowerError(f"refuses: {superlink.UNKNOWN}."), RunLostError, "without its database"),
    ],
)
def test_how_a_run_ended(
    answer: Run | FlowerError, error: type[Exception], text: str, asked: Asked, tmp_path: Path
) -> None:
    asked.answers = [answer]
    with pytest.raises(FlowerError, match=text) as raised:
        superlink.finish(tmp_path, "1", 60.0, silent=0.1)
    assert type(raised.value) is error


def test_a_run_that_does_not_end_is_stopped(asked: Asked, tmp_path: Path) -> None:
    asked.answers = [run_is("running")]
    with pytest.raises(FlowerError, match=r"not finished after 0\.2 s"):
        superlink.finish(tmp_path, "1", 0.2)
    assert asked.stopped == [1]


# The command


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    (tmp_path / "ca.crt").touch()
    return ["--superlink", "h:1", "--root-certificates", str(tmp_path / "ca.crt")]


def test_a_missing_authority_is_named(where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(where[-1]).unlink()
    assert submit.main([*where, "run"]) == 2
    assert "ca.crt: no such file" in capsys.readouterr().err


def test_keys_of_another_user_are_refused_without_a_traceback(
    where: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`fedtta keys` makes a folder that only its owner can enter."""

    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert submit.main([*where, "run"]) == 2
    assert capsys.readouterr().err == f"error: [Errno 13] Permission denied: {where[-1]!r}\n"


def test_who_is_interrupted_learns_that_the_run_goes_on(
    where: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finish(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit.superlink, "start", lambda home, config: "1")
    monkeypatch.setattr(submit.superlink, "finish", finish)
    assert submit.main([*where, "run"]) == 130
    assert capsys.readouterr().err == "interrupted; a run that has begun goes on: `flwr stop` ends it\n"


@pytest.mark.parametrize("word", ["rounds=-1", "share=none", "min-clients=11"])
def test_values_are_refused_before_anything_is_submitted(
    word: str, where: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The app would end with a traceback, and a run that failed would be left at the SuperLink."""
    monkeypatch.setattr(submit.superlink, "start", None)
    assert submit.main([*where, "run", "--set", word]) == 2
    assert capsys.readouterr().err.startswith(f"error: {word.partition('=')[0]} = ")
    assert flower_cli.main(["--set", word]) == 2
    assert capsys.readouterr().err.startswith(f"error: {word.partition('=')[0]} = ")


def test_a_signed_bundle_needs_the_database(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*where, "run", "--signed", str(tmp_path / "app.fab")]
    assert submit.main(words) == 2
    assert "--database" in capsys.readouterr().err
    assert submit.main([*words, "--database", str(tmp_path / "nowhere.db")]) == 2
    assert "app.fab" in capsys.readouterr().err


def test_a_run_is_not_resumed_less_than_never(where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main([*where, "run", "--supervise", "-1"]) == 2
    assert "--supervise -1: allowed is 0 or more" in capsys.readouterr().err


def test_a_run_has_a_day_and_a_standing_one_no_end(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    def finish(home: Path, number: str, timeout: float, *_: Any, **__: Any) -> None:
        found.append(timeout)

    monkeypatch.setattr(superlink, "start", lambda *_: "1")
    monkeypatch.setattr(superlink, "finish", finish)
    standing = ["--set", "observe-only=true"]
    for words in ([], standing, [*standing, "--supervise", "1"], [*standing, "--timeout", "7"]):
        assert submit.main([*where, "run", *words]) == 0
    assert found == [86400.0, math.inf, math.inf, 7.0]


def test_a_lost_run_says_how_to_continue(
    where: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any) -> None:
        raise RunLostError(LOST)

    monkeypatch.setattr(superlink, "start", lost)
    assert submit.main([*where, "run"]) == 1
    assert "--supervise" in capsys.readouterr().err


def test_the_error_of_a_failed_run_has_the_logs_of_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> None:
        raise FlowerError("finished:failed: rounds = -1")

    monkeypatch.setattr(superlink, "run", refused)
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        (tmp_path / f"node-{node}" / deployment.NODE_LOG).write_text(f"first\nlast of {node}\n")
    with pytest.raises(FlowerError, match=r"(?s)^finished:failed: rounds = -1\n.*last of 0.*last of 1"):
        deployment.run(tmp_path, {}, 1.0)
