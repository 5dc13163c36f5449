"""What a rule of local training is, and the steps that rules have in common.

A rule is a client's turn in a round: it trains the received network in place and may keep tensors of its own. How the
server joins what comes back, and which arrays travel at all, is a strategy's part.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from client import training
from client.compute import autocast
from client.objectives import Objective
from client.training import Step, TrainingSet
from models import TwoHead
from models.optim import Optimizer
from settings import Settings


@dataclass
class Local:
    """One client's turn: what a rule trains, and on what.

    Parameters
    ----------
    model : TwoHead
        The received weights, and what the client kept. A rule trains it in place and leaves it in evaluation mode;
        after an error it is of no use.
    data : TrainingSet
        The client's training split.
    objective : Objective
        Loss of the shared part.
    settings : Settings
        Epochs, batch size, optimiser and the rules' own numbers.
    draw : torch.Generator
        All randomness of the turn.
    own : dict
        The rule's private tensors by name, from its last round; empty at first. A rule replaces entries at the end of
        `train`, so that a failed round leaves no trace. They are never sent.
    """

    model: TwoHead
    data: TrainingSet
    objective: Objective
    settings: Settings
    draw: torch.Generator
    own: dict[str, Tensor] = field(default_factory=dict)

    def outputs(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `network(x)`, under autocast where the settings ask for it; the result has full precision."""
        with autocast(x.device, self.settings.autocast):
            result = network(x)
        return result.float() if self.settings.autocast else result

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean objective of logits [B, K]."""
        return self.objective(logits, labels, self.data.counts)


class Rule(ABC):
    """How a client trains in a round, and what it tests with afterwards. A rule itself has no state."""

    #: Whether the phase that trains the personal head on the frozen encoder comes before; a rule that trains that head
    #: itself, or does not use it, does without.
    uses_personal_head: ClassVar[bool]

    @abstractmethod
    def train(self, local: Local) -> float:
        """Do one round and return the mean loss of the last epoch.

        Raises
        ------
        ValueError
            The batch size is 1 and the network has BatchNorm, or `local.own` does not fit the network.
        FloatingPointError
            The loss or a trained value is not finite.
        """

    @abstractmethod
    def personalise(self, local: Local) -> None:
        """Turn `local.model`, the final received weights, in place into the network that the client tests with.

        Raises as `train` does.
        """


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of a scalar for each parameter, None where it plays no part; nothing is accumulated."""
    return list(torch.autograd.grad(loss, list(parameters), allow_unused=True))


def minimise(loss: Tensor, parameters: Sequence[Tensor], descent: Optimizer) -> None:
    """Make one step of the optimiser down the loss, for these parameters and no others."""
    for value, gradient in zip(parameters, gradients(loss, parameters), strict=True):
        value.grad = gradient
    descent.step()


def train_epochs(
    local: Local, what: str, epochs: int, step: Step, trained: Sequence[Tensor], smallest: int = 1
) -> float:
    """Call `step` on every batch of the client's shuffled epochs; see `client.training.train_epochs`."""
    return training.train_epochs(local.data, local.settings, local.draw, what, epochs, step, trained, smallest)


def kept_network(model: TwoHead, own: Mapping[str, Tensor], prefix: str) -> TwoHead:
    """Return a copy of the network with the encoder and head that a rule has kept; as it is if it has kept none.

    Raises
    ------
    ValueError
        What is there does not fit the network.
    """
    network = copy.deepcopy(model)
    kept = {name: own[prefix + name] for name in model.global_state() if prefix + name in own}
    if kept:
        network.load_global_state(kept)
    return network


def keep_network(network: TwoHead, prefix: str) -> dict[str, Tensor]:
    """Return copies of encoder and head, BatchNorm statistics included, under names with a prefix."""
    return {prefix + name: value.detach().clone() for name, value in network.global_state().items()}
