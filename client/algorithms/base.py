"""What a local algorithm is, and the steps that local algorithms have in common.

A local algorithm is a client's part of a training round: it trains the received network in place and may keep private
tensors. How the server aggregates the result, and which arrays travel at all, is the strategy's part.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedtta.client.algorithms import training
from fedtta.client.algorithms.training import Objective, Step, TrainingSet, autocast
from fedtta.models import TwoHead
from fedtta.models.optim import Optimizer
from fedtta.settings import Settings


@dataclass
class LocalContext:
    """What a local algorithm trains in a round of one client, and on what.

    Parameters
    ----------
    model : TwoHead
        The received weights, and what the client kept. The algorithm trains it in place and leaves it in evaluation
        mode; after an error it must not be used.
    data : TrainingSet
        The client's training split.
    objective : Objective
        Loss of the shared part.
    settings : Settings
        Epochs, batch size, optimizer and the algorithms' own numbers.
    draw : torch.Generator
        All randomness of the round.
    own : dict
        The algorithm's private tensors by name, from its last round; empty at first. Entries are replaced at the end of
        `train`, so that a failed round leaves no trace. They are never sent.
    proximal_mu : float
        μ of FedProx's term in the loss of the shared part. An algorithm without that term ignores it; the server
        refuses FedProx for it.
    """

    model: TwoHead
    data: TrainingSet
    objective: Objective
    settings: Settings
    draw: torch.Generator
    own: dict[str, Tensor] = field(default_factory=dict)
    proximal_mu: float = 0.0

    def outputs(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `network(x)`, under autocast where the settings ask for it; the result has full precision."""
        with autocast(x.device, self.settings.autocast):
            result = network(x)
        return result.float() if self.settings.autocast else result

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean objective of logits [B, K]."""
        return self.objective(logits, labels, self.data.counts)


class LocalAlgorithm(ABC):
    """How a client trains in a round, and which network it tests afterwards. An algorithm itself has no state.

    Attributes
    ----------
    heads : frozenset of str
        Heads beside the global one that training makes, by the names that adapters need them under: "personal_head"
        (trained on the frozen encoder before `train`), "residual_head", "rotation_head".
    stackable : bool
        Whether `train` is what `fedtta.client.cohort` does for many clients at once.
    """

    heads: ClassVar[frozenset[str]] = frozenset()
    stackable: ClassVar[bool] = False

    @property
    def uses_personal_head(self) -> bool:
        """Tell whether the personal head is trained on the frozen encoder before `train`."""
        return "personal_head" in self.heads

    @abstractmethod
    def train(self, local: LocalContext) -> float:
        """Do one round and return the mean loss of the last epoch.

        Raises
        ------
        ValueError
            The batch size is 1 and the network has BatchNorm, or `local.own` does not fit the network.
        FloatingPointError
            The loss or a trained value is not finite.
        """

    @abstractmethod
    def personalize(self, local: LocalContext) -> None:
        """Turn `local.model`, the final received weights, in place into the network that the client tests.

        Raises as `train` does.
        """


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of a scalar for each parameter; nothing is accumulated.

    It is None where a parameter plays no part, or is frozen (`requires_grad=False`).
    """
    free = [value for value in parameters if value.requires_grad]
    found = iter(torch.autograd.grad(loss, free, allow_unused=True) if free else ())
    return [next(found) if value.requires_grad else None for value in parameters]


def minimise(loss: Tensor, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Make one step of the optimiser down the loss, for these parameters and no others."""
    for value, gradient in zip(parameters, gradients(loss, parameters), strict=True):
        value.grad = gradient
    optimizer.step()


def train_epochs(
    local: LocalContext, what: str, epochs: int, step: Step, trained: Sequence[Tensor], smallest: int = 1
) -> float:
    """Call `step` on every batch of the client's shuffled epochs; see `training.train_epochs`."""
    return training.train_epochs(local.data, local.settings, local.draw, what, epochs, step, trained, smallest)


def kept_network(model: TwoHead, own: Mapping[str, Tensor], prefix: str) -> TwoHead:
    """Return a copy of the network with the encoder and head that an algorithm has kept, or as it is if there are none.

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
