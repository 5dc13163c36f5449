"""What a line of `metrics.jsonl` can say: one frozen dataclass an event, fields named as in the file.

A field whose type allows None may be null in the file; one with a default may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WEIGHT_BINS = 20  # equal bins over [0, 1] of an evaluation's histogram of e


@dataclass(frozen=True)
class RunInfo:
    """What ran, and where: the event ``run``."""

    time: str  # start, ISO 8601
    settings: dict[str, Any]
    versions: dict[str, str]
    hardware: str
    commit: str | None = None


@dataclass(frozen=True)
class Clients:
    """Who has what: the event ``clients``.

    `class_counts` is [clients][K], or None in deployment, where labels stay on the devices; `sizes` holds
    (train, validation, test) samples of each client.
    """

    class_counts: list[list[int]] | None
    classes: list[str]
    sizes: list[list[int]]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.classes) for row in self.class_counts or []):
            raise ValueError(f"'class_counts' must have {len(self.classes)} numbers a client, one a class")


@dataclass(frozen=True)
class Round:
    """One training round: the event ``round``.

    `validation_accuracy` (0 to 1) is of the global model *received* in this round, before local training,
    as a mean over clients. Losses that are not finite (a training that diverged) are kept as they are.
    """

    training: str
    round: int
    sampled: list[int]
    replied: list[int]
    train_loss: float | None
    validation_accuracy: float | None
    train_seconds: list[float]
    wall_seconds: float
    bytes_up: int
    bytes_down: int
    personal_validation_accuracy: float | None = None


@dataclass(frozen=True)
class Incident:
    """A reply that was ``refused``, a client that ``failed``, or one that was ``late``."""

    event: str
    training: str
    round: int
    reason: str
    partition: int | None = None
    node_id: int | str | None = None


@dataclass(frozen=True)
class Evaluation:
    """One method on one test stream of one client: the event ``evaluation``.

    The accuracy is `correct` / `total`; the written ``accuracy`` is for people and is not read. The
    histogram of e (the weight of the global head) has `WEIGHT_BINS` equal bins over [0, 1].
    """

    training: str
    method: str
    shift: str
    partition: int
    correct: int
    total: int
    weight_histogram: list[int] | None = None
    weight_mean: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.correct > self.total:
            raise ValueError(f"{self.correct} correct of {self.total} samples")


@dataclass(frozen=True)
class LeakCheck:
    """How many test samples were checked, by index, and how many had been trained on: ``leak_check``."""

    checked: int
    leaked: int
    training: str | None = None


@dataclass(frozen=True)
class End:
    """The event ``end``."""

    seconds: float
    status: str
