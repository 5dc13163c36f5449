"""ATP: Adaptive Test-Time Personalization for Federated Learning (Bao, Wei, Wang, He; NeurIPS 2023).

Source clients learn how fast, and in which direction, each module l of a network should adapt without labels; target
clients then adapt with these rates α. Section 4, Algorithms 1 and 2:

    h[l] = -∂/∂w[l] mean_b H(p(f(x_b; w_G)))       a parameter, eq. 4
    h[l] = batch statistic - running statistic     a BatchNorm mean or variance, eq. 5
    w = w_G + α[l] h[l]                            eq. 6; every batch starts from w_G
    α ← α - η <h[l], ∂CE(f(X; w), Y)/∂w[l]> / √numel[l]     eq. 7, on labelled batches of source clients

What the paper leaves open. Both kinds of h come from one forward pass in evaluation mode, so that a layer's batch
statistic is that of its input when nothing before it is adapted. The batch variance is the unbiased one; with fewer
than two values its direction is zero. A running variance is clamped at 0 after the step, and w is the point at which
eq. 7 is evaluated: the clamp is not differentiated. An empty batch has zero directions and is no batch of the stream.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtta.models.arrays import to_device
from fedtta.tta.base import Adapter, prefixed
from fedtta.tta.checks import Checks, check_choice, check_finite, check_number
from fedtta.tta.modules import (
    Adapt,
    batch_statistics,
    call_with,
    check_rates,
    differentiable_statistics,
    evaluating,
    gradients_of,
    module_tensors,
    modules,
    moved_modules,
    variance_modules,
    zero_rates,
)

__all__ = [
    "ATP",
    "Adapt",
    "Refinement",
    "adapted",
    "call_with",
    "check_rates",
    "directions",
    "modules",
    "refine",
    "refine_with_loss",
    "zero_rates",
]

#: Name of module → tensor of the module's shape.
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Refinement:
    """One step of refinement on a labelled batch.

    Parameters
    ----------
    rates : dict of str to float
        α after the step, in order of definition.
    loss : float
        Mean cross-entropy, in nats, of the network adapted with the rates before the step.
    correct : int
        Samples that this network classifies correctly, 0..samples.
    samples : int
        B.
    """

    rates: dict[str, float]
    loss: float
    correct: int
    samples: int


def directions(model: nn.Module, x: Tensor, adapt: Adapt = "all", checks: Checks | None = None) -> Tensors:
    """Return the unsupervised update directions h of a batch (eq. 4, 5).

    Parameters
    ----------
    model : nn.Module
        w_G, in any mode; left as it is. Gives logits [B, K].
    x : Tensor [B, ...]
        The batch; of an empty one all directions are zero.
    adapt : str
        "params" and "stats" leave the directions of all other modules at zero.
    checks : Checks or None
        Take over the check of the network's output.

    Returns
    -------
    dict of str to Tensor
        Name → h[l], of the module's shape, in order of definition (see `modules`). A module that the output does not
        depend on has a zero direction.

    Raises
    ------
    ValueError
        The network's output is not finite (the message names the samples), or it has nothing to adapt.
    """
    own, moved = module_tensors(model), moved_modules(model, adapt)
    h = {name: torch.zeros_like(value, requires_grad=False) for name, value in own.items()}
    if len(x) == 0:
        return h
    parameters = [name for name in moved if isinstance(own[name], nn.Parameter)]
    with torch.inference_mode(False), evaluating(model), batch_statistics(model) as statistics:
        with torch.set_grad_enabled(bool(parameters)):
            logits = model(_differentiable(x))
            (check_finite if checks is None else checks.finite)("the network's output", logits.detach())
            log_p = logits.log_softmax(1)  # [B, K]
            entropy = -(log_p.exp() * log_p).sum(1).mean()
        gradients = gradients_of(entropy, [own[name] for name in parameters])
    h.update((name, -gradient) for name, gradient in zip(parameters, gradients, strict=True))
    if adapt != "params":
        h.update((name, value - own[name]) for name, value in statistics.items())
    return h


def adapted(model: nn.Module, h: Mapping[str, Tensor], rates: Mapping[str, float]) -> Tensors:
    """Return w = w_G + α[l] h[l] (eq. 6), running variances clamped at 0; tensors of their own, by name.

    The network's output with these weights: `call_with(model, w, x)`, in evaluation mode.
    """
    variances = variance_modules(model)
    with torch.no_grad():
        w = {name: torch.add(value, h[name], alpha=rates[name]) for name, value in module_tensors(model).items()}
        for name in variances:
            w[name].clamp_(min=0)
    return w


def refine(
    model: nn.Module, x: Tensor, y: Tensor, rates: Mapping[str, float], lr: float, adapt: Adapt = "all"
) -> dict[str, float]:
    """Return the rates after one step on a labelled batch (Algorithm 1, lines 10 to 13); see `refine_with_loss`."""
    return refine_with_loss(model, x, y, rates, lr, adapt).rates


def refine_with_loss(
    model: nn.Module, x: Tensor, y: Tensor, rates: Mapping[str, float], lr: float, adapt: Adapt = "all"
) -> Refinement:
    """Adapt to a labelled batch without its labels, then move the rates down the gradient of its cross-entropy.

    Parameters
    ----------
    model : nn.Module
        w_G, in any mode; left as it is. Gives logits [B, K].
    x : Tensor [B, ...]
        The batch, B at least 1.
    y : Tensor [B], integer
        Labels in 0..K-1.
    rates : mapping
        α, of every module: see `check_rates`; training starts from `zero_rates(model)`.
    lr : float
        η, not negative.
    adapt : str
        "params" or "stats": the other modules stay at w_G and their rates are returned as they came.

    Raises
    ------
    ValueError
        The batch is empty or its labels do not fit, a rate is missing, unknown or not finite, or the network's output
        or a refined rate is not finite.
    """
    check_number("lr", lr, 0, math.inf)
    numbers = check_rates(model, rates)
    if len(x) == 0:
        raise ValueError("refinement needs at least one labelled sample, the batch is empty")
    if y.shape != (len(x),) or y.is_floating_point():
        raise ValueError(f"labels must be integers of shape ({len(x)},), got {y.dtype} of shape {tuple(y.shape)}")
    checks = Checks()
    h = directions(model, x, adapt, checks)
    moved = moved_modules(model, adapt)
    with torch.inference_mode(False), torch.enable_grad():
        w = adapted(model, h, numbers)
        leaves = [w[name].requires_grad_() for name in moved]
        with evaluating(model), differentiable_statistics(model):
            logits = call_with(model, w, _differentiable(x))
        checks.finite("the adapted network's output", logits.detach())
        _check_labels(y, logits.shape[1], checks)
        loss = F.cross_entropy(logits, _differentiable(y).long())
        gradients = gradients_of(loss, leaves)
    right = (logits.argmax(1) == y).sum()
    measured = [*_slopes([h[name] for name in moved], gradients), loss.detach().double(), right.double()]
    *slopes, loss_before, correct = torch.stack(measured).tolist()
    refined = dict(numbers)
    for name, slope in zip(moved, slopes, strict=True):
        refined[name] -= lr * slope
    bad = [f"{name}={rate}" for name, rate in refined.items() if not math.isfinite(rate)]
    if bad:
        raise ValueError(f"refinement at lr={lr} left the finite numbers: {', '.join(bad)}")
    return Refinement(refined, loss_before, int(correct), len(x))


def _differentiable(x: Tensor) -> Tensor:
    """Return a tensor that gradients can pass through: one of a caller's inference mode is copied."""
    return x.clone() if x.is_inference() else x


def _slopes(h: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return g[l] = <h[l], gradient[l]> / √numel[l] of every module (eq. 7 and the remark after it), float64."""
    pairs = zip(h, gradients, strict=True)
    return [(one * other).sum(dtype=torch.float64) / math.sqrt(max(one.numel(), 1)) for one, other in pairs]


def _check_labels(y: Tensor, classes: int, checks: Checks) -> None:
    """Raise what `checks` require, and ValueError naming the range of labels unless all are in 0..classes-1."""
    low, high = checks.read(torch.stack(y.aminmax()).double()).astype(int)
    if low < 0 or high >= classes:
        raise ValueError(f"labels {low}..{high} are outside 0..{classes - 1}")


class ATP(Adapter):
    """Adapt every module of the network by its learned rate, to each batch alone or to the stream so far.

    Defined per batch (the paper's default: 20 samples). The network itself is never changed, and every batch starts
    from it. With all rates zero the predictions are exactly the network's own.

    Parameters
    ----------
    model : nn.Module
        w_G; gives logits [B, K], for a two-head model those of the global head.
    rates : mapping
        α, learned with `refine`: see `check_rates`.
    mode : str
        "batch" (Algorithm 2, TTBA): each batch adapts on its own directions. "online" (OTTA): on the mean of the
        directions of all batches so far, this one included; the clamp comes after the mean.
    adapt : str
        "params" or "stats" (the variants of Table 4) take the rates of all other modules as zero.
    record : bool
        Keep the report: `update_norms` [batches, D], the norm ‖α[l] h[l]‖ of every batch's step in every module, in
        the order of `names`, before the clamp; online, h is the mean.

    Raises
    ------
    ValueError
        A rate is missing, unknown or not finite, or an option is unknown.
    """

    name = "atp"
    paper = "Adaptive Test-Time Personalization for Federated Learning (NeurIPS 2023)"
    adapts = "every module by its learned rate"
    per = "batch"
    needs = frozenset({"rates"})
    _non_negative = re.compile("batches")  # mean directions may have any sign

    def __init__(
        self,
        model: nn.Module,
        rates: Mapping[str, float],
        mode: Literal["batch", "online"] = "batch",
        *,
        adapt: Adapt = "all",
        record: bool = True,
    ) -> None:
        super().__init__(model, record=record)
        check_choice("mode", mode, ("batch", "online"))
        self.mode = mode
        self.adapt = adapt
        moved = set(moved_modules(model, adapt))
        #: α by module; 0 where `adapt` leaves a module alone.
        self.rates = {name: rate if name in moved else 0.0 for name, rate in check_rates(model, rates).items()}
        #: Names of the D modules, in order of definition.
        self.names = list(self.rates)
        self._mean: Tensors = {}  # online: the mean direction of the stream so far
        self._batches = 0  # online: how many it is a mean of
        self.reset()

    def _predict(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return self.model(x).softmax(1)  # no batch of the stream
        if self.mode == "batch" and not any(self.rates.values()):
            self._note_norms(None)
            return check_finite("the network's output", self.model(x)).softmax(1)
        checks = Checks()
        h = directions(self.model, x, self.adapt, checks)
        batches = self._batches + 1
        if self.mode == "online":
            h = {name: torch.lerp(mean, h[name], 1 / batches) for name, mean in self._mean.items()}
        w = adapted(self.model, h, self.rates)
        logits = checks.finite("the adapted network's output", call_with(self.model, w, x))
        checks.read()
        self._note_norms(h)
        if self.mode == "online":
            self._mean, self._batches = h, batches
        return logits.softmax(1)

    def _note_norms(self, h: Mapping[str, Tensor] | None) -> None:
        """Record ‖α[l] h[l]‖ of a batch; None stands for a step that all rates make zero."""
        if not self.record:
            return
        norms = torch.zeros(len(self.names), dtype=torch.float64)
        if h is not None:
            lengths = torch.stack([torch.linalg.vector_norm(h[name]).double() for name in self.names])
            rates = torch.tensor(list(self.rates.values()), dtype=torch.float64).abs()
            norms = lengths * to_device(rates, lengths.device)
        self._note(update_norms=norms[None])  # [1, D]

    def _reset(self) -> None:
        self._batches = 0
        if self.mode == "online":
            own = module_tensors(self.model)
            self._mean = {name: torch.zeros_like(value, requires_grad=False) for name, value in own.items()}

    def _state(self) -> dict[str, Tensor]:
        if self.mode == "batch":
            return {}
        return {"batches": torch.tensor(self._batches), **prefixed("mean", self._mean)}

    def _load(self, state: dict[str, Tensor]) -> None:
        super()._load(state)
        if self.mode == "online":
            self._batches = int(state["batches"])
