"""`fedtta devices --check`: one line an alert, and the exit status."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtta import cli
from fedtta.messages.replies import Telemetry
from fedtta.server.observation import Kept
from fedtta.simulation import control, devices
from fedtta.simulation.devices import Device
from fedtta.simulation.superlink import FlowerError


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet of which one has fallen silent, one was removed, one never came, and one's guard holds."""
    now = datetime.now(UTC)
    fleet = [
        Device("held", 1, "online", now),
        Device("silent", 2, "offline", now - timedelta(hours=2)),
        Device("removed", 3, "unregistered", now - timedelta(days=2)),
        Device("new", 4, "registered", None),
    ]
    monkeypatch.setattr(devices, "listed", lambda *_: fleet)
    monkeypatch.setattr(control, "certificate_ends", lambda _: time.time() + 31 * 86_400)
    kept = Kept(tmp_path / "results" / "run")
    for images in (100, 700, 1300):
        telemetry = Telemetry(name="held", holding=True, predictions=images, saving_fails=images == 100)
        kept.append(time.time() - 2000 + images, 1, "1", telemetry)
    return tmp_path / "results"


def check(*words: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(cli.app, ["devices", "--check", *words])
    return done.exit_code, done.output.splitlines()


def test_alerts_are_lines_and_status_1(results: Path) -> None:
    status, lines = check("--results", str(results))
    assert status == 1
    assert [line.partition(", since ")[0] for line in lines] == [
        "held: guard-holding-samples: the guard has held for 1,200 images or more (limit 1,000)",
        "silent: silent-minutes: silent for 120 minutes (limit 10)",
    ]


def test_a_folder_that_is_not_there_is_no_fleet_without_alerts(results: Path) -> None:
    """Such as a relative one in a line of cron: whatever the devices say, the rules about it would find nothing."""
    status, lines = check("--results", str(results / "elsewhere"))
    assert status == 2
    assert not any("held" in line for line in lines)


def test_no_alerts_are_status_0(results: Path) -> None:
    (results / "alerts.toml").write_text("silent-minutes = 180\nguard-holding-samples = 1201\n")
    assert check("--results", str(results), "--alerts", str(results / "alerts.toml")) == (0, [])


def test_a_device_that_predicts_rarely_is_held_for_as_long_as_its_telemetry_goes_back(results: Path) -> None:
    """An image and a reading a minute: no hour of telemetry has the limit, all of it has."""
    kept = Kept(results / "later")
    for minute in range(1100):
        telemetry = Telemetry(name="new", holding=True, predictions=minute)
        kept.append(time.time() - 60 * (1100 - minute), 4, "1", telemetry)
    lines = [line.partition(", since ")[0] for line in check("--results", str(results))[1]]
    assert "new: guard-holding-samples: the guard has held for 1,099 images or more (limit 1,000)" in lines


def test_a_certificate_that_ends_soon_is_an_alert(results: Path) -> None:
    off = "silent-minutes = 180\nguard-holding-samples = 1201\n"
    (results / "alerts.toml").write_text(f"{off}certificate-days = 32\n")
    words = ("--results", str(results), "--alerts", str(results / "alerts.toml"))
    status, (line,) = check(*words)
    assert status == 1
    assert line.startswith("SuperLink: certificate-days: its certificate is valid until 20")
    assert check(*words, "--insecure") == (0, [])


def test_a_superlink_that_does_not_answer_is_status_1(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*_: object) -> list[Device]:
        raise FlowerError("no answer")

    monkeypatch.setattr(devices, "listed", listed)
    assert check("--results", str(results)) == (1, ["failed: no answer"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--alerts", "none.toml"], "none.toml"),
        (["--alerts", "{wrong}"], "most-drift = 3.0: allowed is at most 1"),
        (["--watch"], "--check is allowed without --watch"),
    ],
)
def test_what_is_wrong_is_status_2(results: Path, words: list[str], told: str) -> None:
    (results / "wrong.toml").write_text("most-drift = 3")
    status, lines = check("--results", str(results), *(word.format(wrong=results / "wrong.toml") for word in words))
    assert (status, len(lines)) == (2, 1)
    assert told in lines[0]


def test_rules_without_check_are_status_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["devices", "--once", "--alerts", str(tmp_path)])
    assert done.exit_code == 2
