"""FedTHE: Test-Time Robust Personalization for Federated Learning (Liangze Jiang, Tao Lin; ICLR 2023).

Section 4.2 and appendix B, Algorithm 2, lines 1 to 8. For each test sample one weight e mixes the logits of the global
and the personal head; 20 steps of Adam choose it so that the mixture is confident (L_EM, eq. 3) and the feature lies
near the training data of the head that it trusts (L_FA, eq. 4), weighted by how much the heads agree (L_SLW, eq. 5).

Every sample has its own e and its own Adam state, so a batch is one problem of B scalars with an analytic gradient, and
the history is a linear recurrence: the result does not depend on the batch size. Adam on (a_g, a_l) from (0, 0) keeps
a_l = -a_g = -a, because the two gradients are opposite, so that e = softmax(a_g, a_l)_g = (1 + tanh a) / 2 and one
scalar a sample is enough. All steps are taken, without early stopping.

The default is Algorithm 2; `history="batch"` is the history of the published code, which takes a feature in before it
smooths it, and never the first one of a batch, so that at batch size 1 the history never moves. Two of that code's
readings are not offered: its loss is the mean over a batch, so that Adam's ε counts B times, and it ends when the
gradient of the whole batch is below 1e-5 (e differs by up to 3e-3 at 200 samples). It sets β = 0.1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedtta.models.constants import BETAS, EPS
from fedtta.tta.arrays import (
    Array,
    Constants,
    class_major,
    copied,
    double,
    from_tensor,
    largest,
    namespace,
    softmax,
    softmax_of,
    to_device_of,
    to_tensor,
)
from fedtta.tta.base import Adapter
from fedtta.tta.checks import check_choice, check_number
from fedtta.tta.heads import check_two_heads, statistic_vector, two_heads
from fedtta.tta.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor, nn

#: λ_s of the objectives that do not look at the heads.
CONSTANTS = {"em": 1.0, "fa": 0.0, "half": 0.5}
OBJECTIVES = ("slw", *CONSTANTS)
HISTORIES = ("sample", "batch")


class FedTHE(Adapter):
    """Choose the weight of the global head for every sample by a few steps of Adam.

    Parameters
    ----------
    model : nn.Module
        A two-head network with d features.
    statistics : Statistics
        `descriptor_local` h^l and `descriptor_global` h^g, [d] each.
    alpha : float
        α in [0, 1], how much of h_n enters the history h^hist after sample n.
    beta : float
        β in [0, 1], share of h_n in h'_n = β h_n + (1-β) h^hist; 1 uses no history.
    steps : int
        Steps of Adam a sample, at least 1.
    lr : float
        Adam's rate, above 0 (the paper: 0.1, for CCT 0.01).
    objective : "slw", "em", "fa" or "half"
        λ_s is the cosine similarity of the heads' probabilities (the paper), 1 (entropy alone), 0 (alignment alone)
        or 1/2.
    history : "sample" or "batch"
        "sample", Algorithm 2: h^hist holds the features before the sample, whatever the batches. "batch", the published
        code: with H_0 the last H of the batch before (in the first batch h_0) and H_i = α h_i + (1-α) H_{i-1}, sample
        i = 0, 1, ... of a batch takes H_i, which already holds h_i; the first feature of a later batch never enters.
    record : bool
        Keep the report: `weight` e and `similarity` (the cosine, whatever the objective), [n] each.

    Raises
    ------
    ValueError
        A statistic is missing, of the wrong shape or not finite, or an option is out of range.
    """

    name = "fedthe"
    paper = "Test-Time Robust Personalization for Federated Learning (ICLR 2023)"
    adapts = "the weight of the global head"
    needs = frozenset({"personal_head", "descriptor"})

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        alpha: float = 0.1,
        beta: float = 0.3,
        steps: int = 20,
        lr: float = 0.1,
        objective: Literal["slw", "em", "fa", "half"] = "slw",
        history: Literal["sample", "batch"] = "sample",
        record: bool = True,
    ) -> None:
        features = check_two_heads(model, "fedthe")
        statistics = statistics or Statistics()
        statistics.require("fedthe", "descriptor_local", "descriptor_global")
        check_number("alpha", alpha, 0, 1)
        check_number("beta", beta, 0, 1)
        check_number("steps", steps, 1, math.inf)
        check_number("lr", lr, 0, math.inf, open_low=True)
        check_choice("objective", objective, OBJECTIVES)
        check_choice("history", history, HISTORIES)
        super().__init__(model, record=record)
        self.alpha, self.beta, self.objective, self.history = alpha, beta, objective, history
        self.per = "sample" if history == "sample" else "batch"
        self._features = features
        self._descriptors = Constants(
            global_=statistic_vector("descriptor_global", statistics.descriptor_global, features),
            local=statistic_vector("descriptor_local", statistics.descriptor_local, features),
        )
        self._schedule = adam_schedule(steps, lr)
        self._history: Array | None = None

    def _predict(self, x: Tensor) -> Tensor:
        return self.interpolate(*two_heads(self.model, x))

    def interpolate(self, z: Tensor, logits_global: Tensor, logits_personal: Tensor) -> Tensor:
        """Return what `predict` returns, given the network's outputs z [B, d] and logits [B, K]; history moves on."""
        if z.shape[0] == 0:
            return softmax_of(logits_global)
        return self._mix(z, logits_global, logits_personal)[0]

    def weigh(self, z: Tensor, logits_global: Tensor, logits_personal: Tensor) -> Tensor:
        """Return e [B] in float64 for the network's outputs, as `interpolate` uses it; history moves on as there."""
        none = double(z[:0].reshape(0))
        return none if z.shape[0] == 0 else to_tensor(self._mix(z, logits_global, logits_personal)[1], like=none)

    def _mix(self, z: Tensor, logits_global: Tensor, logits_personal: Tensor) -> tuple[Tensor, Array]:
        if z.shape[1] != self._features:
            raise ValueError(f"features have {z.shape[1]} values, the descriptors {self._features}")
        logits, features = class_major(logits_global, logits_personal), from_tensor(z)  # (K, 2, B), (B, d)
        past = self._past(features)  # (B+1, d), or (B, d) with history="batch"
        similarity = head_similarity(logits)  # (B,)
        confidence = self._confidence(similarity)  # λ_s, (B,)
        alignment = (1 - confidence) * self._distance_gap(features, past[: len(features)])
        e = solve_weight(logits[:, 0], logits[:, 1], confidence, alignment, self._schedule)
        probabilities = softmax(e * logits[:, 0] + (1 - e) * logits[:, 1])  # (K, B)
        self._history = copied(past[-1])
        self._note(weight=e, similarity=similarity)
        return to_tensor(probabilities.T, like=logits_global), e

    def _confidence(self, similarity: Array) -> Array:
        """Return λ_s [B]: the similarity itself, or the constant that the objective puts in its place."""
        return similarity if self.objective == "slw" else 0 * similarity + CONSTANTS[self.objective]

    def _past(self, features: Array) -> Array:
        """Return the histories in order: each sample's own first, the last one stays for the next batch."""
        start = features[0] if self._history is None else to_device_of(self._history, features)
        kept_out = 1 if self.history == "batch" else 0
        return running_average(features[kept_out:], start, self.alpha)

    def _distance_gap(self, features: Array, past: Array) -> Array:
        """Return ‖h' - h^g‖ - ‖h' - h^l‖ [B], the derivative of L_FA with respect to e (eq. 4)."""
        xp, descriptor = namespace(features), self._descriptors.on(features)
        smoothed = self.beta * features + (1 - self.beta) * past  # h', (B, d)
        to_global, to_local = smoothed - descriptor["global_"], smoothed - descriptor["local"]
        return xp.sqrt((to_global * to_global).sum(1)) - xp.sqrt((to_local * to_local).sum(1))

    def _reset(self) -> None:
        self._history = None

    def _state(self) -> dict[str, Any]:
        has_history = self._history is not None
        history = self._history if self._history is not None else np.zeros(self._features)
        return {"history": history, "has_history": np.array(has_history)}

    def _load(self, state: dict[str, Tensor]) -> None:
        self._history = copied(from_tensor(state["history"])) if bool(state["has_history"]) else None


def head_similarity(logits: Array) -> Array:
    """Return λ_s [B], the cosine of the two heads' probabilities (eq. 5), from their logits [K, 2, B]."""
    xp = namespace(logits)
    probabilities = softmax(logits)
    lengths = (probabilities * probabilities).sum(0)  # squared, (2, B); at least 1/K
    return (probabilities[:, 0] * probabilities[:, 1]).sum(0) / xp.sqrt(lengths[0] * lengths[1])


def running_average(features: Array, start: Array, rate: float) -> Array:
    """Return h_0 and h_n = rate x_n + (1-rate) h_{n-1} for a whole batch at once.

    The recurrence is solved by doubling: after the pass of width s every row holds the sum over its last 2s terms.

    Parameters
    ----------
    features : Array [B, d]
        x_1 to x_B; B may be 0.
    start : Array [d]
        h_0.
    rate : float
        In [0, 1].

    Returns
    -------
    Array [1 + B, d]
    """
    xp = namespace(features)
    keep = 1 - rate
    average = rate * features
    average[:1] += keep * start
    width = 1
    while width < len(features):
        average[width:] += keep**width * average[:-width]
        width *= 2
    return xp.concat([start[None], average], axis=0)


def adam_schedule(steps: int, lr: float) -> list[tuple[float, float]]:
    """Return (scale, shift) of each step of Adam, bias corrections folded in.

    With the plain sums m = Σ 0.9^k g and v = Σ 0.999^k g², Adam's step is scale · m / (sqrt(v) + shift).
    """
    first, second = BETAS
    schedule = []
    for step in range(1, steps + 1):
        root = math.sqrt((1 - second) / (1 - second**step))  # turns sqrt(v) into Adam's denominator
        schedule.append((lr * (1 - first) / (1 - first**step) / root, EPS / root))
    return schedule


def solve_weight(
    logits_global: Array, logits_personal: Array, confidence: Array, alignment: Array, schedule: list
) -> Array:
    """Return e [B] after Adam's steps from e = 0.5 on λ_s L_EM + (1-λ_s) L_FA, one state a sample.

    With t = tanh a = 2e - 1 the mixture is ŷ = (ŷ^g + ŷ^l)/2 + t (ŷ^g - ŷ^l)/2, and ∂t/∂a_g = (1 - t²)/2.

    Parameters
    ----------
    logits_global, logits_personal : Array [K, B]
        ŷ^g and ŷ^l.
    confidence, alignment : Array [B]
        λ_s, and (1-λ_s) ∂L_FA/∂e; both constant.
    schedule : list of (float, float)
        Of `adam_schedule`.
    """
    xp = namespace(confidence)
    middle, reach = 0.5 * (logits_global + logits_personal), 0.5 * (logits_global - logits_personal)
    drive, pull = 0.5 * confidence * reach, 0.25 * alignment  # with the half of ∂t/∂a_g
    position, moment, square = (xp.zeros_like(confidence) for _ in range(3))
    t = position
    for scale, shift in schedule:
        slope = weight_gradient(t, middle, reach, drive, pull)
        slope *= 1 - t * t  # dL/da_g; dL/da_l is its negative
        moment *= BETAS[0]
        moment += slope
        square *= BETAS[1]
        square += slope * slope
        position -= scale * moment / (xp.sqrt(square) + shift)
        t = xp.tanh(position)
    return 0.5 + 0.5 * t


def weight_gradient(t: Array, middle: Array, reach: Array, drive: Array, pull: Array) -> Array:
    """Return dL/dt [B] at t = 2e - 1.

    With p = p(ŷ), ŷ = middle + t · reach: dH(p)/dt = -Cov_p(ŷ, reach), which is Σ_c g_c reach_c with
    g_c = -p_c (ln p_c + H). Measured from the largest ŷ and from the mean reach, no two large terms cancel, so the
    gradient of a confident sample, which Adam blows up, keeps its leading digits.

    Parameters
    ----------
    t : Array [B]
    middle, reach : Array [K, B]
        Half the sum and half the difference of the heads' logits.
    drive : Array [K, B]
        λ_s · reach.
    pull : Array [B]
        (1-λ_s) ∂L_FA/∂t.
    """
    mixed = t * reach
    mixed += middle
    mixed -= largest(mixed)
    mass = namespace(mixed).exp(mixed)
    mass /= mass.sum(0)
    centred = drive - (mass * drive).sum(0)
    mass *= mixed
    mass *= centred
    return pull - mass.sum(0)
