"""Whether a new model may be served: its check on the device's own samples, and its trial beside the served model.

Both compare unadapted predictions: what the adapter learns from the stream comes later, and the guard watches it.

Refused is a model

- with a weight or an output that is not finite;
- of whose predictions one class has more than `one_class`, and clearly more than of the device's labels, or of the
  served model's predictions where there are no labels;
- that is less accurate than the served one by more than `margin` on the validation split, what was lost by the models
  before it included; or, without labels,
- that agrees with the served one on less than `agreement` of the samples, or by chance alone, or is close to guessing
  where that is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtta.client.agent.live import Live, as_floats
from fedtta.client.agent.status import CALIBRATED, CALIBRATION
from fedtta.client.config import Acceptance
from fedtta.client.served import ServedModel
from fedtta.models.arrays import array_finite
from fedtta.tta.arrays import to_host, untracked
from fedtta.tta.estimates import calibrate, confidences, signals

if TYPE_CHECKING:
    from fedtta.client.device import Device
    from fedtta.data import Images, Split

MOST = 512  # samples of a check, evenly spaced over the split
LEAST = 16  # with fewer samples, shares of classes and agreement say nothing
BATCH = 32
ADAPTED = 128  # samples of a check, evenly spaced, that a new adapter predicts where their labels are known
BEYOND_CHANCE = 0.2  # least Cohen's kappa of two models on samples without labels
SLACK = 0.1  # by which one class's share may exceed its share of the labels


@dataclass(frozen=True)
class Samples:
    """A device's own samples that a model is checked on.

    Parameters
    ----------
    pixels : uint8 or float32 [n, C, H, W]
    labels : int64 [n] or None
        None where the device has none that it may use.
    """

    pixels: NDArray[Any]
    labels: NDArray[np.int64] | None = None

    @classmethod
    def none(cls, shape: tuple[int, int, int]) -> Samples:
        """Return no samples of a shape C, H, W."""
        return cls(np.empty((0, *shape), np.uint8))

    @classmethod
    def of_device(cls, device: Device, round: int) -> Samples:
        """Return validation samples, or training samples where there are none; test samples without their labels."""
        federation = device.federation.in_round(round)
        return cls.of_split(federation.images, federation.splits[device.partition], device.role != "target")

    @classmethod
    def of_split(cls, images: Images, split: Split, labelled: bool) -> Samples:
        """Return samples of a split, chosen as in `of_device`."""
        for index, known in ((split.validation, labelled), (split.train, labelled), (split.test, False)):
            if len(index):
                chosen = spaced(index)
                return cls(np.asarray(images.pixels[chosen]), np.asarray(images.labels[chosen]) if known else None)
        return cls.none(images.shape)


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Parameters
    ----------
    reason : str
        Why the model is refused; empty: it is accepted.
    figures : dict
        Name → number: samples, accuracy, served_accuracy, lost, agreement, confidence, served_confidence, one_class;
        those that could be computed. All are of unadapted predictions; accuracy and confidence, the mean of the
        largest probabilities, are those that the estimated accuracy begins from (`fedtta.tta.estimates`). Only those
        that begin with `CALIBRATED` are of what a new adapter predicts: the calibration of the estimate for it.
    """

    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def spaced(index: NDArray[np.int64], most: int = MOST) -> NDArray[np.int64]:
    """Return at most `most` values of an index, evenly spaced."""
    return index[np.linspace(0, len(index) - 1, min(len(index), most)).astype(np.int64)]


def comparable(one: ServedModel, other: ServedModel | None) -> bool:
    """Return whether two models take the same images, prepared alike, and know the same classes."""
    if other is None:
        return False
    return (one.shape, one.preprocessing, one.classes) == (other.shape, other.preprocessing, other.classes)


def check(
    candidate: ServedModel, served: ServedModel | None, samples: Samples, limits: Acceptance, lost: float = 0.0
) -> Check:
    """Check a model (see the module).

    Parameters
    ----------
    candidate : ServedModel
    served : ServedModel or None
        What is served now, if anything.
    lost : float
        By how much the served model is less accurate than the best one since the owner's last decision: many offers
        together may lose no more than one.
    """
    if name := not_finite(candidate):
        return Check(f"{name}: not finite")
    pixels = samples.pixels if len(samples.pixels) else _noise(candidate.shape)
    new = probabilities(candidate, pixels)
    if not np.isfinite(new).all():
        return Check("its output is not finite")
    shown = np.arange(len(pixels))[:BATCH] if samples.labels is None else spaced(np.arange(len(pixels)), ADAPTED)
    try:
        adapted = _adapted(candidate, pixels[shown])
    except (ValueError, FloatingPointError) as error:
        return Check(f"its adapter does not predict: {error}")
    if not np.isfinite(adapted).all():
        return Check("its adapter's output is not finite")
    count, labels = len(samples.pixels), samples.labels
    if not count:
        return Check(figures={"samples": 0})
    figures = {"samples": float(count), "confidence": float(confidences(new).mean()), "lost": lost}
    old = probabilities(served, pixels) if served is not None and comparable(candidate, served) else None
    old = None if old is None or not np.isfinite(old).all() else old
    reference = None if old is None else _shares(old.argmax(1), new.shape[1])
    if labels is not None:
        reference = _shares(labels, new.shape[1])
        figures["accuracy"] = float((new.argmax(1) == labels).mean())
        figures |= _calibration(adapted, new[shown], labels[shown])
    reasons = [_one_class(new, reference, limits, candidate.classes, figures)]
    if old is not None:
        figures["agreement"] = float((new.argmax(1) == old.argmax(1)).mean())
        figures["served_confidence"] = float(old.max(1).mean())
        reasons.append(
            _less_accurate(new, old, labels, limits, figures)
            if labels is not None
            else _unlike(new, old, limits, figures)
        )
    return Check(next(filter(None, reasons), ""), figures)


def _noise(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return images of noise, for a look at outputs where a device has no samples."""
    return np.random.default_rng(0).integers(0, 256, (BATCH, *shape), np.uint8)


def not_finite(served: ServedModel) -> str:
    """Return the name of a weight or private value that is not finite; empty for none."""
    arrays = {**served.network_arrays(), **served.arrays()}
    return next((name for name, value in arrays.items() if value.dtype.kind == "f" and not array_finite(value)), "")


def probabilities(served: ServedModel, pixels: NDArray[Any]) -> NDArray[np.float32]:
    """Return the unadapted probabilities [n, K] of images [n, C, H, W]."""
    starts = range(0, len(pixels), BATCH)
    with untracked():
        return np.concatenate([served.unadapted(as_floats(pixels[begin : begin + BATCH])) for begin in starts])


def _adapted(served: ServedModel, pixels: NDArray[Any]) -> NDArray[np.float32]:
    """Return what a new adapter predicts for images, at least one, as a stream."""
    adapter = served.build()
    parts = [served.images(as_floats(pixels[begin : begin + BATCH])) for begin in range(0, len(pixels), BATCH)]
    return np.concatenate([to_host(adapter.predict(part)) for part in parts])


def _calibration(
    adapted: NDArray[np.float32], plain: NDArray[np.float32], labels: NDArray[np.int64]
) -> dict[str, float]:
    """Return the figures that calibrate the estimated accuracy of adapted predictions (`Recent.accuracy`)."""
    found = calibrate("label_shift", signals(adapted, plain)["judged"], adapted.argmax(1) == labels)
    values = float(len(labels)), found.offset, found.variance
    return {f"{CALIBRATED}{name}": value for name, value in zip(CALIBRATION, values, strict=True)}


def _shares(predicted: NDArray[Any], classes: int) -> NDArray[np.float64]:
    return np.bincount(predicted, minlength=classes) / len(predicted)


def _one_class(
    new: NDArray[np.float32],
    reference: NDArray[np.float64] | None,
    limits: Acceptance,
    classes: tuple[str, ...],
    figures: dict[str, float],
) -> str:
    """Return why a model is refused that predicts one class; `reference` has the usual shares, if they are known."""
    shares = _shares(new.argmax(1), new.shape[1])
    top = int(shares.argmax())
    figures["one_class"] = float(shares[top])
    usual = 0.0 if reference is None else float(reference[top])
    if len(new) < LEAST or shares[top] <= max(limits.one_class, usual + SLACK):
        return ""
    beside = "" if reference is None else f", usual is {usual:.0%}"
    return f"it predicts {classes[top]!r} for {shares[top]:.0%} of {len(new)} samples{beside}"


def _less_accurate(
    new: NDArray[np.float32],
    old: NDArray[np.float32],
    labels: NDArray[np.int64],
    limits: Acceptance,
    figures: dict[str, float],
) -> str:
    """Return why a model is refused that is less accurate; one sample makes no difference."""
    right = [int((rows.argmax(1) == labels).sum()) for rows in (new, old)]
    found, before = (count / len(labels) for count in right)
    figures["served_accuracy"] = before
    past, figures["lost"] = figures["lost"], max(0.0, figures["lost"] + before - found)
    if right[0] >= right[1] or figures["lost"] * len(labels) <= max(limits.margin * len(labels), 1) + 1e-9:
        return ""
    since = f", and {past:.3f} were lost before" if past else ""
    return f"accuracy {found:.3f} on {len(labels)} validation samples, the served model has {before:.3f}{since}"


def _unlike(new: NDArray[np.float32], old: NDArray[np.float32], limits: Acceptance, figures: dict[str, float]) -> str:
    """Return why a model is refused that is unlike the served one on samples without labels.

    Agreement has to exceed that of two models which predict the same shares of classes by chance: of two classes, half.
    """
    if figures["samples"] < LEAST:
        return ""
    classes = new.shape[1]
    by_chance = float(_shares(new.argmax(1), classes) @ _shares(old.argmax(1), classes))
    least = max(limits.agreement, by_chance + BEYOND_CHANCE * (1 - by_chance)) if limits.agreement else 0.0
    if figures["agreement"] < least:
        return f"it agrees with the served model on {figures['agreement']:.0%} of {figures['samples']:.0f} samples"
    confidence, before, chance = figures["confidence"], figures["served_confidence"], 1 / classes
    if confidence - chance < (before - chance) / 4:
        return f"its mean confidence is {confidence:.2f}, close to guessing; the served model has {before:.2f}"
    return ""


class Shadow:
    """A model that predicts beside the served one, which answers.

    Parameters
    ----------
    live : Live
        The model; it adapts to what it predicts.
    wanted : int
        Samples of the trial.
    labelled : bool
        Whether its check had labels: these say more than agreement with the served model.

    Attributes
    ----------
    seen, agreed : int
        Samples so far, and those of the same predicted class.
    failure : str
        Why the trial ended early; empty: it did not.
    postponed : bool
        Whether its end could not be stored: the next time is when the adapter's state is to be saved.
    """

    def __init__(self, live: Live, wanted: int, labelled: bool) -> None:
        self.live, self.wanted, self.labelled = live, wanted, labelled
        self.seen, self.agreed, self.failure, self.postponed = 0, 0, "", False
        classes = len(live.served.classes)
        self._counts = np.zeros((2, classes))  # of predicted classes: the shadow's, the served model's

    @property
    def ended(self) -> bool:
        """Return whether the trial has ended."""
        return bool(self.failure) or self.seen >= self.wanted

    def predict(self, pixels: NDArray[np.float32], answered: NDArray[np.float32]) -> None:
        """Predict images [B, C, H, W] for which the served model has given `answered` [B, K]; never raises."""
        if self.ended:
            return
        try:
            rows, _, _ = self.live.predict(pixels)
            new, old = rows.argmax(1), answered.argmax(1)
            for row, predicted in enumerate((new, old)):
                self._counts[row] += np.bincount(predicted, minlength=self._counts.shape[1])
            self.seen += len(new)
            self.agreed += int((new == old).sum())
        except Exception as error:  # the request has been answered: whatever happens here is the shadow's own
            self.failure = f"failed in shadow: {error}"

    def result(self, limits: Acceptance) -> Check:
        """Return whether the model may be promoted."""
        agreement = self.agreed / max(self.seen, 1)
        figures = {"shadow_samples": float(self.seen), "shadow_agreement": agreement}
        if self.failure:
            return Check(self.failure, figures)
        shares = self._counts / max(self.seen, 1)
        top = int(shares[0].argmax())
        if self.seen >= LEAST and shares[0, top] > max(limits.one_class, shares[1, top] + SLACK):
            name = self.live.served.classes[top]
            return Check(f"in shadow it predicted {name!r} for {shares[0, top]:.0%} of {self.seen} samples", figures)
        if self.seen >= LEAST and not self.labelled and agreement < limits.agreement:
            return Check(f"in shadow it agreed on {agreement:.0%} of {self.seen} samples", figures)
        return Check("", figures)
