"""Two runs made up so that every number of a summary can be computed by hand."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from fedtta.server.report import METRICS_FILE, Results, read_results
from fedtta.settings import Settings

SHIFTS = ("original", "out_of_client")
#: seed → method → distribution → correct of 4 at each of two clients.
CORRECT = {
    1: {"fedavg": ((1, 3), (3, 2)), "personal": ((4, 3), (0, 1)), "btfl": ((4, 2), (1, 2))},
    2: {"fedavg": ((2, 2), (4, 2)), "personal": ((4, 4), (1, 1)), "btfl": ((4, 3), (1, 2))},
}


def events(seed: int, settings: Settings, status: str = "completed", training: str = "t") -> list[dict[str, Any]]:
    """What a run of this seed writes."""
    run = {"time": "2030-01-01T00:00:00+00:00", "versions": {"torch": "9.9"}, "hardware": "abacus", "commit": "abc"}
    evaluations = [
        {"event": "evaluation", "training": training, "method": method, "shift": shift, "partition": client}
        | {"correct": correct, "total": 4}
        for method, shifts in CORRECT[seed].items()
        for shift, clients in zip(SHIFTS, shifts, strict=True)
        for client, correct in enumerate(clients)
    ]
    return [
        {"event": "run", "settings": settings.flat(), **run},
        {"event": "note", "text": "made up"},
        *evaluations,
        {"event": "leak_check", "training": training, "checked": 16, "leaked": 0},
        {"event": "end", "seconds": 10.0 * seed, "status": status},
    ]


def write_run(folder: Path, seed: int, settings: Settings, status: str = "completed", training: str = "t") -> Path:
    """Write a run folder as a simulation would."""
    folder.mkdir(parents=True)
    lines = [json.dumps(event) for event in events(seed, settings, status, training)]
    (folder / METRICS_FILE).write_text("\n".join(lines) + "\n")
    (folder / "report.html").write_text(f"<p>seed {seed}</p>")
    return folder


def results(seed: int, settings: Settings | None = None, training: str = "t") -> Results:
    """Return what a run of this seed wrote."""
    with tempfile.TemporaryDirectory() as folder:
        made = write_run(Path(folder) / "run", seed, settings or Settings(), training=training)
        return read_results(made / METRICS_FILE)
