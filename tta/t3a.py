"""T3A: the last layer is replaced by class prototypes computed from the stream.

Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization (Iwasawa and Matsuo, NeurIPS 2021),
as a baseline of FedTHE (ICLR 2023, which takes it sample by sample), ATP (NeurIPS 2023) and FedICON. Sample n with
feature z, pseudo-label k = argmax head(z) and entropy H(p(head(z))):

    S_k ← S_k ∪ {z/‖z‖}, of which the M with the smallest entropy stay;   S_k starts as {ω_k/‖ω_k‖}, the head's row
    c_k = 1/|S_k| Σ_{s in S_k} s;   p(y = k) = softmax_k(z · c_k),   z itself not normalised, and no bias

M = 50 is what FedTHE (appendix) and FedICON (appendix) chose; the paper takes M from {1, 5, 20, 50, 100, all}.

Decisions and deviations:

- `prototype="mean"` is the paper's c_k. The published code, and those of FedTHE and ATP, normalise it once more, so
  that how far a class is spread does not count: `prototype="direction"`.
- The row ω_k always starts in S_k, as in the paper; the published code puts it where the head would. It has the entropy
  of head(ω_k), bias included and not normalised, as in the published code, and can be pushed out like any support.
- Sample by sample: sample n is predicted with supports that include it and no later one. The published code adds a
  whole batch first; FedTHE reports that both do about equally well.
- Of supports with the same entropy the older one stays. A feature of length 0 counts as a support and adds nothing.
- Prototypes are float64, on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedtta.tta.arrays import (
    double,
    entropy_of_logits,
    from_tensor,
    namespace,
    softmax,
    to_device_of,
    to_host,
    to_tensor,
)
from fedtta.tta.base import Adapter
from fedtta.tta.checks import Checks, check_choice, check_finite, check_least
from fedtta.tta.heads import feature_head, features_and_logits
from fedtta.tta.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor, nn

PROTOTYPES = ("mean", "direction")
SMALLEST_NORM = 1e-12  # as torch's `normalize`


class T3A(Adapter):
    """Predict by class prototypes, the means of the most certain features so far (see the module).

    Parameters
    ----------
    model : nn.Module
        A network with `features` and `head` (`fedtta.models.TwoHead`); with `personal_head` where `head` is "personal".
        Nothing in it changes.
    statistics : Statistics or None
        Not used.
    support : int
        M, supports a class; 0 keeps all (then only their sum is stored).
    prototype : "mean" or "direction"
        The mean of the supports, or that mean normalised to length 1.
    head : "global" or "personal"
        The head whose rows start the supports and that gives pseudo-labels and entropies.
    record : bool
        Keep the report: `entropy` [n], of the head's prediction, in nats.

    Raises
    ------
    ValueError
        An option is out of range, or the network has no such head.
    """

    name = "t3a"
    paper = "Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization (NeurIPS 2021)"
    adapts = "the classes' prototypes"

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        support: int = 50,
        prototype: Literal["mean", "direction"] = "mean",
        head: Literal["global", "personal"] = "global",
        record: bool = True,
    ) -> None:
        check_least(0, support=support)
        check_choice("prototype", prototype, PROTOTYPES)
        self._linear = feature_head(model, head, "T3A")
        super().__init__(model, record=record)
        self.support, self.prototype, self.head = support, prototype, head
        self.reset()

    def _predict(self, x: Tensor) -> Tensor:
        checks = Checks()
        z, logits = features_and_logits(self.model, x, self.head, checks)
        entropy = checks.finite("the entropy", entropy_of_logits(logits))
        xp = namespace(logits)
        rows = xp.concat((double(z), double(entropy)[:, None], double(logits.argmax(1))[:, None]), axis=1)
        rows = checks.read(rows)  # [B, d + 2]
        values, entropies, labels = rows[:, :-2], rows[:, -2].tolist(), rows[:, -1].astype(int).tolist()
        directions, scores = _directions(values), np.empty(logits.shape)
        # Nothing below can fail: the state is changed in place.
        for i, (k, h) in enumerate(zip(labels, entropies, strict=True)):
            self._admit(k, directions[i], h)
            scores[i] = self._prototypes @ values[i]
        self._note(entropy=entropy)
        return to_tensor(to_device_of(softmax(scores.T).T, logits), like=logits)

    def _admit(self, k: int, direction: np.ndarray, entropy: float) -> None:
        """Let a feature's direction [d] join class k, if it is among the M most certain ones."""
        if self.support == 0:
            self._counts[k] += 1
            self._sums[k] += direction
        else:
            ranked, kept = self._entropies[k], self._supports[k]  # by rising entropy
            rank = int(np.searchsorted(ranked[: self._counts[k]], entropy, side="right"))
            if rank == self.support:
                return
            n = self._counts[k] = min(self._counts[k] + 1, self.support)
            ranked[rank + 1 : n], kept[rank + 1 : n] = ranked[rank : n - 1], kept[rank : n - 1]
            ranked[rank], kept[rank] = entropy, direction
            self._sums[k] = kept[:n].sum(0)
        self._prototypes[k] = self._prototypes_of(self._sums[k], self._counts[k])

    def _prototypes_of(self, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return c [..., d] of sums [..., d] of counts [...] supports."""
        if self.prototype == "mean":
            return sums / counts[..., None]
        return sums / np.maximum(np.linalg.norm(sums, axis=-1, keepdims=True), SMALLEST_NORM)

    def _reset(self) -> None:
        rows = self._linear.weight  # [K, d]
        classes, features = rows.shape
        self._counts = np.ones(classes, dtype=np.int64)
        self._supports = np.zeros((classes, self.support, features))  # [K, M, d]
        self._entropies = np.zeros((classes, self.support))
        self._sums = _directions(rows)
        if self.support:
            self._supports[:, 0] = self._sums
            self._entropies[:, 0] = to_host(from_tensor(entropy_of_logits(self._linear(rows))))
        self._prototypes = self._prototypes_of(self._sums, self._counts)

    def _state(self) -> dict[str, Any]:
        kept = {"supports": self._supports, "entropies": self._entropies} if self.support else {"sums": self._sums}
        return {**kept, "counts": self._counts}

    def _load(self, state: dict[str, Tensor]) -> None:
        arrays = {name: to_host(value) for name, value in state.items()}
        counts = arrays["counts"]
        if (counts < 1).any() or (self.support and (counts > self.support).any()):
            raise ValueError(f"state 'counts' of T3A must be at least 1 and at most support: {counts.tolist()}")
        if self.support:
            ranked = zip(arrays["entropies"], counts, strict=True)
            if any((np.diff(entropies[:n]) < 0).any() for entropies, n in ranked):
                raise ValueError("state 'entropies' of T3A must rise within each class")
            self._supports, self._entropies = arrays["supports"], arrays["entropies"]
            self._sums = np.stack([kept[:n].sum(0) for kept, n in zip(self._supports, counts, strict=True)])
        else:
            self._sums = arrays["sums"]
        self._counts = counts
        self._prototypes = self._prototypes_of(self._sums, counts)


def _directions(vectors: Tensor | np.ndarray) -> np.ndarray:
    """Return vectors [n, d] divided by their length, float64; a vector of length 0 stays.

    Raises
    ------
    ValueError
        A length is not finite.
    """
    values = to_host(from_tensor(vectors))
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    check_finite("the length of the features", lengths)
    return values / np.maximum(lengths, SMALLEST_NORM)
