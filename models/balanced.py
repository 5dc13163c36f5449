"""Balanced BatchNorm: per-class statistics, averaged with equal weights.

pFedBBN: A Personalized Federated Test-Time Adaptation with Balanced Batch Normalization for Class-Imbalanced Data
(anonymous, under review, 2025), section 3.1.1, equations 1 to 4.

With z_i a sample's feature map, m_i its mean over positions and ĉ_i its pseudo-label, each class k of a batch moves by

    Δμ_k = η_k Σ_{i: ĉ_i=k} (m_i - μ_k)                                                                     (eq. 3)
    σ²_k ← σ²_k - Δμ_k² + η_k Σ_{i: ĉ_i=k} (mean over positions of (z_i - μ_k)² - σ²_k),  μ_k ← μ_k + Δμ_k  (eq. 1, 2)
    μ = 1/K Σ_k μ_k,   σ² = 1/K Σ_k (σ²_k + (μ_k - μ)²)                                                     (eq. 4)

Deviations, where the paper is silent or its formula fails:

- The paper's 1/d is read as a mean over positions; with d the number of features the sums would mix channels.
- η_k = min(η, 1/n_k), n_k the class's count in the batch. With a constant η, σ²_k turns negative from n_k > 1/η on and
  μ_k diverges from 2/η on.
- With r = η_k n_k ≤ 1, V the class's variance in the batch and δ the distance of its mean from μ_k, eq. 2 equals
  σ²_k ← (1-r) σ²_k + r V + r(1-r) δ². This form is computed: no term is negative, so no rounding can make σ²_k so.
- `gamma` (for many classes, of which a batch shows few; the paper has none): sample i moves class k by the weight
  (1-γ) η_k [ĉ_i = k] + γ min(η/K, 1/B) instead of η_k [ĉ_i = k]. So γ = 1 is a BatchNorm that knows no classes, of
  momentum min(ηB/K, 1). The weights of a class still sum to at most one, so σ²_k ≥ 0.
- `between="sample"` divides the sum of (μ_k - μ)² in eq. 4 by K - 1, as does the code of TRIBE, its source.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

#: The divisor of the variance between classes: K or K - 1.
Between = Literal["population", "sample"]


def default_momentum(num_classes: int) -> float:
    """Return η = max(0.0005 K, 0.01)."""
    return max(0.0005 * num_classes, 0.01)


class BalancedBatchNorm(nn.Module):
    """Replacement of a BatchNorm layer whose statistics weight all classes equally.

    Outside `pseudo_labels` the layer normalizes with its current statistics. Inside, it first updates the class
    statistics from its input, then normalizes with the new ones. In both cases (μ, σ²) are constants for the gradient;
    training mode has no effect.

    Parameters
    ----------
    layer : BatchNorm1d, BatchNorm2d or BatchNorm3d
        The layer to replace. Its weight and bias, if any, are shared, not copied; its running statistics initialize
        those of every class.
    num_classes : int
        K, at least 1.
    momentum : float or None
        η in (0, 1]; None: max(0.0005 K, 0.01).
    gamma : float or None
        γ in [0, 1], interpolation with the statistics of the whole batch; None: 0, the paper's method.
    between : "population" or "sample"
        Variance between the classes' means: their squared distances over K (eq. 4), or over K - 1, for K above 1.

    Attributes
    ----------
    class_mean, class_variance : Tensor [K, C]
        μ_k and σ²_k, buffers. An update replaces the tensors, so the old ones can be kept and restored.

    Raises
    ------
    ValueError
        A parameter is out of range, or `layer` keeps no running statistics.
    """

    class_mean: Tensor
    class_variance: Tensor

    def __init__(
        self,
        layer: _BatchNorm,
        num_classes: int,
        momentum: float | None = None,
        *,
        gamma: float | None = None,
        between: Between = "population",
    ) -> None:
        super().__init__()
        self.train(layer.training)
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes} must be at least 1")
        self.momentum = default_momentum(num_classes) if momentum is None else momentum
        if not 0 < self.momentum <= 1:
            raise ValueError(f"momentum={momentum} is outside (0, 1]")
        self.gamma = 0.0 if gamma is None else gamma
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma={gamma} is outside [0, 1]")
        if between not in get_args(Between):
            raise ValueError(f"between={between!r} must be one of {', '.join(get_args(Between))}")
        if between == "sample" and num_classes < 2:
            raise ValueError(f"between='sample' divides by K - 1 and needs two classes, num_classes={num_classes}")
        self.between = between
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(f"{layer} keeps no running statistics to start from")
        self.num_classes = num_classes
        self.num_features = layer.num_features
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias  # None where the layer has none
        self.register_buffer("class_mean", layer.running_mean.detach().repeat(num_classes, 1))  # [K, C]
        self.register_buffer("class_variance", layer.running_var.detach().repeat(num_classes, 1))  # [K, C]
        self._labels: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [B, C, ...]; inside `pseudo_labels`, update the statistics first."""
        if self._labels is not None:
            self.update(x, self._labels)
        mean, variance = self.balanced()
        return functional.batch_norm(x, mean, variance, self.weight, self.bias, training=False, eps=self.eps)

    @torch.no_grad()
    def balanced(self) -> tuple[Tensor, Tensor]:
        """Return μ [C] and σ² [C] (eq. 4)."""
        mean = self.class_mean.mean(0)
        apart = (self.class_mean - mean) ** 2  # [K, C]
        if self.between == "sample":
            return mean, self.class_variance.mean(0) + apart.sum(0) / (self.num_classes - 1)
        return mean, (self.class_variance + apart).mean(0)

    @torch.no_grad()
    def update(self, x: Tensor, labels: Tensor) -> None:
        """Update the class statistics from the layer's input (eq. 1 to 3); classes without a sample do not change.

        Parameters
        ----------
        x : Tensor [B, C, ...]
            Input; dimensions after C are positions.
        labels : Tensor [B]
            ĉ, integers in [0, K).

        Raises
        ------
        ValueError
            `x` and `labels` differ in B.
        """
        if len(x) != len(labels):
            raise ValueError(f"BatchNorm sees {len(x)} samples, but there are {len(labels)} pseudo-labels")
        if len(x) == 0:
            return
        centre, spread = sample_moments(x)  # [B, C] each
        member = functional.one_hot(labels, self.num_classes).T.to(self.class_mean.dtype)  # [K, B]
        count = member.sum(1, keepdim=True)  # [K, 1] n_k
        share = member / count.clamp(min=1)
        # Deviations from the old means, so that large means cost no precision.
        off = centre - self.class_mean[labels]  # [B, C]
        delta = share @ off  # [K, C] δ
        within = share @ (spread + (off - delta[labels]) ** 2)  # [K, C] V
        rate = (1 - self.gamma) * (self.momentum * count).clamp(max=1)  # [K, 1] r
        keep = 1 - rate
        mean, variance = self.class_mean + rate * delta, rate * within
        if self.gamma:
            whole = centre.mean(0)  # [C] mean of the batch
            batch_rate = self.gamma * min(self.momentum * len(x) / self.num_classes, 1.0)
            batch_delta = whole - self.class_mean  # [K, C]
            batch_within = (spread + (centre - whole) ** 2).mean(0)  # [C]
            keep = (keep - batch_rate).clamp(min=0)
            mean = mean + batch_rate * batch_delta
            variance = variance + batch_rate * (
                batch_within + keep * batch_delta**2 + rate * (delta - batch_delta) ** 2
            )
        self.class_mean = mean
        self.class_variance = keep * self.class_variance + variance + keep * rate * delta**2

    def extra_repr(self) -> str:
        """Return the constants for `print(model)`."""
        return (
            f"{self.num_features}, num_classes={self.num_classes}, momentum={self.momentum}, gamma={self.gamma}, "
            f"eps={self.eps}, affine={self.weight is not None}"
        )


def sample_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population variance over the positions of x [B, C, ...], each [B, C].

    The mean is subtracted before squaring, so a large mean costs no precision. On a CPU this is many times faster than
    `torch.var_mean`.
    """
    positions = tuple(range(2, x.ndim))
    if not positions:
        return x, torch.zeros_like(x)
    centre = x.mean(positions, keepdim=True)
    return centre.flatten(1), (x - centre).square_().mean(positions)


def balance(
    model: nn.Module,
    num_classes: int,
    momentum: float | None = None,
    *,
    gamma: float | None = None,
    between: Between = "population",
) -> nn.Module:
    """Return a deep copy of a BatchNorm network in which every BatchNorm layer is a `BalancedBatchNorm`.

    Until its first update inside `pseudo_labels`, the copy equals the network in evaluation mode.

    Parameters
    ----------
    model : nn.Module
        Not changed; the copy has the same module and parameter names.
    num_classes, momentum, gamma, between
        See `BalancedBatchNorm`.

    Raises
    ------
    ValueError
        `model` has no BatchNorm layer, one keeps no running statistics (named), or a parameter is out of range.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no BatchNorm layer to balance")
    # deepcopy looks up replacements in its memo, so a layer is replaced wherever the network refers to it.
    memo: dict[int, Any] = {}
    for name, layer in layers.items():
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(f"{name} keeps no running statistics to start from")
        copied = copy.deepcopy(layer, memo)
        memo[id(layer)] = BalancedBatchNorm(copied, num_classes, momentum, gamma=gamma, between=between)
    return copy.deepcopy(model, memo)


@contextmanager
def pseudo_labels(model: nn.Module, labels: Tensor) -> Iterator[None]:
    """Make every `BalancedBatchNorm` of `model` update from `labels` [B] in forward passes inside the block."""
    layers = [module for module in model.modules() if isinstance(module, BalancedBatchNorm)]
    for layer in layers:
        layer._labels = labels
    try:
        yield
    finally:
        for layer in layers:
            layer._labels = None
