"""A cohort: one round of several clients at once, networks stacked and batches side by side.

Results match those of one client after another up to rounding: each client draws from its own generator, and the
padding of its batches is masked. Only FedAvg's local training, with or without FedProx's term, can be vectorized.
Clients for which the memory does not suffice come after the others, in a stack of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedtta.client.algorithms import find_algorithm
from fedtta.client.algorithms.training import (
    FLOAT32,
    Objective,
    TrainingSet,
    augmented_at_once,
    autocast,
    epoch,
    find_objective,
    generator,
    smallest_batch,
)
from fedtta.client.device import Device, Turn
from fedtta.client.network import own_tensors
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Train
from fedtta.models import PERSONAL_PREFIX, TwoHead
from fedtta.models.accelerator import clock
from fedtta.models.arrays import to_device
from fedtta.models.memory import budget, in_parts, is_out_of_memory, saved_bytes
from fedtta.models.optim import StackedOptimizer
from fedtta.models.vectorized import VectorizedNetwork, is_stackable

MEMORY_SHARE = 0.75  # of what this process plans with; the rest is for workspaces of convolutions
COPIES = 6  # of a client's weights: values, received, gradients, optimizer's state and temporaries

#: (batch, leaves, class counts) → (mean loss of each client [k], what is added to it for the gradient [k]).
Loss = Callable[["Batch", dict[str, Tensor], Tensor], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Batch:
    """The next batches of the first k clients: x [k, B, C, H, W], labels [k, B], mask [k, B] (0: padding)."""

    x: Tensor
    labels: Tensor
    mask: Tensor


def fits(device: Device, request: Train) -> bool:
    """Tell whether a training can be vectorized: that of a stackable algorithm, on a network that can be stacked."""
    return find_algorithm(request.task.algorithm).stackable and is_stackable(device.model)


def train(devices: Sequence[Device], requests: Sequence[Train]) -> list[Trained | Exception]:
    """Do one round of several clients; return for each what `Device.train` returns, or what it would have raised.

    Parameters
    ----------
    devices : sequence of Device
        With one network and equal settings; see `fits`.
    requests : sequence of Train
        Of one round; they differ in their arrays only.
    """
    replies = in_parts(
        len(devices), clients_at_once(devices, requests), lambda part: _train(devices[part], requests[part])
    )
    return [reply for part in replies for reply in part]


def clients_at_once(devices: Sequence[Device], requests: Sequence[Train]) -> int:
    """Return how many clients' stacks are in memory at once: as many as `client_bytes` allows, at least one."""
    first, request = devices[0], requests[0]
    samples = max(len(one.federation.in_round(request.round).splits[one.partition].train) for one in devices)
    return max(1, int(MEMORY_SHARE * budget(first.device) / client_bytes(first, request, samples)))


def client_bytes(device: Device, request: Train, samples: int) -> int:
    """Estimate the memory that a client with so many training samples takes in a stack.

    Images as bytes, those augmented at once and those before them, a batch with what its forward pass saves for the
    backward pass, doubled for the gradients on the way back, and copies of the weights.
    """
    shape, batch_size = device.federation.images.shape, device.settings.batch_size
    weights = [value.detach() for value in device.model.state_dict().values() if value.is_floating_point()]
    image = math.prod(shape)
    augmented = 2 * min(samples, augmented_at_once(shape, batch_size)) * FLOAT32 * image
    batch = 2 * min(samples, batch_size) * (_saved_of_sample(device.model, shape) + FLOAT32 * image)
    return samples * image + augmented + batch + COPIES * sum(value.nbytes for value in weights)


def _saved_of_sample(model: TwoHead, shape: Sequence[int]) -> int:
    """Return how many bytes a sample (C, H, W) saves in a stack's forward pass, in training mode."""
    values = {name: value.detach()[None].requires_grad_() for name, value in model.named_parameters()}
    buffers = {name: value[None] for name, value in model.named_buffers() if value.is_floating_point()}
    mask = next(iter(values.values())).detach().new_ones(1, 2)  # two samples, for BatchNorm
    x, network, training = mask.new_zeros(1, 2, *shape), VectorizedNetwork(model), model.training
    model.train()
    saved = saved_bytes(lambda: network(values, buffers, x, mask), list(values.values()))
    model.train(training)
    return saved // 2


def _train(devices: Sequence[Device], requests: Sequence[Train]) -> list[Trained | Exception]:
    """Do what `train` does, with all of them in one stack."""
    cohort = Cohort.begin(devices, requests)
    if cohort.members:
        same = requests[0].aggregated is None and all(one.arrays is requests[0].arrays for one in requests)
        cohort.train_heads(same)
        for index in cohort.members:
            cohort.load(index)
            devices[index].measure(cohort.turns[index])
        cohort.train_networks()
    return [cohort.failed.get(index) or cohort.end(index) for index in range(len(devices))]


@dataclass
class Cohort:
    """Clients in the middle of a round.

    Parameters
    ----------
    devices : sequence of Device
    turns : dict
        Index → the turn of a client that has begun.
    failed : dict
        Index → why a client has no result.
    members : list of int
        Indices in the order of the stack: most samples first, so that the clients with a batch left are the first k.
    values : dict
        Name → [N, ...], all floating-point values of the members' networks.
    """

    devices: Sequence[Device]
    turns: dict[int, Turn]
    failed: dict[int, Exception]
    members: list[int]
    values: dict[str, Tensor]

    @classmethod
    def begin(cls, devices: Sequence[Device], requests: Sequence[Train]) -> Cohort:
        """Begin the round of every client; those that cannot begin have failed."""
        turns: dict[int, Turn] = {}
        failed: dict[int, Exception] = {}
        states: dict[int, dict[str, Tensor]] = {}
        for index, (device, request) in enumerate(zip(devices, requests, strict=True)):
            try:
                smallest_batch(device.model, device.settings)
                turns[index] = device.begin(request)
            except Exception as error:  # of this client alone; the others go on
                if is_out_of_memory(error):  # of all of them
                    raise
                failed[index] = error
                continue
            state = device.model.state_dict().items()
            states[index] = {name: value.clone() for name, value in state if value.is_floating_point()}
        members = sorted(turns, key=lambda index: -len(turns[index].data))
        names = list(states[members[0]]) if members else []
        values = {name: torch.stack([states[index][name] for index in members]) for name in names}
        return cls(devices, turns, failed, members, values)

    @property
    def first(self) -> Device:
        """Return one of the members: all have the same network and settings."""
        return self.devices[self.members[0]]

    def load(self, index: int) -> None:
        """Put a member's numbers into the network, in evaluation mode."""
        where, state = self.members.index(index), self.first.model.state_dict()
        for name, value in self.values.items():
            state[name].copy_(value[where])
        self.first.model.eval()

    def end(self, index: int) -> Trained | Exception:
        """End a member's turn; its result may be an error."""
        self.load(index)
        device, turn = self.devices[index], self.turns[index]
        try:
            return device.end(turn, own_tensors(turn.private, device.device))
        except Exception as error:  # such as a full disk: the others have theirs
            return error

    def train_heads(self, same: bool) -> None:
        """Train the personal heads on the frozen encoders; with `same`, all have received one encoder."""
        model, settings = self.first.model.eval(), self.first.settings
        names = [name for name in self.values if name.startswith(PERSONAL_PREFIX)]
        encoder = {name: value for name, value in self.values.items() if name.startswith("encoder.")}
        inner = {name.removeprefix("encoder."): value for name, value in encoder.items()}
        networks, head = VectorizedNetwork(model.encoder), VectorizedNetwork(model.personal_head)
        objective = find_objective(settings.personal_objective)
        if same:
            self.load(self.members[0])

        def features(batch: Batch) -> Tensor:
            with torch.no_grad(), autocast(batch.x.device, settings.autocast):
                if same:
                    return model.features(batch.x.flatten(0, 1)).unflatten(0, batch.mask.shape)
                own = {name: value[: len(batch.x)] for name, value in inner.items()}
                return networks(own, {}, batch.x, batch.mask)[0]

        def loss(batch: Batch, leaves: dict[str, Tensor], counts: Tensor) -> tuple[Tensor, Tensor | float]:
            own = {name.removeprefix(PERSONAL_PREFIX): value for name, value in leaves.items()}
            logits, _ = head(own, {}, features(batch).float(), batch.mask)
            return mean_losses(objective, logits, batch, counts), 0.0

        self._descend("personal", "training of the personal head", settings.personal_epochs, names, loss)

    def train_networks(self) -> None:
        """Train encoders and global heads."""
        model, settings = self.first.model.train(), self.first.settings
        free = {name for name, value in model.named_parameters() if value.requires_grad}
        shared = [name for name in self.values if not name.startswith(PERSONAL_PREFIX)]
        names = [name for name in shared if name in free]
        others = [name for name in shared if name not in free]  # buffers, and what is frozen
        request = self.turns[self.members[0]].request
        mu = request.proximal_mu
        received = {name: self.values[name].clone() for name in names if mu}
        network, objective = VectorizedNetwork(model), find_objective(request.task.objective)

        def loss(batch: Batch, leaves: dict[str, Tensor], counts: Tensor) -> tuple[Tensor, Tensor | float]:
            count = len(batch.x)
            with autocast(batch.x.device, settings.autocast):
                kept = {name: self.values[name][:count] for name in others}
                logits, moved = network(leaves, kept, batch.x, batch.mask)
            for name, value in moved.items():
                self.values[name][:count] = value
            pull = sum(((leaves[name] - received[name][:count]) ** 2).flatten(1).sum(1) for name in received)
            return mean_losses(objective, logits.float(), batch, counts), mu / 2 * pull

        self._descend("local", "local training", settings.local_epochs, names, loss, smallest_batch(model, settings))
        model.eval()

    def _descend(
        self, purpose: str, what: str, epochs: int, names: Sequence[str], loss: Loss, smallest: int = 1
    ) -> None:
        """Train the values `names` of all members for some epochs; `purpose` names their generators."""
        device, settings, turns = self.first.device, self.first.settings, [self.turns[one] for one in self.members]
        start = clock(device)
        clients = [self.devices[index].number for index in self.members]
        draw = [generator(settings.seed, purpose, turns[0].request.round, client) for client in clients]
        trained = {name: self.values[name] for name in names}
        how = settings.optimizer, settings.learning_rate, settings.weight_decay, settings.momentum
        descent, counts = StackedOptimizer(trained, *how), torch.stack([turn.data.counts for turn in turns])
        for _ in range(epochs):
            total, seen = torch.zeros(2, len(turns), dtype=torch.float64, device=counts.device)
            for batch in cohort_epoch([turn.data for turn in turns], settings.batch_size, draw, smallest):
                count = len(batch.x)
                leaves = {name: value[:count].detach().requires_grad_() for name, value in trained.items()}
                losses, more = loss(batch, leaves, counts[:count])
                gradients = torch.autograd.grad((losses + more).sum(), list(leaves.values()), allow_unused=True)
                found = zip(leaves, gradients, strict=True)
                descent.step({name: gradient for name, gradient in found if gradient is not None})
                sizes = batch.mask.sum(1).double()
                total[:count] += losses.detach() * sizes
                seen[:count] += sizes
            self._note(what, (total / seen.clamp(min=1)).tolist())
        samples, seconds = sum(len(turn.data) for turn in turns), clock(device) - start
        for turn in turns:
            turn.seconds += seconds * len(turn.data) / max(samples, 1)

    def _note(self, what: str, losses: Sequence[float]) -> None:
        """Record the losses of an epoch, and the members that diverged in it."""
        finite = torch.stack([value.isfinite().flatten(1).all(1) for value in self.values.values()]).all(0).tolist()
        for index, loss, fine in zip(self.members, losses, finite, strict=True):
            self.turns[index].loss = loss
            if not (fine and math.isfinite(loss)):
                self.failed.setdefault(index, FloatingPointError(f"{what} diverged: mean loss {loss:g}"))


def cohort_epoch(
    sets: Sequence[TrainingSet], batch_size: int, draws: Sequence[torch.Generator], smallest: int = 1
) -> Iterator[Batch]:
    """Yield one epoch of all clients, as `training.epoch` does, until no client has a batch left.

    Parameters
    ----------
    sets : sequence of TrainingSet
        Most samples first.
    """
    running = [epoch(data, batch_size, draw, smallest) for data, draw in zip(sets, draws, strict=True)]
    while running:
        batches = []
        for one in running:
            batch = next(one, None)
            if batch is None:
                break
            batches.append(batch)
        running = running[: len(batches)]
        if batches:
            yield padded(batches)


def padded(batches: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """Return batches (x [b, C, H, W], labels [b]) side by side, shorter ones with zeros at their ends."""
    images, labels = (pad_sequence(list(column), batch_first=True) for column in zip(*batches, strict=True))
    sizes = torch.tensor([[len(own)] for _, own in batches])
    mask = (torch.arange(labels.shape[1]) < sizes).to(images.dtype)
    return Batch(images, labels, to_device(mask, images.device))


def mean_losses(objective: Objective, logits: Tensor, batch: Batch, counts: Tensor) -> Tensor:
    """Return the mean objective over each client's samples [k], from logits [k, B, K] and class counts [k, K]."""

    def of_sample(own: Tensor, label: Tensor, held: Tensor) -> Tensor:
        return objective(own.unsqueeze(0), label.unsqueeze(0), held)

    losses = vmap(vmap(of_sample, (0, 0, None)), (0, 0, 0))(logits, batch.labels, counts)
    return (losses * batch.mask).sum(1) / batch.mask.sum(1)
