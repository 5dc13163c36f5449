"""SHOT, online: information maximisation and pseudo-labels for the encoder, with a frozen head.

Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised Domain Adaptation (Liang, Hu,
Feng, ICML 2020), section 3, one batch at a time as in Adaptive Test-Time Personalization for Federated Learning (Bao,
Wei, Wang, He, NeurIPS 2023). For a batch of B samples with predictions p_b and mean prediction p̄:

    L = 1/B Σ_b H(p_b) - H(p̄) + β · 1/B Σ_b -ln p_b(ŷ_b)                                      (eq. 3, 7)

ŷ is the class of the nearest centroid (cosine distance), centroids first weighted by p, then, once, by ŷ itself
(eq. 4 to 6). The head is frozen; the encoder, BatchNorm weights included, takes one step of SGD a batch, and keeps it.
The prediction is the one of the forward pass whose gradient the (last) step takes, as in ATP's code.

Defaults: β = 0.3 (the paper's; 0.1 for digits), momentum 0.9, and 1e-3, the paper's rate for the pretrained backbone.

Decisions and deviations:

- The paper adapts for 15 epochs to a whole data set, with pseudo-labels of all of it; here a batch is all there is.
- BatchNorm normalises with the batch's own statistics while adapting, as in both codes' training mode. The paper's
  predicts with running statistics at the end; online the prediction is that of the same pass, as in ATP's.
- Centroids as in the paper's code: features with a 1 appended, scaled to length one, and only classes that at least one
  sample has (predicted, then nearest) are candidates. (ATP's has unscaled centroids, Euclidean distances, no second
  pass, and by default β = 0.)
- Plain momentum; the published code adds Nesterov's term, weight decay 1e-3 and a decaying rate over its epochs.
- With one sample entropy and diversity cancel, only the pseudo-label's term is left; the paper's code skips it.
- Only BatchNorm leaves evaluation mode; a layer with one value a channel falls back to the source (see `bn_adapt`).
- Frozen parameters are left alone.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, normalize, one_hot, pad

from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.base import Adapter, prefixed
from fedtta.tta.bn_adapt import with_batch_statistics
from fedtta.tta.checks import Checks, check_choice, check_least, check_number, check_parts
from fedtta.tta.collaborator import shared_parameters
from fedtta.tta.heads import HEADS
from fedtta.tta.statistics import Statistics


def information_maximisation(logits: Tensor) -> Tensor:
    """Return mean_b H(p_b) - H(mean_b p_b), in nats, of p = softmax(logits [B, K]): a scalar in [-ln K, 0].

    It is minus the mutual information of sample and class, and its gradient is finite also where p = 0.
    """
    log_p = logits.log_softmax(1)
    log_mean = log_p.logsumexp(0) - math.log(len(logits))  # [K]
    return entropy_of_logits(logits).mean() + (log_mean.exp() * log_mean).sum()


def centroid_labels(z: Tensor, logits: Tensor) -> Tensor:
    """Return the pseudo-labels ŷ of a batch (eq. 4 to 6).

    Parameters
    ----------
    z : Tensor [B, d]
        Features, B at least 1.
    logits : Tensor [B, K]

    Returns
    -------
    Tensor [B], int64
        Classes, out of those that are predicted for at least one sample.
    """
    directions = normalize(pad(z, (0, 1), value=1.0), dim=1)  # [B, d + 1]
    shares, labels = logits.softmax(1), logits.argmax(1)
    for _ in range(2):
        centroids = normalize(shares.T @ directions, dim=1)  # [K, d + 1]; a cosine needs no division by the shares
        present = one_hot(labels, logits.shape[1]).any(0)
        labels = (directions @ centroids.T).masked_fill(~present, -math.inf).argmax(1)
        shares = one_hot(labels, logits.shape[1]).to(z.dtype)
    return labels


class _Split(nn.Module):
    """Features and logits of a model as a module, for `functional_call`."""

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts: Any = self.model
        z = parts.features(x)
        return z, getattr(parts, self.head)(z)


class SHOT(Adapter):
    """Information maximisation and centroid pseudo-labels for the encoder (see the module).

    Defined per batch; what is learned stays for the batches that follow. `report()` has, for every sample, the
    `entropy` of its returned prediction, in nats, and its `pseudo_label` in the (last) step.

    Parameters
    ----------
    model : nn.Module
        With `features` and the head, such as `fedtta.models.TwoHead`; BatchNorm is not needed.
    statistics : Statistics or None
        Not needed.
    head : "global" or "personal"
        Which head, frozen, predicts.
    strength : float
        β, finite, 0 or more; 0 is SHOT-IM.
    lr : float
        Of SGD, finite, 0 or more.
    momentum : float
        In [0, 1].
    steps : int
        Steps a batch, at least 1.
    record : bool
        Keep the report.

    Raises
    ------
    ValueError
        An option is out of range, or the model lacks a part or an encoder with parameters that may be trained.
    """

    name = "shot"
    paper = "Do We Really Need to Access the Source Data? Source Hypothesis Transfer (ICML 2020)"
    adapts = "the encoder"
    per = "batch"
    _weights: dict[str, Tensor]
    _memory: dict[str, Tensor]

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        head: Literal["global", "personal"] = "global",
        strength: float = 0.3,
        lr: float = 1e-3,
        momentum: float = 0.9,
        steps: int = 1,
        record: bool = True,
    ) -> None:
        check_choice("head", head, tuple(HEADS))
        check_number("strength", strength, 0, math.inf)
        check_least(1, steps=steps)
        check_parts(model, "SHOT", "features", HEADS[head])
        super().__init__(model, record=record)
        self.strength, self.steps = strength, steps
        self._optimizer = FunctionalOptimizer("sgd", lr, momentum)
        own = copy.deepcopy(model).requires_grad_(False)
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in own.modules()):
            own, _ = with_batch_statistics(own)
        self._network = _Split(own, HEADS[head])
        source = dict(own.named_parameters())
        names = [name for name in shared_parameters(model) if not name.startswith("head.")]
        self._source = {name: source[name].detach() for name in names}
        if not self._source:
            raise ValueError(f"the encoder of {type(model).__name__} has no parameters that may be trained")
        self.reset()

    def _predict(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return torch.softmax(self._outputs(self._weights, x)[1], 1)
        weights, memory, checks = self._weights, self._memory, Checks()
        for _ in range(self.steps):
            with torch.enable_grad():
                z, logits = self._outputs(weights, x)
                checks.finite("the network's output", torch.cat((z.detach(), logits.detach()), 1))
                labels = centroid_labels(z.detach(), logits.detach())
                loss = information_maximisation(logits) + self.strength * cross_entropy(logits, labels)
                gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            weights, memory = self._optimizer.step(weights, gradients, memory, checks.require_finite)
        checks.read()
        self._weights, self._memory = weights, memory
        self._note(entropy=entropy_of_logits(logits), pseudo_label=labels)
        return torch.softmax(logits.detach(), 1)

    def _outputs(self, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, d] and logits [B, K] of x [B, ...]."""
        outputs: tuple[Tensor, Tensor] = functional_call(self._network, prefixed("model", weights), (x,))
        return outputs

    def _reset(self) -> None:
        self._weights = {name: value.clone().requires_grad_() for name, value in self._source.items()}
        self._memory = self._optimizer.init(self._source)

    def _state(self) -> dict[str, Tensor]:
        return {**prefixed("weight", self._weights), **prefixed("optimizer", self._memory)}
