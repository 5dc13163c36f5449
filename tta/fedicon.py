"""FedICON at test time: self-supervised contrastive tuning of the encoder on test images.

Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning (Tan, Chen, Zhuang, Dong, Lyu, Long, 2023),
section 3.2 and the test phase of Algorithm 1. From the aggregated encoder θ, for each batch of test images,

    θ ← θ - η ∇_θ L_us,   L_us of eq. 5: two random views of an image attract, the batch's other views repel

and the classifier, which is not tuned, predicts from the tuned features. Loss and views are in `contrastive`, the
training phase in `client.algorithms.fedicon`. `mode`:

- "online": a call is one batch, tuned on for `epochs` steps and then predicted; what is learned stays for the batches
  that follow.
- "offline": a call is a whole test set, as Algorithm 1 has it: from θ as given, `epochs` passes over its shuffled
  batches, then all of it is predicted. Nothing is carried to the next call.

Decisions and deviations:

- SGD without momentum, in batches of 32, is the paper's for training (appendix A); "eq. 2 and 5 [...] can share the
  same optimization strategy". Training's η = 0.01 undoes what labels have taught the encoder: on Digit-5, corrupted
  validation images (seed 1, one pass), 87.0 % are right untuned, 85.1 % with 0.01, 88.8 % with 0.003, 88.3 % with 0.001
  (τ = 0.5; with training's 0.1: 76.0, 87.1, 87.8). Weight decay of 5e-4 is left out: it would take 2e-6 of a weight.
- The public code of the authors' group (COALA) has τ = 0.1 (the loss times 0.1/0.07, here a factor of η), η = 0.005,
  momentum 0.9, weight decay 5e-4 and 5 epochs in batches of 128, but this step is commented out: it tests with Tent on
  BatchNorm2d. The cell `published` of the protocol `fedicon` has both.
- The paper does not tell τ, nor what a view is: see `contrastive`. z' of eq. 5 is read as the
  other one of two views, as in training; the image as it is takes no part.
- All parameters of the encoder are tuned, as copies, whatever their `requires_grad`.
- BatchNorm (the paper's ResNet-18; its small network has none) trains as in training: the 2B views normalise with their
  own statistics, and running statistics follow, as copies; predictions use running statistics. Other layers stay in
  evaluation mode: no dropout.
- One image has no negatives: its loss and gradient are 0 whatever θ. A batch of one (in "offline" the last) takes no
  step; its running statistics are left alone too. It is predicted like any other.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from fedtta.models.arrays import to_device
from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.base import Adapter, prefixed
from fedtta.tta.checks import Checks, check_choice, check_finite, check_least, check_number
from fedtta.tta.contrastive import ContrastiveViews, self_contrastive
from fedtta.tta.heads import HEADS, check_two_heads
from fedtta.tta.views import Augment, augmented, seeded

MODES = ("offline", "online")
PASS = 256  # samples predicted at once


@dataclass(frozen=True)
class Tuned:
    """The tuned encoder: its weights and BatchNorm buffers by name, and the optimizer state."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    memory: dict[str, Tensor]


class FedICON(Adapter):
    """Self-supervised contrastive tuning of the encoder on the test images (see the module).

    Defined per batch ("online") or per call ("offline"). A batch of B costs a forward and a backward pass of 2B views,
    and a forward pass of B images. `report()` has the `loss` before every step that was taken.

    Parameters
    ----------
    model : nn.Module
        A `fedtta.models.TwoHead`; its encoder takes what `augment` gives.
    mode : "offline" or "online"
        What a call of `predict` is.
    epochs : int
        Passes over a test set ("offline"), or steps a batch ("online"), at least 1. The paper's: 1.
    batch_size : int
        Images a step of "offline", at least 2; a last short batch is kept. A batch of "online" is what `predict` gets.
    lr : float
        η of SGD, finite, 0 or more.
    momentum : float
        Of SGD, in [0, 1].
    temperature : float
        τ of the loss, finite, above 0.
    augment : callable or None
        `augment(x [n, ...], generator) -> [n, ...]` makes a random view of each; called once a step, with the batch
        twice over. None: `ContrastiveViews()`, for images.
    seed : int
        Of views and order, 0 or more. They depend on it and, "online", on the number of batches since the last reset.
    head : "global" or "personal"
        Which head predicts; the paper's classifier is personalised.
    record : bool
        Keep the report.

    Raises
    ------
    ValueError
        An option is out of range, the model is not built like `fedtta.models.TwoHead`, or its encoder has nothing to
        tune.
    """

    name = "fedicon"
    paper = "Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning (2023)"
    adapts = "the encoder"
    per = "batch"
    views = ContrastiveViews
    whole_set = ("mode", "offline")

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: Literal["offline", "online"] = "online",
        epochs: int = 1,
        batch_size: int = 32,
        lr: float = 0.003,
        momentum: float = 0.0,
        temperature: float = 0.5,
        augment: Augment | None = None,
        seed: int = 0,
        head: Literal["global", "personal"] = "global",
        record: bool = True,
    ) -> None:
        check_two_heads(model, "FedICON")
        if not any(True for _ in getattr(model, "encoder", nn.Identity()).parameters()):
            raise ValueError(f"{type(model).__name__} has no encoder with parameters to tune")
        super().__init__(model, record=record)
        check_choice("mode", mode, MODES)
        check_choice("head", head, tuple(HEADS))
        check_number("temperature", temperature, 0, math.inf, open_low=True)
        check_least(1, epochs=epochs)
        check_least(2, batch_size=batch_size)
        check_least(0, seed=seed)
        self.mode, self.epochs, self.batch_size, self.seed = mode, epochs, batch_size, seed
        self.temperature = temperature
        self.augment = ContrastiveViews() if augment is None else augment
        self._optimizer = FunctionalOptimizer("sgd", lr, momentum)
        own = copy.deepcopy(model).requires_grad_(False)
        self._encoder = cast(nn.Module, own.encoder)
        self._head = cast(nn.Module, getattr(own, HEADS[head]))
        self._norms = {
            name: layer
            for name, layer in self._encoder.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        }
        self.reset()

    def _reset(self) -> None:
        self._tuned = self._start()
        self._batches = torch.zeros((), dtype=torch.int64)

    def _start(self) -> Tuned:
        """Return the encoder as it was given."""
        weights = {name: value.clone().requires_grad_() for name, value in self._encoder.named_parameters()}
        buffers = {
            f"{name}.{part}".lstrip("."): value.clone()
            for name, layer in self._norms.items()
            for part, value in layer.named_buffers(recurse=False)
        }
        return Tuned(weights, buffers, self._optimizer.init(weights))

    def _predict(self, x: Tensor) -> Tensor:
        offline = self.mode == "offline"
        tuned, losses = self._tune_on_all(x) if offline else self._tune_on_batch(x)
        probabilities = self._probabilities(tuned, x)
        if not offline:
            self._tuned, self._batches = tuned, self._batches + bool(len(x))
        if losses:
            self._note(loss=torch.stack(losses))
        return probabilities

    def _tune_on_batch(self, x: Tensor) -> tuple[Tuned, list[Tensor]]:
        """Return the encoder after this batch x [B, ...], and the loss of each step."""
        tuned, losses = self._tuned, []
        for step in range(self.epochs if len(x) > 1 else 0):
            tuned, loss = self._step(tuned, x, seeded(self.seed, int(self._batches), step))
            losses.append(loss)
        return tuned, losses

    def _tune_on_all(self, x: Tensor) -> tuple[Tuned, list[Tensor]]:
        """Return the encoder after a whole test set x [n, ...], from the start, and the loss of each step."""
        tuned, losses = self._start(), []
        for epoch in range(self.epochs):
            order = to_device(torch.randperm(len(x), generator=seeded(self.seed, epoch)), x.device)
            for step, chosen in enumerate(order.split(self.batch_size)):
                if len(chosen) > 1:
                    tuned, loss = self._step(tuned, x[chosen], seeded(self.seed, epoch, step))
                    losses.append(loss)
        return tuned, losses

    def _step(self, tuned: Tuned, x: Tensor, generator: Generator) -> tuple[Tuned, Tensor]:
        """Return what is tuned after a step on x [B, ...], B > 1, and the loss before it; nothing is changed in place.

        Raises
        ------
        ValueError
            A feature, a weight or a running statistic is not finite, or views have another shape.
        """
        checks = Checks()
        views = augmented(self.augment, torch.cat((x, x)), generator)  # [2B, ...]
        buffers = {name: value.clone() for name, value in tuned.buffers.items()}
        with torch.enable_grad():
            z = self._features({**tuned.weights, **buffers}, views, training=True)  # [2B, d]; `buffers` follow
            checks.finite("the encoder's output", z.detach().unflatten(0, (2, -1)).transpose(0, 1))
            loss = self_contrastive(z[: len(x)], z[len(x) :], self.temperature)
            gradients = torch.autograd.grad(loss, list(tuned.weights.values()), allow_unused=True)
        if buffers:
            finite, names = torch.stack([torch.isfinite(value).all() for value in buffers.values()]), list(buffers)
            checks.require_finite(finite, lambda bad: f"the batch makes {names[bad[0]]} not finite")
        weights, memory = self._optimizer.step(tuned.weights, gradients, tuned.memory, checks.require_finite)
        checks.read()
        return Tuned(weights, buffers, memory), loss.detach()

    def _features(self, values: dict[str, Tensor], x: Tensor, *, training: bool) -> Tensor:
        """Return z [n, d] of x [n, ...]; in training BatchNorm uses x's statistics and moves its own in `values`."""
        for layer in self._norms.values():
            layer.train(training)
        return functional_call(self._encoder, values, (x,))

    def _probabilities(self, tuned: Tuned, x: Tensor) -> Tensor:
        """Return the head's probabilities [n, K] of x [n, ...], in evaluation mode."""
        values = {**tuned.weights, **tuned.buffers}
        logits = torch.cat([self._head(self._features(values, part, training=False)) for part in x.split(PASS)])
        check_finite("the network's output", logits)
        return torch.softmax(logits, 1)

    def _state(self) -> dict[str, Tensor]:
        """Return the adapter's own tensors, into which a state is copied; "offline" has none."""
        if self.mode == "offline":
            return {}
        encoder, memory = self._tuned.weights | self._tuned.buffers, self._tuned.memory
        return {**prefixed("encoder", encoder), **prefixed("optimizer", memory), "batches": self._batches}
