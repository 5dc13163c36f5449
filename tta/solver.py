"""FedTHE's inner problem: one scalar a sample, 20 steps of Adam, with the gradient written out (Algorithm 2, line 6).

Adam on (a_g, a_l) from (0, 0) keeps a_l = -a_g = -a, because the two gradients are opposite, so that
e = softmax(a_g, a_l)_g = (1 + tanh a) / 2 and one scalar is enough.
"""

from __future__ import annotations

import math

from tta.arrays import Array, largest, namespace


def adam_schedule(steps: int, lr: float) -> list[tuple[float, float]]:
    """Return (scale, shift) of each step of Adam (betas 0.9 and 0.999, eps 1e-8), bias corrections folded in.

    With the plain sums m = Σ 0.9^k g and v = Σ 0.999^k g², Adam's step is scale · m / (sqrt(v) + shift).
    """
    first, second, eps = 0.9, 0.999, 1e-8
    schedule = []
    for step in range(1, steps + 1):
        root = math.sqrt((1 - second) / (1 - second**step))  # turns sqrt(v) into Adam's denominator
        schedule.append((lr * (1 - first) / (1 - first**step) / root, eps / root))
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
        moment *= 0.9
        moment += slope
        square *= 0.999
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
