"""A deadline for what one thread computes: checked at every call of a network, and where a loop has no network.

Computation is never interrupted between two checks: what is being written is written, and a network is left as it is.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_CURRENT = threading.local()


class Stopped(TimeoutError):
    """A computation was stopped: its time is over, or its caller has gone."""


class Deadline:
    """A moment after which a computation must stop.

    Parameters
    ----------
    seconds : float
        From now on.
    clock : callable
        Monotonic time in seconds.

    Attributes
    ----------
    gone : str
        Why the caller waits no longer; empty: it waits.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.seconds = clock, seconds
        self._end = clock() + seconds
        self.gone = ""

    @property
    def left(self) -> float:
        """Return the seconds that are left, 0 if none are."""
        return 0.0 if self.gone else max(0.0, self._end - self._clock())

    def limit(self, seconds: float) -> None:
        """Make it `seconds` from now, if that is earlier."""
        if self._clock() + seconds < self._end:
            self._end, self.seconds = self._clock() + seconds, seconds

    def cancel(self, reason: str) -> None:
        """Stop at the next check; any thread may call it."""
        self.gone = reason

    def check(self) -> None:
        """Raise Stopped if the time is over."""
        if self.gone:
            raise Stopped(f"stopped: {self.gone}")
        if self._clock() > self._end:
            raise Stopped(f"stopped: not done within {self.seconds:g} s")

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Let this thread's computations inside the block check this deadline."""
        self.check()
        before = getattr(_CURRENT, "deadline", None)
        _CURRENT.deadline = self
        try:
            with ExitStack() as stack:
                if torch := sys.modules.get("torch"):  # otherwise this process has no network of torch's
                    stack.callback(torch.nn.modules.module.register_module_forward_pre_hook(_at_forward).remove)
                yield
        finally:
            _CURRENT.deadline = before


def check_deadline() -> None:
    """Raise Stopped if this thread has a deadline that is over."""
    deadline: Deadline | None = getattr(_CURRENT, "deadline", None)
    if deadline is not None:
        deadline.check()


def _at_forward(module: Any, inputs: Any) -> None:
    check_deadline()
