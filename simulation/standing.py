"""The standing run of a SuperLink: it asks all devices how they are, and trains nothing (`observe-only = true`).

One is enough for all who look. A run of another kind goes on beside it: Flower runs several ServerApps at once, and a
SuperNode works on their messages one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fedtta.server.observation import STANDING
from fedtta.simulation.control import FlowerError, runs, stop
from fedtta.simulation.superlink import APP_FAILED, Scalar

KEY = "observe-only"


class Standing:
    """Makes sure that a standing run is there, and in the end stops the one that it has started.

    Parameters
    ----------
    superlink, ca
        As in `control.client`.
    begin : callable
        Submits a run with a config and returns its number.
    results : Path
        Folder of run folders, on the SuperLink's machine.
    every : float
        Seconds between two questions to a device.
    """

    def __init__(
        self, superlink: str, ca: Path | None, begin: Callable[[Mapping[str, Scalar]], str], results: Path, every: float
    ) -> None:
        self._where, self._begin = (superlink, ca), begin
        self._config: dict[str, Scalar] = {
            KEY: True, "observe-every": every, "results": str(results.expanduser().resolve()), "run-name": STANDING,
        }  # fmt: skip
        self.started: int | None = None

    def ensure(self) -> None:
        """Start a standing run if none is there.

        Raises
        ------
        FlowerError
            The SuperLink does not answer or refuses, or the run that this had started has failed.
        """
        found = runs(*self._where)
        if any(run.config.get(KEY) and not run.over for run in found):
            return
        mine = next((run for run in found if run.number == self.started), None)
        if mine is not None and mine.details.startswith(APP_FAILED):
            raise FlowerError(f"run {mine.number}: {mine.details}")
        self.started = int(self._begin(self._config))

    def stop(self) -> None:
        """Stop the run that was started, if it is still there; say so if that fails."""
        if self.started is None:
            return
        try:
            if any(run.number == self.started and not run.over for run in runs(*self._where)):
                stop(*self._where, self.started)
        except FlowerError as error:
            print(f"run {self.started} could not be stopped: {error}", file=sys.stderr)
