"""Events of a run: one frozen dataclass for each kind of line in `metrics.jsonl`.

The fields are named as in the file and their types are checked when a line is read. A field whose type allows None
may be null; a field with a default may be missing. Unknown events and unknown fields are ignored, so that a newer
version can write more.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

WEIGHT_BINS = 20  # equal bins over [0, 1] of the histogram of e

Check = Callable[[Any], bool]


class Range(NamedTuple):
    """Inclusive range of a finite number, and its description in error messages."""

    words: str
    low: float = -math.inf
    high: float = math.inf

    def accepts(self, value: float) -> bool:
        """Whether a number is finite and in the range."""
        return math.isfinite(value) and self.low <= value <= self.high


class OneOf(NamedTuple):
    """Allowed values of a string."""

    names: tuple[str, ...]

    @property
    def words(self) -> str:
        """Description in error messages."""
        return f"one of {', '.join(self.names)}"

    def accepts(self, value: str) -> bool:
        """Whether a string is allowed."""
        return value in self.names


Count = Annotated[int, Range("an integer >= 0", 0)]
Finite = Annotated[float, Range("a finite number")]
Seconds = Annotated[float, Range("a finite number >= 0", 0)]
Fraction = Annotated[float, Range("a number from 0 to 1", 0, 1 + 1e-6)]  # means of float32 may exceed 1 slightly
Variant = Annotated[str, OneOf(("all", "params", "stats"))]  # ATP adapts all, parameters or BatchNorm statistics


@dataclass(frozen=True)
class RunInfo:
    """Settings and environment of a run: ``run``."""

    key: ClassVar[tuple[str, ...]] = ()
    time: str  # start, ISO 8601
    settings: dict[str, Any]
    versions: dict[str, Any]
    hardware: str
    commit: str | None = None
    bundle: str | None = None  # SHA-256 of the app bundle of a deployed run


@dataclass(frozen=True)
class Clients:
    """Data of the clients: ``clients``.

    Parameters
    ----------
    class_counts : list of lists, [clients][K]
        Samples of each class; None in deployment, where labels stay on the devices.
    classes : list
        Names of the K classes.
    sizes : list of lists, [clients][3]
        Training, validation and test samples.
    roles : list of str, optional
        Role of each client: source, target or both.
    names : list of str, optional
        Names of the clients; without them a client is called by its number.
    data : list of dict, optional
        What is known of each client's data: `own_data`, `labelled`, `samples`, `skipped`, `classes_present`, `notes`.
    """

    key: ClassVar[tuple[str, ...]] = ()
    class_counts: list[list[Count]] | None
    classes: list[str | int]
    sizes: list[list[Count]]
    roles: list[str] | None = None
    names: list[str] | None = None
    data: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if any(len(row) != len(self.classes) for row in self.class_counts or []):
            raise ValueError(f"'class_counts' must have {len(self.classes)} numbers for each client, one a class")
        if any(len(row) != 3 for row in self.sizes):
            raise ValueError("'sizes' must have 3 numbers for each client: train, validation and test")


@dataclass(frozen=True)
class Round:
    """One training round: ``round``.

    `validation_accuracy` is the mean over clients for the global model as *received* in this round, before local
    training. A loss may be infinite or NaN when training diverges. With compressed updates, `bytes_up_float32` is what
    `bytes_up` would be without, and the other two are mean validation accuracies after local training: of the models as
    trained, and as the server decoded them.
    """

    key: ClassVar[tuple[str, ...]] = ("training", "round")
    training: str
    round: Count
    sampled: list[Count]
    replied: list[Count]
    train_loss: float | None
    validation_accuracy: Fraction | None
    train_seconds: list[Seconds]
    wall_seconds: Seconds
    bytes_up: Count
    bytes_down: Count
    personal_validation_accuracy: Fraction | None = None
    bytes_up_float32: Count | None = None
    trained_accuracy: Fraction | None = None
    decoded_accuracy: Fraction | None = None


@dataclass(frozen=True)
class Incident:
    """A reply that did not count as it was sent: ``refused``, ``failed``, ``late``, or ``limited`` in its effect.

    `phase` begins with what was asked for: "train cross_entropy".
    """

    key: ClassVar[tuple[str, ...]] = ()
    event: str
    training: str
    round: Count
    reason: str
    partition: Count | None = None
    node_id: int | str | None = None
    phase: str = ""


@dataclass(frozen=True)
class Membership:
    """A client that came or went: ``joined``, ``left``, ``rejoined``; a node that takes no part: ``left_alone``.

    `sizes`, `role` and `data` are those of `Clients`; a client that joins has them all, one that comes back as another
    node the first and the last.
    """

    key: ClassVar[tuple[str, ...]] = ()
    event: str
    node_id: int | str
    name: str | None = None
    partition: Count | None = None
    training: str | None = None
    round: Count | None = None
    reason: str = ""
    sizes: list[Count] | None = None
    role: str | None = None
    data: dict[str, Any] | None = None


@dataclass(frozen=True)
class Served:
    """What a client's agent did with the model that it got: ``served``."""

    key: ClassVar[tuple[str, ...]] = ("training", "partition")
    training: str
    partition: Count
    served: str


@dataclass(frozen=True)
class Evaluation:
    """One method on one test distribution of one client: ``evaluation``.

    `weight_histogram` counts the weights e of the global head in `WEIGHT_BINS` equal bins over [0, 1]. `estimates` are
    accuracies without labels with the ends of their intervals, [accuracy, low, high] by name. `extra` holds
    every other number of the line, which is where a new metric arrives (`fedtta.server.report.scores.METRICS`).
    """

    key: ClassVar[tuple[str, ...]] = ("training", "method", "shift", "partition")
    training: str
    method: str
    shift: str
    partition: Count
    correct: Count
    total: Count
    weight_histogram: list[Count] | None = None
    weight_mean: Fraction | None = None
    seconds: Seconds | None = None
    estimates: dict[str, list[Fraction]] | None = None
    extra: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.correct > self.total:
            raise ValueError(f"{self.correct} correct of {self.total} samples")
        if self.weight_histogram is not None and len(self.weight_histogram) != WEIGHT_BINS:
            raise ValueError(f"'weight_histogram' must have {WEIGHT_BINS} counts, not {len(self.weight_histogram)}")
        if any(len(one) != 3 for one in (self.estimates or {}).values()):
            raise ValueError("'estimates' must have three numbers each")


@dataclass(frozen=True)
class LeakCheck:
    """Number of test samples checked by index, and how many of them had been trained on: ``leak_check``."""

    key: ClassVar[tuple[str, ...]] = ("training",)
    checked: Count
    leaked: Count
    training: str | None = None


@dataclass(frozen=True)
class RatesRound:
    """One round of learning adaptation rates on source clients (ATP): ``rates_round``.

    `loss` and `accuracy` are means over the samples of the round's clients, after adaptation with the rates received
    and before the clients refine them; None with noise on the rates, which hides them. Bytes are sums over clients;
    `context_bytes` is the clients' context, which Flower ships with every message.
    """

    key: ClassVar[tuple[str, ...]] = ("training", "variant", "round")
    training: str
    variant: Variant
    round: Count
    sampled: list[Count]
    replied: list[Count]
    loss: float | None
    accuracy: Fraction | None
    wall_seconds: Seconds
    bytes_down: Count
    bytes_up: Count
    context_bytes: Count


@dataclass(frozen=True)
class Rates:
    """Learned adaptation rate and number of values of each module, in order of definition: ``rates``."""

    key: ClassVar[tuple[str, ...]] = ("training", "variant")
    training: str
    variant: Variant
    rates: dict[str, Finite]
    sizes: dict[str, Count]

    def __post_init__(self) -> None:
        if different := sorted(set(self.rates) ^ set(self.sizes)):
            raise ValueError(f"'rates' and 'sizes' must name the same modules; not in both: {', '.join(different)}")


@dataclass(frozen=True)
class AdaptRound:
    """One collaborative round at test time: ``adapt_round``.

    `weights` is W, [replied][replied]: row i holds the weights that client i gives to the clients of `replied`. It is
    empty when there are too many clients to record it. Bytes as in `RatesRound`.
    """

    key: ClassVar[tuple[str, ...]] = ("method", "collaboration", "round")
    method: str
    collaboration: str
    round: Count
    replied: list[Count]
    weights: list[list[Fraction]]
    wall_seconds: Seconds
    bytes_down: Count
    bytes_up: Count
    context_bytes: Count

    def __post_init__(self) -> None:
        number = len(self.replied)
        if self.weights and [len(row) for row in self.weights] != [number] * number:
            raise ValueError(f"'weights' must be empty or {number} rows of {number}, one for each client of 'replied'")


@dataclass(frozen=True)
class Adapted:
    """Correct predictions and samples of each class, [K], of one client in one round: ``adapted``."""

    key: ClassVar[tuple[str, ...]] = ("method", "collaboration", "round", "partition", "corruption")
    method: str
    collaboration: str
    round: Count
    partition: Count
    corruption: str
    correct: list[Count]
    total: list[Count]
    seconds: Seconds

    def __post_init__(self) -> None:
        pairs = zip(self.correct, self.total, strict=False)
        if len(self.correct) != len(self.total) or any(correct > total for correct, total in pairs):
            raise ValueError(f"'correct' must be from 0 to 'total' in each class: {self.correct} of {self.total}")


@dataclass(frozen=True)
class Note:
    """A remark of the run: ``note``."""

    key: ClassVar[tuple[str, ...]] = ()
    text: str


@dataclass(frozen=True)
class Resumed:
    """A run that was resumed: ``resumed``."""

    key: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class End:
    """The end of a run: ``end``."""

    key: ClassVar[tuple[str, ...]] = ()
    seconds: Seconds
    status: str


Event = (
    RunInfo | Clients | Round | Incident | Membership | Served | Evaluation | LeakCheck | RatesRound | Rates
    | AdaptRound | Adapted | Note | Resumed | End
)  # fmt: skip

#: Name in the file → type. Two events with the same values of `key` describe the same thing, and the later one counts.
EVENTS: dict[str, type[Event]] = {
    "run": RunInfo,
    "clients": Clients,
    "round": Round,
    "refused": Incident,
    "failed": Incident,
    "late": Incident,
    "limited": Incident,
    "joined": Membership,
    "left": Membership,
    "rejoined": Membership,
    "left_alone": Membership,
    "served": Served,
    "evaluation": Evaluation,
    "leak_check": LeakCheck,
    "rates_round": RatesRound,
    "rates": Rates,
    "adapt_round": AdaptRound,
    "adapted": Adapted,
    "note": Note,
    "resumed": Resumed,
    "end": End,
}


def parse_event(record: Any) -> Event | None:
    """Return the event that a JSON value describes; None for an unknown event.

    Raises
    ------
    ValueError
        The value is no JSON object with a field ``event``, or a field is missing or invalid.
    """
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError("expected a JSON object with a field 'event'")
    kind = EVENTS.get(record["event"])
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for name, (check, words, required) in _FIELDS[record["event"]].items():
        if name not in record:
            if required:
                raise ValueError(f"'{name}' is missing")
            continue
        if not check(record[name]):
            raise ValueError(f"'{name}' must be {words}, not {record[name]!r}")
        values[name] = record[name]
    if kind is Evaluation:
        values["extra"] = _other_numbers(record, values)
    return kind(**values)


def _other_numbers(record: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, float]:
    is_finite, _ = _checker(Finite)
    return {name: float(value) for name, value in record.items() if name not in fields and is_finite(value)}


def _fields(kind: type[Event]) -> dict[str, tuple[Check, str, bool]]:
    """Return the check of each field, its description and whether the field is required."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        one.name: (*_checker(hints[one.name]), one.default is MISSING) for one in fields(kind) if one.name != "extra"
    }


def _checker(kind: Any) -> tuple[Check, str]:
    """Compile a type to a check of JSON values and its description."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        kind, limits = inner
        of_kind, _ = _checker(kind)
        return (lambda value: of_kind(value) and limits.accepts(value)), limits.words
    if origin in (Union, types.UnionType):
        options = [_checker(option) for option in inner]
        return (lambda value: any(check(value) for check, _ in options)), " or ".join(words for _, words in options)
    if origin in (list, dict):
        item, words = _checker(inner[-1])
        if origin is list:
            return (lambda value: isinstance(value, list) and all(map(item, value))), f"a list (items: {words})"
        return (lambda value: isinstance(value, dict) and all(map(item, value.values()))), f"an object of {words}"
    if kind is Any:
        return (lambda value: True), "any value"
    if kind in (int, float):
        number = (int, float) if kind is float else int
        return (
            lambda value: isinstance(value, number) and not isinstance(value, bool) and _is_float(value)
        ), "a number"
    return (lambda value: isinstance(value, kind)), {str: "a string", type(None): "null"}.get(kind, kind.__name__)


def _is_float(value: float) -> bool:
    """Whether a number is one of float64, which JSON's integers need not be."""
    return isinstance(value, float) or abs(value) <= sys.float_info.max


_FIELDS = {name: _fields(kind) for name, kind in EVENTS.items()}
