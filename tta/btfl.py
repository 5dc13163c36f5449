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
by u = exp((H - H̄)/H); the text raises them to the power u (`rectify`).

The published code departs from the paper: six readings, each an option, and all of them `reading="published"`, but for
its constant C = 100, which is K there unless `classes=100` (`Reading`). It departs in training, too, which is not
offered: σ‖z‖₁/32 is added to the loss (σ = 1e-3 for the CNN, 1e-4 for CCT). One fault of it is not repeated: where τ̂ is
exactly 1, its squash gives 0; here it stays 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fedtta.tta.arrays import (
    Array,
    Constants,
    class_major,
    from_tensor,
    namespace,
    softmax,
    softmax_entropy,
    softmax_of,
    to_device_of,
    to_tensor,
)
from fedtta.tta.base import Adapter
from fedtta.tta.checks import Checks, check_choice, check_least, check_number, class_count
from fedtta.tta.heads import check_two_heads, statistic_vector, two_heads
from fedtta.tta.posterior import LARGEST_LOG, BetaRule, GridRule, mixing_weight
from fedtta.tta.statistics import Statistics, discretise

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["BTFL", "Reading", "discretise", "mixing_weight"]

NEEDS_RELU = "btfl needs features that are not negative: a ReLU before the heads (model-options features=relu)"

RECTIFICATIONS = ("power", "product", "none")

#: What stands in for a mean entropy of 0, and for an entropy of 0 below a fraction line: SMALL / TINY is huge.
SMALL, TINY = 1e-290, 1e-300

#: With `smoothing=0` a frequency keeps this distance from 0 and 1.
CLIP = 1e-6

#: ln u stays within this where it has no bound of its own; τ̂ is 0 or ∞ long before.
LARGEST_TRUST = 30.0

#: More events than a stream has: the nodes of `BetaRule` are 100 sqrt(λ). With counts of more than 3000 in all, the
#: density is narrower than the points of `GridRule` are apart.
LARGEST_STRENGTH = {"exact": 1e6, "grid": 3000.0}


@dataclass(frozen=True)
class Reading:
    """What paper and published code do differently; the defaults are the paper's.

    Parameters
    ----------
    strength : float
        λ, above 0, at most 1e6, with integral="grid" 3000. The paper: 16. The code: 5 (CNN), 300 (CCT; ImageNet), 3000
        (ResNet), 50 (OfficeHome).
    leave_one_out : int or None
        N >= 2: take the client's own share out of p^g, a uniform mean over N clients; 0: leave it in; None: N is
        missing. The code always takes it out.
    mixing : "probability" or "log"
        Y = e Y_g + (1-e) Y_l (eq. 21), or ∝ exp(e ln Y_g + (1-e) ln Y_l).
    denominators : "paper" or "code"
        u = exp((H - H̄)/H) of each head, or u_l = exp((H_l - H̄_l)/H̄_l) and u_g = exp((H_g - ln C)/ln C), in which H̄_g
        has no part. Events compare with H̄_l and H̄_g in both.
    classes : int or None
        C of that constant, at least 2; None: the network's number of classes. The code: 100 for every data set.
    squash : float
        k_b >= 0; 0: off. τ̂ > 1 → 1 + k_b tanh(τ̂ - 1), τ̂ < 1 → 1/(1 + k_b tanh(1/τ̂ - 1)). The code: 4, 10 for ResNet.
    prune : "paper" or "code"
        Above λ, a → 1 + a/(a+b), or a → 1 + (λ/10) a/(a+b), and b alike.
    integral : "exact" or "grid"
        The mean of eq. 21, or trapezoids between 100 points (`GridRule`), up to 0.14 off.
    prior : "sample" or "batch"
        (a, b) of every sample, or one for a whole batch, whose events are counted and pruned together after it.
    """

    strength: float = 16
    leave_one_out: int | None = 0
    mixing: Literal["probability", "log"] = "probability"
    denominators: Literal["paper", "code"] = "paper"
    classes: int | None = None
    squash: float = 0
    prune: Literal["paper", "code"] = "paper"
    integral: Literal["exact", "grid"] = "exact"
    prior: Literal["sample", "batch"] = "sample"

    def __post_init__(self) -> None:
        check_choice("integral", self.integral, ("exact", "grid"))
        check_number("strength", self.strength, 0, LARGEST_STRENGTH[self.integral], open_low=True)
        check_choice("mixing", self.mixing, ("probability", "log"))
        check_choice("denominators", self.denominators, ("paper", "code"))
        check_number("squash", self.squash, 0, math.inf)
        check_choice("prune", self.prune, ("paper", "code"))
        check_choice("prior", self.prior, ("sample", "batch"))
        if self.classes is not None:
            check_least(2, classes=self.classes)

    @property
    def pruned(self) -> float:
        """Return what the counts above 1 sum to after pruning."""
        return 1.0 if self.prune == "paper" else self.strength / 10


READINGS = {
    "paper": Reading(),
    "published": Reading(5, None, "log", "code", None, 4, "code", "grid", "batch"),
}


class BTFL(Adapter):
    """Mix the heads with the posterior probability that a sample is external.

    Parameters
    ----------
    model : nn.Module
        A two-head network with d features z >= 0 (a ReLU before the heads). One that says by `features_nonnegative`
        that features may be negative is refused; external networks get a ReLU by their option `features = "relu"`.
    statistics : Statistics
        `dle_local` p^l and `dle_global` p^g ([d], in [0, 1]), `entropy_local` H̄_l and `entropy_global` H̄_g (nats).
    smoothing : float
        s in [0, 0.5]; 0 is the paper to the letter, clipped to [1e-6, 1 - 1e-6].
    rectify : "power", "product" or "none"
        ln τ̂ = (u_l ln q_l - u_g ln q_g)/d, or (ln q_l - ln q_g)/d + ln u_l - ln u_g with each ln u clipped to ±30, or
        (ln q_l - ln q_g)/d.
    reading : "paper" or "published"
        What the options below say where they are None: the paper, or all that the published code does but for C, which
        is the network's number of classes unless `classes=100`.
    strength, leave_one_out, mixing, denominators, classes, squash, prune, integral, prior
        See `Reading`. With `prior="batch"` results depend on the batches.
    clients : int or None
        N where the reading leaves the own share out and leave_one_out does not say it.
    record : bool
        Keep the report: `weight` e, `log_tau` (raw) and `log_tau_hat` (rectified, squashed) [n], `prior` (a, b) as used
        [n, 2], `event` [n]: 1 external, -1 internal, 0 none.

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
    needs = frozenset({"personal_head", "dle", "entropy", "nonnegative", "clients"})

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        strength: float | None = None,
        smoothing: float = 0.2,
        rectify: Literal["power", "product", "none"] = "power",
        leave_one_out: int | None = None,
        reading: Literal["paper", "published"] = "paper",
        mixing: Literal["probability", "log"] | None = None,
        denominators: Literal["paper", "code"] | None = None,
        classes: int | None = None,
        squash: float | None = None,
        prune: Literal["paper", "code"] | None = None,
        integral: Literal["exact", "grid"] | None = None,
        prior: Literal["sample", "batch"] | None = None,
        clients: int | None = None,
        record: bool = True,
    ) -> None:
        features = check_two_heads(model, "btfl")
        if not getattr(model, "features_nonnegative", True):
            raise ValueError(NEEDS_RELU)
        statistics = statistics or Statistics()
        statistics.require("btfl", "dle_local", "dle_global", "entropy_local", "entropy_global")
        check_number("smoothing", smoothing, 0, 0.5)
        check_choice("rectify", rectify, RECTIFICATIONS)
        check_choice("reading", reading, tuple(READINGS))
        said = {
            "strength": strength, "leave_one_out": leave_one_out, "mixing": mixing, "denominators": denominators,
            "classes": classes, "squash": squash, "prune": prune, "integral": integral, "prior": prior,
        }  # fmt: skip
        given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        self.reading = replace(READINGS[reading], **given)
        if self.reading.leave_one_out is None:
            self.reading = replace(self.reading, leave_one_out=clients)
        super().__init__(model, record=record)
        self.rectify = rectify
        self.per = self.reading.prior
        local = _frequency("dle_local", statistics.dle_local, features)
        global_ = _frequency("dle_global", statistics.dle_global, features)
        global_ = without_own_share(global_, local, self.reading.leave_one_out)
        table, offset = likelihood_table(smooth(local, smoothing), smooth(global_, smoothing))
        self._mean_entropy = _mean_entropies(statistics)
        pace = np.array([[self._mean_entropy[0]], [self._global_pace()]])  # what a fraction line divides, (2, 1)
        self._fixed = Constants(table=table, offset=offset, pace=np.maximum(pace, SMALL))
        # An event adds one count to at most `strength`, and pruning leaves this sum.
        self._largest = max(float(self.reading.strength), 2 + self.reading.pruned)
        exact = self.reading.integral == "exact"
        self._rule = BetaRule(np.array([[1.0, self._largest - 1.0]])) if exact else GridRule()
        self._prior = (1.0, 1.0)  # a, b

    @classmethod
    def leaves_own_share_out(cls, options: Mapping[str, Any]) -> bool:
        """See `Adapter.leaves_own_share_out`."""
        said = options.get("leave_one_out")
        return (READINGS[options.get("reading", "paper")].leave_one_out if said is None else said) != 0

    def _global_pace(self) -> float:
        """Return H̄_g, or ln C."""
        if self.reading.denominators == "paper":
            return self._mean_entropy[1]
        return math.log(class_count(self.model, self.reading.classes))

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
        logits = class_major(logits_personal, logits_global)  # (K, 2, B)
        probabilities, entropy = softmax_entropy(logits)  # (K, 2, B), (2, B)
        likelihood = xp.tanh(features).round() @ fixed["table"] + fixed["offset"]  # ln q_l, ln q_g, ln τ: (B, 3)
        log_tau = likelihood[:, 2]
        evidence = checks.read(xp.stack((log_tau, entropy[0], entropy[1]), axis=1)).tolist()  # the only wait for a GPU
        events = [detect_event(ratio, entropies, self._mean_entropy) for ratio, *entropies in evidence]
        path, prior = prior_path(events, self._prior, self.reading)
        priors = to_device_of(np.array(path), features)  # (B, 2)
        log_tau_hat = squashed(self._rectified(likelihood, entropy), self.reading.squash)
        e = self._rule.mean(priors, log_tau_hat)  # (B,)
        if self.reading.mixing == "log":  # in which the logits' own constants cancel
            mixed = softmax(e * logits[:, 1] + (1 - e) * logits[:, 0])  # (K, B)
        else:
            mixed = probabilities[:, 0] + e * (probabilities[:, 1] - probabilities[:, 0])
        self._prior = prior
        self._note(weight=e, prior=priors, log_tau=log_tau, log_tau_hat=log_tau_hat, event=np.array(events))
        return to_tensor(mixed.T, like=logits_global)

    def _rectified(self, likelihood: Array, entropy: Array) -> Array:
        """Return ln τ̂ [B] (eq. 14, 15) from ln q_l, ln q_g, ln τ [B, 3] and the heads' entropies [2, B]."""
        xp, fixed = namespace(likelihood), self._fixed.on(likelihood)
        features = len(fixed["table"])
        if self.rectify == "none":
            return likelihood[:, 2] / features
        log_trust = self._log_trust(entropy)
        if self.rectify == "product":
            log_trust = xp.clip(log_trust, -LARGEST_TRUST, LARGEST_TRUST)
            return likelihood[:, 2] / features + log_trust[0] - log_trust[1]
        trusted = xp.exp(log_trust) * likelihood[:, :2].T  # ln q^u, (2, B)
        log_tau_hat = (trusted[0] - trusted[1]) / features
        if self.reading.denominators == "paper":  # u <= e
            return log_tau_hat
        return xp.clip(log_tau_hat, -LARGEST_LOG, LARGEST_LOG)

    def _log_trust(self, entropy: Array) -> Array:
        """Return ln u [2, B] from the heads' entropies [2, B]."""
        pace = self._fixed.on(entropy)["pace"]
        if self.reading.denominators == "code":
            return namespace(entropy).clip(entropy / pace - 1, -LARGEST_TRUST, LARGEST_TRUST)
        return 1 - pace / (entropy + TINY)  # H = 0 gives less than -1e9, also when H̄ = 0: SMALL stands in for that

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
    events: list[int], prior: tuple[float, float], reading: Reading
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Return the prior (a, b) of each sample, and the one after the last (eq. 11, Algorithm 1).

    An external event (1) raises a, an internal one (-1) raises b, from the next sample on, or from the next batch.
    """
    if reading.prior == "batch":
        a, b = prior[0] + events.count(1), prior[1] + events.count(-1)
        return [prior] * len(events), prune(a, b, reading)
    path = []
    for event in events:
        path.append(prior)
        a, b = prior
        if event > 0:
            a += 1
        elif event < 0:
            b += 1
        prior = prune(a, b, reading)
    return path, prior


def prune(a: float, b: float, reading: Reading) -> tuple[float, float]:
    """Return (a, b), or in their proportion 1 each and `reading.pruned` together if they exceed the strength."""
    total = a + b
    if total > reading.strength:
        return 1 + reading.pruned * a / total, 1 + reading.pruned * b / total
    return a, b


def squashed(log_tau: Array, bound: float) -> Array:
    """Return the logarithm of 1 + k_b tanh(τ - 1) for τ >= 1, of its inverse in 1/τ below; ln τ itself for k_b = 0.

    Parameters
    ----------
    log_tau : Array [B]
        In ± `LARGEST_LOG`.
    bound : float
        k_b.
    """
    if bound == 0:
        return log_tau
    xp = namespace(log_tau)
    return xp.sign(log_tau) * xp.log1p(bound * xp.tanh(xp.expm1(abs(log_tau))))


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


def without_own_share(global_: np.ndarray, local: np.ndarray, clients: int | None) -> np.ndarray:
    """Return (N p^g - p^l)/(N-1) in [0, 1], the mean over the other clients; p^g itself for `clients` = 0."""
    if clients == 0:
        return global_
    if clients is None or clients < 2:
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
