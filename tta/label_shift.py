"""EM and BBSE: correction of predictions for the label prior of each batch, estimated without labels.

Both assume label shift: p(x|y) stays, p(y) changes from the source's p_s to p_t. A prediction is then corrected by

    p_t(y|x) ∝ p_t(y)/p_s(y) · p_s(y|x)

EM: Adjusting the outputs of a classifier to new a priori probabilities: a simple procedure (Saerens, Latinne,
Decaestecker, Neural Computation 2002), eq. 2.9, from p^(0) = p_s over a batch of B posteriors:

    p^(s+1)(y) = 1/B Σ_b r_b(y),    r_b(y) ∝ p^(s)(y)/p_s(y) · p_s(y|x_b)

Each iteration raises the likelihood of the batch, Σ_b ln Σ_y p(y)/p_s(y) p_s(y|x_b).

BBSE: Detecting and Correcting for Label Shift with Black Box Predictors (Lipton, Wang, Smola, ICML 2018), section 3:

    w = C^-1 μ,    C_ij = P(ŷ = i, y = j) on source data, μ_i = P(ŷ = i) on the batch;   p_t(y) = w(y) p_s(y), w ≥ 0

Both are baselines of Adaptive Test-Time Personalization (ATP, NeurIPS 2023). The source prior is the mean label
frequency of the clients that trained.

Decisions and deviations:

- A class with p_s(y) = 0 keeps p_t(y) = 0 in EM, whatever the posteriors say.
- C is inverted by its pseudo-inverse (minimum-norm least squares), as in ATP's published code: the inverse where there
  is one. Singular values below `rtol` times the largest count as 0; by default only what float32 cannot tell from 0.
- Where nothing can be estimated BBSE abstains, w = 1: for a class without source data (its column of C is 0), and for
  all classes where no weight is positive, as when the batch has only predictions that the source never had.
- ATP's published EM takes two iterations (here until nothing moves, at most 100) and a uniform source prior.
- ATP's published BBSE divides C's columns by their sums, takes p_t = C^+ μ, projects it onto the simplex, mixes in
  0.001 of the uniform distribution and multiplies predictions by p_t itself, which supposes a uniform source. Here they
  are multiplied by w = p_t/p_s, cut off at 0, as in the paper.
- The BBSE paper estimates over the whole test set and trains again; here each batch is corrected by its own estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from fedtta.tta.arrays import double, log_softmax_of, namespace, on_cpu, softmax_of, to_device_of, to_host, to_tensor
from fedtta.tta.base import Adapter
from fedtta.tta.checks import check_choice, check_finite, check_least, check_number
from fedtta.tta.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor, nn

PREDICTIONS = ("hard", "soft")
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
    return em_prior_of_logs(namespace(posteriors).log(posteriors), source, iterations, tolerance)


def em_prior_of_logs(log_posteriors: Tensor, source: Tensor, iterations: int = 100, tolerance: float = 1e-6) -> Tensor:
    """Return `em_prior(exp(log_posteriors))`; posteriors too small for a float still count."""
    classes = log_posteriors.shape[-1]
    if log_posteriors.ndim != 2 or source.shape != (classes,) or len(log_posteriors) == 0:
        shapes = f"{tuple(log_posteriors.shape)} and {tuple(source.shape)}"
        raise ValueError(f"EM needs posteriors [B, K], B > 0, and a prior [K]: got {shapes}")
    if iterations < 1 or not tolerance >= 0:
        raise ValueError(f"iterations={iterations} must be at least 1, tolerance={tolerance} at least 0")
    xp = namespace(source)
    if bool(xp.isnan(log_posteriors).any()):
        raise ValueError("posteriors must be 0 or more, and numbers")
    _check_distribution("source", source)
    logs = xp.where(source == 0, -np.inf, log_posteriors - _log(source))  # of p_s(y|x) / p_s(y)
    lost = (logs == -np.inf).all(1)
    if bool(lost.any()):
        bad = [i for i, one in enumerate(lost.tolist()) if one]
        raise ValueError(f"samples {bad} have probability 0 for every class that the source has")
    prior = source
    for _ in range(iterations):
        previous, prior = prior, softmax_of(logs + _log(prior)).mean(0)
        if float(abs(prior - previous).max()) <= tolerance:
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
    xp = namespace(confusion)
    weights = xp.linalg.pinv(confusion, rtol=rtol) @ predicted
    weights = xp.where(weights > 0, weights, 0.0)
    source = confusion.sum(0)  # p_s
    if float(weights @ source) <= SMALLEST_MASS:
        return xp.ones_like(weights)
    return xp.where(source > 0, weights, 1.0)


def reweighted(logits: Tensor, weights: Tensor) -> Tensor:
    """Return probabilities [B, K] ∝ weights [K] · softmax(logits [B, K]), in the logits' dtype.

    Weights are 0 or more, at least one of them positive.
    """
    return to_tensor(softmax_of(double(logits) + _log(double(weights))), like=logits)


def _log(values: Tensor) -> Tensor:
    """Return the logarithm; that of 0 is -inf, without a warning."""
    with np.errstate(divide="ignore"):
        return namespace(values).log(values)


def required(statistics: Statistics | None, name: str, method: str, dimensions: int) -> Tensor:
    """Return a statistic that is a distribution over classes, float64, on the CPU, [K] or (2 dimensions) [K, K].

    Raises
    ------
    ValueError
        It is missing, is not of that shape, has a negative or non-finite value, or does not sum to 1.
    """
    known = statistics or Statistics()
    known.require(method, name)
    table = on_cpu(double(getattr(known, name)))
    if table.ndim != dimensions or len(set(table.shape)) != 1:
        raise ValueError(f"{name} has shape {tuple(table.shape)}, not [{', '.join(['K'] * dimensions)}]")
    _check_distribution(name, table)
    return table / table.sum()


def _check_distribution(name: str, table: Tensor) -> None:
    """Raise ValueError unless the values of `table` are 0 or more and sum to 1."""
    if not bool(namespace(table).isfinite(table).all()) or bool((table < 0).any()):
        raise ValueError(f"{name} holds values that are negative or not finite")
    if abs(float(table.sum()) - 1) > SUM_TOLERANCE:
        raise ValueError(f"{name} sums to {float(table.sum()):.6g}, not to 1")


class EM(Adapter):
    """Estimate each batch's label prior by EM and predict with it; nothing is carried from batch to batch.

    On a batch of one sample the estimate concentrates on its class: the prediction nears certainty.

    Parameters
    ----------
    model : nn.Module
        Gives logits [B, K]; `fedtta.models.TwoHead` predicts with its global head.
    statistics : Statistics
        Its `label_prior` [K], the source's p_s, is needed.
    iterations : int
        Of EM, at most, at least 1.
    tolerance : float
        EM stops when no entry of the prior moves by more; 0 or more.
    record : bool
        Keep the report: `shift` [n], the distance ½‖p_t - p_s‖₁ in [0, 1], for every sample that of its batch.

    Raises
    ------
    ValueError
        An option is out of range, or there is no label prior or one that is no distribution.
    """

    name = "em"
    paper = "Adjusting the Outputs of a Classifier to New a Priori Probabilities (Neural Computation 2002)"
    adapts = "the label prior"
    per = "batch"
    needs = frozenset({"label_prior"})

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        iterations: int = 100,
        tolerance: float = 1e-6,
        record: bool = True,
    ) -> None:
        check_least(1, iterations=iterations)
        check_number("tolerance", tolerance, 0, 1)
        self._source = required(statistics, "label_prior", "EM", 1)
        super().__init__(model, record=record)
        self.iterations, self.tolerance = iterations, tolerance

    def _predict(self, x: Tensor) -> Tensor:
        outputs = self.model(x)
        logits: Tensor = on_cpu(outputs)  # where the many small steps of an estimate wait for no GPU
        check_finite("the network's output", logits)
        source = to_device_of(self._source, logits)
        if logits.shape[1] != len(source):
            raise ValueError(f"label_prior has {len(source)} classes, the network's output {logits.shape[1]}")
        if len(x) == 0:
            return softmax_of(outputs)
        prior = em_prior_of_logs(log_softmax_of(double(logits)), source, self.iterations, self.tolerance)
        self._note(shift=np.full(len(x), float(abs(prior - source).sum() / 2)))
        xp, absent = namespace(source), source == 0
        corrected = reweighted(logits, xp.where(absent, 0.0, prior / xp.where(absent, 1.0, source)))
        return to_device_of(corrected, outputs)


class BBSE(Adapter):
    """Estimate each batch's label prior by BBSE and predict with it; nothing is carried from batch to batch.

    Parameters
    ----------
    model : nn.Module
        Gives logits [B, K]; `fedtta.models.TwoHead` predicts with its global head.
    statistics : Statistics
        Its `confusion` [K, K] is needed: P(ŷ = i, y = j) on validation data, row i, column j.
    predictions : "hard" or "soft"
        μ is the frequency of each predicted class, or the mean probability. For "soft" the confusion should hold mean
        probabilities too: E[p_i(x), y = j].
    rtol : float
        Relative cut-off of C's singular values, in [0, 1).
    record : bool
        Keep the report: `shift` [n], the distance ½ Σ_y |w(y) - 1| p_s(y), for every sample that of its batch.

    Raises
    ------
    ValueError
        An option is out of range, or there is no confusion matrix or one that is no distribution.
    """

    name = "bbse"
    paper = "Detecting and Correcting for Label Shift with Black Box Predictors (ICML 2018)"
    adapts = "the label prior"
    per = "batch"
    needs = frozenset({"confusion"})

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        predictions: Literal["hard", "soft"] = "hard",
        rtol: float = 1e-6,
        record: bool = True,
    ) -> None:
        check_choice("predictions", predictions, PREDICTIONS)
        if not 0 <= rtol < 1:
            raise ValueError(f"rtol={rtol} is outside [0, 1)")
        self._confusion = required(statistics, "confusion", "BBSE", 2)
        super().__init__(model, record=record)
        self.predictions, self.rtol = predictions, rtol

    def _predict(self, x: Tensor) -> Tensor:
        outputs = self.model(x)
        logits: Tensor = on_cpu(outputs)  # where the many small steps of an estimate wait for no GPU
        check_finite("the network's output", logits)
        confusion = to_device_of(self._confusion, logits)
        classes = logits.shape[1]
        if classes != len(confusion):
            raise ValueError(f"confusion has {len(confusion)} classes, the network's output {classes}")
        if len(x) == 0:
            return softmax_of(outputs)
        if self.predictions == "hard":
            counts = np.bincount(to_host(logits.argmax(1)), minlength=classes)
            predicted = to_device_of(counts / len(x), logits)
        else:
            predicted = softmax_of(double(logits)).mean(0)
        weights = bbse_weights(confusion, predicted, self.rtol)
        self._note(shift=np.full(len(x), float(abs(weights - 1) @ confusion.sum(0) / 2)))
        return to_device_of(reweighted(logits, weights), outputs)
