"""Estimates of the label prior of unlabelled data, from a classifier's predictions: EM and BBSE.

Both assume label shift: p(x|y) stays, p(y) changes from the source's p_s to p_t. A prediction is then corrected by

    p_t(y|x) ∝ p_t(y)/p_s(y) · p_s(y|x)

EM: Adjusting the outputs of a classifier to new a priori probabilities: a simple procedure (Saerens, Latinne,
Decaestecker, Neural Computation 2002), eq. 2.9, from p^(0) = p_s over a batch of B posteriors:

    p^(s+1)(y) = 1/B Σ_b r_b(y),    r_b(y) ∝ p^(s)(y)/p_s(y) · p_s(y|x_b)

Each iteration raises the likelihood of the batch, Σ_b ln Σ_y p(y)/p_s(y) p_s(y|x_b).

BBSE: Detecting and Correcting for Label Shift with Black Box Predictors (Lipton, Wang, Smola, ICML 2018), section 3:

    w = C^-1 μ,    C_ij = P(ŷ = i, y = j) on source data, μ_i = P(ŷ = i) on the batch;   p_t(y) = w(y) p_s(y), w ≥ 0

Decisions:

- A class with p_s(y) = 0 keeps p_t(y) = 0 in EM, whatever the posteriors say.
- C is inverted by its pseudo-inverse (minimum-norm least squares), as in ATP's published code: the inverse where there
  is one. Singular values below `rtol` times the largest count as 0; by default only what float32 cannot tell from 0.
- Where nothing can be estimated BBSE abstains, w = 1: for a class without source data (its column of C is 0), and for
  all classes where no weight is positive, as when the batch has only predictions that the source never had.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tta.statistics import Statistics

SUM_TOLERANCE = 1e-4  # of what should sum to 1, and may have been averaged in float32
SMALLEST_MASS = 1e-9  # of an estimated p_t, before it is normalised: below it there is only rounding


def em_prior(posteriors: Tensor, source: Tensor, iterations: int = 100, tolerance: float = 1e-6) -> Tensor:
    """Return EM's estimate of the label prior [K].

    Parameters
    ----------
    posteriors : Tensor [B, K]
        Class probabilities under the source's prior, B > 0.
    source : Tensor [K]
        p_s; sums to 1.
    iterations : int
        At most so many, at least 1.
    tolerance : float
        Stop when no entry moves by more; 0 or more.

    Raises
    ------
    ValueError
        A size or range does not fit, or a sample has probability 0 for every class that the source has.
    """
    return em_prior_of_logs(posteriors.log(), source, iterations, tolerance)


def em_prior_of_logs(log_posteriors: Tensor, source: Tensor, iterations: int = 100, tolerance: float = 1e-6) -> Tensor:
    """Return `em_prior(exp(log_posteriors))`; posteriors too small for a float still count."""
    classes = log_posteriors.shape[-1]
    if log_posteriors.ndim != 2 or source.shape != (classes,) or len(log_posteriors) == 0:
        shapes = f"{tuple(log_posteriors.shape)} and {tuple(source.shape)}"
        raise ValueError(f"EM needs posteriors [B, K], B > 0, and a prior [K]: got {shapes}")
    if iterations < 1 or not tolerance >= 0:
        raise ValueError(f"iterations={iterations} must be at least 1, tolerance={tolerance} at least 0")
    if bool(torch.isnan(log_posteriors).any()):
        raise ValueError("posteriors must be 0 or more, and numbers")
    _check_distribution("source", source)
    logs = (log_posteriors - source.log()).masked_fill(source == 0, -torch.inf)  # of p_s(y|x) / p_s(y)
    lost = torch.isneginf(logs).all(1)
    if bool(lost.any()):
        bad = torch.nonzero(lost).flatten().tolist()
        raise ValueError(f"samples {bad} have probability 0 for every class that the source has")
    prior = source
    for _ in range(iterations):
        previous, prior = prior, torch.softmax(logs + prior.log(), 1).mean(0)
        if float((prior - previous).abs().max()) <= tolerance:
            break
    return prior


def bbse_weights(confusion: Tensor, predicted: Tensor, rtol: float = 1e-6) -> Tensor:
    """Return BBSE's weights w(y) = p_t(y)/p_s(y) [K], 0 or more, some of them positive.

    Parameters
    ----------
    confusion : Tensor [K, K]
        C, rows by prediction, columns by label; sums to 1.
    predicted : Tensor [K]
        μ, how often each class is predicted; sums to 1.
    rtol : float
        Singular values of C below rtol times the largest count as 0, in [0, 1).

    Raises
    ------
    ValueError
        Shapes do not fit, `rtol` is out of range, or an argument is no distribution.
    """
    classes = predicted.shape[-1]
    if predicted.ndim != 1 or confusion.shape != (classes, classes):
        raise ValueError(f"BBSE needs [K, K] and [K]: got {tuple(confusion.shape)} and {tuple(predicted.shape)}")
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol={rtol} is outside [0, 1)")
    _check_distribution("confusion", confusion)
    _check_distribution("predicted", predicted)
    weights = (torch.linalg.pinv(confusion, rtol=rtol) @ predicted).clamp_min(0)
    source = confusion.sum(0)  # p_s
    if float(weights @ source) <= SMALLEST_MASS:
        return torch.ones_like(weights)
    return torch.where(source > 0, weights, 1.0)


def reweighted(logits: Tensor, weights: Tensor) -> Tensor:
    """Return probabilities [B, K] ∝ weights [K] · softmax(logits [B, K]), in the logits' dtype.

    Weights are 0 or more, at least one of them positive.
    """
    return torch.softmax(logits.double() + weights.double().log(), 1).to(logits)


def required(statistics: Statistics | None, name: str, method: str, dimensions: int) -> Tensor:
    """Return a statistic that is a distribution over classes, float64, [K] or (2 dimensions) [K, K].

    Raises
    ------
    ValueError
        It is missing, is not of that shape, has a negative or non-finite value, or does not sum to 1.
    """
    value = getattr(statistics, name, None)
    if value is None:
        raise ValueError(f"{method} needs the statistics {name}, which are None")
    table = torch.as_tensor(value).detach().double()
    if table.ndim != dimensions or len(set(table.shape)) != 1:
        raise ValueError(f"{name} has shape {tuple(table.shape)}, not [{', '.join(['K'] * dimensions)}]")
    _check_distribution(name, table)
    return table / table.sum()


def _check_distribution(name: str, table: Tensor) -> None:
    """Raise ValueError unless the values of `table` are 0 or more and sum to 1."""
    if not bool(torch.isfinite(table).all()) or bool((table < 0).any()):
        raise ValueError(f"{name} holds values that are negative or not finite")
    if abs(float(table.sum()) - 1) > SUM_TOLERANCE:
        raise ValueError(f"{name} sums to {float(table.sum()):.6g}, not to 1")
