"""Drift: a sequential rank test that finds changes of a stream of features or outputs at a stated false-alarm rate.

Sources, each for one part:

- sequential ranks of new samples among those before, and a test martingale from them: Fedorova, Gammerman, Nouretdinov,
  Vovk, Plug-in martingales for testing exchangeability on-line, ICML 2012;
- a sum over possible change points: the Shiryaev-Roberts procedure; conformal: Vovk, Testing randomness online,
  Statistical Science 2021; over the last `window` of them: Lai, IEEE Trans. Inf. Theory 1998.

The values of a sample are d numbers, for example class probabilities (`outputs`) or features. For each column,
`bins - 1` order statistics of the n reference samples cut the line into bins. Let bin b consist of m_b of the n + 1
spacings, Σ m_b = n + 1, and let c_b of the t stream samples so far lie in it. If reference and stream are exchangeable,
the next sample lies in bin b with probability

    P_t(b) = (m_b + c_b) / (n + 1 + t)

whatever the distribution is (Pólya's urn; ties are broken at random). For each of the last `window` start points k,
the alternative is "the distribution changed before sample k": its prediction is that of a Dirichlet prior,

    Q_{k,t}(b) = (s m_b / (n + 1) + c_b(k..t-1)) / (s + t - k),    s = bins / 2

with the counts since k. Λ_{k,t} = Π_{i=k..t} Q_{k,i}(b_i) / P_i(b_i) has the mean 1 as long as nothing has changed, and
R_t = Σ_k Λ_{k,t} has at most the mean t. The alarm is given when R_t of any column reaches d / false_alarms.

Guarantee: R_t is at most a nonnegative submartingale with mean t, so that by Doob's inequality, summed over columns,

    P(an alarm in the first t samples) <= t false_alarms    for every t,

for any n, d, `window` and dependence between columns; nothing is estimated or simulated. The mean distance between
false alarms is therefore at least 1 / (2 false_alarms); measured, it was above 1 / false_alarms. t counts from each new
reference.

Why this test: with windows and permutations, as of the maximum mean discrepancy (MMD), a rate holds for one window, but
a stream has one for each sample; thresholds for streams have to be simulated on each device. Here a sample costs some
`window` d additions, and the state is a table of counts.

Decisions:

- After an alarm the next `renewal` samples become the reference, and the test starts again: so the way back is a change
  as well. During these samples the test is blind. Whether the stream is now as the training data were, it does not say.
- Without a reference the first `renewal` samples are it. A federation's descriptors are no substitute: the own and the
  mean one, which a device knows, have no spread.
- It sees changes of the columns' own distributions. One that leaves all of them alone, such as of a correlation, stays
  unseen; append a column that shows it.
- Stream samples enter the counts: what changes over many more samples than `window` is taken for normal.
- A stream sorted by class, or of neighbouring frames, is not exchangeable: it is a chain of changes, and alarms are
  given. The guarantee is for samples in random order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.tta.arrays import Array, to_host
from fedtta.tta.checks import check_finite, check_least, check_number

Float = NDArray[np.float64]
#: Purposes of random numbers.
REFERENCE, SAMPLE = range(2)


def outputs(probabilities: Array) -> Float:
    """Return the values [B, K + 2] of class probabilities [B, K]: these, their entropy in nats, the largest of them."""
    p = to_host(probabilities).astype(np.float64)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    return np.column_stack((p, entropy, p.max(1)))


class DriftTest:
    """Finds changes in a stream of values (see the module); results do not depend on how it is cut into batches.

    Parameters
    ----------
    reference : Array [n, d], optional
        Values of samples that the stream is expected to resemble, such as a validation split's; n at least `bins`,
        d at least 1. None: the first `renewal` samples of the stream.
    false_alarms : float
        In (0, 0.5]: without a change, the probability of an alarm in t samples is at most t times this.
    window : int
        Start points, at least 2: the longest stretch of samples that is compared with those before.
    renewal : int
        Samples after an alarm that become the reference, at least `bins`.
    bins : int
        Of each column, at least 2; in the reference they have equal shares.
    seed : int
        Of the order of equal values.

    Raises
    ------
    ValueError
        An argument is out of range, or the reference has another shape or values that are not finite.
    """

    def __init__(
        self,
        reference: Array | None = None,
        *,
        false_alarms: float = 0.001,
        window: int = 100,
        renewal: int = 50,
        bins: int = 5,
        seed: int = 0,
    ) -> None:
        check_number("false_alarms", false_alarms, 0, 0.5, open_low=True)
        check_least(2, window=window, bins=bins)
        check_least(bins, renewal=renewal)
        check_least(0, seed=seed)
        self.false_alarms, self.window, self.renewal = false_alarms, window, renewal
        self.bins, self.seed = bins, seed
        self._reference = None if reference is None else _rows("the reference", reference)
        if self._reference is not None and len(self._reference) < bins:
            raise ValueError(f"a reference of {len(self._reference)} samples is too small: at least bins={bins}")
        self.reset()

    def reset(self) -> None:
        """Start again with the reference that was given."""
        self.position = 0  # samples since the reset
        self._state = self._blank(0)
        if self._reference is not None:
            self._anchor(self._reference)

    @property
    def evidence(self) -> float:
        """Return the largest R_t as a share of what gives an alarm, in [0, 1); 0 while a reference is collected."""
        if self._seen <= 0:
            return 0.0
        return float(self._sums().max()) * self.false_alarms / self._columns

    def update(self, values: Array) -> list[int]:
        """Take the next samples of the stream.

        Parameters
        ----------
        values : Array [B, d]
            In order, finite; B may be 0.

        Returns
        -------
        list of int
            Positions since the reset, from 0, of the samples at which a change was found.

        Raises
        ------
        ValueError
            Another shape, or a value that is not finite; nothing is taken then.
        """
        rows = _rows("the stream", values)
        if self._columns and rows.shape[1] != self._columns:
            raise ValueError(f"the stream has {rows.shape[1]} columns, the samples before {self._columns}")
        if not self._columns:
            self._state = self._blank(rows.shape[1])
        found = []
        for row in rows:
            if self._seen < 0:
                self._collect(row)
            elif self._observe(row):
                found.append(self.position)
                self._state = self._blank(self._columns)
            self.position += 1
        return found

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of what a continuation needs, as arrays by name; they have values of single samples."""
        return {"position": np.array(self.position), **{name: value.copy() for name, value in self._state.items()}}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a `state_dict()` of a test with the same arguments.

        Raises
        ------
        ValueError
            Names, shapes or values do not fit; nothing is loaded then.
        """
        names = {"position", *self._state}
        if set(state) != names:
            raise ValueError(f"the state of a drift test has the names {sorted(names)}, got {sorted(state)}")
        if any(state[name].ndim != 2 for name in ("urn", "collected")):
            raise ValueError("states 'urn' and 'collected' of a drift test have two dimensions")
        columns = state["urn"].shape[1]
        if self._reference is not None and columns != self._reference.shape[1]:
            raise ValueError(f"the state has {columns} columns, the reference {self._reference.shape[1]}")
        like = {"position": np.array(0), **self._blank(columns, len(state["collected"]))}
        for name, value in state.items():
            if value.shape != like[name].shape or not np.isfinite(value).all():
                raise ValueError(f"state {name!r} of a drift test does not fit, or is not finite")
        if state["since"] >= 0 and (state["urn"] <= 0).any():
            raise ValueError("state 'urn' of a drift test has bins without a spacing")
        self.position = int(state["position"])
        self._state = {name: state[name].astype(like[name].dtype) for name in self._state}

    @property
    def _columns(self) -> int:
        return self._state["urn"].shape[1]

    @property
    def _seen(self) -> int:
        """Stream samples since the reference; -1 while it is collected."""
        return int(self._state["since"])

    def _blank(self, columns: int, collected: int = 0) -> dict[str, NDArray[Any]]:
        """Return the state before the first sample of a reference."""
        return {
            "since": np.array(-1),
            "collected": np.zeros((collected, columns)),
            "edges": np.zeros((self.bins - 1, columns)),  # between the bins, with their random places among equals
            "places": np.zeros((self.bins - 1, columns)),
            "urn": np.zeros((self.bins, columns), np.int64),  # m + c
            "shares": np.zeros(self.bins),  # m / (n + 1)
            "counts": np.zeros((self.window, self.bins, columns), np.int32),  # since each start point
            "logs": np.zeros((self.window, columns)),  # ln Λ
        }

    def _collect(self, row: Float) -> None:
        self._state["collected"] = np.vstack((self._state["collected"], row))
        if len(self._state["collected"]) >= self.renewal:
            self._anchor(self._state["collected"])

    def _anchor(self, reference: Float) -> None:
        """Begin a test against a reference [n, d]."""
        size, columns = reference.shape
        places = np.random.default_rng((self.seed, REFERENCE, self.position)).random(reference.shape)
        order = np.lexsort((places, reference), axis=0)
        ranks = np.rint(np.arange(1, self.bins) * (size + 1) / self.bins).astype(np.int64)  # from 1
        spacings = np.diff([0, *ranks, size + 1])
        self._state = self._blank(columns) | {
            "since": np.array(0),
            "edges": np.take_along_axis(reference, order, 0)[ranks - 1],
            "places": np.take_along_axis(places, order, 0)[ranks - 1],
            "urn": np.repeat(spacings[:, None], columns, 1),
            "shares": spacings / (size + 1),
        }

    def _observe(self, row: Float) -> bool:
        """Take a sample [d]; return whether it gives the alarm."""
        state, seen, every = self._state, self._seen, np.arange(self._columns)
        bins = self._bins(row)
        urn, counts, logs = state["urn"], state["counts"][: seen + 1], state["logs"][: seen + 1]
        newest = seen % self.window
        counts[newest], logs[newest] = 0, 0.0
        ages = (seen - np.arange(len(logs))) % self.window  # samples since each start point [W]
        strength = self.bins / 2
        changed = (strength * state["shares"][bins] + counts[:, bins, every]) / (strength + ages)[:, None]  # [W, d]
        logs += np.log(changed) - np.log(urn[bins, every] / urn[:, 0].sum())
        counts[:, bins, every] += 1
        urn[bins, every] += 1
        state["since"] = np.array(seen + 1)
        return bool(self._sums().max() >= self._columns / self.false_alarms)

    def _bins(self, row: Float) -> NDArray[np.int64]:
        """Return the bin [d] of each value."""
        edges = self._state["edges"]
        above, equal = row > edges, row == edges
        if equal.any():
            place = np.random.default_rng((self.seed, SAMPLE, self.position)).random(row.shape)
            above |= equal & (place > self._state["places"])
        return above.sum(0)

    def _sums(self) -> Float:
        """Return R_t of each column [d]."""
        total: Float = np.exp(self._state["logs"][: self._seen]).sum(0)
        return total


def _rows(what: str, values: Array) -> Float:
    """Return values [n, d] as float64 on the host; ValueError for another shape, d = 0 and what is not finite."""
    rows = to_host(values).astype(np.float64)
    if rows.ndim != 2 or not rows.shape[1]:
        raise ValueError(f"{what} has the shape {rows.shape}; allowed is [samples, columns]")
    return check_finite(what, rows)
