"""What the SuperLink says, asked now and then: all devices for the pages, beside telemetry, and its certificate."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from fedtta.messages.record import printable
from fedtta.messages.replies import Telemetry
from fedtta.simulation.devices import Device
from fedtta.simulation.superlink import FlowerError
from fedtta.watch.fleet import FleetDevice, history, read_fleet

PAUSE = 10.0  # seconds between two questions to the SuperLink, at least
LOOK = 600.0  # seconds between two looks at its certificate


class Fleet:
    """The devices of a results folder and of a SuperLink.

    Parameters
    ----------
    folder : Path
        The results folder.
    ask : callable, optional
        Returns what the SuperLink lists, as `fedtta.simulation.devices.listed` does; None: there is none to ask.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        ask: Callable[[], Sequence[Device]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.asks = folder, ask is not None
        self.problem = ""  # why the last question failed; the devices are those of the last answer
        self._ask, self._clock = ask, clock
        self._listed: Sequence[Device] = ()
        self._again = -1e9
        self._lock = threading.Lock()

    def devices(self) -> list[FleetDevice]:
        """Return all devices; it may wait for the SuperLink, so call it in a thread."""
        return read_fleet(self.folder, self._current())

    def history(self, device: FleetDevice) -> list[tuple[float, Telemetry]]:
        """Return the last telemetry of one of these devices; see `fedtta.watch.fleet.history`."""
        return history(self.folder, device.name, node_id=device.key[1])

    def _current(self) -> Sequence[Device]:
        """Return the list; where another thread is asking for it, the last one."""
        if self._ask is None or self._clock() < self._again or not self._lock.acquire(blocking=False):
            return self._listed
        try:
            self._listed, self.problem = self._ask(), ""
        except (FlowerError, OSError, ValueError, DecodeError) as error:
            self.problem = printable(" ".join(str(error).split()))
        finally:
            self._again = self._clock() + PAUSE
            self._lock.release()
        return self._listed


class Ending:
    """When the SuperLink's certificate ends: asked for every `LOOK` seconds, and the last answer where it gives none.

    Parameters
    ----------
    ask : callable
        Returns seconds since 1970, as `fedtta.simulation.control.certificate_ends` does.
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, ask: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._known: float | None = None
        self._again = -1e9

    def __call__(self) -> float | None:
        """Return it; None: not known yet."""
        if self._clock() >= self._again:
            with contextlib.suppress(FlowerError):  # it does not answer now: the list of devices says so
                self._known = self._ask()
            self._again = self._clock() + (PAUSE if self._known is None else LOOK)
        return self._known
