"""TSA: a mixture of the two heads, tuned for the agreement of its predictions on two random views.

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

from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.base import Adapter, prefixed
from fedtta.tta.checks import Checks, check_choice, check_least
from fedtta.tta.heads import check_two_heads, two_heads
from fedtta.tta.statistics import Statistics
from fedtta.tta.views import Augment, Views, augmented, seeded

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
        `augment(x [n, ...], generator) -> [n, ...]`; None: `fedtta.tta.views.Views()`, for images.
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

    name = "tsa"
    paper = "Self-Supervised Aggregation of Diverse Experts for Test-Agnostic Long-Tailed Recognition (NeurIPS 2022)"
    adapts = "the weight of the global head"
    per: Literal["sample", "batch"] = "batch"
    needs = frozenset({"personal_head"})
    views = Views
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
        augment: Augment | None = None,
        seed: int = 0,
        record: bool = True,
    ) -> None:
        check_two_heads(model, "tsa")
        check_choice("scope", scope, SCOPES)
        check_choice("similarity", similarity, SIMILARITIES)
        steps = STEPS[scope] if steps is None else steps
        check_least(0, steps=steps, seed=seed)
        if not 0 <= least < 0.5:
            raise ValueError(f"least={least} is outside [0, 0.5)")
        self._optimizer = FunctionalOptimizer("sgd" if scope == "stream" else "adam", lr, momentum)
        super().__init__(model, record=record)
        self.scope, self.steps, self.similarity, self.least, self.seed = scope, steps, similarity, least, seed
        self.per = "sample" if scope == "sample" else "batch"
        self.augment = augment or Views()
        self.reset()

    def _predict(self, x: Tensor) -> Tensor:
        checks = Checks()
        _, logits_global, logits_personal = two_heads(self.model, x, checks)
        tuned, memory = self._tuned(x, checks) if len(x) else (self._a, self._memory)
        e = torch.softmax(tuned["a"], -1)[..., :1]  # [1] or [B, 1]
        if self.scope == "stream":
            self._a, self._memory = tuned, memory
        self._position += len(x)
        self._note(weight=e.detach().double().expand(len(x), 1)[:, 0])
        return torch.softmax(e * logits_global + (1 - e) * logits_personal, 1).detach()

    def _tuned(self, x: Tensor, checks: Checks) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a and the optimizer state after the steps on x [B, ...], B > 0."""
        values, memory = self._a, self._memory
        if self.scope == "sample":
            values = {"a": self._a["a"].detach().repeat(len(x), 1).requires_grad_()}
            memory = self._optimizer.init(values)
            views = self._pairs(x, checks)
        for step in range(self.steps):
            if self.scope == "stream":
                if checks.read(torch.softmax(values["a"], 0).detach().double()).min() < self.least:
                    break
                drawn = augmented(self.augment, torch.cat((x, x)), self._generator(self._position, step))
                views = self._experts(drawn, len(x), checks)
            with torch.enable_grad():
                agreed = agreement(values["a"], *views, self.similarity)
                # A sum, so that a sample's gradient does not depend on the number of samples.
                loss = -(agreed.sum() if self.scope == "sample" else agreed.mean())
                gradient = torch.autograd.grad(loss, values["a"])
            values, memory = self._optimizer.step(values, gradient, memory, checks.require_finite)
        checks.read()
        return values, memory

    def _pairs(self, x: Tensor, checks: Checks) -> tuple[Experts, Experts]:
        """Return the heads' logits for a pair of views of each of x [B, ...], drawn sample by sample."""
        generators = [self._generator(self._position + i, 0) for i in range(len(x))]
        views = augmented(self.augment, x.repeat_interleave(2, 0), *generators)  # [2 B, ...], pair by pair
        return self._experts(torch.cat((views[::2], views[1::2])), len(x), checks)

    def _experts(self, views: Tensor, batch: int, checks: Checks) -> tuple[Experts, Experts]:
        """Return the heads' logits for views [2 B, ...], first views first."""
        first, second = (two_heads(self.model, part, checks)[1:] for part in views.split(batch))
        return (first[0], first[1]), (second[0], second[1])

    def _generator(self, position: int, step: int) -> Generator:
        return seeded(self.seed, position, step)

    def _reset(self) -> None:
        weight = next(self.model.head.parameters())  # type: ignore[union-attr]
        self._a = {"a": torch.zeros(2, dtype=weight.dtype, device=weight.device).requires_grad_()}
        self._memory = self._optimizer.init(self._a)
        self._position = 0

    def _state(self) -> dict[str, Tensor]:
        position = {"position": torch.tensor(self._position)}
        return position if self.scope == "sample" else {**position, **self._a, **prefixed("optimizer", self._memory)}

    def _load(self, state: dict[str, Tensor]) -> None:
        super()._load(state)
        self._position = int(state["position"])
