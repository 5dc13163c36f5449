"""BBN: balanced BatchNorm with confidence-filtered self-distillation, the client side of pFedBBN.

pFedBBN: A Personalized Federated Test-Time Adaptation with Balanced Batch Normalization for Class-Imbalanced Data
(anonymous, under review, 2025), section 3.1. Three networks come from one: source (frozen), teacher and student. The
two share the weights and biases (γ, β) of their balanced BatchNorm layers (`fedtta.models.balanced`), the only
parameters that are trained; each has class statistics of its own. One batch x, with x̃ its augmented views:

1. teacher(x) with the statistics as they are, without gradient: pseudo-labels ĉ, and the prediction returned;
2. one pass of teacher(x) and student(x̃), in which each layer first updates its class statistics with ĉ, then normalises
   with the new ones, which are constants for the gradient. With p^T, p^S, p^Src the softmax outputs, ŷ = argmax p^T:

       L_KD = 1/B Σ_i 1[H(p^T_i) < δ] CE(ŷ_i, p^S_i)            ŷ and the mask are constants      (eq. 5)
       L_CR = 1/(B K) Σ_i ‖p^T_i - p^Src_i‖²                    p^T has a gradient here           (eq. 6)

3. one step of Adam for (γ, β) on L_KD + λ_cr L_CR.

Decisions and deviations:

- The student sees the views and the teacher the images, as in TRIBE (AAAI 2024), where BBN comes from. The paper's
  section 3.1.2 prints it the other way round: `augment="teacher"`.
- δ = h0 ln K. The paper gives no numbers; h0, λ_cr and Adam's rate are TRIBE's.
- How class statistics are updated, and where that departs from the print, is in `fedtta.models.balanced`.
- BatchNorm parameters that are frozen, or in the personal head, are left alone. Layers without weights only normalise.
- L_KD and L_CR are differentiated one after the other, so that one network's activations are in memory, not two.

Class statistics tell which classes a client has seen: sharing "statistics" or "all" reveals that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtta.models import PERSONAL_PREFIX
from fedtta.models.balanced import BalancedBatchNorm, Between, balance, pseudo_labels
from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.base import prefixed
from fedtta.tta.checks import Checks, check_choice, check_least, check_number, class_count
from fedtta.tta.collaborator import Collaborator, affine_names, batchnorm_layers
from fedtta.tta.views import Augment, Views, augmented, seeded

MANY_CLASSES = 100  # K from which h0 is the larger one
NOT_TAUGHT = -100  # takes the place of ŷ where the teacher is not confident


class BBN(Collaborator):
    """Balanced BatchNorm with self-training (see the module).

    Defined per batch (the paper's: 200 samples); what is learned stays for the batches that follow. A batch costs four
    forward passes and two backward passes without gradients of convolutions' weights. `report()` has, for every sample,
    the teacher's `entropy` in nats in step 2, and whether it was `confident` enough to be learned from.

    Parameters
    ----------
    model : nn.Module
        A network with BatchNorm layers; `fedtta.models.TwoHead` predicts with its global head. It is the source
        network: leave its weights alone while the adapter is in use.
    num_classes : int or None
        K; None: `model.num_classes`.
    momentum : float or None
        η of the class statistics, in (0, 1]; None: max(0.0005 K, 0.01).
    gamma : float or None
        Interpolation of class statistics with those of the batch, in [0, 1], see `fedtta.models.balanced`; None: 0.
        TRIBE takes 0.1 for 100 classes.
    between : "population" or "sample"
        Variance between classes: over K (the paper), or over K - 1 (TRIBE's code), which needs two classes.
    h0 : float or None
        δ / ln K, finite, 0 or more; None: 0.05 below 100 classes, 0.2 from there on.
    consistency : float
        λ_cr, finite, 0 or more.
    lr : float
        Of Adam (β = 0.9, 0.999), finite, 0 or more.
    augment : "student", "teacher" or callable
        Which network sees the views, made by `fedtta.tta.views.Views()`, for images. A callable
        `augment(x [B, ...], generator) -> [B, ...]` makes views for the student.
    seed : int
        Of the views, 0 or more; they depend on it and on the number of batches since the last reset only.
    record, proximal
        See `Collaborator`.

    Raises
    ------
    ValueError
        An option is out of range, the network has no BatchNorm layer, or K is not known.
    """

    name = "bbn"
    paper = (
        "pFedBBN: a personalized federated test-time adaptation with balanced batch normalization (under review, 2025)"
    )
    adapts = "class statistics, BatchNorm weights and biases"
    needs = frozenset({"batchnorm"})
    views = Views

    def __init__(
        self,
        model: nn.Module,
        num_classes: int | None = None,
        *,
        momentum: float | None = None,
        gamma: float | None = None,
        between: Between = "population",
        h0: float | None = None,
        consistency: float = 0.5,
        lr: float = 1e-3,
        augment: Literal["student", "teacher"] | Augment = "student",
        seed: int = 0,
        record: bool = True,
        proximal: float = 0.0,
    ) -> None:
        super().__init__(model, record=record, proximal=proximal)
        self.num_classes = class_count(model, num_classes, least=1)
        h0 = (0.05 if self.num_classes < MANY_CLASSES else 0.2) if h0 is None else h0
        for name, value in (("h0", h0), ("consistency", consistency)):
            check_number(name, value, 0, math.inf)
        check_least(0, seed=seed)
        self.threshold = h0 * math.log(self.num_classes)  # δ, in nats
        self.consistency = consistency  # λ_cr
        self.seed = seed
        self._teacher_sees_views = augment == "teacher"
        if not callable(augment):
            check_choice("augment", str(augment), ("student", "teacher"))
        self.augment: Augment = augment if callable(augment) else Views()
        self._optimizer = FunctionalOptimizer("adam", lr)

        names = [name for name in batchnorm_layers(model) if not name.startswith(PERSONAL_PREFIX)]
        if not names:
            raise ValueError(f"{type(model).__name__} has no BatchNorm layer outside the personal head")
        self._teacher = balance(model, self.num_classes, momentum, gamma=gamma, between=between).requires_grad_(False)
        # The student is a copy that shares every parameter with the teacher: what differs are the class statistics.
        self._student = copy.deepcopy(self._teacher, {id(value): value for value in self._teacher.parameters()})
        self._layers = {
            f"{role}.{name}": cast(BalancedBatchNorm, network.get_submodule(name))
            for role, network in (("teacher", self._teacher), ("student", self._student))
            for name in names
        }
        parameters = dict(self._teacher.named_parameters())
        self._affine = {name: parameters[name].requires_grad_() for name in affine_names(model, required=False)}
        self._memory = self._optimizer.init(self._affine)
        self._batches = torch.zeros((), dtype=torch.int64)
        self._anchor_here()
        self._start = self.state_dict()

    def trained(self) -> dict[str, Tensor]:
        """Return γ and β of the BatchNorm layers, which teacher and student share, by their names in the network."""
        return dict(self._affine)

    def normalisation(self) -> dict[str, Tensor]:
        """Return the class statistics [K, C] of every layer, "teacher.<layer>.class_mean" and so on."""
        return {
            f"{name}.{kind}": getattr(layer, kind)
            for name, layer in self._layers.items()
            for kind in ("class_mean", "class_variance")
        }

    def domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the student's balanced (μ [C], σ² [C]) by layer; before the first batch the source's."""
        return {
            name.removeprefix("student."): layer.balanced()
            for name, layer in self._layers.items()
            if name.startswith("student.")
        }

    def _predict(self, x: Tensor) -> Tensor:
        checks = Checks()
        prediction = torch.softmax(self._logits("teacher", self._teacher, x, checks), 1)  # step 1
        if len(x):
            self._adapt(x, prediction.argmax(1), checks)
        return prediction

    def _adapt(self, x: Tensor, labels: Tensor, checks: Checks) -> None:
        """Take steps 2 and 3 on x [B, ...], B > 0, with pseudo-labels ĉ [B]; all or nothing."""
        views = augmented(self.augment, x, seeded(self.seed, int(self._batches)))
        for_teacher, for_student = (views, x) if self._teacher_sees_views else (x, views)
        source = torch.softmax(self._logits("source", self.model, x, checks), 1)
        with self._all_or_nothing():
            with torch.enable_grad(), pseudo_labels(self._teacher, labels):
                logits = self._logits("teacher", self._teacher, for_teacher, checks)
                drift = ((torch.softmax(logits, 1) - source) ** 2).mean()  # L_CR
                gradients = self._gradients(self.consistency * drift)
            logits = logits.detach()
            entropy = entropy_of_logits(logits)
            confident = entropy < self.threshold
            with torch.enable_grad(), pseudo_labels(self._student, labels):
                taught = self._logits("student", self._student, for_student, checks)
                target = torch.where(confident, logits.argmax(1), NOT_TAUGHT)  # ŷ
                distillation = functional.cross_entropy(taught, target, ignore_index=NOT_TAUGHT, reduction="sum") / len(
                    x
                )  # L_KD
                more = self._gradients(distillation + self._pull())
            gradients = [one + other for one, other in zip(gradients, more, strict=True)]
            self._check_statistics(checks)
            moved, memory = self._affine, self._memory
            if moved:
                moved, memory = self._optimizer.step(moved, gradients, memory, checks.require_finite)
            checks.read()
        self._memory = memory
        for name, value in moved.items():
            self._affine[name].copy_(value)
        self._batches = self._batches + 1
        self._note(entropy=entropy, confident=confident)

    def _logits(self, role: str, network: nn.Module, x: Tensor, checks: Checks) -> Tensor:
        """Return logits [B, K], which `checks` require to be finite; raise ValueError where K is another."""
        logits: Tensor = network(x)
        if logits.shape != (len(x), self.num_classes):
            raise ValueError(f"the network's output {tuple(logits.shape)} is not [{len(x)}, {self.num_classes}]")
        checks.finite(f"the {role}'s output", logits.detach())
        return logits

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradient of `loss` for every trained parameter, 0 where the network does not use it."""
        if not self._affine:
            return []
        return list(torch.autograd.grad(loss, list(self._affine.values()), allow_unused=True, materialize_grads=True))

    def _check_statistics(self, checks: Checks) -> None:
        """Require that class statistics be finite; a layer's output can be finite even where one is not."""
        statistics = self.normalisation()
        names = list(statistics)
        checks.require_finite(
            torch.stack([torch.isfinite(value).all() for value in statistics.values()]),
            lambda bad: f"the batch makes {', '.join(names[index] for index in bad)} not finite",
        )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Restore the class statistics if the block fails; updates replace tensors, so the old ones are intact."""
        before = {layer: (layer.class_mean, layer.class_variance) for layer in self._layers.values()}
        try:
            yield
        except BaseException:
            for layer, (mean, variance) in before.items():
                layer.class_mean, layer.class_variance = mean, variance
            raise

    def _reset(self) -> None:
        self._load(self._start)

    def _state(self) -> dict[str, Tensor]:
        """Return the adapter's own tensors, into which a state is copied."""
        return {
            **prefixed("affine", self._affine),
            **self.normalisation(),
            **prefixed("optimizer", self._memory),
            "batches": self._batches,
            **self._anchor_state(),
        }
