"""BN-Adapt: BatchNorm with the statistics of the test batch, or a mixture of the source's and the batch's.

Improving robustness against common corruptions by covariate shift adaptation (Schneider, Rusak, Eck, Bringmann,
Brendel, Bethge, NeurIPS 2020), for a batch of n samples and a prior of N source samples:

    μ̄ = N/(N+n) μ_source + n/(N+n) μ_batch,    σ̄² = N/(N+n) σ²_source + n/(N+n) σ²_batch

The default N = 0 is the batch alone: the rows "BN-Adapt" of ATP (NeurIPS 2023) and "BN" of most other papers.

`BatchStatistics`, the layer, and `BatchNormalised`, what goes with it, are also how `tent` and `cotta` normalise.

Decisions and deviations:

- σ²_batch is the biased variance (divided by the number of values), for every N: it is what torch normalises with in
  training mode, and `domain` returns the same numbers. The published code mixes in the unbiased one where N > 0.
- A channel that has one value in the batch (one sample of a vector, or of a 1x1 map) has no variance: that layer
  normalises with the source's statistics, for every N. Source code in training mode stops with an error there.
- Only BatchNorm leaves evaluation mode; dropout, which would add noise to predictions, stays off.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtta.tta.base import prefixed
from fedtta.tta.checks import Checks, check_least
from fedtta.tta.collaborator import Collaborator, replace_batchnorms


class BatchStatistics(nn.Module):
    """A BatchNorm layer that normalises with the statistics of its input.

    Parameters
    ----------
    layer : BatchNorm
        Whose weight, bias and ε it has, and whose running statistics are the source's. They are not copied.
    prior : int
        N, source samples; with N > 0 no gradient passes through the statistics.

    Attributes
    ----------
    groups : int
        How many batches of one size lie one after the other in the input; each has statistics of its own.
    last : (Tensor [C], Tensor [C])
        Mean and variance last normalised with (of the last group).
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, prior: int = 0) -> None:
        super().__init__()
        self.eps, self.prior, self.groups = layer.eps, prior, 1
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        assert layer.running_mean is not None  # `batchnorm_layers` refuses others
        assert layer.running_var is not None
        self.running_mean, self.running_var = nn.Buffer(layer.running_mean), nn.Buffer(layer.running_var)
        self.last: tuple[Tensor, Tensor] = (layer.running_mean, layer.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [G B, C, ...] normalised group by group."""
        if self.groups == 1:
            return self._normalise(x)
        *others, last = x.chunk(self.groups)
        return torch.cat([*(self._normalise(batch, keep=False) for batch in others), self._normalise(last)])

    def _normalise(self, x: Tensor, keep: bool = True) -> Tensor:
        """Return one batch [n, C, ...] normalised; `keep` the statistics in `last`."""
        values = x.numel() // x.shape[1]  # a channel
        if values < 2:
            return self._with(x, self.running_mean, self.running_var)
        if self.prior:
            variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
            share = self.prior / (self.prior + len(x))  # N/(N+n)
            mean, variance = torch.lerp(mean, self.running_mean, share), torch.lerp(variance, self.running_var, share)
            return self._with(x, mean, variance)
        if not keep:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        # torch's own kernel; momentum 1 makes the "running" statistics those of this batch, the variance unbiased.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self.last = mean, variance * ((values - 1) / values)
        return y

    def _with(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return x [n, C, ...] normalised with given statistics."""
        self.last = mean, variance
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)


def with_batch_statistics(network: nn.Module, prior: int = 0) -> tuple[nn.Module, dict[str, BatchStatistics]]:
    """Replace every BatchNorm of a network by `BatchStatistics`, as `replace_batchnorms`; names of parameters stay."""
    return replace_batchnorms(network, lambda layer: BatchStatistics(layer, prior))


class BatchNormalised(Collaborator):
    """Base of collaborators that normalise with the statistics of the batch, on a private copy of the network.

    A subclass implements `_adapt`, `trained` and, where it learns, `_begin` and `_state`; it calls `reset` at the end
    of its constructor. The statistics do not outlive a batch, so `normalisation` is empty; those of the last batch are
    `domain`, and part of the state.

    Parameters
    ----------
    model, record, proximal
        See `Collaborator`.
    prior : int
        N of `BatchStatistics`.

    Raises
    ------
    ValueError
        The network has no BatchNorm layer, or one that keeps no running statistics.
    """

    needs = frozenset({"batchnorm"})

    def __init__(self, model: nn.Module, *, record: bool, proximal: float, prior: int = 0) -> None:
        super().__init__(model, record=record, proximal=proximal)
        own = copy.deepcopy(model).requires_grad_(False)
        self._network, self._layers = with_batch_statistics(own, prior)

    def domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the (mean [C], biased variance [C]) that each layer last normalised with; before that the source's."""
        return self._domain

    @abstractmethod
    def _adapt(self, x: Tensor) -> Tensor:
        """Adapt to `x [B, ...]`, B > 0, and return probabilities [B, K]; commit state last."""

    def _begin(self) -> None:
        """Initialise what is learned; nothing to do for a method that learns nothing."""

    def _predict(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return torch.softmax(self._logits(x, Checks()), 1)  # no row, and nothing to learn from
        return self._adapt(x)

    def _logits(self, x: Tensor, checks: Checks, values: Mapping[str, Tensor] | None = None, groups: int = 1) -> Tensor:
        """Return logits [G B, K] of x [G B, ...], G batches one after the other; `checks` require them to be finite.

        `values` stand in for parameters of those names; the others are the source's.
        """
        for layer in self._layers.values():
            layer.groups = groups
        logits: Tensor = functional_call(self._network, dict(values or {}), (x,))
        checks.finite("the network's output", logits.detach().reshape(groups, -1, logits.shape[1]).transpose(0, 1))
        return logits

    def _last(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return what the layers normalised with in the last `_logits`, by layer, as copies."""
        return {name: (layer.last[0].clone(), layer.last[1].clone()) for name, layer in self._layers.items()}

    def _reset(self) -> None:
        self._domain = {
            name: (layer.running_mean.clone(), layer.running_var.clone()) for name, layer in self._layers.items()
        }
        self._begin()
        self._anchor_here()

    def _state(self) -> dict[str, Tensor]:
        """Return the adapter's own tensors, into which a state is copied."""
        parts = {f"{name}.mean": mean for name, (mean, _) in self._domain.items()}
        parts |= {f"{name}.variance": variance for name, (_, variance) in self._domain.items()}
        return {**prefixed("domain", parts), **self._anchor_state()}


class BNAdapt(BatchNormalised):
    """Normalise with batch statistics, or a mixture with the source's (see the module); nothing is trained.

    Defined per batch: a sample's prediction depends on the others in its batch, not on earlier batches.

    Parameters
    ----------
    model : nn.Module
        Any network with BatchNorm; `fedtta.models.TwoHead` predicts with its global head.
    prior : int
        N, 0 or more: how many samples the source's statistics count for. The smaller the batch, the more they help.
    record, proximal
        See `Collaborator`; without anything trained `proximal` has no effect.

    Raises
    ------
    ValueError
        `prior` is negative, or the network has no BatchNorm layer.
    """

    name = "bn_adapt"
    paper = "Improving robustness against common corruptions by covariate shift adaptation (NeurIPS 2020)"
    adapts = "BatchNorm statistics"
    shares = False

    def __init__(self, model: nn.Module, *, prior: int = 0, record: bool = True, proximal: float = 0.0) -> None:
        check_least(0, prior=prior)
        super().__init__(model, record=record, proximal=proximal, prior=prior)
        self.prior = prior
        self.reset()

    def trained(self) -> dict[str, Tensor]:
        """Return nothing: there is nothing to share."""
        return {}

    def _adapt(self, x: Tensor) -> Tensor:
        checks = Checks()
        logits = self._logits(x, checks)
        checks.read()
        self._domain = self._last()
        return torch.softmax(logits, 1)
