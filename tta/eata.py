"""EATA: entropy minimisation on reliable, non-redundant samples with a Fisher regulariser.

Efficient Test-Time Model Adaptation without Forgetting (Niu, Wu, Zhang, Chen, Zheng, Zhao, Tan, ICML 2022), section 4.
One batch x of B samples with predictions p (softmax) and entropies E, normalised by its own statistics:

    kept:  E < E_0 = 0.4 ln K  (eq. 3),   |cos(p, m)| < ε  (eq. 5)
    loss:  mean over the kept of exp(E_0 - E) E  +  β Σ_i ω_i (θ_i - θ_i^source)²      (eq. 2, 8)
    m ← 0.9 m + 0.1 mean of the kept p (eq. 4), the first mean as it is

θ are the BatchNorm weights and biases, exp(E_0 - E) is a constant for the gradient, ω is the diagonal of the Fisher
information of the source network with its own predictions as labels (eq. 9). A batch without a kept sample takes no
step. The prediction is the one of the forward pass whose gradient the (last) step takes, as in the published code.

Defaults are the paper's for CIFAR-10: SGD, momentum 0.9, rate 0.005, E_0 = 0.4 ln K, ε = 0.4, β = 1. Its ImageNet
values: rate 2.5e-4, ε = 0.05, β = 2000 (FedICON's EATA rows have ε = 0.05 and β = 2000, too).

Decisions and deviations:

- ω comes from 2,000 source images in the paper: `fisher_diagonal` computes it, `fisher` takes it. Without it ω is
  computed from the first `fisher_batches` test batches, with the source weights, so that no source data are needed.
- Gradients for ω are squared batch by batch and averaged over batches, as in the published code; the paper's eq. 9
  squares them sample by sample, which with batch statistics has no one meaning (`batch_size=1` is the nearest).
- The loss is a mean over the kept samples, as in the published code; eq. 2 is a minimum over all x.
- Only BatchNorm leaves evaluation mode; a layer with one value a channel falls back to the source (see `bn_adapt`).
- BatchNorm parameters that are frozen, or in the personal head, are left alone. All BatchNorm layers are trained; the
  published code trains BatchNorm2d alone: `layers="batchnorm2d"`. Batch statistics normalise in every layer there, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy

from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.base import prefixed
from fedtta.tta.bn_adapt import BatchNormalised, with_batch_statistics
from fedtta.tta.checks import Checks, check_finite, check_least, check_number, class_count
from fedtta.tta.collaborator import AffineLayers, affine_names


def sample_weights(logits: Tensor, average: Tensor, margin: float, redundancy: float) -> Tensor:
    """Return the weight of every sample's entropy in the loss, 0 for those left out.

    Parameters
    ----------
    logits : Tensor [B, K]
    average : Tensor [K]
        m, the average prediction so far; zero where there is none yet, and then no sample is redundant.
    margin : float
        E_0, in nats.
    redundancy : float
        ε.

    Returns
    -------
    Tensor [B]
        exp(E_0 - E), above 1, or 0.
    """
    entropy = entropy_of_logits(logits)
    similarity = cosine_similarity(average[None], logits.softmax(1), dim=1)
    kept = (entropy < margin) & (similarity.abs() < redundancy)
    return torch.where(kept, torch.exp(margin - entropy), 0)


def squared_gradients(logits: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the squares of ∂/∂θ mean_b -ln p_{ŷ_b}(x_b), ŷ the predicted class, by name; logits [B, K], B > 0."""
    loss = cross_entropy(logits, logits.detach().argmax(1))
    gradients = torch.autograd.grad(loss, list(values.values()), materialize_grads=True)
    return {name: gradient.square() for name, gradient in zip(values, gradients, strict=True)}


def fisher_diagonal(model: nn.Module, x: Tensor, batch_size: int = 64) -> dict[str, Tensor]:
    """Estimate ω, the diagonal of the Fisher information of the BatchNorm weights and biases (eq. 9).

    Parameters
    ----------
    model : nn.Module
        The source network with BatchNorm; left as it is. Every batch is normalised with its own statistics.
    x : Tensor [n, ...]
        Source samples, n at least 1 (the paper: 2,000); their labels are the network's predictions.
    batch_size : int
        Samples a gradient, at least 1; the last batch may be smaller. 64 is the published code's.

    Returns
    -------
    dict of str to Tensor
        Name of parameter → ω, of its shape, 0 or more.

    Raises
    ------
    ValueError
        There is no sample, `batch_size` is below 1, the network's output is not finite, or there is no BatchNorm.
    """
    check_least(1, batch_size=batch_size)
    if len(x) == 0:
        raise ValueError("fisher_diagonal needs at least one sample, x is empty")
    names = affine_names(model)
    network, _ = with_batch_statistics(copy.deepcopy(model).eval().requires_grad_(False))
    parameters = dict(network.named_parameters())
    sums = {name: torch.zeros_like(parameters[name]) for name in names}
    batches = x.split(batch_size)
    for batch in batches:
        with torch.inference_mode(False), torch.enable_grad():
            values = {name: parameters[name].detach().clone().requires_grad_() for name in names}
            logits = functional_call(network, values, (batch.clone(),))
            check_finite("the network's output", logits)
            squares = squared_gradients(logits, values)
        sums = {name: total + squares[name] for name, total in sums.items()}
    return {name: total / len(batches) for name, total in sums.items()}


class EATA(BatchNormalised):
    """Sample-adaptive entropy minimisation with a Fisher regulariser (see the module).

    Defined per batch; what is learned stays for the batches that follow. `report()` has the `entropy` of every sample's
    returned prediction, in nats, and its `loss_weight` in the (last) step, 0 where the sample was left out.

    Parameters
    ----------
    model : nn.Module
        Any network with BatchNorm; `fedtta.models.TwoHead` predicts with its global head.
    optimizer, lr, momentum, steps, layers
        See `Tent`; the paper takes one step of SGD a batch.
    margin : float
        E_0 / ln K, in (0, 1].
    redundancy : float
        ε, in (0, 1].
    momentum_probs : float
        What m keeps of itself, in [0, 1].
    fisher_strength : float
        β, finite, 0 or more.
    fisher : mapping or None
        ω by name of parameter, as `fisher_diagonal` returns it; None: from the stream.
    fisher_batches : int
        From how many of the stream's first batches ω is computed where it is not given; 0: no regulariser.
    num_classes : int or None
        K; None: `model.num_classes`.
    record, proximal
        See `Collaborator`.

    Raises
    ------
    ValueError
        An option is out of range, the number of classes is unknown, `fisher` does not fit the network, or the network
        has no BatchNorm layer with weights that may be trained.
    """

    name = "eata"
    paper = "Efficient Test-Time Model Adaptation without Forgetting (ICML 2022)"
    adapts = "BatchNorm statistics, weights and biases"

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Literal["adam", "sgd"] = "sgd",
        lr: float = 0.005,
        momentum: float = 0.9,
        steps: int = 1,
        margin: float = 0.4,
        redundancy: float = 0.4,
        momentum_probs: float = 0.9,
        fisher_strength: float = 1.0,
        fisher: Mapping[str, Tensor] | None = None,
        fisher_batches: int = 1,
        layers: AffineLayers = "batchnorm",
        num_classes: int | None = None,
        record: bool = True,
        proximal: float = 0.0,
    ) -> None:
        check_number("margin", margin, 0, 1, open_low=True)
        check_number("redundancy", redundancy, 0, 1, open_low=True)
        check_number("momentum_probs", momentum_probs, 0, 1)
        check_number("fisher_strength", fisher_strength, 0, math.inf)
        check_least(1, steps=steps)
        check_least(0, fisher_batches=fisher_batches)
        super().__init__(model, record=record, proximal=proximal)
        self.steps, self.redundancy, self.momentum_probs = steps, redundancy, momentum_probs
        self.fisher_strength = fisher_strength
        self.fisher_batches = fisher_batches if fisher is None and fisher_strength else 0  # that ω is computed from
        self.classes = class_count(model, num_classes)
        self.margin = margin * math.log(self.classes)  # E_0, nats
        self._optimizer = FunctionalOptimizer(optimizer, lr, momentum)
        parameters = dict(self._network.named_parameters())
        self._source = {name: parameters[name].detach() for name in affine_names(model, layers=layers)}
        self._given = None if fisher is None else _fitting(fisher, self._source)
        self.reset()

    def trained(self) -> dict[str, Tensor]:
        """Return γ and β of the BatchNorm layers, by their names in the network."""
        return self._affine

    def _begin(self) -> None:
        self._affine = {name: value.clone().requires_grad_() for name, value in self._source.items()}
        self._memory = self._optimizer.init(self._source)
        self._average = next(iter(self._source.values())).new_zeros(self.classes)  # m; zero: none yet
        self._fisher = self._given or {name: torch.zeros_like(value) for name, value in self._source.items()}
        self._batches = torch.zeros((), dtype=torch.int64)

    def _adapt(self, x: Tensor) -> Tensor:
        before, checks = (self._affine, self._memory, self._average, self._fisher, self._batches), Checks()
        try:
            if int(self._batches) < self.fisher_batches:
                self._fisher = self._updated_fisher(x, checks)
            for _ in range(self.steps):
                logits, weights = self._step(x, checks)
            checks.read()
            self._batches = self._batches + 1
        except Exception:  # what fails undoes what came before it in the batch
            self._affine, self._memory, self._average, self._fisher, self._batches = before
            raise
        self._domain = self._last()
        self._note(entropy=entropy_of_logits(logits), loss_weight=weights)
        return torch.softmax(logits, 1)

    def _updated_fisher(self, x: Tensor, checks: Checks) -> dict[str, Tensor]:
        """Return ω as a mean over the batches so far, x [B, ...] included."""
        with torch.enable_grad():
            source = {name: value.clone().requires_grad_() for name, value in self._source.items()}
            squares = squared_gradients(self._logits(x, checks, source), source)
        share = 1 / (int(self._batches) + 1)
        return {name: torch.lerp(old, squares[name], share) for name, old in self._fisher.items()}

    def _step(self, x: Tensor, checks: Checks) -> tuple[Tensor, Tensor]:
        """Take one step; return the logits [B, K] before it, and the samples' weights [B]."""
        with torch.enable_grad():
            logits = self._logits(x, checks, self._affine)
            if logits.shape[1] != self.classes:
                raise ValueError(f"the network gives {logits.shape[1]} classes, num_classes={self.classes}")
            weights = sample_weights(logits.detach(), self._average, self.margin, self.redundancy)
            kept = torch.nonzero(weights).flatten()
            if len(kept) == 0:
                return logits.detach(), weights
            loss = (weights[kept] * entropy_of_logits(logits[kept])).mean() + self._regulariser() + self._pull()
            gradients = torch.autograd.grad(loss, list(self._affine.values()), allow_unused=True)
        self._affine, self._memory = self._optimizer.step(self._affine, gradients, self._memory, checks.require_finite)
        mean = logits.detach()[kept].softmax(1).mean(0)
        moved = torch.lerp(mean, self._average, self.momentum_probs)
        self._average = torch.where(self._average.any(), moved, mean)
        return logits.detach(), weights

    def _regulariser(self) -> Tensor | float:
        """Return β Σ ω (θ - θ_source)²."""
        if self._given is None and not self.fisher_batches:
            return 0.0
        pulls = [(self._fisher[name] * (value - self._source[name]) ** 2).sum() for name, value in self._affine.items()]
        return self.fisher_strength * torch.stack(pulls).sum()

    def _state(self) -> dict[str, Tensor]:
        learned = {**prefixed("affine", self._affine), **prefixed("optimizer", self._memory)}
        fisher = {} if self._given else prefixed("fisher", self._fisher)
        return {**super()._state(), **learned, **fisher, "average": self._average, "batches": self._batches}

    def _load(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            if name.startswith(("fisher.", "average")) and bool((value < 0).any()):
                raise ValueError(f"state {name!r} of EATA holds negative values")
        super()._load(state)


def _fitting(fisher: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ω as tensors like the values; raise ValueError where names, shapes or signs are wrong."""
    missing, unknown = sorted(set(values) - set(fisher)), sorted(set(fisher) - set(values))
    if missing or unknown:
        raise ValueError(f"fisher does not fit the network: missing {missing}, unknown {unknown}")
    for name, value in fisher.items():
        if value.shape != values[name].shape:
            raise ValueError(f"fisher of {name}: shape {tuple(value.shape)} does not fit {tuple(values[name].shape)}")
        if not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ValueError(f"fisher of {name} must be finite, 0 or more")
    return {name: fisher[name].detach().to(value, copy=True) for name, value in values.items()}
