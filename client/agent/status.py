"""What an agent tells its owner: its state, and a snapshot that was saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Figures of a model's check that calibrate the estimated accuracy, which only a program reads: prefix and names.
CALIBRATED, CALIBRATION = "adapted_", ("samples", "offset", "variance")


def of_any_adapter(check: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a model's check that hold whatever adapter it is served with."""
    return {name: value for name, value in check.items() if not name.startswith(CALIBRATED)}


@dataclass(frozen=True)
class Saved:
    """A saved snapshot of the adapter's state.

    Parameters
    ----------
    snapshot : str
        Its name.
    version : str
        Version of its model.
    samples : int
        Samples predicted before it.
    """

    snapshot: str
    version: str
    samples: int


@dataclass(frozen=True)
class Status:
    """State of an agent; the fields are those of `StatusReply` in agent.proto, except for the queue's.

    Parameters
    ----------
    version, adapter : str
        Model version (empty: no model yet) and adapter with its options.
    classes : tuple of str
        Class names in the order of the probabilities' columns; empty without a model.
    samples, unsaved_samples : int
        Predicted since the model was installed or the adapter was reset; and those of them not covered by a snapshot.
    holding : bool
        Whether predictions are those of the unadapted model.
    guard_events : dict
        Kind of collapse or degenerate input → number of times that the guard has acted on it.
    snapshots : list of str
        Names, oldest first.
    notes : list of str
        Events that the owner should know of, oldest first: history reset, files refused, failed saves.
    uptime : float
        Seconds.
    training : str
        The federated request that is being processed; empty: none.
    shape : tuple of int
        C, H, W of the images that the model takes; empty without a model.
    candidate : str
        "shadow <version>" or "waiting for approval <version>"; empty: none.
    refused : str
        "<version>: <reason>" of the last refused model; empty: none.
    data_samples, data_skipped : int
        Files of the device's own data, when they were last looked at, and those that cannot be used.
    data_notes : list of str
        Skipped files by reason.
    estimated_accuracy : tuple of float
        That of the last predictions, adapted ones included, and the ends of its interval, estimated without labels
        (`fedtta.client.agent.observation`); empty: unknown.
    choice, choice_reason : str
        The adapter that `auto` predicts with now; and since which sample and why. Empty: another adapter, or no model.
    """

    version: str = ""
    adapter: str = ""
    classes: tuple[str, ...] = ()
    samples: int = 0
    unsaved_samples: int = 0
    holding: bool = False
    guard_events: dict[str, int] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uptime: float = 0.0
    training: str = ""
    shape: tuple[int, ...] = ()
    candidate: str = ""
    refused: str = ""
    data_samples: int = 0
    data_skipped: int = 0
    data_notes: list[str] = field(default_factory=list)
    estimated_accuracy: tuple[float, ...] = ()
    choice: str = ""
    choice_reason: str = ""
