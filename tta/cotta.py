"""CoTTA: student and weight-averaged teacher with augmentation-averaged targets and stochastic restoration.

Continual Test-Time Domain Adaptation (Wang, Fink, Van Gool, Dai, CVPR 2022), Algorithm 1. For every batch x:

1. target ŷ': the teacher's prediction of x where the source network is confident (mean confidence of the batch at least
   the threshold), else the mean of its outputs for 32 random views of x (eq. 3, 4);
2. one step of Adam for the student on the cross-entropy -Σ_c ŷ'_c ln ŷ_c(x), over all its parameters (eq. 1, 5);
3. teacher: θ' ← α θ' + (1 - α) θ (eq. 2);
4. student: every number goes back to the source's with probability p (eq. 7, 8).

The prediction is ŷ', of the teacher as it was before the batch. Source, student and teacher normalise every batch, and
every view of it, with its own statistics, as in the published code.

Decisions and deviations:

- The views' outputs are averaged as logits, as in the published code, which made the paper's numbers; the paper's
  eq. 3 reads as a mean of probabilities: `average="probabilities"`.
- The threshold is for the mean confidence over the batch, as in the published code; the paper writes it for one sample.
- "All parameters" are those that are not frozen and not the personal head's. The published code skips those that are
  called neither weight nor bias.
- Only BatchNorm leaves evaluation mode; a layer with one value a channel falls back to the source (see `bn_adapt`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fedtta.models.arrays import to_device
from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.base import prefixed
from fedtta.tta.bn_adapt import BatchNormalised
from fedtta.tta.checks import Checks, check_choice, check_least, check_number
from fedtta.tta.collaborator import shared_parameters
from fedtta.tta.views import Augment, Views, augmented, seeded

AVERAGES = ("logits", "probabilities")
#: Samples that the teacher sees in one pass, with several views of a small batch: on a CPU what suits its cache, on a
#: GPU, which then waits less for the program, what is not too large.
PASS, PASS_BYTES = 256, 32 * 2**20


class CoTTA(BatchNormalised):
    """Weight-averaged teacher, augmentation-averaged targets, stochastic restoration (see the module).

    Defined per batch; what is learned stays for the batches that follow. A batch costs 2 + `views` forward passes and
    one backward pass where the source is not confident, else 3 and one. `report()` has, for every sample, the source
    network's `confidence`, whether views were `averaged`, and the student's `loss` in nats.

    Parameters
    ----------
    model : nn.Module
        Any network with BatchNorm; `fedtta.models.TwoHead` predicts with its global head.
    lr : float
        Of Adam (β = 0.9, 0.999), finite, 0 or more.
    momentum_teacher : float
        α in [0, 1].
    restore : float
        p in [0, 1].
    threshold : float
        p_th in [0, 1]; 0.92 is the published code's for CIFAR-10 (0.72 for CIFAR-100, 0.1 for ImageNet).
    views : int
        N, at least 1.
    average : "logits" or "probabilities"
        What of the views is averaged.
    augment : callable or None
        `augment(x [B, ...], generator) -> [B, ...]`, called once a view; None: `fedtta.tta.views.Views()`, for images.
    seed : int
        Of views and restoration, 0 or more. Both depend on it and on the number of batches since the last reset only.
    record, proximal
        See `Collaborator`.

    Raises
    ------
    ValueError
        An option is out of range, or the network has no BatchNorm layer or no parameter that may be trained.
    """

    name = "cotta"
    paper = "Continual Test-Time Domain Adaptation (CVPR 2022)"
    adapts = "all parameters of student and teacher"
    views = Views

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        momentum_teacher: float = 0.999,
        restore: float = 0.01,
        threshold: float = 0.92,
        views: int = 32,
        average: Literal["logits", "probabilities"] = "logits",
        augment: Augment | None = None,
        seed: int = 0,
        record: bool = True,
        proximal: float = 0.0,
    ) -> None:
        for name, value in (("momentum_teacher", momentum_teacher), ("restore", restore), ("threshold", threshold)):
            check_number(name, value, 0, 1)
        check_choice("average", average, AVERAGES)
        check_least(1, views=views)
        check_least(0, seed=seed)
        super().__init__(model, record=record, proximal=proximal)
        self.momentum_teacher, self.restore, self.threshold = momentum_teacher, restore, threshold
        self.draws, self.average, self.augment, self.seed = views, average, augment or Views(), seed
        self._optimizer = FunctionalOptimizer("adam", lr)
        parameters = dict(self._network.named_parameters())
        self._source = {name: parameters[name].detach() for name in shared_parameters(model)}
        if not self._source:
            raise ValueError(f"no parameter of {type(model).__name__} may be trained")
        self.reset()

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters of both networks, as "student.<name>" and "teacher.<name>"."""
        return {**prefixed("student", self._student), **prefixed("teacher", self._teacher)}

    def _begin(self) -> None:
        self._student = {name: value.clone().requires_grad_() for name, value in self._source.items()}
        self._teacher = {name: value.clone() for name, value in self._source.items()}
        self._memory = self._optimizer.init(self._source)
        self._batches = torch.zeros((), dtype=torch.int64)

    def _adapt(self, x: Tensor) -> Tensor:
        checks = Checks()
        confidence = torch.softmax(self._logits(x, checks), 1).amax(1)  # [B], of the source
        checks.read()
        averaged = bool(confidence.mean() < self.threshold)
        if averaged:
            target = self._average_over_views(x, checks)  # [B, K]
        else:
            target = torch.softmax(self._logits(x, checks, self._teacher), 1)
        with torch.enable_grad():
            losses = -(target * self._logits(x, checks, self._student).log_softmax(1)).sum(1)  # [B]
            checks.finite("the loss", losses)
            gradients = torch.autograd.grad(
                losses.mean() + self._pull(), list(self._student.values()), allow_unused=True
            )
        domain = self._last()
        student, memory = self._optimizer.step(self._student, gradients, self._memory, checks.require_finite)
        checks.read()
        teacher = {
            name: torch.lerp(student[name].detach(), old, self.momentum_teacher) for name, old in self._teacher.items()
        }
        self._student, self._teacher, self._memory = self._restored(student), teacher, memory
        self._domain, self._batches = domain, self._batches + 1
        self._note(confidence=confidence, averaged=torch.full_like(confidence, averaged, dtype=torch.bool), loss=losses)
        return target

    def _average_over_views(self, x: Tensor, checks: Checks) -> Tensor:
        """Return the teacher's mean prediction [B, K] over random views of x [B, ...]."""
        sums = []
        together = max(1, PASS // len(x) if x.is_cpu else PASS_BYTES // x.nbytes)
        for first in range(0, self.draws, together):
            drawn = range(first, min(first + together, self.draws))
            views = augmented(self.augment, torch.cat([x] * len(drawn)), *map(self._generator, drawn))  # [V B, ...]
            outputs = self._logits(views, checks, self._teacher, groups=len(drawn))  # [V B, K]
            if self.average == "probabilities":
                outputs = torch.softmax(outputs, 1)
            sums.append(outputs.reshape(len(drawn), len(x), -1).sum(0))
        mean = torch.stack(sums).sum(0) / self.draws  # [B, K]
        return mean if self.average == "probabilities" else torch.softmax(mean, 1)

    def _restored(self, student: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the student with a share p of its numbers, drawn for each batch, reset to the source's."""
        sizes, restored = [value.numel() for value in student.values()], {}
        # Drawn on the CPU, so that the numbers are the same on every device.
        drawn = torch.rand(sum(sizes), generator=self._generator(), dtype=torch.float32) < self.restore
        forgotten = to_device(drawn, next(iter(student.values())).device).split(sizes)
        for (name, value), mask in zip(student.items(), forgotten, strict=True):
            restored[name] = torch.where(mask.view(value.shape), self._source[name], value.detach()).requires_grad_()
        return restored

    def _generator(self, *draw: int) -> Generator:
        """Return the CPU generator of this batch: of a view, or, without `draw`, of the restoration."""
        return seeded(self.seed, int(self._batches), *draw)

    def _state(self) -> dict[str, Tensor]:
        memory = prefixed("optimizer", self._memory)
        return {**super()._state(), **self.trained(), **memory, "batches": self._batches}
