"""Provenance: when, where and from which code a result was computed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedtta.server.environment import describe
from fedtta.server.events import RunError
from fedtta.server.report import Results
from fedtta.settings import Settings
from fedtta.settings.files import write_atomically

RESULTS = Path(__file__).parent / "results"
#: What runs did before a setting existed, where its default is something else: the mean had no limits.
BEFORE: dict[str, Any] = {"clip-factor": 0.0, "max-share": 0.0}


def provenance() -> dict[str, Any]:
    """Return time (UTC), commit, versions, hardware and load, as JSON values.

    The load is the mean number of processes that wanted a core in the last minute, this one included: far above one per
    core, wall-clock times mean little.
    """
    environment = {key: value for key, value in describe(Settings()).items() if key not in ("settings", "bundle")}
    return {**environment, "load_average": round(os.getloadavg()[0], 2)}


def provenance_of_run(results: Results) -> dict[str, Any]:
    """Return where and when a run was computed, and its duration; RunError if it does not say so, or has no end."""
    run, end = results.run, results.end
    if run is None or end is None:
        raise RunError("a run has no header or no end")
    own = {"time": run.time, "commit": run.commit, "hardware": run.hardware, "versions": run.versions}
    return {**own, "wall_seconds": round(end.seconds), "load_average": provenance()["load_average"]}


def differing(found: Mapping[str, Any], settings: Settings, ignored: Collection[str] = ()) -> list[str]:
    """Return the keys in which recorded settings differ from these.

    A key missing in a record is younger than the record, which was made with today's default.
    """
    defaults, expected = Settings().flat(), settings.flat()
    return [key for key in expected if key not in ignored and found.get(key, defaults[key]) != expected[key]]


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write `content` atomically and return the path; ValueError for NaN and infinity, which JSON does not have."""
    return write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
