"""Tent: entropy minimisation through BatchNorm statistics, weights and biases.

Tent: Fully Test-Time Adaptation by Entropy Minimization (Wang, Shelhamer, Liu, Olshausen, Darrell, ICLR 2021),
section 3:

    min_{γ, β}  1/B Σ_b H(p(f(x_b))),    H(p) = -Σ_c p_c ln p_c

Normalisation is by the batch's own statistics, and gradients pass through them. The prediction is the one of the
forward pass whose gradient the (last) step takes, as in the published code: one forward and one backward pass a batch.

Decisions and deviations:

- `optimizer="sgd"` is the paper's "SGD with momentum", 0.9, without the Nesterov term of the published settings.
- Only BatchNorm leaves evaluation mode; a layer with one value a channel falls back to the source (see `bn_adapt`).
- BatchNorm parameters that are frozen, or in the personal head, are left alone. All BatchNorm layers are trained; the
  published code trains BatchNorm2d alone: `layers="batchnorm2d"`. Batch statistics normalise in every layer there, too.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.base import prefixed
from fedtta.tta.bn_adapt import BatchNormalised
from fedtta.tta.checks import Checks, check_least
from fedtta.tta.collaborator import AffineLayers, affine_names


class Tent(BatchNormalised):
    """Minimise the entropy of each batch's predictions in γ and β of the BatchNorm layers (see the module).

    Defined per batch; what is learned stays for the batches that follow. `report()` has the `entropy` of every sample's
    returned prediction, in nats.

    Parameters
    ----------
    model : nn.Module
        Any network with BatchNorm; `fedtta.models.TwoHead` predicts with its global head.
    optimizer : "adam" or "sgd"
        Adam is the paper's choice for CIFAR, SGD with momentum for ImageNet.
    lr : float
        Step size, finite, 0 or more. The paper's: 1e-3 (Adam, batches of 200), 2.5e-4 (SGD, batches of 64).
    momentum : float
        Of SGD, in [0, 1].
    steps : int
        Steps a batch, at least 1. The paper takes 1.
    layers : "batchnorm" or "batchnorm2d"
        Whose weights and biases are trained: those of all BatchNorm layers, or of BatchNorm2d alone.
    record, proximal
        See `Collaborator`.

    Raises
    ------
    ValueError
        An option is out of range, or the network has no BatchNorm layer with weights that may be trained.
    """

    name = "tent"
    paper = "Tent: Fully Test-Time Adaptation by Entropy Minimization (ICLR 2021)"
    adapts = "BatchNorm statistics, weights and biases"

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Literal["adam", "sgd"] = "adam",
        lr: float = 1e-3,
        momentum: float = 0.9,
        steps: int = 1,
        layers: AffineLayers = "batchnorm",
        record: bool = True,
        proximal: float = 0.0,
    ) -> None:
        check_least(1, steps=steps)
        super().__init__(model, record=record, proximal=proximal)
        self.steps = steps
        self._optimizer = FunctionalOptimizer(optimizer, lr, momentum)
        self._names = affine_names(model, layers=layers)
        self.reset()

    def trained(self) -> dict[str, Tensor]:
        """Return γ and β of the BatchNorm layers, by their names in the network."""
        return self._affine

    def _begin(self) -> None:
        source = dict(self._network.named_parameters())
        self._affine = {name: source[name].detach().clone().requires_grad_() for name in self._names}
        self._memory = self._optimizer.init(self._affine)

    def _adapt(self, x: Tensor) -> Tensor:
        before, checks = (self._affine, self._memory), Checks()
        try:
            for _ in range(self.steps):
                logits, entropy = self._step(x, checks)
            checks.read()
        except Exception:  # a step that fails undoes those before it
            self._affine, self._memory = before
            raise
        self._domain = self._last()
        self._note(entropy=entropy)
        return torch.softmax(logits, 1)

    def _step(self, x: Tensor, checks: Checks) -> tuple[Tensor, Tensor]:
        """Take one step; return the logits [B, K] before it, and their entropies [B]."""
        with torch.enable_grad():
            logits = self._logits(x, checks, self._affine)
            entropy = checks.finite("the entropy", entropy_of_logits(logits))
            gradients = torch.autograd.grad(
                entropy.mean() + self._pull(), list(self._affine.values()), allow_unused=True
            )
        self._affine, self._memory = self._optimizer.step(self._affine, gradients, self._memory, checks.require_finite)
        return logits.detach(), entropy.detach()

    def _state(self) -> dict[str, Tensor]:
        affine, memory = prefixed("affine", self._affine), prefixed("optimizer", self._memory)
        return {**super()._state(), **affine, **memory}
