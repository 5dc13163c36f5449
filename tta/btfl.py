"""BTFL: a Bayesian mixture of the global and the personal head.

BTFL: A Bayesian-based Test-Time Generalization Method for Internal and External Data Distributions in Federated
Learning (Yu Zhou, Bingyan Liu; KDD 2025), section 4.

m is the probability that a sample comes from outside the client's own distribution. Its history is a Beta
distribution that counts past events (eq. 7 to 11, Algorithm 1); each sample sharpens it by how likely its binarised
feature is under local and global training data (eq. 5, 6, 9, 14, 15); the two heads' probabilities are mixed with the
posterior mean of m (eq. 21). No gradient anywhere; only the two counts are sequential, all else is one pass.

Where the paper is ambiguous: (a) eq. 8 lets internal events raise m; here m ~ Beta(a, b) with a = 1 + external and
b = 1 + internal events, as in the published code. (b) Frequencies are smoothed, p → s + (1-2s) p, as in the published
code: a unit that never or always fires would divide by zero in eq. 9. (c) Eq. 15 as printed multiplies the likelihoods
by u = exp((H - H̄)/H); text and published code raise them to the power u (`rectify`). (d) The mean of eq. 21 is exact;
the published code takes 100 points on [0.01, 0.99], up to 0.14 off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fedtta.tta.arrays import (
    Array,
    Constants,
    class_major,
    from_tensor,
    namespace,
    softmax_entropy,
    softmax_of,
    to_device_of,
    to_tensor,
)
from fedtta.tta.base import Adapter
from fedtta.tta.checks import Checks, check_choice, check_number
from fedtta.tta.heads import check_two_heads, statistic_vector, two_heads
from fedtta.tta.posterior import BetaRule, mixing_weight
from fedtta.tta.statistics import Statistics, discretise

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["BTFL", "discretise", "mixing_weight"]

NEEDS_RELU = "btfl needs features that are not negative: a ReLU before the heads (model-options features=relu)"

RECTIFICATIONS = ("power", "product", "none")

#: What stands in for a mean entropy of 0, and for an entropy of 0 below a fraction line: SMALL / TINY is huge.
SMALL, TINY = 1e-290, 1e-300

#: With `smoothing=0` a frequency keeps this distance from 0 and 1.
CLIP = 1e-6


class BTFL(Adapter):
    """Mix the heads with the posterior probability that a sample is external.

    Parameters
    ----------
    model : nn.Module
        A two-head network with d features z >= 0 (a ReLU before the heads). One that says by `features_nonnegative`
        that features may be negative is refused; external networks get a ReLU by their option `features = "relu"`.
    statistics : Statistics
        `dle_local` p^l and `dle_global` p^g ([d], in [0, 1]), `entropy_local` H̄_l and `entropy_global` H̄_g (nats).
    strength : float
        λ of Algorithm 1, above 0: once a + b exceeds it, the history is pruned.
    smoothing : float
        s in [0, 0.5]; 0 is the paper to the letter, clipped to [1e-6, 1 - 1e-6].
    rectify : "power", "product" or "none"
        ln τ̂ = (u_l ln q_l - u_g ln q_g)/d, or (ln q_l - ln q_g)/d + ln u_l - ln u_g with each ln u clipped to ±30, or
        (ln q_l - ln q_g)/d.
    leave_one_out : int
        N >= 2: take the client's own share out of p^g, a mean over N clients; 0: leave it in.
    record : bool
        Keep the report: `weight` e, `log_tau` (raw) and `log_tau_hat` (rectified) [n], `prior` (a, b) as used [n, 2],
        `event` [n]: 1 external, -1 internal, 0 none.

    Raises
    ------
    ValueError
        Features may be negative; a statistic is missing, of the wrong shape or out of range, or an option is. `predict`
        raises it for samples
        with a negative feature.
    """

    name = "btfl"
    paper = "BTFL: A Bayesian-based Test-Time Generalization Method (KDD 2025)"
    adapts = "the weight of the global head"
    needs = frozenset({"personal_head", "dle", "entropy", "nonnegative"})

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        strength: float = 16,
        smoothing: float = 0.2,
        rectify: Literal["power", "product", "none"] = "power",
        leave_one_out: int = 0,
        record: bool = True,
    ) -> None:
        features = check_two_heads(model, "btfl")
        if not getattr(model, "features_nonnegative", True):
            raise ValueError(NEEDS_RELU)
        statistics = statistics or Statistics()
        statistics.require("btfl", "dle_local", "dle_global", "entropy_local", "entropy_global")
        check_number("strength", strength, 0, math.inf, open_low=True)
        check_number("smoothing", smoothing, 0, 0.5)
        check_choice("rectify", rectify, RECTIFICATIONS)
        super().__init__(model, record=record)
        self.strength, self.rectify = strength, rectify
        local = _frequency("dle_local", statistics.dle_local, features)
        global_ = _frequency("dle_global", statistics.dle_global, features)
        global_ = without_own_share(global_, local, leave_one_out)
        table, offset = likelihood_table(smooth(local, smoothing), smooth(global_, smoothing))
        self._mean_entropy = _mean_entropies(statistics)
        pace = np.maximum(np.array(self._mean_entropy)[:, None], SMALL)  # H̄ above a fraction line, (2, 1)
        self._fixed = Constants(table=table, offset=offset, pace=pace)
        # An event adds one count to at most `strength`, and pruning leaves a sum of 3.
        self._largest = max(float(strength), 3.0)
        self._rule = BetaRule(np.array([[1.0, self._largest - 1.0]]))
        self._prior = (1.0, 1.0)  # a, b

    def _predict(self, x: Tensor) -> Tensor:
        checks = Checks()
        return self._mixed(*two_heads(self.model, x, checks), checks)

    def interpolate(self, z: Tensor, logits_global: Tensor, logits_personal: Tensor) -> Tensor:
        """Return what `predict` returns, given the network's outputs z [B, d] and logits [B, K]; history moves on."""
        return self._mixed(z, logits_global, logits_personal, Checks())

    def _mixed(self, z: Tensor, logits_global: Tensor, logits_personal: Tensor, checks: Checks) -> Tensor:
        """Return `interpolate`, after what `checks` already require."""
        if z.shape[0] == 0:
            return softmax_of(logits_global)
        features = from_tensor(z)  # (B, d)
        xp, fixed = namespace(features), self._fixed.on(features)
        require_non_negative(features, len(fixed["table"]), checks)
        probabilities, entropy = softmax_entropy(class_major(logits_personal, logits_global))  # (K, 2, B), (2, B)
        likelihood = xp.tanh(features).round() @ fixed["table"] + fixed["offset"]  # ln q_l, ln q_g, ln τ: (B, 3)
        log_tau = likelihood[:, 2]
        evidence = checks.read(xp.stack((log_tau, entropy[0], entropy[1]), axis=1)).tolist()  # the only wait for a GPU
        events = [detect_event(ratio, entropies, self._mean_entropy) for ratio, *entropies in evidence]
        path, prior = prior_path(events, self._prior, self.strength)
        priors = to_device_of(np.array(path), features)  # (B, 2)
        log_tau_hat = self._rectified(likelihood, entropy)
        e = self._rule.mean(priors, log_tau_hat)  # (B,)
        mixed = probabilities[:, 0] + e * (probabilities[:, 1] - probabilities[:, 0])  # (K, B)
        self._prior = prior
        self._note(weight=e, prior=priors, log_tau=log_tau, log_tau_hat=log_tau_hat, event=np.array(events))
        return to_tensor(mixed.T, like=logits_global)

    def _rectified(self, likelihood: Array, entropy: Array) -> Array:
        """Return ln τ̂ [B] (eq. 14, 15) from ln q_l, ln q_g, ln τ [B, 3] and the heads' entropies [2, B]."""
        xp, fixed = namespace(likelihood), self._fixed.on(likelihood)
        features = len(fixed["table"])
        if self.rectify == "none":
            return likelihood[:, 2] / features
        # ln u, (2, B). H = 0 gives ln u < -1e9, also when H̄ = 0: SMALL stands in for that.
        log_trust = 1 - fixed["pace"] / (entropy + TINY)
        if self.rectify == "product":
            log_trust = xp.clip(log_trust, -30.0, 30.0)
            return likelihood[:, 2] / features + log_trust[0] - log_trust[1]
        trusted = xp.exp(log_trust) * likelihood[:, :2].T  # ln q^u, (2, B)
        return (trusted[0] - trusted[1]) / features

    def _reset(self) -> None:
        self._prior = (1.0, 1.0)

    def _state(self) -> dict[str, Any]:
        return {"prior": np.array(self._prior, np.float64)}

    def _load(self, state: dict[str, Tensor]) -> None:
        a, b = state["prior"].tolist()
        if min(a, b) < 1 or a + b > self._largest + 1e-9:
            raise ValueError(
                f"state 'prior' of BTFL is ({a}, {b}): both are at least 1, their sum at most {self._largest}"
            )
        self._prior = (a, b)


def detect_event(log_tau: float, entropy: Sequence[float], mean_entropy: tuple[float, float]) -> int:
    """Return 1 for an external event, -1 for an internal one, 0 for none (eq. 10, 11; all inequalities strict).

    Parameters
    ----------
    log_tau : float
        ln τ, raw, not rectified.
    entropy, mean_entropy : (float, float)
        Of the personal and the global head.
    """
    (personal, global_), (mean_personal, mean_global) = entropy, mean_entropy
    if log_tau > 0 and personal < mean_personal and global_ > mean_global:
        return -1
    if log_tau < 0 and personal > mean_personal and global_ < mean_global:
        return 1
    return 0


def prior_path(
    events: list[int], prior: tuple[float, float], strength: float
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Return the prior (a, b) before each event, and after the last one (eq. 11, Algorithm 1).

    An external event (1) raises a, an internal one (-1) raises b; a sum above `strength` is then pruned to 3, in the
    proportion of the counts, both with the old sum.
    """
    a, b = prior
    path = []
    for event in events:
        path.append((a, b))
        if event > 0:
            a += 1
        elif event < 0:
            b += 1
        total = a + b
        if total > strength:
            a, b = 1 + a / total, 1 + b / total
    return path, (a, b)


def require_non_negative(features: Array, width: int, checks: Checks) -> None:
    """Require that no feature [B, d] be negative; raise ValueError if they are not `width` wide."""
    if features.shape[1] != width:
        raise ValueError(f"features have {features.shape[1]} values, the statistics {width}")
    checks.require(
        (features >= 0).all(1),
        lambda bad: f"samples {bad} of the batch have negative features; BTFL needs a ReLU before the heads",
    )


def smooth(frequency: np.ndarray, smoothing: float) -> np.ndarray:
    """Return s + (1-2s) p, or p clipped to [1e-6, 1 - 1e-6] for s = 0."""
    if smoothing == 0:
        return np.clip(frequency, CLIP, 1 - CLIP)
    return smoothing + (1 - 2 * smoothing) * frequency


def without_own_share(global_: np.ndarray, local: np.ndarray, clients: int) -> np.ndarray:
    """Return (N p^g - p^l)/(N-1) in [0, 1], the mean over the other clients; p^g itself for `clients` = 0."""
    if clients == 0:
        return global_
    if clients < 2:
        raise ValueError(f"leave_one_out={clients}: give the number of clients, at least 2, or 0 for off")
    return np.clip((clients * global_ - local) / (clients - 1), 0, 1)


def likelihood_table(local: np.ndarray, global_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the linear map from a binarised feature to (ln q_l, ln q_g, ln τ) (eq. 6, 9).

    ln τ has a column of its own, so that it is exactly zero for equal frequencies.

    Returns
    -------
    table : np.ndarray [d, 3]
    offset : np.ndarray [3]
    """
    silent = np.log(np.stack((local, global_), 1))  # of ẑ_i = 0, (d, 2)
    active = np.log1p(-np.stack((local, global_), 1))  # of ẑ_i = 1
    slope, offset = active - silent, silent.sum(0)
    ratio = slope[:, 0] - slope[:, 1]
    return np.column_stack((slope, ratio)), np.append(offset, (silent[:, 0] - silent[:, 1]).sum())


def _frequency(name: str, value: Tensor | None, features: int) -> np.ndarray:
    frequency = statistic_vector(name, value, features)
    if frequency.min() < 0 or frequency.max() > 1:
        raise ValueError(f"{name} holds values outside [0, 1]")
    return frequency


def _mean_entropies(statistics: Statistics) -> tuple[float, float]:
    """Return (H̄_l, H̄_g); raise ValueError naming one that is negative or not finite."""
    local, global_ = float(cast(float, statistics.entropy_local)), float(cast(float, statistics.entropy_global))
    check_number("entropy_local", local, 0, math.inf)
    check_number("entropy_global", global_, 0, math.inf)
    return local, global_
