"""SGD and Adam in three forms: in place, in place for many stacked networks, and as a pure function.

The classes of `torch.optim` import torch's compiler when they are first used, which takes a new process seconds and
some 150 MiB; a deployment starts a process for every message. All three forms are Adam of Kingma and Ba (ICLR 2015),
with β = (0.9, 0.999), ε = 1e-8 and bias correction, and SGD with plain momentum, no dampening and no Nesterov term:

    m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²,   θ ← θ - η/(1 - β₁ᵗ) · m / (√(v/(1 - β₂ᵗ)) + ε)
    u ← μ u + g,   θ ← θ - η u
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedtta.models.constants import BETAS, EPS

OPTIMIZERS = ("adam", "sgd")


class Optimizer:
    """Update parameters in place; bit for bit `torch.optim.SGD` and `torch.optim.Adam`.

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
        """Set all gradients to None."""
        for value in self.parameters:
            value.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        held = [(index, value, value.grad) for index, value in enumerate(self.parameters) if value.grad is not None]
        indices = [index for index, _, _ in held]
        values, gradients = [value for _, value, _ in held], [gradient for _, _, gradient in held]
        update = self._adam if self.kind == "adam" else self._sgd
        update(indices, values, gradients)

    def _sgd(self, indices: list[int], values: list[Tensor], gradients: list[Tensor]) -> None:
        velocity = [self._velocity[index] for index in indices]  # filled in by torch
        rule: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "momentum": self.momentum}
        sgd(values, gradients, velocity, **rule, dampening=0.0, nesterov=False, maximize=False)
        for index, value in zip(indices, velocity, strict=True):
            self._velocity[index] = value

    def _adam(self, indices: list[int], values: list[Tensor], gradients: list[Tensor]) -> None:
        for index, value in zip(indices, values, strict=True):
            if index not in self._steps:
                self._steps[index] = torch.zeros((), dtype=torch.float32)
                self._first[index] = torch.zeros_like(value, memory_format=torch.preserve_format)
                self._second[index] = torch.zeros_like(value, memory_format=torch.preserve_format)
        first, second, steps = ([kept[index] for index in indices] for kept in (self._first, self._second, self._steps))
        rule: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "eps": EPS}
        beta1, beta2 = BETAS
        adam(
            values, gradients, first, second, [], steps, **rule, beta1=beta1, beta2=beta2, amsgrad=False, maximize=False
        )


class StackedOptimizer:
    """Update tensors with a first dimension of N networks in place; the first k networks take a step.

    Parameters
    ----------
    values : mapping
        Name → [N, ...]; changed in place.
    kind, learning_rate, weight_decay, momentum
        See `Optimizer`.
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
        """Take one step with gradients [k, ...]; a tensor without one is left alone."""
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
        """Update one tensor. The networks may differ in their number of steps, which torch's function cannot."""
        count = len(steps)
        value, first, second = (kept[name][:count] for kept in (self.values, self._first, self._second))
        gradient = gradient + self.weight_decay * value
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        shape = [count, *[1] * (value.ndim - 1)]
        unbiased, unbiased_second = ((1 - beta**steps).reshape(shape) for beta in BETAS)
        value.sub_(self.learning_rate / unbiased * first / (second.sqrt() / unbiased_second.sqrt() + EPS))


@dataclass(frozen=True)
class FunctionalOptimizer:
    """Compute new values and a new optimizer state; nothing is changed in place.

    The state is a flat dict of tensors, so that it can be part of a state dict, and a step that fails leaves values and
    state as they were. Equal to `torch.optim.Adam` and `torch.optim.SGD(momentum=...)` up to rounding.

    Parameters
    ----------
    kind : "adam" or "sgd"
    lr : float
        η, finite, 0 or more.
    momentum : float
        μ of SGD, in [0, 1].

    Raises
    ------
    ValueError
        An argument is unknown or out of range.
    """

    kind: str
    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.kind!r}; there are: {', '.join(OPTIMIZERS)}")
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"lr={self.lr} is outside [0, inf)")
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum={self.momentum} is outside [0, 1]")

    def init(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state before the first step: "step", and "<name>.first", ".second" or ".velocity"."""
        parts = ("first", "second") if self.kind == "adam" else ("velocity",)
        state = {f"{name}.{part}": torch.zeros_like(value) for name, value in values.items() for part in parts}
        return {"step": torch.zeros((), dtype=torch.int64), **state}

    def step(
        self,
        values: Mapping[str, Tensor],
        gradients: Sequence[Tensor | None],
        state: Mapping[str, Tensor],
        require: Callable[[Tensor, Callable[[list[int]], str]], None] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return new values, which are leaves that require a gradient, and the new state.

        Parameters
        ----------
        values, state : mapping
            The current ones.
        gradients : sequence of Tensor or None
            Of the values in order; None, for what the network does not use, leaves a value as it is.
        require : callable, optional
            Takes over the check: called with what has to be True throughout, and with what makes a message of the
            indices where it is not. Reading it makes the program wait for a GPU.

        Raises
        ------
        ValueError
            A new value or moment is not finite; the message names the values.
        """
        new_values, new_state = dict(values), {**state, "step": state["step"] + 1}
        update = self._adam if self.kind == "adam" else self._sgd
        with torch.no_grad():
            for (name, value), gradient in zip(values.items(), gradients, strict=True):
                if gradient is not None:
                    new_values[name] = update(name, value, gradient, new_state)
        parts = {**new_values, **{name: part for name, part in new_state.items() if name != "step"}}
        finite, names = torch.stack([torch.isfinite(part).all() for part in parts.values()]), list(parts)

        def error(bad: list[int]) -> str:
            return f"a step at lr={self.lr} left the finite numbers in {', '.join(names[index] for index in bad)}"

        if require is not None:
            require(finite, error)
        elif not bool(finite.all()):
            raise ValueError(error([index for index, fine in enumerate(finite.tolist()) if not fine]))
        return {name: value.detach().requires_grad_() for name, value in new_values.items()}, new_state

    def _adam(self, name: str, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Return the new value; put the new moments into `state`, whose "step" counts this one already."""
        first = state[f"{name}.first"] = torch.lerp(state[f"{name}.first"], gradient, 1 - BETAS[0])
        second = state[f"{name}.second"] = torch.lerp(state[f"{name}.second"], gradient * gradient, 1 - BETAS[1])
        unbias_first, unbias_second = (1 - beta ** int(state["step"]) for beta in BETAS)
        return value - self.lr / unbias_first * first / (second.sqrt() / math.sqrt(unbias_second) + EPS)

    def _sgd(self, name: str, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        velocity = state[f"{name}.velocity"] = self.momentum * state[f"{name}.velocity"] + gradient
        return value - self.lr * velocity
