"""Alerts of a results folder: looked for at an interval, logged, and sent to the webhook."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType
from typing import Self

from fastapi import APIRouter, FastAPI

from fedtta.messages.replies import Telemetry
from fedtta.watch.alerts import Alert, AlertLog, Change, HeldSamples, evaluate
from fedtta.watch.fleet import FleetDevice
from fedtta.watch.rules import Rules
from fedtta.watch.webhook import Webhook

LOG = logging.getLogger(__name__)
INTERVAL = 5.0  # seconds between two looks
LEAVING = 2.0  # seconds for a look that is under way when the server stops; it may wait for a SuperLink

Fleet = Callable[[], Sequence[FleetDevice]]
#: A device → its telemetry with the seconds since 1970 at which it arrived, oldest first.
History = Callable[[FleetDevice], Sequence[tuple[float, Telemetry]]]


class Alerting:
    """Looks for alerts at an interval while it is entered, in a thread of its own.

    Every alert that begins or ends is one line of the log and one message to the webhook. An alert that lasted when the
    process ended begins again with the next one.

    Parameters
    ----------
    rules : Rules
    fleet, history : callable
        What is known of the devices at the moment; see `fedtta.watch.fleet`.
    certificate : callable
        Returns when the SuperLink's certificate ends, in seconds since 1970; None: not known.
    interval : float
        Seconds.
    clock : callable
        Seconds since 1970.
    """

    def __init__(
        self,
        rules: Rules,
        fleet: Fleet,
        history: History,
        certificate: Callable[[], float | None] = lambda: None,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rules, self._fleet, self._history, self._clock = rules, fleet, history, clock
        self._certificate = certificate
        self._held, self._log = HeldSamples(), AlertLog()
        self._known: set[Hashable] = set()
        self._interval, self._ended = interval, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="alerts", daemon=True)
        self._webhook: Webhook | None = None
        self._left = ExitStack()
        self._problem = ""

    def __enter__(self) -> Self:
        """Begin to look."""
        if self.rules.webhook:
            self._webhook = self._left.enter_context(Webhook(self.rules.webhook))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join(LEAVING)
        self._left.close()

    def router(self) -> APIRouter:
        """Return a router without routes: its app looks for alerts as long as it serves."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            with self:
                yield

        return APIRouter(lifespan=lifespan)

    @property
    def current(self) -> list[Alert]:
        """Return the alerts that last, in the order in which they began."""
        return self._log.current

    def look(self) -> list[Change]:
        """Look at the fleet once, and return the alerts that begin and end."""
        fleet, now = self._fleet(), self._clock()
        for device in fleet:
            if device.telemetry is not None and device.telemetry_at is not None:
                if device.telemetry.holding and device.key not in self._known:  # since when?
                    for at, telemetry in self._history(device):
                        self._held.note(device.key, telemetry, at)
                self._known.add(device.key)
                self._held.note(device.key, device.telemetry, device.telemetry_at)
        ends = self._certificate() if self.rules.certificate_days else None
        return self._log.update(evaluate(self.rules, fleet, now, self._held, ends), now)

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                changes, problem = self.look(), ""
            except Exception as error:  # the fleet cannot be read now; pages and metrics go on
                changes, problem = [], f"{type(error).__name__}: {error}"
            if problem and problem != self._problem:
                LOG.warning("alerts: the devices cannot be read: %s", problem)
            self._problem = problem
            for change in changes:
                LOG.warning("%s", change.line)
                if self._webhook is not None:
                    self._webhook.send(change.as_json())
            self._ended.wait(self._interval)
