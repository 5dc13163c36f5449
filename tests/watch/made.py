"""A made results folder: a run that goes on, and devices in several states."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtta.messages.replies import Telemetry
from fedtta.server.observation import Kept
from fedtta.server.report.live import LIVE_FILE, ClientState, Live
from fedtta.simulation.devices import Device
from tests.report.runs import training_round, write_events

#: Everything that telemetry may hold.
FULL: dict[str, Any] = {
    "software": {"fedtta": "0.9.1", "torch": "2.7.0"}, "uptime": 7200.0, "model": "3f2c1ab", "candidate": "shadow 77aa",
    "refused": "12ab: accuracy 0.41 is below 0.55", "adapter": "fedthe_plus[lr=0.001]", "choice": "btfl",
    "phase": "train", "predictions": 1200, "refusals": 3, "samples": 1100, "unsaved_samples": 40,
    "latency": [0, 10, 30, 40, 15, 5, 0, 0, 0, 0, 0, 0, 0, 0], "latency_sum": 1.25, "weight": 0.62,
    "weights": [0.5, 0.55, 0.7, 0.62], "estimated_accuracy": 0.81, "drift": 0.2, "holding": True,
    "guard_events": {"collapse": 2, "constant images": 1}, "saving_fails": True, "disk_used": 123_000_000,
    "disk_free": 9_876_000_000, "memory": 512_000_000, "data_samples": 812, "data_skipped": 3,
}  # fmt: skip


def telemetry(name: str, **fields: Any) -> Telemetry:
    return Telemetry(name=name, **fields)


def say(folder: Path, *devices: tuple[int, Telemetry], at: float | None = None) -> None:
    """Add lines to `devices.jsonl` of a run folder, as a server does."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = Kept(folder)
    for node, one in devices:
        kept.append(time.time() if at is None else at, node, folder.name, one)


def listed(name: str, node: int, status: str = "online", seen: float | None = None) -> Device:
    return Device(name, node, status, None if seen is None else datetime.fromtimestamp(seen, UTC))


def run_events(rounds: int = 3) -> list[dict[str, Any]]:
    return [
        {"event": "run", "time": "2026-11-21T10:00:00Z", "settings": {}, "versions": {}, "hardware": "none"},
        {"event": "clients", "class_counts": None, "classes": ["a", "b"], "sizes": [[8, 1, 1]] * 3},
        *(
            training_round(
                "cross_entropy", number, train_loss=1.0 / number, validation_accuracy=0.1 * number, replied=[0, 1],
                wall_seconds=2.0 * number, bytes_up=100, bytes_down=1000, personal_validation_accuracy=0.5,
            )
            for number in range(1, rounds + 1)
        ),
        *(
            {"event": event, "training": "cross_entropy", "round": 2, "partition": 2, "node_id": 7, "reason": "x"}
            for event in ("refused", "failed", "late", "late", "limited")
        ),
    ]  # fmt: skip


def made(folder: Path) -> Path:
    """Make a results folder with everything that has metrics, and return it."""
    run = write_events(folder / "r1", run_events())
    states = {0: ClientState("asked", 1.0), 1: ClientState("answered", 1.0), 2: ClientState("late", 1.0)}
    (run / LIVE_FILE).write_bytes(Live(time.time(), 1.0, "train cross_entropy", 1.0, clients=states).to_json())
    write_events(folder / "r0", [*run_events(1), {"event": "end", "seconds": 3.0, "status": "completed"}])
    say(run, (1, telemetry("site-a", **FULL)), (2, telemetry("site-b")))
    return folder


def damage(path: Path) -> None:
    """Add half a JSON object as a whole line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "x"})[:-3] + "\n")
