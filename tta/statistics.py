"""Statistics of the training data that adapters use at test time: shapes, ranges and pooling.

A client computes them in the statistics round, under the final global encoder, in evaluation mode and without
augmentation, and sends them to the server, which averages them over clients. `STATISTICS` describes each one;
a client then combines its own values and the means into `Statistics`, which adapters read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtta.tta.arrays import is_tensor, namespace, to_host

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Statistic:
    """One array that clients send in the statistics round, float64; the server pools it by a mean over clients.

    Parameters
    ----------
    shape : tuple of str
        Dimensions by name: "features" (d), "classes" (K), "blocks"; empty for one number, which travels as [1].
    need : str
        The adapters' need that it meets; see `fedtta.tta.base.NEEDS`.
    own, mean : str
        Fields of `Statistics` that the client's own value and the mean over clients fill; empty: not used.
    high, low : float
        Its values lie in [low, high].
    on_request : bool
        Sent only if an adapter of the run needs it; the others are always sent.
    distribution : bool
        Its numbers sum to one.
    """

    shape: tuple[str, ...]
    need: str
    own: str = ""
    mean: str = ""
    high: float = 1.0
    low: float = 0.0
    on_request: bool = False
    distribution: bool = False

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for given sizes of the dimensions."""
        return tuple(sizes[dimension] for dimension in self.shape) or (1,)


#: What clients send, by name and in order.
STATISTICS: dict[str, Statistic] = {
    "descriptor": Statistic(
        ("features",), "descriptor", "descriptor_local", "descriptor_global", high=math.inf, low=-math.inf
    ),
    "dle": Statistic(("features",), "dle", "dle_local", "dle_global"),
    "entropy_local": Statistic((), "entropy", own="entropy_local", high=math.inf),
    "entropy_global": Statistic((), "entropy", own="entropy_global", high=math.inf),
    "label_prior": Statistic(("classes",), "label_prior", mean="label_prior", on_request=True, distribution=True),
    "confusion": Statistic(("classes", "classes"), "confusion", mean="confusion", on_request=True, distribution=True),
    "block_scores": Statistic(("blocks",), "block_scores", mean="block_scores", on_request=True),
}

#: Statistics that are sent only if an adapter needs them; those whose numbers sum to one.
ON_REQUEST = tuple(name for name, statistic in STATISTICS.items() if statistic.on_request)
DISTRIBUTIONS = tuple(name for name, statistic in STATISTICS.items() if statistic.distribution)
#: Needs of adapters that the statistics round meets, and those for which a client needs training data of its own.
STATISTICS_NEEDS = frozenset(statistic.need for statistic in STATISTICS.values())
OWN_NEEDS = frozenset(statistic.need for statistic in STATISTICS.values() if statistic.own)
#: Needs of an adapter that only a client that trains on labels of its own can meet.
PERSONALISED = OWN_NEEDS | {"personal_head", "residual_head", "datastore", "candidates"}


@dataclass(frozen=True)
class Statistics:
    """A client's statistics of the training data under the final global encoder.

    An adapter reads the fields it needs; the rest may be None. For a network that gives numpy arrays they are these.

    Parameters
    ----------
    descriptor_local, descriptor_global : Tensor [d] or None
        Mean feature z (FedTHE, section 4.2: h^l, h^g).
    dle_local, dle_global : Tensor [d] or None
        Fraction of samples whose discretised feature is 0, raw, in [0, 1] (BTFL, section 4.1: p^l, p^g). A feature
        below 0 counts as 0; BTFL itself refuses networks with such features.
    entropy_local, entropy_global : float or None
        Mean entropy in nats of the predictions of the personal and of the global head (BTFL: mean H_l, mean H_g).
    label_prior : Tensor [K] or None
        Frequency of each class in training, mean over clients (EM).
    confusion : Tensor [K, K] or None
        Frequencies P(ŷ = i, y = j) on validation data, mean over clients (BBSE).
    block_scores : Tensor [blocks] or None
        Accuracy on validation data after adapting one block alone, mean over clients (Surgical).
    clients : float or None
        How many clients these means are over, where it is not known otherwise; 0: this client is none of them.
    """

    descriptor_local: Tensor | None = None
    descriptor_global: Tensor | None = None
    dle_local: Tensor | None = None
    dle_global: Tensor | None = None
    entropy_local: float | None = None
    entropy_global: float | None = None
    label_prior: Tensor | None = None
    confusion: Tensor | None = None
    block_scores: Tensor | None = None
    clients: float | None = None

    def require(self, method: str, *names: str) -> None:
        """Raise ValueError naming every statistic that `method` needs and that is missing here."""
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            own = [statistic.own for statistic in STATISTICS.values()]
            named = (f"{name} ({'of this client' if name in own else 'mean over clients'})" for name in missing)
            raise ValueError(
                f"{method} needs statistics of training data that are not here: {', '.join(named)}; "
                "a run's statistics round makes them at clients that train"
            )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the fields that are known, as arrays by name; numbers have no dimension."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: to_host(value) if np.ndim(value) else np.array(value, np.float64)
            for name, value in values.items()
            if value is not None
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays, device: torch.device | None = None) -> Statistics:
        """Return what `to_arrays` was made of; arrays without a dimension become numbers."""
        import torch

        values: dict[str, Any] = {
            name: torch.tensor(value, device=device) if value.ndim else float(value) for name, value in arrays.items()
        }
        return cls(**values)

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> Statistics:
        """Return `from_arrays` for a network that gives numpy arrays."""
        values: dict[str, Any] = {name: value if value.ndim else float(value) for name, value in arrays.items()}
        return cls(**values)

    @classmethod
    def combine(cls, own: Arrays, means: Arrays, device: torch.device | None = None) -> Statistics:
        """Combine a client's own statistics with the means over clients, both named as in `STATISTICS`.

        A client without training data of its own passes `own = {}` and the statistics `ON_REQUEST` alone.
        """
        found: dict[str, NDArray[Any]] = {}
        for name, statistic in STATISTICS.items():
            for field, arrays in ((statistic.own, own), (statistic.mean, means)):
                if field and name in arrays:
                    found[field] = arrays[name] if statistic.shape else arrays[name][0]
        return cls.from_arrays(found, device)


def out_of_range(name: str, value: NDArray[Any]) -> str:
    """Return which values of a statistic are not allowed; empty if all are finite and in range."""
    low, high = STATISTICS[name].low, STATISTICS[name].high
    if (np.isfinite(value) & (value >= low) & (value <= high)).all():
        return ""
    return f"values from {value.min()} to {value.max()}, allowed are {low:g} to {high:g}"


def discretise(z: Any) -> Any:
    """Return round(tanh z), ties to even (BTFL, eq. 5): 1 where z > atanh(1/2) = 0.549..., else 0.

    Parameters
    ----------
    z : Tensor or array
        Not negative: features behind a ReLU.

    Returns
    -------
    Tensor or np.ndarray
        Of the kind, dtype and shape of z, with values in {0, 1}.
    """
    z = z if is_tensor(z) else np.asarray(z)
    return namespace(z).round(namespace(z).tanh(z))
