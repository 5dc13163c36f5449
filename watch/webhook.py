"""A webhook: every alert that begins or ends is sent to a URL as JSON, and nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from fedtta.settings.names import is_loopback

LOG = logging.getLogger(__name__)
TIMEOUT = 10.0  # seconds for one request, from connecting to the answer's status
PAUSES = (1.0, 10.0, 60.0, 300.0)  # seconds before each further attempt: a receiver may be restarted
WAITING = 1000  # messages that wait, at most
LEAVING = 2.0  # seconds for what still waits when the server stops


class Webhook:
    """Sends messages in the order of `send`, from a thread of its own, while it is entered.

    Tried again after `pauses`: what gets no answer in time, or status 429 or 5xx. A redirect is not followed. A message
    that is given up is logged, without the URL's path, which often is a secret.

    Parameters
    ----------
    url : str
        See `fedtta.watch.rules.check_webhook`.
    timeout : float
        Seconds for one attempt.
    pauses : sequence of float
    """

    def __init__(self, url: str, timeout: float = TIMEOUT, pauses: Sequence[float] = PAUSES) -> None:
        self._url, self._timeout, self._pauses = httpx.URL(url), timeout, pauses
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._deliver, name="webhook", daemon=True)

    def __enter__(self) -> Self:
        """Begin to send."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what waits, for a moment; what cannot be sent by then is dropped."""
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(None)
            self._thread.join(LEAVING)
        if waiting := self._messages.qsize():
            LOG.warning("webhook %s: stopped with %d messages waiting", self.place, waiting)

    @property
    def place(self) -> str:
        """Return the URL without its path, for messages."""
        return f"{self._url.scheme}://{self._url.netloc.decode()}"

    def send(self, message: dict[str, Any]) -> None:
        """Send a message some time later; if too many wait, it is dropped and logged."""
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            LOG.warning("webhook %s: %d messages wait; dropped: %s", self.place, WAITING, _about(message))

    def _deliver(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._attempts(message)
            except Exception:  # of one message; the next one is sent nevertheless
                LOG.exception("webhook %s: not sent: %s", self.place, _about(message))

    def _attempts(self, message: dict[str, Any]) -> None:
        for pause in (*self._pauses, None):
            problem, again = asyncio.run(self._post(message))
            if not problem:
                return
            if not again or pause is None:
                break
            time.sleep(pause)
        LOG.warning("webhook %s: not sent: %s: %s", self.place, problem, _about(message))

    async def _post(self, message: dict[str, Any]) -> tuple[str, bool]:
        """Return what went wrong, if anything, and whether another attempt may help."""
        try:
            async with (
                asyncio.timeout(self._timeout),  # httpx has limits for each step only
                httpx.AsyncClient(
                    timeout=None, follow_redirects=False, trust_env=not is_loopback(self._url.host)
                ) as client,
                client.stream("POST", self._url, json=message) as answer,  # its body is not read
            ):
                if answer.is_success:
                    return "", False
                return f"status {answer.status_code}", answer.status_code == 429 or answer.is_server_error
        except TimeoutError:
            return f"no answer in {self._timeout:g} s", True
        except httpx.ConnectError as error:  # why: no server listens, or a certificate that is not trusted
            return f"{type(error).__name__}: {error}", True
        except httpx.HTTPError as error:
            return type(error).__name__, True


def _about(message: Mapping[str, Any]) -> str:
    """Return what a line of the log says of a message: the same alert begins and ends with the same text."""
    return ": ".join(str(message[key]) for key in ("state", "text") if key in message)
