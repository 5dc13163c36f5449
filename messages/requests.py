"""Requests of the server to a client, one frozen dataclass each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from fedtta.messages.arrays import Arrays
from fedtta.messages.record import Count, Number, Typed
from fedtta.messages.replies import (
    Adapted,
    Evaluated,
    Hex,
    Identity,
    RefinedRates,
    Reply,
    SharedKeys,
    Summarized,
    Telemetry,
    Trained,
    Unmasked,
)
from fedtta.messages.updates import Format, decode

Base = Literal["global", "personalised"]
Variant = Literal["all", "params", "stats"]


@dataclass(frozen=True)
class TrainingTask:
    """Which federated training a request belongs to, and what the client does in it.

    Parameters
    ----------
    training : str
        Name of the federated training; private state of several trainings is kept apart by it.
    algorithm : str
        Local algorithm, a key of `fedtta.client.algorithms.ALGORITHMS`.
    objective : str
        Loss that the local algorithm minimizes, a key of `fedtta.client.algorithms.training.OBJECTIVES`.
    """

    training: str
    algorithm: str = "fedavg"
    objective: str = "cross_entropy"


@dataclass(frozen=True)
class AdapterRow:
    """One row of the results table: an adapter with options, and the network that it gets.

    Parameters
    ----------
    label : str
        Name of the row in results.
    adapter : str
        A key of `fedtta.tta.registry.ADAPTERS`.
    options : mapping
        Keyword arguments of the adapter.
    base : "global" or "personalised"
        The network as the training left it, or after the local algorithm has personalized it.
    """

    label: str
    adapter: str
    options: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)
    base: Base = "global"


@dataclass(frozen=True)
class Masking:
    """How a reply is masked, so that the server learns the sum over clients only (`fedtta.privacy`).

    Parameters
    ----------
    session : str
        Names one sum; keys and masks of a session are used once.
    own : int
        The client's number among `members`, from 1.
    members : list of int
        Numbers of the clients that it shares masks with, itself among them.
    keys : list of str
        Their public masking keys, in hexadecimal digits.
    clients : int
        All clients whose replies are summed.
    most : int
        The largest weight of a client in the sum.
    weighting : "uniform" or "examples"
        Whether a client counts once, or by its samples.
    """

    session: str
    own: Count
    members: list[Count]
    keys: list[Hex]
    clients: Count
    most: Count
    weighting: Literal["uniform", "examples"]


@dataclass(frozen=True, kw_only=True)
class Request(Typed):
    """What every request carries.

    Parameters
    ----------
    settings : str
        All settings of the run as one JSON object; `fedtta.settings.from_json` parses it once per process.
    run : str
        Identity of the run, which private state belongs to.
    checkpoint_rounds : list of int
        Rounds that the server could resume from; private state of these rounds is kept.
    """

    #: What a client answers with.
    reply: ClassVar[type[Reply]]

    settings: str
    run: str
    checkpoint_rounds: list[int] = field(default_factory=list)

    def decoded(self, reply: Reply) -> Reply:
        """Return a reply of the expected kind as the server uses it; ValueError if it does not fit the request."""
        return reply


@dataclass(frozen=True, kw_only=True)
class Identify(Request):
    """The question what a client is called, and what its data are like."""

    kind: ClassVar[str] = "query.identify"
    reply: ClassVar[type[Reply]] = Identity


@dataclass(frozen=True, kw_only=True)
class Train(Request):
    """One round of local training.

    Parameters
    ----------
    round : int
        Training round, from 1.
    task : TrainingTask
    arrays : dict
        The global model, or the part of it that this client does not keep.
    aggregated : list of str or None
        Names of the arrays that the server aggregates; the others stay on the client. None: all are aggregated.
    proximal_mu : float
        μ of FedProx's term in the local loss.
    client_metrics : list of str
        Metrics that the server aggregation needs in addition to the standard ones.
    masking : Masking or None
        How the reply is masked under secure aggregation.
    update_format : str
        How the trained arrays travel, see `fedtta.messages.updates`; float32: all of them, as they are.
    """

    kind: ClassVar[str] = "train"
    reply: ClassVar[type[Reply]] = Trained

    round: Count
    task: TrainingTask
    arrays: Arrays
    aggregated: list[str] | None = None
    proximal_mu: Number = 0.0
    client_metrics: list[str] = field(default_factory=list)
    masking: Masking | None = None
    update_format: Format = "float32"

    @property
    def expected(self) -> Arrays:
        """Return what was sent of the arrays that come back trained."""
        names = self.arrays if self.aggregated is None else set(self.aggregated)
        return {name: value for name, value in self.arrays.items() if name in names}

    def decoded(self, reply: Reply) -> Reply:
        """See `Request.decoded`: a model has whole arrays again, in the dtypes of what was sent."""
        assert isinstance(reply, Trained), "of the expected kind"
        if self.update_format == "float32":
            if reply.scales is not None:
                raise ValueError("scales: allowed with update-format = 'int8' only")
            return reply
        arrays = decode(self.update_format, self.expected, reply.arrays, reply.scales or {})
        return replace(reply, arrays=arrays, scales=None)


@dataclass(frozen=True, kw_only=True)
class Summarize(Request):
    """Train the personal head on the final model and report the client's statistics under it.

    Parameters
    ----------
    round : int
        One after the last training round; the tag of the private state that this writes.
    wanted : list of str
        Statistics on request, in addition to those that are always sent.
    aggregated : list of str or None
        See `Train`; told under secure aggregation where some clients have arrays of their own and others are sent all.
    masking : Masking or None
        See `Train`.
    """

    kind: ClassVar[str] = "train.statistics"
    reply: ClassVar[type[Reply]] = Summarized

    round: Count
    task: TrainingTask
    arrays: Arrays
    wanted: list[str] = field(default_factory=list)
    aggregated: list[str] | None = None
    masking: Masking | None = None


@dataclass(frozen=True, kw_only=True)
class RefineRates(Request):
    """Refine adaptation rates on the validation split (ATP, Algorithm 1).

    Parameters
    ----------
    variant : "all", "params" or "stats"
        Which modules have a rate other than zero.
    network : str
        Digest of the network; it is sent once and kept by the client.
    arrays : dict or None
        The network, for a client that does not have it yet.
    rates : dict
        One float64 number per module.
    masking : Masking or None
        See `Train`.
    """

    kind: ClassVar[str] = "train.rates"
    reply: ClassVar[type[Reply]] = RefinedRates

    round: Count
    variant: Variant
    network: str
    arrays: Arrays | None = None
    rates: Arrays = field(default_factory=dict)
    masking: Masking | None = None


@dataclass(frozen=True, kw_only=True)
class Adapt(Request):
    """One test-time round: adapt to the next batch of the client's stream and predict it.

    Parameters
    ----------
    round : int
        From 1; also the position in the stream.
    cell : str
        Names method and collaboration; each has a memory of its own on the client.
    row : AdapterRow
    share : str
        What clients share, a value of `fedtta.tta.collaborator.Share`.
    network, arrays
        See `RefineRates`.
    shared : dict or None
        This client's mixture of what the clients shared in the round before.
    proximal_mu : float
        μ of FedProx's term in the adapter's loss.
    send_normalization, send_start : bool
        Whether the collaboration rule needs the normalization statistics, and what was shared before any adaptation.
    """

    kind: ClassVar[str] = "train.adapt"
    reply: ClassVar[type[Reply]] = Adapted

    round: Count
    cell: str
    row: AdapterRow
    share: str
    network: str
    arrays: Arrays | None = None
    shared: Arrays | None = None
    proximal_mu: Number = 0.0
    send_normalization: bool = False
    send_start: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluate(Request):
    """Run adapters on test streams.

    Parameters
    ----------
    round : int
        Tag of the private state to evaluate with.
    arrays : dict
        The final global model, or its aggregated part.
    statistics : dict or None
        Means of the clients' statistics.
    means_over : int or None
        How many clients these are over, where it is not `clients` of the settings; 0: this client is none of them.
    rates : dict
        Variant → learned adaptation rates, one float64 number per module.
    rows : list of AdapterRow
    shifts : list of str
        Test distributions; empty for a client without labels, which installs the model and has no results.
    """

    kind: ClassVar[str] = "evaluate"
    reply: ClassVar[type[Reply]] = Evaluated

    round: Count
    task: TrainingTask
    arrays: Arrays
    rows: list[AdapterRow]
    shifts: list[str]
    statistics: Arrays | None = None
    means_over: Count | None = None
    rates: dict[str, Arrays] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ShareKeys(Request):
    """Make the secrets of one secure sum, and share them among its members.

    Parameters
    ----------
    session, own, members
        See `Masking`.
    keys : list of str
        The members' public keys from their identities.
    threshold : int
        Shares that give a secret back.
    """

    kind: ClassVar[str] = "query.share_keys"
    reply: ClassVar[type[Reply]] = SharedKeys

    session: str
    own: Count
    members: list[Count]
    keys: list[Hex]
    threshold: Count


@dataclass(frozen=True, kw_only=True)
class Unmask(Request):
    """Reveal shares, of each member one, so that the masks of a sum can be removed.

    Parameters
    ----------
    session : str
    survivors : list of int
        Members whose masked replies are summed: shares of their own masks are revealed; of the others those of the
        masks of pairs.
    shares : list of str
        What each member has shared with this client (`SharedKeys.shares`), in the members' order; empty: nothing.
    """

    kind: ClassVar[str] = "query.unmask"
    reply: ClassVar[type[Reply]] = Unmasked

    session: str
    survivors: list[Count]
    shares: list[Hex]


@dataclass(frozen=True, kw_only=True)
class Observe(Request):
    """The question how a device is; it is answered beside other work, without data and network."""

    kind: ClassVar[str] = "query.observe"
    reply: ClassVar[type[Reply]] = Telemetry


#: Every request by its name on the wire, which is also its Flower message type.
REQUESTS: dict[str, type[Request]] = {
    one.kind: one for one in (Identify, Train, Summarize, RefineRates, Adapt, Evaluate, ShareKeys, Unmask, Observe)
}
