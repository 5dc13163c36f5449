"""Replies of a client to the server, one frozen dataclass each; every field has a type, a range and a size.

Labels never travel: of a client's data the server learns sizes and kinds, and counts of right predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from fedtta.messages.arrays import Arrays
from fedtta.messages.record import ARRAYS, MOST, Count, Finite, Identifier, Number, Prose, Share, Typed
from fedtta.messages.updates import LARGEST_SCALE

Role = Literal["both", "source", "target"]
#: Bins of the histogram of e, the weight of the global head, over [0, 1].
WEIGHT_BINS = 20
Histogram = Annotated[list[Count], Field(min_length=WEIGHT_BINS, max_length=WEIGHT_BINS)]
#: Form of a client's name; "0" to "N-1" are the clients of a divided data set.
NAME = r"^[A-Za-z0-9._-]{1,64}$"
Name = Annotated[str, Field(pattern=NAME)]
Sizes = Annotated[list[Count], Field(min_length=3, max_length=3)]
CLASSES = 100_000  # at most
RESULTS = 10_000  # of a client, at most
Channels = Annotated[int, Field(ge=1, le=64)]
PerChannel = Annotated[list[Finite], Field(max_length=64)]
PerClass = Annotated[list[Count], Field(max_length=CLASSES)]
Classes = Annotated[list[Identifier], Field(max_length=CLASSES)]
Distributions = Annotated[list[Identifier], Field(max_length=1000)]
Tags = Annotated[list[Count], Field(max_length=10_000)]
Saved = Annotated[dict[Identifier, Tags], Field(max_length=10_000)]
#: Fields of an event that say what it is; a metric becomes a field of an event, too.
RESERVED = ("event", "at")


def _metric_names(metrics: dict[str, float]) -> dict[str, float]:
    if odd := [name for name in metrics if name in RESERVED]:
        raise ValueError(f"a metric cannot be called {odd[0]}")
    return metrics


def _interval(estimate: list[float]) -> list[float]:
    accuracy, low, high = estimate
    if not low <= accuracy <= high:
        raise ValueError(f"accuracy {accuracy} is outside its interval from {low} to {high}")
    return estimate


#: An accuracy and the ends of its interval.
Estimate = Annotated[list[Share], Field(min_length=3, max_length=3), AfterValidator(_interval)]
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
Estimates = Annotated[dict[MetricName, Estimate], Field(max_length=20)]
Metrics = Annotated[dict[MetricName, Finite], Field(max_length=100), AfterValidator(_metric_names)]
#: Upper bounds in seconds of the intervals in which prediction requests are counted.
LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
Latency = Annotated[list[Count], Field(min_length=len(LATENCY_BOUNDS) + 1, max_length=len(LATENCY_BOUNDS) + 1)]
Version = Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.+!_-]{0,63}$")]
WEIGHT_WINDOW = 100  # images of a mean of e, the weight of the global head
WEIGHTS_KEPT = 100  # such means of the past
Scale = Annotated[float, Field(gt=0, le=LARGEST_SCALE, allow_inf_nan=False)]
Scales = Annotated[dict[Identifier, Scale], Field(max_length=ARRAYS)]
#: Bytes of keys and shares, as hexadecimal digits.
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1024)]


@dataclass(frozen=True, kw_only=True)
class Reply(Typed):
    """A client's reply.

    Parameters
    ----------
    num_examples : int
        Samples behind the reply, its weight in means over clients.
    """

    num_examples: Annotated[int, Field(gt=0, le=MOST)] = 1


@dataclass(frozen=True, kw_only=True)
class Identity(Reply):
    """A client's name, and what its data are like; no label counts.

    Parameters
    ----------
    name : str
        The device's name; "0" to "N-1" for clients of a divided data set.
    classes : list of str
    channels : int
    mean, std : list of float
        Normalization of the images, per channel.
    sizes : list of int
        Samples for training, validation and test.
    shifts : list of str
        Test distributions that the settings stand for.
    note : str
        What a reader of the results has to know about the data; may be empty.
    role : "both", "source" or "target"
        Whether the client trains and tests, only trains, or only tests.
    corruptions : list of str
        Corruptions of the test-time streams; empty without collaborations.
    stream_rounds : int
        Length of the test-time streams in rounds.
    saved : dict
        Key → tags (rounds) of the private state that the client still has of this run.
    own_data : bool
        Whether the device has data of its own; otherwise it holds a part of the run's data set.
    images : int
        Images of the data set that the run divides, which is the same on every machine; 0 with own data.
    pixel_mean : float
        Mean of all their pixels, from 0 to 255; machines may decode and round differently.
    labelled : bool
        Whether its samples have labels. A client without them is a target that is never asked for what needs labels.
    samples, skipped : int
        Files of a device, and those of them that cannot be used; 0 without data of its own.
    classes_present : int or None
        How many of the classes occur in its training split; None where that cannot be known.
    notes : list of str
        What the run's report says about this client's data: files skipped by reason, classes it lacks.
    mask_key : str or None
        Public key with which others encrypt shares for it; None without secure aggregation.
    """

    kind: ClassVar[str] = "identity"

    name: Name
    classes: Classes
    channels: Channels
    mean: PerChannel
    std: PerChannel
    sizes: Sizes
    shifts: Distributions
    note: Prose
    role: Role
    corruptions: Distributions = field(default_factory=list)
    stream_rounds: Count = 0
    saved: Saved = field(default_factory=dict)
    own_data: bool = False
    images: Count = 0
    pixel_mean: Finite = 0.0
    labelled: bool = True
    samples: Count = 0
    skipped: Count = 0
    classes_present: Count | None = None
    notes: Annotated[list[Prose], Field(max_length=1000)] = field(default_factory=list)
    mask_key: Hex | None = None


@dataclass(frozen=True, kw_only=True)
class Validated(Reply):
    """A reply that says how many validation samples the heads classify correctly.

    Parameters
    ----------
    validation_total, validation_correct : int
        Validation samples, and how many of them the received global head classifies correctly.
    personal_validation_correct : int or None
        The same for the new personal head, where the local algorithm has one.
    seconds : float
        Time spent on computing.
    """

    validation_total: Count
    validation_correct: Count
    personal_validation_correct: Count | None = None
    seconds: Number


@dataclass(frozen=True, kw_only=True)
class Trained(Validated):
    """The result of one round of local training.

    Parameters
    ----------
    arrays : dict
        The trained arrays that are aggregated; on the wire, an update in the request's format.
    train_loss : float
        Mean loss of the last epoch.
    global_loss : float or None
        Loss of the received model on the training split, where it is asked for.
    masked : dict or None
        Under secure aggregation: everything that is aggregated, masked; all other fields are empty then.
    scales : dict or None
        On the wire, of int8 arrays: see `fedtta.messages.updates.Update`. The server's transport decodes the arrays.
    trained_correct, decoded_correct : int or None
        Validation samples that the global head classifies correctly after local training, with the arrays as they were
        trained and as the server decodes them; None where nothing is rounded, or noise hides it.
    """

    kind: ClassVar[str] = "trained"

    arrays: Arrays
    train_loss: Number
    global_loss: Number | None = None
    masked: Arrays | None = None
    scales: Scales | None = None
    trained_correct: Count | None = None
    decoded_correct: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Summarized(Validated):
    """A client's statistics under the final model, float64 (see `fedtta.tta.statistics`).

    Parameters
    ----------
    masked : dict or None
        See `Trained`.
    """

    kind: ClassVar[str] = "statistics"

    statistics: Arrays
    masked: Arrays | None = None


@dataclass(frozen=True, kw_only=True)
class RefinedRates(Reply):
    """Refined adaptation rates, one float64 number per module.

    Parameters
    ----------
    loss, correct
        Of the adapted network on the validation batches of the last epoch, before the rates move.
    seconds : float
    context_bytes : int
        Bytes that Flower ships with every message because they are in the client's context.
    masked : dict or None
        See `Trained`.
    """

    kind: ClassVar[str] = "rates"

    rates: Arrays
    loss: Number
    correct: Count
    seconds: Number
    context_bytes: Count = 0
    masked: Arrays | None = None


@dataclass(frozen=True, kw_only=True)
class Adapted(Reply):
    """The result of one test-time round.

    Parameters
    ----------
    shared : dict
        What other clients may mix; empty when the method has nothing to share.
    normalization : dict or None
        `<layer>.mean` and `<layer>.variance` of the client's domain, where they are asked for.
    start : dict or None
        What `shared` was before any adaptation, where it is asked for.
    corruption : int
        Index of the batch's corruption in `Identity.corruptions`.
    correct, total : list of int
        Correct predictions and samples per class.
    seconds : float
        Of the adaptation.
    context_bytes : int
        See `RefinedRates`.
    """

    kind: ClassVar[str] = "adapted"

    shared: Arrays
    normalization: Arrays | None = None
    start: Arrays | None = None
    corruption: Count
    correct: PerClass
    total: PerClass
    seconds: Number
    context_bytes: Count = 0


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """One adapter on one test stream.

    Parameters
    ----------
    label, shift : str
        Row of the table and test distribution.
    correct, total : int
    seconds : float
    weight_histogram : list of int or None
        Counts of e, the weight of the global head, over `WEIGHT_BINS` bins of [0, 1]; for adapters that choose it per
        sample.
    weight_mean : float or None
    metrics : dict
        Further evaluation metrics by name (`fedtta.client.evaluation.METRICS`).
    estimates : dict
        Accuracy, and the low and high end of its interval, as estimated without labels (`fedtta.tta.estimates`), by
        estimate; empty where they are not asked for.
    """

    label: Identifier
    shift: Identifier
    correct: Count
    total: Count
    seconds: Number
    weight_histogram: Histogram | None = None
    weight_mean: Share | None = None
    metrics: Metrics = field(default_factory=dict)
    estimates: Estimates = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluated(Reply):
    """Results of all adapters on all test streams.

    Parameters
    ----------
    checked, leaked : int
        Test samples compared with everything trained on, and how many of them had been trained on.
    results : list of EvaluationResult
        Empty for a client without labels.
    served : str
        What a resident agent did with the model: "promoted <version>", "shadow <version>", "refused: <reason>" or
        "waiting for approval <version>"; empty without one.
    """

    kind: ClassVar[str] = "evaluated"

    checked: Count
    leaked: Count
    results: Annotated[list[EvaluationResult], Field(max_length=RESULTS)]
    served: Prose = ""


@dataclass(frozen=True, kw_only=True)
class SharedKeys(Reply):
    """A client's public key and secret shares for one secure sum.

    Parameters
    ----------
    key : str
        Public masking key.
    shares : list of str
        For each member, encrypted with its key: a share of the client's masking key and one of its mask's seed.
    key_digests, seed_digests : list of str
        SHA-256 of each of these shares: one that is revealed later must be the one that was dealt.
    seed_digest : str
        SHA-256 of the seed.
    """

    kind: ClassVar[str] = "shared_keys"

    key: Hex
    shares: list[Hex]
    key_digests: list[Hex]
    seed_digests: list[Hex]
    seed_digest: Hex


@dataclass(frozen=True, kw_only=True)
class Unmasked(Reply):
    """Revealed shares of the members' secrets, in their order; empty where there is none."""

    kind: ClassVar[str] = "unmasked"

    shares: list[Hex]


@dataclass(frozen=True, kw_only=True)
class Telemetry(Reply):
    """The state of a device in counts and summaries: no image, no prediction, no label.

    A field is None, empty or 0 where the device does not know it: a node without an agent knows little of this.

    Parameters
    ----------
    name : str
    software : dict
        Package → version.
    uptime : float
        Seconds since its process began.
    model, candidate, refused : str
        Version that is served; "shadow <version>" or "waiting for approval <version>"; "<version>: <reason>" of the
        last refused model.
    adapter, choice : str
        Test-time adaptation, with its options; and what it predicts with now, if it chooses among others.
    phase : str
        The federated request that is being processed.
    predictions, refusals : int
        Images predicted and prediction requests refused since its process began.
    samples, unsaved_samples : int
        Images that the adapter has seen, and those of them that no snapshot covers.
    latency : list of int
        Prediction requests by seconds, from arrival to answer: counts of the intervals up to each of
        `LATENCY_BOUNDS`, and of those above.
    latency_sum : float
        Seconds of all of them.
    weight : float or None
        Mean e, the weight of the global head, over the last `WEIGHT_WINDOW` images, of fewer in the beginning.
    weights : list of float
        Such means over time, oldest first, one for each `WEIGHT_WINDOW` images.
    estimated_accuracy : float or None
        That of the unadapted network on the last images, estimated without labels (`fedtta.tta.estimates`).
    drift : float or None
        Total variation distance between the classes that the unadapted network predicts for the last images and the
        usual ones when it was evaluated: of each class the larger share of predictions and labels, normalized.
    holding : bool
        Whether the guard holds: predictions are those of the unadapted model.
    guard_events : dict
        Kind of collapse or degenerate input → number of times that the guard has acted on it.
    saving_fails : bool
        Whether the adapter's state could not be saved the last time.
    disk_used, disk_free : int
        Bytes of the state directory, and free on its disk.
    memory : int
        Resident bytes of the process.
    data_samples, data_skipped : int
        Files of its own data, and those of them that cannot be used.
    """

    kind: ClassVar[str] = "telemetry"

    name: Name
    software: Annotated[dict[Identifier, Version], Field(max_length=20)] = field(default_factory=dict)
    uptime: Number = 0.0
    model: Identifier = ""
    candidate: Prose = ""
    refused: Prose = ""
    adapter: Identifier = ""
    choice: Identifier = ""
    phase: Identifier = ""
    predictions: Count = 0
    refusals: Count = 0
    samples: Count = 0
    unsaved_samples: Count = 0
    latency: Latency = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    latency_sum: Number = 0.0
    weight: Share | None = None
    weights: Annotated[list[Share], Field(max_length=WEIGHTS_KEPT)] = field(default_factory=list)
    estimated_accuracy: Share | None = None
    drift: Share | None = None
    holding: bool = False
    guard_events: Annotated[dict[Identifier, Count], Field(max_length=20)] = field(default_factory=dict)
    saving_fails: bool = False
    disk_used: Count = 0
    disk_free: Count = 0
    memory: Count = 0
    data_samples: Count = 0
    data_skipped: Count = 0

    @property
    def knows_disk(self) -> bool:
        """Whether it knows its disk, which may be full; an agent's own state takes some bytes of it."""
        return self.disk_used > 0 or self.disk_free > 0


#: Every reply by its name on the wire.
REPLIES: dict[str, type[Reply]] = {
    one.kind: one
    for one in (Identity, Trained, Summarized, RefinedRates, Adapted, Evaluated, SharedKeys, Unmasked, Telemetry)
}
