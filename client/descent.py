"""The local optimiser: torch's own functions for SGD and Adam, without the classes around them.

The classes of `torch.optim` import torch's compiler when they are first used, which takes a new process seconds and
some 150 MiB; a deployment starts a process for every message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam


class Descent:
    """Steps down the gradients that parameters hold, bit for bit those of `torch.optim.SGD` and `torch.optim.Adam`.

    Parameters
    ----------
    parameters : sequence of Tensor
        Changed in place; one without a gradient is left alone.
    kind : "sgd" or "adam"
    learning_rate, weight_decay : float
        0 or more.
    momentum : float
        Of SGD, in [0, 1).
    """

    def __init__(
        self, parameters: Sequence[Tensor], kind: str, learning_rate: float, weight_decay: float, momentum: float
    ) -> None:
        self.parameters, self.kind = list(parameters), kind
        self.learning_rate, self.weight_decay, self.momentum = learning_rate, weight_decay, momentum
        self._velocity: list[Tensor | None] = [None] * len(self.parameters)
        self._first: dict[int, Tensor] = {}
        self._second: dict[int, Tensor] = {}
        self._steps: dict[int, Tensor] = {}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for value in self.parameters:
            value.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Make one step."""
        held = [(which, value, value.grad) for which, value in enumerate(self.parameters) if value.grad is not None]
        which = [place for place, _, _ in held]
        values, gradients = [value for _, value, _ in held], [gradient for _, _, gradient in held]
        advance = self._adam if self.kind == "adam" else self._sgd
        advance(which, values, gradients)

    def _sgd(self, which: list[int], values: list[Tensor], gradients: list[Tensor]) -> None:
        velocity = [self._velocity[place] for place in which]  # filled in by torch
        rule: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "momentum": self.momentum}
        sgd(values, gradients, velocity, **rule, dampening=0.0, nesterov=False, maximize=False)
        for place, value in zip(which, velocity, strict=True):
            self._velocity[place] = value

    def _adam(self, which: list[int], values: list[Tensor], gradients: list[Tensor]) -> None:
        for place, value in zip(which, values, strict=True):
            if place not in self._steps:
                self._steps[place] = torch.zeros((), dtype=torch.float32)
                self._first[place] = torch.zeros_like(value, memory_format=torch.preserve_format)
                self._second[place] = torch.zeros_like(value, memory_format=torch.preserve_format)
        first, second, steps = ([kept[place] for place in which] for kept in (self._first, self._second, self._steps))
        rule: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "eps": EPS}
        beta1, beta2 = BETAS
        adam(
            values, gradients, first, second, [], steps, **rule, beta1=beta1, beta2=beta2, amsgrad=False, maximize=False
        )


class StackedDescent:
    """The same for tensors with a first dimension of networks, the first k of which take a step.

    Parameters
    ----------
    values : mapping
        Name → [N, ...]; changed in place.
    kind, learning_rate, weight_decay, momentum
        See `Descent`.
    """

    def __init__(
        self, values: Mapping[str, Tensor], kind: str, learning_rate: float, weight_decay: float, momentum: float
    ) -> None:
        self.values, self.kind = values, kind
        self.learning_rate, self.weight_decay, self.momentum = learning_rate, weight_decay, momentum
        first = next(iter(values.values()))
        self._steps = torch.zeros(len(first), dtype=first.dtype, device=first.device)
        kept = kind == "adam" or momentum > 0
        self._first = {name: torch.zeros_like(value) for name, value in values.items() if kept}
        self._second = {name: torch.zeros_like(value) for name, value in values.items() if kind == "adam"}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Make one step with gradients [k, ...]; a tensor without one is left alone."""
        count = len(next(iter(gradients.values())))
        self._steps[:count] += 1
        if self.kind == "adam":
            for name, gradient in gradients.items():
                self._adam(name, gradient, self._steps[:count])
            return
        names = list(gradients)
        velocity = [self._first[name][:count] if self._first else None for name in names]
        rule: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "momentum": self.momentum}
        values = [self.values[name][:count] for name in names]
        sgd(values, list(gradients.values()), velocity, **rule, dampening=0.0, nesterov=False, maximize=False)

    def _adam(self, name: str, gradient: Tensor, steps: Tensor) -> None:
        """Networks may have taken different numbers of steps, which torch's function does not know."""
        count = len(steps)
        value, first, second = (kept[name][:count] for kept in (self.values, self._first, self._second))
        gradient = gradient + self.weight_decay * value
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        shape = [count, *[1] * (value.ndim - 1)]
        unbiased, unbiased_second = ((1 - beta**steps).reshape(shape) for beta in BETAS)
        value.sub_(self.learning_rate / unbiased * first / (second.sqrt() / unbiased_second.sqrt() + EPS))
