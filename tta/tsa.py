"""TSA: the two heads are experts whose mixture is tuned until two views of a sample get the same prediction.

Self-Supervised Aggregation of Diverse Experts for Test-Agnostic Long-Tailed Recognition (Zhang, Hooi, Hong, Feng,
NeurIPS 2022), section 4.2, eq. 5, as a baseline of FedTHE (ICLR 2023, rows "TSA on our pure 2-head model"). With the
heads' logits ŷ^g, ŷ^l and two random views of each of B samples:

    max_a 1/B Σ_b s(p(ŷ(x_b¹)), p(ŷ(x_b²))),    ŷ = e ŷ^g + (1-e) ŷ^l,   (e, 1-e) = softmax(a),   a = (0, 0) at first

s is the scalar product of the two predictions in the paper and their cosine in the published code (`similarity`). Only
a is trained. The prediction is p(ŷ(x)) of the image itself, after the steps on its batch.

`scope="stream"`: one a for all, as in the paper, carried on over the stream. SGD at 0.1, momentum 0.9 as in its
published settings for CIFAR, and tuning stops for good when one head has less than 0.05, as there.
`scope="sample"`: every sample has its own a, as in FedTHE's published code: 10 steps of Adam at 0.1 (ten times its
learning rate of 0.01) on one pair of views; does not depend on the batch size, and has no memory.

Decisions and deviations:

- The paper tunes on the whole test set for 5 epochs, then predicts all of it. Here each batch gets 5 steps, with new
  views at each one, before it is predicted.
- SGD has no Nesterov term and no weight decay (published: 5e-4, which here would pull towards equal weights).
- The views are those of `views`; both published codes take MoCo's crops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Generator, Tensor, nn

from tta.base import Adapter
from tta.heads import check_choice, check_two_heads, two_heads
from tta.memo import checked_position
from tta.statistics import Statistics
from tta.tent import Descent

SCOPES = ("stream", "sample")
SIMILARITIES = ("cosine", "dot")
STEPS = {"stream": 5, "sample": 10}

#: Logits of the global and of the personal head, [B, K] each.
Experts = tuple[Tensor, Tensor]


def agreement(a: Tensor, first: Experts, second: Experts, similarity: str = "cosine") -> Tensor:
    """Return the similarity [B] of the mixture's predictions for two views.

    Parameters
    ----------
    a : Tensor [2] or [B, 2]
        Before the softmax: of the global and of the personal head, for all samples or for each.
    first, second : (Tensor [B, K], Tensor [B, K])
        The heads' logits for the two views.
    similarity : "cosine" or "dot"
        Both are in [0, 1].
    """
    e = torch.softmax(a, -1)[..., :1]  # [1] or [B, 1]
    p, q = (torch.softmax(e * one + (1 - e) * other, 1) for one, other in (first, second))
    dot = (p * q).sum(1)
    return dot if similarity == "dot" else dot / (p.norm(dim=1) * q.norm(dim=1))


class TSA(Adapter):
    """Tune the weights of the two heads until two views agree (see the module).

    Defined per batch, and per sample with `scope="sample"`.

    Parameters
    ----------
    model : nn.Module
        A two-head network. Nothing in it changes.
    statistics : Statistics or None
        Not used.
    scope : "stream" or "sample"
        Whose weights: one pair for the stream, or a pair for each sample.
    lr : float
        Finite, 0 or more.
    steps : int or None
        Steps a batch ("stream") or a sample, 0 or more; None: 5 or 10.
    momentum : float
        Of SGD, in [0, 1]; "stream" only.
    similarity : "cosine" or "dot"
        Of two predictions.
    least : float
        Tuning stops when a head has less weight, in [0, 0.5); "stream" only.
    augment : callable or None
        `augment(x [n, ...], generator) -> [n, ...]`; None: `tta.views.Views()`, for images.
    seed : int
        Of the views, 0 or more; they depend on it, on the position since the last reset (of the batch's first sample,
        or of each sample) and on the step.
    record : bool
        Keep the report: `weight` [n], e of every sample.

    Raises
    ------
    ValueError
        An option is out of range, or the network has no two heads.
    """

    per: ClassVar[Literal["sample", "batch"]] = "batch"
    _a: dict[str, Tensor]
    _memory: dict[str, Tensor]
    _position: int

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        scope: Literal["stream", "sample"] = "stream",
        lr: float = 0.1,
        steps: int | None = None,
        momentum: float = 0.9,
        similarity: Literal["cosine", "dot"] = "cosine",
        least: float = 0.05,
        augment: Callable[[Tensor, Generator], Tensor] | None = None,
        seed: int = 0,
        record: bool = True,
    ) -> None:
        check_two_heads(model, "tsa")
        check_choice("scope", scope, SCOPES)
        check_choice("similarity", similarity, SIMILARITIES)
        steps = STEPS[scope] if steps is None else steps
        for name, value in (("steps", steps), ("seed", seed)):
            if value < 0:
                raise ValueError(f"{name}={value} must be 0 or more")
        if not 0 <= least < 0.5:
            raise ValueError(f"least={least} is outside [0, 0.5)")
        self._descent = Descent("sgd" if scope == "stream" else "adam", lr, momentum)
        super().__init__(model, record=record)
        self.scope, self.steps, self.similarity, self.least, self.seed = scope, steps, similarity, least, seed
        self.per = "sample" if scope == "sample" else "batch"  # type: ignore[misc]
        self.augment = augment or _views()
        self._reset()

    def _predict(self, x: Tensor) -> Tensor:
        # What is tuned is made of ordinary tensors, also where the caller is in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            x = x.clone() if x.is_inference() else x
            _, logits_global, logits_personal = two_heads(self.model, x)
            tuned, memory = self._tuned(x) if len(x) else (self._a, self._memory)
            e = torch.softmax(tuned["a"], -1)[..., :1]  # [1] or [B, 1]
            if self.scope == "stream":
                self._a, self._memory = tuned, memory
            self._position += len(x)
            self._note(weight=e.detach().double().expand(len(x), 1)[:, 0])
            return torch.softmax(e * logits_global + (1 - e) * logits_personal, 1).detach()

    def _tuned(self, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a and the optimiser's memory after the steps on x [B, ...], B > 0."""
        values, memory = self._a, self._memory
        if self.scope == "sample":
            values = {"a": self._a["a"].detach().repeat(len(x), 1).requires_grad_()}
            memory = self._descent.start(values)
            views = self._pairs(x)
        for step in range(self.steps):
            if self.scope == "stream":
                if float(torch.softmax(values["a"], 0).min()) < self.least:
                    break
                views = self._experts(self._viewed(torch.cat((x, x)), self._position, step), len(x))
            with torch.enable_grad():
                agreed = agreement(values["a"], *views, self.similarity)
                # A sum, so that a sample's gradient does not know how many others there are.
                loss = -(agreed.sum() if self.scope == "sample" else agreed.mean())
                gradient = torch.autograd.grad(loss, values["a"])
            values, memory = self._descent.step(values, gradient, memory)
        return values, memory

    def _pairs(self, x: Tensor) -> tuple[Experts, Experts]:
        """Return the heads' logits for a pair of views of each of x [B, ...], drawn sample by sample."""
        pairs = [self._viewed(torch.stack((one, one)), self._position + i, 0) for i, one in enumerate(x)]
        return self._experts(torch.stack(pairs, 1).flatten(0, 1), len(x))

    def _experts(self, views: Tensor, batch: int) -> tuple[Experts, Experts]:
        """Return the heads' logits for views [2 B, ...], first views first."""
        first, second = (two_heads(self.model, part)[1:] for part in views.split(batch))
        return (first[0], first[1]), (second[0], second[1])

    def _viewed(self, x: Tensor, position: int, step: int) -> Tensor:
        key = np.random.SeedSequence(self.seed, spawn_key=(position, step))
        views = self.augment(x, Generator().manual_seed(int(key.generate_state(1, np.uint64)[0])))
        if views.shape != x.shape:
            raise ValueError(f"augment made {tuple(views.shape)} of a batch of shape {tuple(x.shape)}")
        return views

    def _reset(self) -> None:
        weight = next(self.model.head.parameters())  # type: ignore[union-attr]
        with torch.inference_mode(False):
            self._a = {"a": torch.zeros(2, dtype=weight.dtype, device=weight.device).requires_grad_()}
            self._memory = self._descent.start(self._a)
        self._position = 0

    def _state(self) -> dict[str, Tensor]:
        position = {"position": torch.tensor(self._position)}
        if self.scope == "sample":
            return position
        return {**position, **self._a, **{f"optimizer.{name}": value for name, value in self._memory.items()}}

    def _load(self, state: dict[str, Tensor]) -> None:
        own = self._state()
        for name, value in state.items():
            if name != "position" and (value.shape != own[name].shape or value.dtype != own[name].dtype):
                kind = f"{value.dtype} of shape {tuple(value.shape)}"
                fitting = f"{own[name].dtype} of shape {tuple(own[name].shape)}"
                raise ValueError(f"state {name!r} of TSA: {kind} does not fit {fitting}")
        position = checked_position(state["position"])
        if self.scope == "stream":
            if int(state["optimizer.step"]) < 0:
                raise ValueError(f"state 'optimizer.step' of TSA is negative: {int(state['optimizer.step'])}")
            with torch.no_grad():
                for name, value in state.items():
                    own[name].copy_(value)
        self._position = position


def _views() -> Callable[[Tensor, Generator], Tensor]:
    from tta.views import Views  # images only: who brings views of other things does not need it

    return Views()
