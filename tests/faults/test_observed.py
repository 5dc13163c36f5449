"""A standing run beside a training run: both devices are seen, one while it trains, and nothing changes the bits.

Flower's SuperNode works on one message after the other, of all runs. A question to a node that trains is answered after
its training; until then it is seen by its heartbeat and by what it said before.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedtta.messages.replies import Telemetry
from fedtta.settings import Settings
from fedtta.simulation import control, devices, standing, superlink
from fedtta.watch.fleet import damaged_lines, history, read_fleet
from tests.faults.stage import PATIENCE, Stage, stage, wait_until
from tests.server.test_run import assert_same_results, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(4 * PATIENCE)]
EVERY = 5.0
SETTINGS = Settings(
    clients=2, fraction=0.1, rounds=2, local_epochs=20, image_size=16, methods="fedavg", shifts="original",
    device="cpu", observe_every=EVERY,
)  # fmt: skip


def heard(stage: Stage, partition: int) -> list[tuple[float, Telemetry]]:
    return history(stage.root / "results", stage.names[partition], 10_000)


@contextlib.contextmanager
def watching(stage: Stage, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `fedtta devices --watch` as a process, and end it."""
    command = [
        sys.executable, "-m", "fedtta", "devices", "--watch", "--every", str(EVERY), "--superlink", address,
        "--root-certificates", str(stage.keys.ca), "--results", str(stage.root / "results"),
    ]  # fmt: skip
    with (stage.root / "watch.log").open("w") as log, subprocess.Popen(
        command, cwd=superlink.PROJECT, env=superlink.environment(stage.home), stdout=log, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_devices_are_seen_while_one_trains(tmp_path: Path) -> None:
    with stage(tmp_path) as made:
        address, _ = superlink.connection(made.home)
        with watching(made, address) as process:
            wait_until(lambda: all(heard(made, i) for i in range(2)), "telemetry of both devices")
            training = made.run(SETTINGS, run_name="watched")
            wait_until(lambda: made.in_training(0), "training", training)
            made.agents[0].send_signal(signal.SIGSTOP)  # it takes as long as this test wants
            try:
                time.sleep(EVERY)  # what it said before has come
                stopped_at = time.time()
                before = len(heard(made, 1))
                wait_until(lambda: len(heard(made, 1)) >= before + 2, "telemetry of the other device")
                listed = devices.listed(address, made.keys.ca)
                fleet = {one.name: one for one in read_fleet(made.root / "results", listed)}
                assert fleet["0"].status == fleet["1"].status == "online"
                assert fleet["0"].telemetry is not None
                assert fleet["0"].telemetry_at < stopped_at < fleet["1"].telemetry_at
            finally:
                made.agents[0].send_signal(signal.SIGCONT)
            training.result()
            wait_until(lambda: heard(made, 0)[-1][0] > stopped_at, "telemetry of the device that was busy")
            assert process.poll() is None
        assert process.returncode == 143
        text = (made.root / "watch.log").read_text()
        assert " status=online " in text
        (stood,) = [one for one in control.runs(address, made.keys.ca) if one.config.get(standing.KEY)]
        assert stood.over
        results = made.root / "results"
        wait_until(lambda: not made.processes("flwr-serverapp"), "the end of the standing run")
        assert damaged_lines(results) == 0
        assert {path.name for path in (results / "watch").iterdir()} == {"devices.jsonl", "settings.toml"}
        assert (results / "watched" / "devices.jsonl").exists()
        times = [at for at, _ in heard(made, 1)]
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
        print(f"seconds between two answers: median {np.median(gaps):.1f}, longest {gaps[-1]:.1f}")
        assert_same_results(results / "watched", run(tmp_path / "alone", SETTINGS.replace(observe_every=0.0)))
