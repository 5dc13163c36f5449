"""A results folder with made runs and devices, the server of its pages as a process, and Debian's Chromium.

`python -m tests.browser.stage FOLDER` is `fedtta watch` beside a SuperLink that lists the devices.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from fedtta.messages.replies import LATENCY_BOUNDS, Telemetry
from fedtta.server.observation import Kept
from fedtta.server.report.live import LIVE_FILE, STATES, ClientState, Live
from fedtta.server.report.page import write_report
from fedtta.simulation import devices
from fedtta.simulation.devices import Device
from fedtta.watch.__main__ import main as watch
from tests.report.runs import adapting_together, clients_event, learned_rates, training_round, whole_run, write_events

ROOT = Path(__file__).parent.parent.parent
#: What a device or a run may be called or say, and must not become part of a page.
HOSTILE = '<img src="x" onerror="window.injected = 1"><script>window.injected = 1</script>'
ENDED, RUNNING = "digits-ended", "digits-running"
CLIENTS = 8
PLANNED = 20
DEVICES = ("clinic-a", "clinic-b", "van-1", "van-2", "ward-1", "ward-2")
RULES = "silent-minutes = 10\nguard-holding-samples = 1000\nleast-estimated-accuracy = 0.6\nmodel-refused-by = 2\n"


def chromium() -> str | None:
    """Return the path of the browser, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Browser]:
    path = chromium()
    assert path
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        try:
            yield made
        finally:
            made.close()


# Runs


def round_event(number: int) -> dict[str, Any]:
    """A training round of the run that goes on."""
    everyone = list(range(CLIENTS))
    return training_round(
        "cross_entropy", number, sampled=everyone, replied=everyone, train_loss=0.3 + 2 * 0.8**number,
        validation_accuracy=0.9 - 0.8 * 0.75**number, wall_seconds=4.0 + math.sin(number), bytes_up=2_300_000,
        bytes_down=2_300_000, train_seconds=[0.7] * CLIENTS,
    )  # fmt: skip


def begun(rounds: int) -> list[dict[str, Any]]:
    """Events of a run that goes on."""
    run, clients, *_ = whole_run(CLIENTS)
    clients["names"] = [*DEVICES, "van-3", "ward-3"]
    late = {"event": "late", "training": "cross_entropy", "round": 2, "partition": 3, "node_id": 7, "reason": HOSTILE}
    return [run, clients, *map(round_event, range(1, rounds + 1)), late, {"event": "note", "text": HOSTILE}]


def live(rounds: int, answered: int = 3) -> bytes:
    """The state of the run that goes on: every client does something else."""
    now = time.time()
    states = ("answered", "answered", "asked", "late", "asked", "answered", "gone", "refused")
    clients = {partition: ClientState(state, now - 7 * partition) for partition, state in enumerate(states)}
    assert set(states) <= set(STATES)
    return Live(
        now, now - 130, "train", now - 9, CLIENTS, answered, rounds + 1, rounds, PLANNED, now + 80, clients
    ).to_json()


def telemetry(name: str, step: int) -> Telemetry:
    """What a device says at one of its readings, 0 to 59."""
    number, images = DEVICES.index(name), 120 * (step + 1)
    wave = 0.5 + 0.3 * math.sin(step / 9 + number)
    known = Telemetry(
        name=name, software={"fedtta": "0.1.0", "flwr": "1.39.0", "torch": "2.7.0"}, uptime=60.0 * (step + 1),
        model="digits-running/ce/12/4f2a", adapter="fedthe", predictions=images, samples=images, unsaved_samples=40,
        latency=[0, 3 * step, 40 * step, 9 * step, step, *[0] * (len(LATENCY_BOUNDS) - 4)], latency_sum=0.4 * step,
        weight=wave, weights=[0.5 + 0.3 * math.sin((step - ago) / 9 + number) for ago in range(min(step, 40), 0, -1)],
        estimated_accuracy=0.82 - 0.03 * number, drift=0.05 * number, disk_used=48_000_000, disk_free=9_000_000_000,
        memory=410_000_000, data_samples=900 + number, data_skipped=number, guard_events={"one-class": number},
    )  # fmt: skip
    if name == "ward-1":
        known = replace(known, holding=step > 20, guard_events={"noise": 2, "one-class": 1})
    if name == "ward-2":
        known = replace(known, estimated_accuracy=0.52, drift=0.41)
    if name.startswith("van"):
        known = replace(known, refused=f"digits-running/ce/13/9c1d: accuracy 0.61 is below 0.79 {HOSTILE}")
    if name == "clinic-b":
        known = replace(known, candidate="shadow digits-running/ce/13/9c1d")
    return known


def keep(folder: Path, step: int, at: float) -> None:
    """Write a reading of every device but the one that has fallen silent."""
    kept = Kept(folder)
    for node, name in enumerate(DEVICES):
        if name != "van-2" or step < 40:
            kept.append(at, 1000 + node, "1", telemetry(name, step))


def report(folder: Path) -> Path:
    """Write the report of a run that has learned rates and adapted to streams, and return its path."""
    streams = [*learned_rates(3), *adapting_together(15, ("fog", "snow", "frost"), ("tent", "bbn"))]
    events = [clients_event(), *streams, {"event": "end", "seconds": 60.0, "status": "completed"}]
    return write_report(write_events(folder / "digits-streams", events))


def results(folder: Path) -> Path:
    """Make a run that has ended, and one that goes on and has devices."""
    write_events(folder / ENDED, whole_run())
    running = write_events(folder / RUNNING, begun(6))
    (running / LIVE_FILE).write_bytes(live(6))
    now = time.time()
    for step in range(60):
        keep(running, step, now - 60 * (60 - step))
    return folder


class Run:
    """The run that goes on: writes its `live.json` once a second, and a round when it is told to."""

    def __init__(self, results: Path) -> None:
        self.folder, self.rounds = results / RUNNING, 6
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Run:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def next_round(self) -> None:
        self.rounds += 1
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(round_event(self.rounds)) + "\n")
        self._write()

    def _write(self) -> None:
        temporary = self.folder / ".live.json.test"
        temporary.write_bytes(live(self.rounds))
        temporary.replace(self.folder / LIVE_FILE)

    def _follow(self) -> None:
        while not self._ended.wait(1.0):
            self._write()


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Serve a results folder as a user does, and yield the address without a slash at its end."""
    (folder / "alerts.toml").write_text(RULES)
    words = [sys.executable, "-m", "tests.browser.stage", str(folder), *options]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), process.stderr.read()
            yield address.rstrip("/")
        finally:
            process.terminate()
            process.communicate(timeout=30)


def listed(*_: object) -> list[Device]:
    """What the SuperLink says: one device is offline, and one has never connected."""
    now = datetime.now(UTC)
    seen = {name: now - timedelta(seconds=7 * number) for number, name in enumerate(DEVICES)}
    seen["van-2"] = now - timedelta(minutes=21)
    found = [
        Device(name, 1000 + number, "offline" if name == "van-2" else "online", seen[name])
        for number, name in enumerate(DEVICES)
    ]
    return [*found, Device("ward-3", 2000, "registered", None)]


if __name__ == "__main__":
    devices.listed = listed
    results_folder, *given = sys.argv[1:]
    made = ["--listen", "127.0.0.1:0", "--superlink", "made:1", "--alerts", f"{results_folder}/alerts.toml"]
    sys.exit(watch([results_folder, *made, *given]))
