"""Base classes of server aggregations: the facts that a strategy states about itself, and FedAvg over numpy arrays.

The round loop accepts any Flower strategy. An `Aggregation` also states how it is built from a run's settings, which
metrics it needs in each training reply, how many clients a round needs, and which state a checkpoint must keep.
`facts(strategy)` returns it; Flower's own strategies have the defaults.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid, strategy

from fedtta.strategies.arrays import Arrays, Named, as_numpy, as_record, reply_arrays

if TYPE_CHECKING:
    from fedtta.settings import Settings


class RobustAggregator(Protocol):
    """A Byzantine-robust function from the clients' named arrays to one set, in the same dtypes."""

    @property
    def min_clients(self) -> int:
        """Return the smallest number of clients it accepts."""

    def __call__(self, clients: Sequence[Arrays]) -> Named:
        """Aggregate; ValueError with fewer than `min_clients`, or with arrays that do not fit or are not finite."""


class Aggregation(strategy.FedAvg):
    """A strategy of Flower's FedAvg family, and the facts that a run needs to know about it.

    The config of each training message carries `proximal_mu` as "proximal-mu".
    """

    #: Constructor parameter → the setting that it takes its value from.
    options: ClassVar[Mapping[str, str]] = {}
    #: Metrics that each training reply must hold besides the usual ones: fields of `fedtta.messages.replies.Trained`.
    client_metrics: ClassVar[tuple[str, ...]] = ()
    #: Whether it also works where clients keep some arrays to themselves (`PartialFedAvg`).
    aggregates_partial: ClassVar[bool] = False
    #: Whether the replies' weighted mean is all that it uses of them: what secure aggregation gives.
    from_mean: ClassVar[bool] = False
    #: Whether arbitrary replies of a minority cannot move the result beyond those of the others.
    byzantine_robust: ClassVar[bool] = False
    #: μ ≥ 0 of (μ/2)‖w - w_received‖², which clients add to their training loss.
    proximal_mu: float = 0.0

    @classmethod
    def from_settings(cls, settings: Settings, **fedavg: Any) -> Self:
        """Return the strategy that a run's settings describe; `fedavg` are Flower's own parameters."""
        return cls(**cls.option_values(settings), **fedavg)

    @classmethod
    def option_values(cls, settings: Settings) -> dict[str, Any]:
        """Return parameter → value of its setting, for `options`."""
        return {parameter: getattr(settings, name) for parameter, name in cls.options.items()}

    @classmethod
    def robust_aggregator(cls, settings: Settings) -> RobustAggregator | None:
        """Return how models, statistics and rates are aggregated in place of means; None: by means."""
        return None

    @classmethod
    def min_clients(cls, settings: Settings) -> int:
        """Return how many replies a round needs at least."""
        aggregator = cls.robust_aggregator(settings)
        return 1 if aggregator is None else aggregator.min_clients

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model as Flower's strategy does, with the strength of the proximal term."""
        config["proximal-mu"] = float(self.proximal_mu)
        return super().configure_train(server_round, arrays, config, grid)

    def state_arrays(self) -> dict[str, Named]:
        """Return what the next round depends on besides the model: group → name → array, for a checkpoint."""
        return {}

    def load_state_arrays(self, state: Mapping[str, Named]) -> None:
        """Restore what `state_arrays` returned; names must be in the same order.

        Raises
        ------
        ValueError
            The strategy has no such state.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state {sorted(state)}")


def facts(strategy: strategy.Strategy) -> Aggregation:
    """Return what a strategy states about itself: the strategy, or the defaults for one of Flower's own."""
    return strategy if isinstance(strategy, Aggregation) else Aggregation()


@dataclass(frozen=True)
class TrainReply:
    """The model that one client has trained.

    Parameters
    ----------
    node : int
        Node id.
    arrays : mapping
        name → array; may be read from a file at each access.
    metrics : dict
    """

    node: int
    arrays: Arrays
    metrics: dict[str, Any]


class NumpyAggregation(Aggregation):
    """FedAvg with another function over numpy arrays; sampling, messages and metrics are Flower's."""

    _sent: ArrayRecord | None = None

    @abstractmethod
    def aggregate(self, replies: Sequence[TrainReply]) -> Named:
        """Return the new global model from at least one reply."""

    @property
    def sent(self) -> Named:
        """Return the model w that this round's messages carried; ValueError before `configure_train`."""
        if self._sent is None:
            raise ValueError(f"{type(self).__name__}: configure_train has to come before aggregate_train")
        return as_numpy(self._sent)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model as FedAvg does, and remember it."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new model and FedAvg's mean of the metrics; None without a reply.

        Raises
        ------
        ValueError
            The replies do not fit the rule or each other, or `configure_train` was not called although the rule starts
            from the model that was sent.
        """
        valid, _ = self._check_and_log_replies(list(replies), is_train=True)
        if not valid:
            return None, None
        new = self.aggregate([_unpack(reply) for reply in valid])
        return as_record(new), self.train_metrics_aggr_fn([reply.content for reply in valid], self.weighted_by_key)


def _unpack(reply: Message) -> TrainReply:
    """Read the one array record and the one metric record of a reply that Flower has checked."""
    arrays = next(iter(reply.content.array_records.values()))
    metrics = next(iter(reply.content.metric_records.values()))
    return TrainReply(reply.metadata.src_node_id, reply_arrays(arrays), dict(metrics))
