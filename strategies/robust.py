"""Byzantine-robust aggregation: median, trimmed mean, Krum and Multi-Krum.

- Median and trimmed mean of each number: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
  Yin et al., ICML 2018, definitions 1 and 2 (as Flower's FedMedian and FedTrimmedAvg).
- Krum: "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", Blanchard et al., NeurIPS 2017,
  section 4: the client whose n - f - 2 nearest others are nearest, by the sum of squared distances over all numbers;
  Multi-Krum: the mean of the m best (as Flower's Krum and MultiKrum).

The aggregators serve models, statistics and rates. Deviations from Flower's strategies:
- Too few clients are an error. Flower's trimmed mean of 4 at a fraction of 0.2 is the plain mean, its median of two as
  well, and its Krum takes any number of clients.
- Distances are of exact differences in float64. Flower's float32 sum ‖x‖² + ‖y‖² - 2xy loses all digits when weights
  are large compared with their differences, may be negative, and one huge client turns all of them into NaN.
- Clients count alike in Multi-Krum, as in the paper; Flower weighs them by the number of examples that they claim.
- Integers are rounded to the nearest, not truncated; every array keeps its dtype.
- Results do not depend on the order of the clients (Krum resolves a tie by the first), and lie within the range of the
  clients that are kept.

All go through the clients' arrays in blocks (`named_blocks`): some 100 MB in memory however many clients there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from fedtta.messages.arrays import layout_of
from fedtta.settings import exactly
from fedtta.strategies.aggregation import NumpyAggregation, RobustAggregator, TrainReply
from fedtta.strategies.arrays import Arrays, Float, Named, blocks, named_blocks

if TYPE_CHECKING:
    from fedtta.settings import Settings


@dataclass(frozen=True)
class Median:
    """The median of each number; it tolerates fewer than half of the clients."""

    @property
    def min_clients(self) -> int:
        """Return 3: the median of two is their mean."""
        return 3

    def __call__(self, clients: Sequence[Arrays]) -> Named:
        """See `RobustAggregator`."""
        _require(clients, self.min_clients, "the median")
        return middle(clients, (len(clients) - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each number without its ⌊βn⌋ smallest and largest; it tolerates ⌊βn⌋ of n clients.

    Parameters
    ----------
    fraction : float
        β, more than 0, less than 1/2.

    Raises
    ------
    ValueError
        `fraction` is out of its range.
    """

    fraction: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 0.5:  # also refuses NaN
            raise ValueError(f"fraction = {self.fraction!r}; allowed is more than 0, less than 0.5")

    @property
    def min_clients(self) -> int:
        """Return the smallest number of clients of which it trims any."""
        return math.ceil(1 / exactly(self.fraction))

    def __call__(self, clients: Sequence[Arrays]) -> Named:
        """See `RobustAggregator`."""
        _require(clients, self.min_clients, f"a mean trimmed by {self.fraction:g}")
        return middle(clients, int(exactly(self.fraction) * len(clients)))


@dataclass(frozen=True)
class Krum:
    """The mean of the clients with the nearest neighbours; it tolerates `malicious` clients.

    Parameters
    ----------
    malicious : int
        f, at least 1.
    keep : int
        m, how many are averaged, at least 1; 1 is Krum, more is Multi-Krum.

    Raises
    ------
    ValueError
        One of them is less than 1.
    """

    malicious: int = 1
    keep: int = 1

    def __post_init__(self) -> None:
        for name, value in (("malicious", self.malicious), ("keep", self.keep)):
            if value < 1:
                raise ValueError(f"{name} = {value!r}; allowed is 1 or more")

    @property
    def min_clients(self) -> int:
        """Return 2f + 3, or f + 2 + m if that is more."""
        return self.malicious + 2 + max(self.malicious + 1, self.keep)

    def __call__(self, clients: Sequence[Arrays]) -> Named:
        """See `RobustAggregator`."""
        _require(clients, self.min_clients, f"Krum with {self.malicious} malicious and {self.keep} kept")
        best = np.argsort(krum_scores(clients, self.malicious), kind="stable")[: self.keep]
        return middle([clients[i] for i in best], 0)


def middle(clients: Sequence[Arrays], cut: int) -> Named:
    """Return the mean of each number without its `cut` smallest and largest; 0 is the plain mean.

    Raises
    ------
    ValueError
        Nothing is left, arrays do not fit each other, or a value is not finite.
    """
    if not 0 <= cut < len(clients) / 2:
        raise ValueError(f"cut = {cut}: nothing is left of {len(clients)} clients")
    aggregated: Named = {name: np.empty(*layout) for name, layout in layout_of(clients[0]).items()}
    for name, where, block in named_blocks(clients):
        rows = np.sort(block.astype(np.float64), axis=0)[cut : len(clients) - cut]  # [N - 2 cut, P], NaN last
        with np.errstate(over="ignore", invalid="ignore"):
            means = np.clip(rows.mean(axis=0), rows[0], rows[-1])
        if not np.isfinite(block).all():
            raise ValueError(f"{name}: values that are not finite")
        aggregated[name].reshape(-1)[where] = np.rint(means) if block.dtype.kind in "iu" else means
    return aggregated


def krum_scores(clients: Sequence[Arrays], malicious: int) -> Float:
    """Return each client's sum of squared distances to its n - f - 2 nearest others [N]; infinite beyond float64.

    Raises
    ------
    ValueError
        There are fewer than f + 3 clients, arrays do not fit each other, or a value is not finite.
    """
    from scipy.spatial.distance import pdist, squareform  # 20 MB, which other rules do without

    nearest = len(clients) - malicious - 2
    if nearest < 1:
        raise ValueError(f"Krum with {malicious} malicious needs more than {malicious + 2} clients, not {len(clients)}")
    pairs = np.zeros(len(clients) * (len(clients) - 1) // 2)
    for block in blocks(clients):
        pairs += pdist(block, "sqeuclidean")
    ordered = np.sort(squareform(pairs), axis=1)  # the first is the client itself
    scores: Float = ordered[:, 1 : nearest + 1].sum(axis=1)
    return scores


def _require(clients: Sequence[Arrays], least: int, what: str) -> None:
    """Raise ValueError unless there are enough clients."""
    if len(clients) < least:
        raise ValueError(f"{what} needs {least} clients, not {len(clients)}")


class RobustFedAvg(NumpyAggregation):
    """FedAvg whose models are aggregated robustly; the metrics are averaged as FedAvg does.

    Parameters
    ----------
    aggregator : RobustAggregator
        It does not look at "num-examples".
    **fedavg
        Flower's own parameters.
    """

    byzantine_robust = True
    #: Class of the aggregator; `options` are its parameters.
    aggregator_class: ClassVar[Callable[..., RobustAggregator]]

    def __init__(self, aggregator: RobustAggregator, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.aggregator = aggregator

    @classmethod
    def robust_aggregator(cls, settings: Settings) -> RobustAggregator:
        """See `Aggregation`."""
        return cls.aggregator_class(**cls.option_values(settings))

    @classmethod
    def from_settings(cls, settings: Settings, **fedavg: Any) -> Self:
        """See `Aggregation`."""
        return cls(cls.robust_aggregator(settings), **fedavg)

    def aggregate(self, replies: Sequence[TrainReply]) -> Named:
        """Return the new model; ValueError with fewer replies than the aggregator needs."""
        return self.aggregator([reply.arrays for reply in replies])


class FedMedian(RobustFedAvg):
    """FedAvg with the median of each number."""

    aggregator_class = Median


class FedTrimmedAvg(RobustFedAvg):
    """FedAvg with the trimmed mean of each number."""

    aggregator_class = TrimmedMean
    options: ClassVar = {"fraction": "trim_fraction"}


class FedKrum(RobustFedAvg):
    """FedAvg with the model of the one client that Krum selects."""

    aggregator_class = Krum
    options: ClassVar = {"malicious": "krum_malicious"}


class FedMultiKrum(RobustFedAvg):
    """FedAvg over the clients that Multi-Krum selects."""

    aggregator_class = Krum
    options: ClassVar = {"malicious": "krum_malicious", "keep": "krum_keep"}
