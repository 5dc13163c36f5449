"""Accuracy without labels, of any predictions: six estimates, calibrated on labelled samples, with intervals.

Saurabh Garg, Sivaraman Balakrishnan, Zachary Lipton, Behnam Neyshabur, Hanie Sedghi: Leveraging Unlabeled Data to
Predict Out-of-Distribution Performance. ICLR 2022.
Devin Guillory, Vaishaal Shankar, Sayna Ebrahimi, Trevor Darrell, Ludwig Schmidt: Predicting with Confidence on Unseen
Distributions. ICCV 2021.
Marco Saerens, Patrice Latinne, Christine Decaestecker: Adjusting the Outputs of a Classifier to New a Priori
Probabilities. Neural Computation 14 (2002): the class shares behind `label_shift`.

Each replaces c, whether a sample is predicted correctly, by a stand-in v in [0, 1] that needs no label, and corrects
its mean on samples T without labels by what it missed on labelled samples S:

    Â(T) = mean over T of v + mean over S of (c - v)

    doc              v = max_k p_k, the confidence (difference of confidences)
    atc_confidence   v = 1 if max_k p_k >= t, else 0 (average thresholded confidence)
    atc_entropy      v = 1 if Σ_k p_k ln p_k >= t, else 0
    heads            v = 1 where the global and the personal head predict the same class
    unadapted        v = 1 where the prediction is that of the unadapted network
    label_shift      v = the probability that the unadapted network gives to the predicted class, after the class
                     shares have been estimated again from all samples at hand, by expectation maximization

The threshold t is the score below which lies a share of S that equals the error on S. Without ties of scores the
correction of atc is then 0, as in the paper; samples whose scores tie at t would otherwise all count as right.

`label_shift` is ours. A personal head is as sure of classes that its client has never seen as of others, and the first
five follow it; the global head, told only which classes there are, does not. It takes the classes to have been equally
frequent in training.

The interval is for the accuracy of the distribution that T is drawn from, if the estimate's assumption holds there
(that c - v has the mean that it has on S): Â ± z √(Var(v) / m + Var(c - v) / n), one more sample at either end counted
in each mean, as Agresti and Caffo (2000) do for a difference of two proportions. For atc the second term is half the
change of Â between two thresholds, two standard errors of errors on S apart; for label_shift the class shares count as
known. An assumption that fails is in no interval.

Deviations: Â is clipped to [0, 1]; the slope of doc is 1, which the paper also fits on labelled shifts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Name → (the signal that it is computed from, whether it counts those above a threshold).
ESTIMATES = {
    "doc": ("confidence", False),
    "atc_confidence": ("confidence", True),
    "atc_entropy": ("entropy", True),
    "heads": ("heads", False),
    "unadapted": ("unadapted", False),
    "label_shift": ("judged", False),
}
LEVEL = 0.95  # of the intervals
EM_STEPS, EM_CHANGE = 100, 1e-6  # at most, and the largest change of a share that ends them before
Values = NDArray[np.float64]
#: Name → value [n] of each sample; of "judged", [n, K + 1]: probabilities of the unadapted network, predicted class.
Signals = dict[str, Values]


def confidences(probabilities: NDArray[Any]) -> Values:
    """Return the largest probability [B] of each row [B, K]."""
    return probabilities.max(1).astype(np.float64)


def negative_entropies(probabilities: NDArray[Any]) -> Values:
    """Return Σ_k p_k ln p_k [B] of each row [B, K], in nats."""
    p = probabilities.astype(np.float64)
    return (p * np.log(np.where(p > 0, p, 1))).sum(1)


def signals(
    predicted: NDArray[Any], unadapted: NDArray[Any] | None = None, personal: NDArray[Any] | None = None
) -> Signals:
    """Return what the estimates are computed from, of samples that were predicted.

    Parameters
    ----------
    predicted : [B, K]
        Probabilities.
    unadapted : [B, K] or None
        Probabilities of the unadapted network's global head.
    personal : [B, K] or None
        Probabilities or logits of its personal head, where it has one.
    """
    found = {"confidence": confidences(predicted), "entropy": negative_entropies(predicted)}
    if unadapted is not None:
        found["unadapted"] = (predicted.argmax(1) == unadapted.argmax(1)).astype(np.float64)
        found["judged"] = np.concatenate((unadapted, predicted.argmax(1)[:, None]), 1, dtype=np.float64)
        if personal is not None:
            found["heads"] = (personal.argmax(1) == unadapted.argmax(1)).astype(np.float64)
    return found


def slid(window: Signals, batch: Signals, size: int) -> Signals:
    """Return the last `size` values of a window followed by a batch; both stay as they are."""
    return {name: np.concatenate((window.get(name, values[:0]), values))[-size:] for name, values in batch.items()}


def class_shares(probabilities: NDArray[Any]) -> Values:
    """Return the class shares q [K] of samples, estimated from probabilities [n, K] of a network.

    They maximize the likelihood Π_i Σ_k q_k p_ik; expectation maximization, starting from equal shares.
    """
    p = np.asarray(probabilities, np.float64)
    before = shares = np.full(p.shape[1], 1 / p.shape[1])
    for _ in range(EM_STEPS):
        before, shares = shares, shares * ((1 / (p @ shares)) @ p) / len(p)  # the mean of what is returned
        if np.abs(shares - before).max() < EM_CHANGE:
            break
    return before


def with_shares(probabilities: NDArray[Any], shares: NDArray[Any]) -> Values:
    """Return probabilities [n, K] given class shares q [K].

    A class that a network trained on equal shares expects with p_k is as likely as p_k q_k, normalized.
    """
    found: Values = np.asarray(probabilities, np.float64) * shares
    return found / found.sum(1, keepdims=True)


def with_new_shares(probabilities: NDArray[Any]) -> Values:
    """Return probabilities [n, K] after the class shares have been estimated again from all n samples."""
    return with_shares(probabilities, class_shares(probabilities))


def judged(probabilities: NDArray[Any], classes: NDArray[Any]) -> Values:
    """Return the probability [n] of each predicted class [n], given those of all classes, [n, K]."""
    return np.take_along_axis(probabilities, np.asarray(classes, np.int64)[:, None], 1)[:, 0]


@dataclass(frozen=True)
class Estimate:
    """An accuracy and the ends of its interval, `0 <= low <= accuracy <= high <= 1`."""

    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """What labelled samples S say about one estimate.

    Parameters
    ----------
    offset : float
        Mean of c - v over S.
    variance : float
        Of that mean.
    threshold : float or None
        t; None for estimates without.
    around : (float, float)
        Thresholds two standard errors of errors apart, with t in the middle where there are enough on either side.
    """

    offset: float
    variance: float
    threshold: float | None = None
    around: tuple[float, float] = (0.0, 0.0)

    def stand_ins(self, values: Values) -> Values:
        """Return v [m] of signals [m], or [m, K + 1] (`Signals`)."""
        return _without_threshold(values) if self.threshold is None else (values >= self.threshold).astype(np.float64)

    def estimate(self, values: Values, level: float = LEVEL) -> Estimate:
        """Return the estimated accuracy on samples without labels.

        Parameters
        ----------
        values : [m]
            Their signals, m at least 1.
        level : float
            Of the interval, in (0, 1).
        """
        mean, error = self.corrected(self.stand_ins(values), self._variance(values))
        reach = NormalDist().inv_cdf((1 + level) / 2) * error
        return Estimate(_share(mean), _share(mean - reach), _share(mean + reach))

    def corrected(self, stand_ins: Values, variance: float | None = None, least: float = 0) -> tuple[float, float]:
        """Return the mean of v [m] over T, corrected by the offset, and its standard error; neither is clipped.

        `variance` is that due to S, if it is not the offset's; `least` the smallest value that v may have.
        """
        own = self.variance if variance is None else variance
        return float(stand_ins.mean()) + self.offset, math.sqrt(own + _variance_of_mean(stand_ins, least, 1))

    def _variance(self, values: Values) -> float:
        """Return the variance of Â that is due to S."""
        if self.threshold is None:
            return self.variance
        low, high = (float((values >= one).mean()) for one in self.around)
        return ((low - high) / 2) ** 2


def calibrate(name: str, values: Values, correct: NDArray[Any]) -> Calibration:
    """Return the calibration of an estimate.

    Parameters
    ----------
    name : str
        A key of `ESTIMATES`.
    values : [n]
        Its signal for labelled samples, n at least 1.
    correct : bool [n]
        Whether they were predicted correctly.
    """
    right = np.asarray(correct, np.float64)
    if not ESTIMATES[name][1]:
        return calibrated(right - _without_threshold(values))
    ranked, wrong = np.sort(values), int(len(right) - right.sum())
    missed = right - (values >= _threshold(ranked, wrong))
    variance = _variance_of_mean(missed, -1, 1)
    more = max(1, math.ceil(math.sqrt(variance) * len(right)))
    fewest = max(0, min(wrong - more, len(right) - 2 * more))  # near either end both lie on one side
    around = _threshold(ranked, fewest), _threshold(ranked, fewest + 2 * more)
    return Calibration(float(missed.mean()), variance, _threshold(ranked, wrong), around)


def calibrated(missed: Values, least: float = -1) -> Calibration:
    """Return the calibration of stand-ins v without a threshold.

    Parameters
    ----------
    missed : [n]
        c - v of labelled samples.
    least : float
        The smallest value that it may have; the largest is the same with the other sign.
    """
    return Calibration(float(missed.mean()), _variance_of_mean(missed, least, -least))


def calibrations(found: Mapping[str, Values], correct: NDArray[Any]) -> dict[str, Calibration]:
    """Return the calibration of every estimate whose signal is among those of labelled samples (`signals`)."""
    return {name: calibrate(name, found[one], correct) for name, (one, _) in ESTIMATES.items() if one in found}


def estimates(known: Mapping[str, Calibration], found: Mapping[str, Values]) -> dict[str, Estimate]:
    """Return every calibrated estimate for samples without labels; none without samples."""
    usable = {name: found[ESTIMATES[name][0]] for name in known if ESTIMATES[name][0] in found}
    return {name: known[name].estimate(values) for name, values in usable.items() if len(values)}


def of_others(others: Sequence[Calibration], values: Values, level: float = LEVEL) -> Estimate:
    """Return the estimate for a client without labels, by the mean threshold and offset of other clients.

    In the interval, the spread of the estimates by each of them takes the place of the error on S: it tells how far one
    more client may be from their mean. It is known from few values, so its quantile is Student's. Simulated with 2 to
    20 others, intervals of 95 % covered 94 to 98 % where the offsets of clients have a standard deviation of 0.05 or
    0.1, and 96 to 100 % where they are equal.

    Parameters
    ----------
    others : sequence of Calibration
        Of the same estimate, at least two.
    values : [m]
        See `Calibration.estimate`.
    """
    from scipy.special import stdtrit  # here, since devices do without scipy

    each = [one.corrected(one.stand_ins(values))[0] for one in others]
    spread = stdev(each) * math.sqrt(1 + 1 / len(others))  # of one more client, and of their mean
    thresholds = [one.threshold for one in others if one.threshold is not None]
    mean = Calibration(fmean(one.offset for one in others), 0.0, fmean(thresholds) if thresholds else None)
    found, error = mean.corrected(mean.stand_ins(values))  # the error of T alone
    end = (1 + level) / 2
    reach = math.hypot(float(stdtrit(len(others) - 1, end)) * spread, NormalDist().inv_cdf(end) * error)
    return Estimate(_share(found), _share(found - reach), _share(found + reach))


def difference_of_confidences(accuracy: float, before: float, now: float) -> float:
    """Return the estimate `doc` from means, in [0, 1].

    Parameters
    ----------
    accuracy : float
        A(S), on labelled samples, in [0, 1].
    before : float
        C(S), the mean confidence on these.
    now : float
        C(T), the mean confidence on the samples without labels.
    """
    return _share(accuracy - (before - now))


def _without_threshold(values: Values) -> Values:
    """Return v [m] of an estimate that has no threshold."""
    return judged(with_new_shares(values[:, :-1]), values[:, -1]) if values.ndim == 2 else values


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _threshold(ranked: Values, wrong: int) -> float:
    """Return the score that `wrong` of the rising scores [n] are below; just above all of them where that is n."""
    return float(ranked[wrong]) if wrong < len(ranked) else float(np.nextafter(ranked[-1], np.inf))


def _variance_of_mean(values: Values, low: float, high: float) -> float:
    """Return the variance of the mean of values [n], one more at `low` and at `high` counted."""
    more = np.append(values, (low, high))
    return float(more.var() / len(more))
