"""TTT, online: self-supervised rotation prediction on every sample before it is classified.

Test-Time Training with Self-Supervision for Generalization under Distribution Shifts (Sun, Wang, Liu, Miller, Efros,
Hardt, ICML 2020), sections 2 and 3. A second head, trained together with the network, predicts by which of 0, 90, 180,
270 degrees an image was turned. At test time, for every sample in order:

    θ ← θ - η ∇_θ mean over 32 random views, each turned at random, of -ln p_rotation(turn | view; θ)

θ are the encoder and the rotation head; the head that predicts is not touched. Then the sample itself is predicted. θ
is carried on to the next sample (the paper's online version). The rates of the published code: one step of plain SGD
at 0.001, 32 views a step, a view a random crop (4 pixels of black around) and flip. FedTHE and BTFL (appendices C.2 and
B) also found 0.001 and one step best.

`rotate` and `rotation_loss` are also what the training before needs: joint training adds `rotation_loss`.

Decisions and deviations:

- The rotation head is one linear layer on z, the input of the other heads; the paper branches off a stage earlier.
- BatchNorm stays in evaluation mode. (The paper prefers GroupNorm; its code trains BatchNorm on the views.)
- Frozen parameters are left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad

from fedtta.models import PERSONAL_PREFIX
from fedtta.models.arrays import to_device
from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.base import Adapter, prefixed
from fedtta.tta.checks import Checks, check_choice, check_least, check_parts
from fedtta.tta.heads import HEADS
from fedtta.tta.memo import Readout, Tuning
from fedtta.tta.statistics import Statistics
from fedtta.tta.views import Augment, augmented

TURNS = 4  # quarter turns in a circle


def rotate(x: Tensor, quarter_turns: Tensor) -> Tensor:
    """Turn images counterclockwise.

    Parameters
    ----------
    x : Tensor [n, C, S, S]
        Square images.
    quarter_turns : Tensor [n], integer
        0, 1, 2 or 3 quarters of a circle for each.

    Raises
    ------
    ValueError
        The images are not square, or the turns do not fit.
    """
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise ValueError(f"rotation needs square images [n, C, S, S], got the shape {tuple(x.shape)}")
    if quarter_turns.shape != (len(x),) or quarter_turns.is_floating_point():
        got = f"{quarter_turns.dtype} of shape {tuple(quarter_turns.shape)}"
        raise ValueError(f"quarter_turns must be integers of shape ({len(x)},), got {got}")
    if bool(((quarter_turns < 0) | (quarter_turns >= TURNS)).any()):
        raise ValueError(f"quarter_turns must be 0..{TURNS - 1}, got {sorted(set(quarter_turns.tolist()))}")
    turned = torch.stack([torch.rot90(x, k, (2, 3)) for k in range(TURNS)])  # [4, n, C, S, S]
    return turned[to_device(quarter_turns.long(), x.device), torch.arange(len(x), device=x.device)]


def rotation_loss(model: nn.Module, x: Tensor, generator: Generator) -> Tensor:
    """Return the mean cross-entropy, in nats, of predicting a random rotation of each image.

    Parameters
    ----------
    model : nn.Module
        With `features(x) -> z [n, d]` and `rotation_head`, z → [n, 4]; used in the mode it is in.
    x : Tensor [n, C, S, S]
        Images, n at least 1.
    generator : Generator
        On the CPU; draws the turns.

    Returns
    -------
    Tensor
        A scalar with a gradient in encoder and rotation head.

    Raises
    ------
    ValueError
        The model has no rotation head of 4 outputs, or there is no image or none that is square.
    """
    check_parts(model, "rotation_loss", "features", "rotation_head")
    if len(x) == 0:
        raise ValueError("rotation_loss needs at least one image, x is empty")
    turns = torch.randint(TURNS, (len(x),), generator=generator)
    parts: Any = model
    logits: Tensor = parts.rotation_head(parts.features(rotate(x, turns)))  # [n, 4]
    if logits.shape != (len(x), TURNS):
        raise ValueError(f"rotation_head must give {TURNS} numbers an image, got the shape {tuple(logits.shape)}")
    return cross_entropy(logits, to_device(turns, logits.device))


@dataclass(frozen=True)
class CropAndFlip:
    """The views of TTT: the image padded with black, cropped at random to its size, mirrored half of the time.

    Parameters
    ----------
    padding : int
        Pixels on every side, 0 or more.
    flip : bool
        Whether to mirror; off for what has a left and a right, such as digits.

    Raises
    ------
    ValueError
        `padding` is negative.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_least(0, padding=self.padding)

    @classmethod
    def for_data(cls, *, flip: bool, crop: float) -> Self:
        """See `fedtta.tta.views.RandomViews`; the crop shifts the image and keeps its size."""
        return cls(flip=flip)

    def together(self, x: Tensor, generators: Sequence[Generator]) -> Tensor:
        """Return what calls for G equal parts of x [G n, C, H, W], each with its generator, would return together."""
        return torch.cat(list(map(self, x.chunk(len(generators)), generators)))

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return one view of each image of x [n, C, H, W]."""
        n, _, height, width = x.shape
        corner = torch.randint(2 * self.padding + 1, (2, n), generator=generator)
        mirror = (torch.rand(n, generator=generator) < 0.5) & self.flip
        windows = pad(x, 4 * [self.padding]).unfold(2, height, 1).unfold(3, width, 1)
        row, column = to_device(corner, x.device)
        views = windows[torch.arange(n, device=x.device), :, row, column]  # [n, C, H, W]
        return torch.where(to_device(mirror, x.device).view(-1, 1, 1, 1), views.flip(3), views)


class _Rotation(nn.Module):
    """`rotation_loss` of a model as a module, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, generator: Generator) -> Tensor:
        return rotation_loss(self.model, x, generator)


class TTT(Adapter):
    """Online test-time training on rotation (see the module).

    Sequential: a sample is predicted with what it and all before it taught, however the stream is cut. A sample costs
    a forward and a backward pass of `views` images a step. `report()` has the rotation `loss` [n, steps] before
    each step, in nats.

    Parameters
    ----------
    model : nn.Module
        With `features`, `rotation_head` (d → 4) and the head that predicts; its parameters are tuned as copies.
    statistics : Statistics or None
        Not needed.
    head : "global" or "personal"
        Which head predicts: `model(x)`, or `personal_head` of a two-head model.
    views : int
        Views a step, at least 1.
    steps : int
        SGD steps a sample, 0 or more.
    lr : float
        η, finite, 0 or more.
    augment : callable or None
        `augment(x [n, ...], generator) -> views`, of images in [0, 1]; None: `CropAndFlip()`.
    seed : int
        Of views and turns, 0 or more. They depend on it, the position since the last reset and the step only.
    record : bool
        Keep the report.

    Raises
    ------
    ValueError
        An option is out of range, or the model lacks a part.
    """

    name = "ttt"
    paper = "Test-Time Training with Self-Supervision for Generalization under Distribution Shifts (ICML 2020)"
    adapts = "encoder and rotation head"
    needs = frozenset({"rotation_head", "gradients"})
    views = CropAndFlip
    _weights: dict[str, Tensor]
    _position: int

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        head: Literal["global", "personal"] = "global",
        views: int = 32,
        steps: int = 1,
        lr: float = 1e-3,
        augment: Augment | None = None,
        seed: int = 0,
        record: bool = True,
    ) -> None:
        check_choice("head", head, tuple(HEADS))
        check_parts(model, "TTT", "features", "rotation_head")
        super().__init__(model, record=record)
        self.tuning = Tuning(views, steps, lr, augment or CropAndFlip(), seed)
        self._optimizer = FunctionalOptimizer("sgd", lr, momentum=0.0)
        own = copy.deepcopy(model).requires_grad_(False)
        self._readout, self._rotation = Readout(own, head), _Rotation(own)
        left = ("head.", PERSONAL_PREFIX)
        names = [n for n, value in model.named_parameters() if value.requires_grad and not n.startswith(left)]
        parameters = dict(own.named_parameters())
        self._source = {name: parameters[name].detach() for name in names}
        if not self._source:
            raise ValueError(f"encoder and rotation head of {type(model).__name__} have nothing that may be trained")
        self.reset()

    def _predict(self, x: Tensor) -> Tensor:
        weights, rows, checks = self._weights, [], Checks()
        losses = x.new_zeros(len(x), self.tuning.steps)
        for i, sample in enumerate(x):
            weights, losses[i] = self._tuned(weights, sample, self._position + i, checks)
            rows.append(self._logits(weights, sample[None]))
        logits = torch.cat(rows) if rows else self._logits(weights, x)
        checks.finite("the network's output", logits)
        checks.read()
        self._weights, self._position = weights, self._position + len(x)
        self._note(loss=losses)
        return torch.softmax(logits, 1)

    def _logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits [B, K] of x [B, ...]."""
        logits: Tensor = functional_call(self._readout, prefixed("model", weights), (x, x.new_ones(())))  # no mixture
        return logits

    def _tuned(
        self, weights: dict[str, Tensor], sample: Tensor, position: int, checks: Checks
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the weights after the steps on a sample [...], and the losses [steps] before them."""
        losses = sample.new_zeros(self.tuning.steps)
        copies = sample.expand(self.tuning.views, *sample.shape)
        for step in range(self.tuning.steps):
            generator = self.tuning.generator(position, step)
            views = augmented(self.tuning.augment, copies, generator)
            with torch.enable_grad():
                loss = functional_call(self._rotation, prefixed("model", weights), (views, generator))
                gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            losses[step] = loss.detach()
            start = self._optimizer.init(weights)  # plain: no state
            weights, _ = self._optimizer.step(weights, gradients, start, checks.require_finite)
        return weights, losses

    def _reset(self) -> None:
        self._weights = {name: value.clone().requires_grad_() for name, value in self._source.items()}
        self._position = 0

    def _state(self) -> dict[str, Tensor]:
        return {"position": torch.tensor(self._position), **prefixed("weight", self._weights)}

    def _load(self, state: dict[str, Tensor]) -> None:
        super()._load(state)
        self._position = int(state["position"])
