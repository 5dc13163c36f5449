"""Where an agent's work is done: in its own process by torch (`local`), or beside it in a child's (`light`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.scans import Scan
from fedtta.client.served import ServedModel
from fedtta.messages.replies import Reply
from fedtta.messages.requests import AdapterRow, Request

#: Errors that keep a model from being served, not `Stopped`; an evaluation that has succeeded counts all the same.
UNSERVED = (ValueError, RuntimeError, ArithmeticError, OSError)


@dataclass(frozen=True)
class Offer:
    """A model that may be served.

    Parameters
    ----------
    served : ServedModel
    samples : Samples
        What it is checked on.
    file : str
        SHA-256 of the model file that it comes from, if any.
    discard : callable
        Removes what it was brought in; the store has a copy by then.
    """

    served: ServedModel
    samples: Samples
    file: str = ""
    discard: Callable[[], None] = lambda: None


class Backend(Protocol):
    """What reads an agent's models and answers requests."""

    def load(self, folder: Path) -> ServedModel:
        """Return the model in a folder of the store; raises one of `fedtta.client.agent.store.DAMAGED`."""

    def from_file(self, path: Path) -> Offer:
        """Return a model file with the device's adapter and samples; one of `UNSERVED` if it cannot be served."""

    def scan(self, served: ServedModel | None) -> Scan:
        """Scan the device's own data as the served model would read them; ValueError says why it cannot be done."""

    def check(self, request: Request) -> None:
        """Refuse a request by what it says, before anything of it is done; raises PolicyError or ValueError."""

    def answer(self, request: Request, row: AdapterRow | None) -> tuple[Reply, Offer | str]:
        """Answer a request.

        Parameters
        ----------
        row : AdapterRow or None
            Of an evaluation, the adapter with which its model is to be served; None: it is not.

        Returns
        -------
        Reply
        Offer or str
            The model, or why there is none.

        Raises
        ------
        PolicyError, Stopped, SettingsError, ValueError, FloatingPointError
            As `fedtta.client.node.perform`.
        RuntimeError
            The process that did the work has ended.
        """

    def close(self) -> None:
        """End what is being done."""
