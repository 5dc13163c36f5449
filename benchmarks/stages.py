"""Runs that build on each other: each has a folder, and one that is complete is not run again."""

from __future__ import annotations

from pathlib import Path

from benchmarks.protocol import WHERE_KEYS
from benchmarks.record import differing
from server.report import METRICS_FILE, Results, read_results
from settings import Settings, SettingsError


def stage(folder: Path, settings: Settings) -> Results:
    """Run `settings` in `folder`, or read what is there, and return its results.

    Raises
    ------
    SettingsError
        The folder holds a run with other settings, or one that did not complete.
    RunError
        The run failed.
    """
    from simulation import simulate

    if not (folder / METRICS_FILE).exists():
        simulate(settings, folder)
    check_complete(folder, settings)
    return read_results(folder / METRICS_FILE)


def check_complete(folder: Path, settings: Settings) -> None:
    """Raise SettingsError unless a run folder holds a completed run of these settings, wherever it ran."""
    results = read_results(folder / METRICS_FILE)
    if results.end is None or results.end.status != "completed":
        raise SettingsError(f"{folder} holds a run that did not complete; remove it to run that seed again")
    if other := differing(results.run.settings if results.run else {}, settings, WHERE_KEYS):
        raise SettingsError(
            f"{folder} holds a run with other settings ({', '.join(other)}); remove it or choose another --folder"
        )
