"""ROID: self-training with certainty and diversity weighting, weight ensembling and prior correction.

Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior Correction (Marsden, Döbler,
Yang, WACV 2024), section 3. One batch x of B samples with predictions p (softmax), normalised by its own statistics:

1. weights: diversity d = 1 - cos(p̄, p) and certainty c = -H(p), each scaled to [0, 1] over the batch, make
   w = exp(d c / τ), and 0 where d is below its mean. p̄ is an average over past batches: p̄ ← 0.9 p̄ + 0.1 mean(p);
2. soft likelihood ratio: l = -Σ_c p_c ln(p_c / (1 - p_c)), p at most 0.99;
3. consistency, for the samples with w > 0, with the prediction q of a random view of each, normalised among themselves:
   s = -1/2 Σ_c p_c ln q_c - 1/2 Σ_c q_c ln p_c;
4. one step of Adam for the BatchNorm weights and biases on 1/B Σ w (l + s);
5. weight ensembling: θ ← m θ + (1 - m) θ_source;
6. prior correction of the p of 1., which are predicted: times (mean(p) + γ) / (1 + γ K), and rescaled to sum one, with
   γ = max(1/B, 1/K) / max(mean(p)).

Decisions and deviations:

- The prior multiplies probabilities, as Bayes' rule wants; the published code multiplies logits by it, whatever their
  sign. The most probable class can differ.
- Where all d (or all c) of a batch are equal, as for one sample, they are 0 (in the published code 0/0): w = 1.
- The published code divides the loss by the configured batch size, also that of a short last batch: `divide="batch"`.
- Views are those of the published code: no blur and no noise, images continued by reflection.
- Only BatchNorm leaves evaluation mode; a layer with one value a channel falls back to the source (see `bn_adapt`).
- BatchNorm parameters that are frozen, or in the personal head, are left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.base import prefixed
from fedtta.tta.bn_adapt import BatchNormalised
from fedtta.tta.checks import Checks, check_choice, check_least, check_number, class_count
from fedtta.tta.collaborator import affine_names
from fedtta.tta.views import Augment, Views, augmented, seeded

CLIP = 0.99  # largest p in the likelihood ratio, above which the gradient is zero; published code
SMALLEST_RATIO = 1e-5  # added to p / (1 - p) before the logarithm; published code


def soft_likelihood_ratio(logits: Tensor) -> Tensor:
    """Return -Σ_c p_c ln(p_c / (1 - p_c)) [B] of p = softmax(logits [B, K]), clipped at 0.99."""
    p = logits.softmax(1).clamp(max=CLIP)
    return -(p * torch.log(p / (1 - p) + SMALLEST_RATIO)).sum(1)


def symmetric_cross_entropy(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean [B] of the two cross-entropies between softmax(first) and softmax(second), both logits [B, K]."""
    log_p, log_q = first.log_softmax(1), second.log_softmax(1)
    return -(log_p.exp() * log_q + log_q.exp() * log_p).sum(1) / 2


def scaled(values: Tensor) -> Tensor:
    """Return values [B] brought to [0, 1] by their range; equal values become 0."""
    low, high = values.aminmax()
    return (values - low) / torch.where(high > low, high - low, 1)


def sample_weights(logits: Tensor, average: Tensor, temperature: float) -> Tensor:
    """Return w [B] (1. of the module) from logits [B, K] and p̄ [K]."""
    diversity = scaled(1 - cosine_similarity(average[None], logits.softmax(1), dim=1))
    certainty = scaled(-entropy_of_logits(logits))
    return torch.where(diversity < diversity.mean(), 0, torch.exp(diversity * certainty / temperature))


def prior_corrected(probabilities: Tensor) -> Tensor:
    """Return probabilities [B, K] reweighted by their smoothed mean (6. of the module)."""
    samples, classes = probabilities.shape
    prior = probabilities.mean(0)
    smoothing = max(1 / samples, 1 / classes) / prior.max()  # γ
    corrected = probabilities * ((prior + smoothing) / (1 + smoothing * classes))
    return corrected / corrected.sum(1, keepdim=True)


@dataclass(frozen=True)
class PlainViews(Views):
    """The views of ROID's published code."""

    blur: bool = False
    noise: float = 0.0
    padding: Literal["border", "reflection"] = "reflection"


class ROID(BatchNormalised):
    """Certainty and diversity weighting, weight ensembling, prior correction (see the module).

    Defined per batch; what is learned stays for the batches that follow. `report()` has, for every sample, its
    `loss_weight` w and the `entropy` of its uncorrected prediction, in nats.

    Parameters
    ----------
    model : nn.Module
        Any network with BatchNorm; `fedtta.models.TwoHead` predicts with its global head.
    lr : float
        Of Adam (β = 0.9, 0.999), finite, 0 or more. 1e-3 is the published one for CIFAR.
    momentum_src : float
        m in [0, 1], what weight ensembling keeps of the adapted weights.
    momentum_probs : float
        What p̄ keeps of itself, in [0, 1].
    temperature : float
        τ, finite, above 0.
    use_consistency, use_prior_correction : bool
        Whether 3. and 6. take place.
    divide : "samples" or "batch"
        B of 4.: the samples of this batch, or of the largest one since the last reset.
    num_classes : int or None
        K; None: `model.num_classes`.
    augment : callable or None
        `augment(x [n, ...], generator) -> [n, ...]`; None: `PlainViews()`, for images.
    seed : int
        Of the views, 0 or more. They depend on it and on the number of batches since the last reset only.
    record, proximal
        See `Collaborator`.

    Raises
    ------
    ValueError
        An option is out of range, the number of classes is unknown, or the network has no BatchNorm layer with weights
        that may be trained.
    """

    name = "roid"
    paper = (
        "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, Prior Correction (WACV 2024)"
    )
    adapts = "BatchNorm statistics, weights and biases"
    views = PlainViews

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        momentum_src: float = 0.99,
        momentum_probs: float = 0.9,
        temperature: float = 1 / 3,
        use_consistency: bool = True,
        use_prior_correction: bool = True,
        divide: Literal["samples", "batch"] = "samples",
        num_classes: int | None = None,
        augment: Augment | None = None,
        seed: int = 0,
        record: bool = True,
        proximal: float = 0.0,
    ) -> None:
        check_number("momentum_src", momentum_src, 0, 1)
        check_number("momentum_probs", momentum_probs, 0, 1)
        check_number("temperature", temperature, 0, math.inf, open_low=True)
        check_choice("divide", divide, ("samples", "batch"))
        check_least(0, seed=seed)
        super().__init__(model, record=record, proximal=proximal)
        self.momentum_src, self.momentum_probs, self.temperature = momentum_src, momentum_probs, temperature
        self.use_consistency, self.use_prior_correction, self.seed = use_consistency, use_prior_correction, seed
        self.divide = divide
        self.augment = PlainViews() if augment is None else augment
        self.classes = class_count(model, num_classes)
        self._optimizer = FunctionalOptimizer("adam", lr)
        parameters = dict(self._network.named_parameters())
        self._source = {name: parameters[name].detach() for name in affine_names(model)}
        self.reset()

    def trained(self) -> dict[str, Tensor]:
        """Return γ and β of the BatchNorm layers, by their names in the network."""
        return self._affine

    def _begin(self) -> None:
        self._affine = {name: value.clone().requires_grad_() for name, value in self._source.items()}
        self._memory = self._optimizer.init(self._source)
        self._average = next(iter(self._source.values())).new_full((self.classes,), 1 / self.classes)  # p̄
        self._batches = torch.zeros((), dtype=torch.int64)
        self._largest = torch.zeros((), dtype=torch.int64)  # samples of the largest batch

    def _adapt(self, x: Tensor) -> Tensor:
        checks = Checks()
        with torch.enable_grad():
            logits = self._logits(x, checks, self._affine)
            domain = self._last()
            if logits.shape[1] != self.classes:
                raise ValueError(f"the network gives {logits.shape[1]} classes, num_classes={self.classes}")
            weights = sample_weights(logits.detach(), self._average, self.temperature)
            gradients = torch.autograd.grad(
                self._loss(x, logits, weights, checks) + self._pull(), list(self._affine.values()), allow_unused=True
            )
        moved, memory = self._optimizer.step(self._affine, gradients, self._memory, checks.require_finite)
        checks.read()
        ensembled = {name: torch.lerp(self._source[name], moved[name].detach(), self.momentum_src) for name in moved}
        probabilities = torch.softmax(logits.detach(), 1)
        self._affine = {name: value.requires_grad_() for name, value in ensembled.items()}
        self._average = torch.lerp(probabilities.mean(0), self._average, self.momentum_probs)
        self._memory, self._domain, self._batches = memory, domain, self._batches + 1
        self._largest = self._largest.clamp(min=len(x))
        self._note(loss_weight=weights, entropy=entropy_of_logits(logits))
        return prior_corrected(probabilities) if self.use_prior_correction else probabilities

    def _loss(self, x: Tensor, logits: Tensor, weights: Tensor, checks: Checks) -> Tensor:
        """Return 1/B Σ w (l + s), a scalar, for x [B, ...], its logits [B, K] and w [B]."""
        kept = torch.nonzero(weights).flatten()  # never empty: the largest d is not below the mean
        losses = soft_likelihood_ratio(logits[kept])
        if self.use_consistency:
            view = augmented(self.augment, x[kept], seeded(self.seed, int(self._batches)))
            losses = losses + symmetric_cross_entropy(logits[kept], self._logits(view, checks, self._affine))
        checks.finite("the loss", losses)
        size = max(len(x), int(self._largest)) if self.divide == "batch" else len(x)
        return (weights[kept] * losses).sum() / size

    def _state(self) -> dict[str, Tensor]:
        memory = prefixed("optimizer", self._memory)
        learned = {**super()._state(), **self._affine, **memory, "average": self._average}
        size = {"largest.step": self._largest} if self.divide == "batch" else {}
        return {**learned, "batches.step": self._batches, **size}
