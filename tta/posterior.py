"""E[m / (m + (1-m) τ)] for m ~ Beta(a, b): the mixing weight of BTFL (section 4, eq. 16 to 21), to about 1e-14.

In x = logit m the density is a·ln m + b·ln(1-m) in the logarithm, smooth and with exponential tails, where the
trapezoid rule converges geometrically; the other factor is 1 / (1 + τ e^-x), which needs no exponential per sample.
The closed form with ₂F₁ fails in scipy where a or b is exactly 1 and for |ln τ| beyond about 30. `GridRule` is the
coarser integral of the published code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedtta.tta.arrays import Array, Constants, is_tensor, largest, namespace, to_device_of, to_host

#: Smaller shape parameters have tails longer than the nodes are worth.
SMALLEST_SHAPE = 1e-4

#: Exponents stay within this; e^600 · e^100 is still finite.
LARGEST_LOG = 600.0

#: Every ln τ of a float64 τ but 0 and ∞ stays within this.
ANY_LOG = 750.0

#: Number of values of one block: three of these fit a core's cache.
BLOCK = 32768


class BetaRule:
    """Nodes in x = logit m, the same for a set of Beta distributions.

    Parameters
    ----------
    shapes : np.ndarray [n, 2]
        The pairs (a, b) with the heaviest tails and with the largest sum among those the rule has to serve.
    """

    def __init__(self, shapes: np.ndarray) -> None:
        # P(m < m_0) <= m_0^a / (a B(a, b)), and likewise above: both tails left out weigh less than e^-39.
        reach = ((39 - log_beta(shapes) - np.log(shapes)) / shapes).max()
        # The standard deviation of x is at least 2/sqrt(a+b); half of it a step leaves an error of about e^-79.
        step = min(0.25, 1 / np.sqrt(shapes.sum(1).max()))
        half = np.ceil(reach / step)
        x = step * np.arange(-half, half + 1)
        self._wide = bool(reach > 100)
        self.largest_log = ANY_LOG if self._wide else LARGEST_LOG
        self._arrays = Constants(
            density=np.stack((-np.logaddexp(0, -x), -np.logaddexp(0, x))),  # ln m, ln(1-m), (2, M)
            odds=np.exp(np.clip(-x, -LARGEST_LOG, LARGEST_LOG)),  # (1-m)/m, (M,)
            logit=x,
        )

    def mean(self, shapes: Array, log_tau: Array) -> Array:
        """Return e [n] for the priors (a, b) `shapes` [n, 2] and ln τ [n] in ± `largest_log`."""
        arrays = self._arrays.on(shapes)
        rows = max(1, BLOCK // len(arrays["odds"]))
        if len(log_tau) <= rows:
            return self._block(arrays, shapes, log_tau)
        starts = range(0, len(log_tau), rows)
        parts = [self._block(arrays, shapes[i : i + rows], log_tau[i : i + rows]) for i in starts]
        return namespace(shapes).concat(parts, axis=0)

    def _block(self, arrays: dict[str, Array], shapes: Array, log_tau: Array) -> Array:
        xp = namespace(shapes)
        density = shapes @ arrays["density"]  # (n, M)
        density -= largest(density, 1)[:, None]
        density = xp.exp(density)
        if self._wide:  # e^-x alone would overflow
            odds = xp.exp(xp.clip(log_tau[:, None] - arrays["logit"], -LARGEST_LOG, LARGEST_LOG))
        else:
            odds = xp.exp(log_tau)[:, None] * arrays["odds"]
        odds += 1
        return (density / odds).sum(1) / density.sum(1)


class GridRule:
    """The integral of BTFL's published code: trapezoids between 100 points of m in [0.01, 0.99].

    What lies outside is lost: for a = b = τ = 1 it gives 0.49 in place of 0.5, for a = 15, b = 1 it is 0.14 too low. A
    density that is narrower than the points are apart could make more than 1 of it; that is cut to 1.
    """

    def __init__(self) -> None:
        m, step = np.linspace(0.01, 0.99, 100, retstep=True)
        share = np.full(len(m), step)
        share[[0, -1]] /= 2
        self._arrays = Constants(density=np.stack((np.log(m), np.log1p(-m))), odds=(1 - m) / m, share=share)

    def mean(self, shapes: Array, log_tau: Array) -> Array:
        """Return e [n] for the priors (a, b) `shapes` [n, 2], at least 1, and ln τ [n] in ± `LARGEST_LOG`."""
        xp, arrays = namespace(shapes), self._arrays.on(shapes)
        log_norm = log_gamma(shapes.sum(1)) - log_gamma(shapes).sum(1)  # -ln B(a, b)
        density = xp.exp((shapes - 1) @ arrays["density"] + log_norm[:, None]) * arrays["share"]  # (n, 100)
        weight = (density / (1 + xp.exp(log_tau)[:, None] * arrays["odds"])).sum(1)
        return xp.clip(weight, 0.0, 1.0)


def log_gamma(values: Array) -> Array:
    """Return ln Γ of positive values; numpy has none, and scipy takes most of a second to import."""
    if isinstance(values, np.ndarray):
        return np.array([math.lgamma(value) for value in values.ravel().tolist()]).reshape(values.shape)
    return values.lgamma()


def log_beta(shapes: np.ndarray) -> np.ndarray:
    """Return ln B(a, b) [n, 1] of pairs (a, b) [n, 2]."""
    if (shapes[:, 0] == 1).all():  # as of BTFL's rule, which then needs no scipy: 20 MiB and most of a second
        return -np.log(shapes[:, 1:])
    from scipy.special import betaln

    return betaln(shapes[:, :1], shapes[:, 1:])


def mixing_weight(a: Any, b: Any, tau: Any) -> Any:
    """Return e = E[m / (m + (1-m) τ)], m ~ Beta(a, b): the weight of the global head (eq. 21).

    e(a,b,1) = a/(a+b); e(a,b,τ) + e(b,a,1/τ) = 1; e falls with τ from 1 at τ = 0 to 0 at τ = ∞.

    Parameters
    ----------
    a, b : float, array or Tensor
        Shape parameters, at least 1e-4; a counts external events, b internal ones.
    tau : float, array or Tensor
        Likelihood ratio in [0, ∞], both ends included. The three broadcast.

    Returns
    -------
    float, np.ndarray or Tensor
        Float64; a tensor (on its device) if one of the arguments is one, a float if all are plain numbers.

    Raises
    ------
    ValueError
        A shape parameter is not finite or below 1e-4, or τ is negative or not a number.
    """
    tensors = [value for value in (a, b, tau) if is_tensor(value)]
    host = [to_host(value) if is_tensor(value) else value for value in (a, b, tau)]
    first, second, ratio = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in host))
    shapes = np.stack((first.ravel(), second.ravel()), 1)  # (n, 2)
    if not (np.isfinite(shapes) & (shapes >= SMALLEST_SHAPE)).all():
        raise ValueError(f"a and b must be finite and at least {SMALLEST_SHAPE}, got a={a}, b={b}")
    if not (ratio >= 0).all():
        raise ValueError(f"tau must be at least 0, got {tau}")
    weight = _mean_of(shapes, ratio.ravel()).reshape(ratio.shape)
    if tensors:
        return to_device_of(weight, tensors[0])
    return weight if any(isinstance(value, np.ndarray) for value in host) else weight[()]


def _mean_of(shapes: np.ndarray, tau: np.ndarray) -> np.ndarray:
    if len(tau) == 0:
        return np.zeros(0)
    with np.errstate(divide="ignore"):
        log_tau = np.log(tau)
    rule = BetaRule(shapes)
    weight = rule.mean(shapes, np.clip(log_tau, -rule.largest_log, rule.largest_log))
    return np.where(tau == 0, 1.0, np.where(np.isposinf(tau), 0.0, weight))
