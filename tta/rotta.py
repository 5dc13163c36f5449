"""RoTTA: robust BatchNorm statistics, a class-balanced memory, and a student distilled from its teacher.

Robust Test-Time Adaptation in Dynamic Scenarios (Yuan, Xie, Li, CVPR 2023), section 3. Every batch is predicted by the
teacher as it is. Then its samples enter a memory one after the other (`Memory`), and after every `update_every`
of them, with the memory's samples x of ages A (in memory sizes):

1. student and teacher normalise with robust statistics (`RobustNorm`), which both update from what they are given;
2. one step of Adam on the student's BatchNorm weights and biases, for a strong view x' of each x:

       mean over memory of E(A) l(x', x),   E(A) = exp(-A) / (1 + exp(-A)),   l = -Σ_c p_T(c|x) ln p_S(c|x')

3. teacher: θ_T ← (1 - ν) θ_T + ν θ_S.

Decisions and deviations:

- The teacher updates its statistics too, from the originals, as in the published code. So are all default values.
- Only BatchNorm changes its mode: dropout, which the published code switches on for an update, stays off.
- The uncertainty is the entropy itself; the published code adds 1e-6 inside the logarithm.
- BatchNorm parameters that are frozen, or in the personal head, are left alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtta.models.arrays import to_device
from fedtta.models.optim import FunctionalOptimizer
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.base import prefixed
from fedtta.tta.checks import Checks, check_least, check_number, class_count
from fedtta.tta.collaborator import Collaborator, affine_names, replace_batchnorms
from fedtta.tta.views import Augment, Views, augmented, seeded

ROLES = ("student", "teacher")


class RobustNorm(nn.Module):
    """A BatchNorm layer whose running statistics, while `updating`, first move towards the batch's, then normalise.

        μ ← (1 - α) μ + α μ_batch,    σ² ← (1 - α) σ² + α σ²_batch,    from the source's on      (section 3.2)

    σ²_batch is the biased variance, and the gradient passes through μ_batch and σ²_batch, as in the published code. A
    channel with one value in the batch has σ²_batch = 0: only the share α of a variance is lost.

    Parameters
    ----------
    layer : BatchNorm
        Whose weight, bias, ε and running statistics it has, uncopied.
    alpha : float
        α, the share of a batch in the statistics.

    Attributes
    ----------
    updating : bool
        Update the running statistics, in place, from what is given; the gradient passes through them.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, alpha: float) -> None:
        super().__init__()
        self.eps, self.alpha, self.updating = layer.eps, alpha, False
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        assert layer.running_mean is not None  # `batchnorm_layers` refuses others
        assert layer.running_var is not None
        self.running_mean, self.running_var = nn.Buffer(layer.running_mean), nn.Buffer(layer.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, C, ...] normalised."""
        if not self.updating:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
        mean = torch.lerp(self.running_mean, mean, self.alpha)
        variance = torch.lerp(self.running_var, variance, self.alpha)
        with torch.no_grad():
            self.running_mean.copy_(mean)
            self.running_var.copy_(variance)
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        channels = (1, -1) + (1,) * (x.ndim - 2)
        return torch.addcmul(shift.view(channels), x, scale.view(channels))


class Entry(NamedTuple):
    """A sample in memory."""

    sample: Tensor  # [...]
    uncertainty: float  # entropy of its prediction when it came, nats
    born: int  # samples seen before it


class Memory:
    """A bank of recent, certain samples with balanced predicted classes; private, never to be shared.

    Section 3.3, Algorithm 1 (CSTU: category-balanced sampling with timeliness and uncertainty). Of N places, each of K
    classes may fill about N/K. A sample's score H says how dispensable it is, by its age A (samples seen since it came)
    and its uncertainty U:

        H = λ_t / (1 + exp(-A/N)) + λ_u U / ln K

    If its class, or the memory, is full, a new sample (A = 0) replaces the one of highest H, of its own class or of the
    largest classes, provided that H is higher than its own; otherwise it is not kept.

    Parameters
    ----------
    capacity : int
        N, at least 1.
    classes : int
        K, at least 2.
    lambda_t, lambda_u : float
        λ_t and λ_u, the weights of age and uncertainty, finite, 0 or more.

    Raises
    ------
    ValueError
        A number is out of range.
    """

    def __init__(self, capacity: int, classes: int, lambda_t: float = 1.0, lambda_u: float = 1.0) -> None:
        check_least(1, capacity=capacity)
        check_least(2, classes=classes)
        check_number("lambda_t", lambda_t, 0, math.inf)
        check_number("lambda_u", lambda_u, 0, math.inf)
        self.capacity, self.classes = capacity, classes
        self.lambda_t, self.lambda_u = lambda_t, lambda_u
        self._clock = 0  # samples seen
        self._entries: list[list[Entry]] = [[] for _ in range(classes)]  # by predicted class, in order of arrival

    def __len__(self) -> int:
        return sum(map(len, self._entries))

    def copy(self) -> Memory:
        """Return a memory with the same entries, which are not copied: they never change."""
        other = Memory(self.capacity, self.classes, self.lambda_t, self.lambda_u)
        other._clock, other._entries = self._clock, [list(entries) for entries in self._entries]
        return other

    def add(self, sample: Tensor, label: int, uncertainty: float) -> bool:
        """Offer a sample [...] with its predicted class and the entropy of the prediction, in nats.

        Returns
        -------
        bool
            Whether a copy of it was kept. Everything in memory is one sample older then, itself included.
        """
        kept = self._make_room(label, self._score(0, uncertainty))
        if kept:
            self._entries[label].append(Entry(sample.clone(), uncertainty, self._clock))
        self._clock += 1
        return kept

    def content(self) -> tuple[Tensor, Tensor]:
        """Return samples [n, ...] and their ages A/N [n] (float64, CPU), class by class in order of arrival."""
        entries = [entry for of_class in self._entries for entry in of_class]
        ages = torch.tensor([self._clock - entry.born for entry in entries], dtype=torch.float64)
        return torch.stack([entry.sample for entry in entries]) if entries else torch.zeros(0), ages / self.capacity

    def state(self) -> dict[str, Tensor]:
        """Return everything kept, by name: n entries, class by class in order of arrival."""
        entries = [(label, entry) for label, of_class in enumerate(self._entries) for entry in of_class]
        return {
            "samples": self.content()[0],
            "labels": torch.tensor([label for label, _ in entries], dtype=torch.int64),
            "uncertainties": torch.tensor([entry.uncertainty for _, entry in entries], dtype=torch.float64),
            "ages": torch.tensor([self._clock - entry.born for _, entry in entries], dtype=torch.int64),
        }

    def loaded(self, state: dict[str, Tensor]) -> Memory:
        """Return a memory of this size with the entries of a `state()`.

        Raises
        ------
        ValueError
            The parts do not belong together, are of the wrong kind or out of range, or do not fit in.
        """
        samples, labels, uncertainties, ages = (state[name] for name in ("samples", "labels", "uncertainties", "ages"))
        n = len(labels) if labels.ndim == 1 else -1
        if any(part.shape != (n,) for part in (labels, uncertainties, ages)) or samples.shape[:1] != (n,):
            shapes = {name: tuple(part.shape) for name, part in state.items()}
            raise ValueError(f"memory needs as many labels, uncertainties and ages as samples, got the shapes {shapes}")
        if n > self.capacity:
            raise ValueError(f"{n} samples do not fit into a memory with capacity={self.capacity}")
        if labels.is_floating_point() or bool(((labels < 0) | (labels >= self.classes)).any()):
            raise ValueError(f"labels in memory must be integers from 0 to {self.classes - 1}, got {labels.tolist()}")
        if ages.is_floating_point() or bool((ages < 1).any()) or bool((uncertainties < 0).any()):
            raise ValueError("ages in memory must be integers of 1 or more, uncertainties 0 or more")
        other = Memory(self.capacity, self.classes, self.lambda_t, self.lambda_u)
        for sample, *rest in zip(samples, labels.tolist(), uncertainties.tolist(), ages.tolist(), strict=True):
            label, uncertainty, age = rest
            other._entries[label].append(Entry(sample.clone(), uncertainty, -age))  # the clock starts at 0
        return other

    def require_like(self, x: Tensor) -> None:
        """Raise ValueError unless samples x [B, ...] are of the shape and dtype of those in memory."""
        for sample in (entry.sample for of_class in self._entries for entry in of_class):
            if (sample.shape, sample.dtype) != (x.shape[1:], x.dtype):
                raise ValueError(
                    f"samples in memory are {sample.dtype} of shape {tuple(sample.shape)}, those of the batch are "
                    f"{x.dtype} of shape {tuple(x.shape[1:])}"
                )

    def _score(self, age: int, uncertainty: float) -> float:
        """Return H of a sample."""
        timeliness = 1 / (1 + math.exp(-age / self.capacity))
        return self.lambda_t * timeliness + self.lambda_u * uncertainty / math.log(self.classes)

    def _make_room(self, label: int, score: float) -> bool:
        """Tell whether a new sample of this class and score is kept; remove another one if space is needed."""
        sizes = [len(entries) for entries in self._entries]
        if sizes[label] >= self.capacity / self.classes:
            crowded = [label]
        elif sum(sizes) < self.capacity:
            return True
        else:
            crowded = [other for other, size in enumerate(sizes) if size == max(sizes)]
        # Of equal scores the last goes, in order of class and arrival, as in the published code.
        worst, where, index = max(
            (self._score(self._clock - entry.born, entry.uncertainty), other, index)
            for other in crowded
            for index, entry in enumerate(self._entries[other])
        )
        if worst <= score:
            return False
        del self._entries[where][index]
        return True


class _Learned(NamedTuple):
    """Tensors that an update replaces; none is changed in place during a batch."""

    affine: dict[str, dict[str, Tensor]]  # by role: γ and β
    running: dict[str, dict[str, Tensor]]  # by role: the robust statistics
    moments: dict[str, Tensor]  # Adam's, of the student's γ and β


class RoTTA(Collaborator):
    """Robust statistics, category-balanced memory, timeliness-weighted teacher and student (see the module).

    Defined per batch: all its samples are predicted before any is learned from. `report()` has the `entropy` of every
    sample's prediction, in nats. A batch may hold several updates, so FedProx's pull (`proximal`) acts inside it.

    Parameters
    ----------
    model : nn.Module
        Any network with BatchNorm; `fedtta.models.TwoHead` predicts with its global head.
    lr : float
        Of Adam (β = 0.9, 0.999), finite, 0 or more.
    capacity : int
        N, samples in memory, at least 1.
    update_every : int
        Samples from one update to the next, at least 1; the published code counts on over batches, and so do we.
    alpha : float
        α in [0, 1].
    nu : float
        ν in [0, 1].
    lambda_t, lambda_u : float
        Weights of age and uncertainty in the memory, finite, 0 or more.
    num_classes : int or None
        K, at least 2; None: `model.num_classes`.
    augment : callable or None
        `augment(x [n, ...], generator) -> [n, ...]`, the strong views; None: `fedtta.tta.views.Views()`, for images.
    seed : int
        Of the views, 0 or more. They depend on it and on the number of updates since the last reset only.
    record, proximal
        See `Collaborator`.

    Raises
    ------
    ValueError
        An option is out of range, the number of classes is unknown, or the network has no BatchNorm layer with weights
        that may be trained.
    """

    name = "rotta"
    paper = "Robust Test-Time Adaptation in Dynamic Scenarios (CVPR 2023)"
    adapts = "BatchNorm statistics, weights and biases"
    needs = frozenset({"batchnorm"})
    views = Views

    _learned: _Learned
    _memory: Memory
    _seen: int  # samples since the last reset

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        capacity: int = 64,
        update_every: int = 64,
        alpha: float = 0.05,
        nu: float = 0.001,
        lambda_t: float = 1.0,
        lambda_u: float = 1.0,
        num_classes: int | None = None,
        augment: Augment | None = None,
        seed: int = 0,
        record: bool = True,
        proximal: float = 0.0,
    ) -> None:
        check_least(1, update_every=update_every)
        check_least(0, seed=seed)
        check_number("alpha", alpha, 0, 1)
        check_number("nu", nu, 0, 1)
        super().__init__(model, record=record, proximal=proximal)
        self.update_every, self.nu, self.seed = update_every, nu, seed
        self.augment = Views() if augment is None else augment
        self._optimizer = FunctionalOptimizer("adam", lr)
        self._empty = Memory(capacity, class_count(model, num_classes), lambda_t, lambda_u)
        own = copy.deepcopy(model).requires_grad_(False)
        self._network, self._layers = replace_batchnorms(own, lambda layer: RobustNorm(layer, alpha))
        self._names = affine_names(model)
        self.reset()

    def trained(self) -> dict[str, Tensor]:
        """Return γ and β of both networks, as "student.<name>" and "teacher.<name>"."""
        return _flat(self._learned.affine)

    def normalisation(self) -> dict[str, Tensor]:
        """Return the robust statistics of both networks, as "student.<layer>.running_mean" and so on."""
        return _flat(self._learned.running)

    def domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the student's robust (mean [C], variance [C]) of each layer."""
        running = self._learned.running["student"]
        return {
            name: (running[f"{name}.running_mean".lstrip(".")], running[f"{name}.running_var".lstrip(".")])
            for name in self._layers
        }

    def _predict(self, x: Tensor) -> Tensor:
        self._memory.require_like(x)
        checks = Checks()
        logits = self._logits(x, checks, "teacher")
        if logits.shape[1] != self._empty.classes:
            raise ValueError(f"the network gives {logits.shape[1]} classes, num_classes={self._empty.classes}")
        entropy = entropy_of_logits(logits)
        found = checks.read(torch.stack((logits.argmax(1).double(), entropy.double())))  # [2, B]
        before = self._learned, self._memory.copy(), self._seen
        try:
            self._learn(x, found[0].astype(int).tolist(), found[1].tolist())
        except Exception:  # an update that fails undoes those before it
            self._learned, self._memory, self._seen = before
            raise
        self._note(entropy=entropy)
        return torch.softmax(logits, 1)

    def _learn(self, x: Tensor, labels: list[int], uncertainties: list[float]) -> None:
        """Take the samples x [B, ...] into memory one after the other; update whenever enough have come."""
        for sample, label, uncertainty in zip(x, labels, uncertainties, strict=True):
            self._memory.add(sample, label, uncertainty)
            self._seen += 1
            if self._seen % self.update_every == 0:
                self._update()

    def _update(self) -> None:
        """Take one step from the memory (1. to 3. of the module)."""
        (x, ages), checks = self._memory.content(), Checks()
        view = augmented(self.augment, x, seeded(self.seed, self._seen // self.update_every - 1))
        affine, moments = self._learned.affine, self._learned.moments
        running = {role: {name: v.clone() for name, v in self._learned.running[role].items()} for role in ROLES}
        target = torch.softmax(self._logits(x, checks, "teacher", running["teacher"]), 1)  # [n, K]
        with torch.enable_grad():
            losses = -(target * self._logits(view, checks, "student", running["student"]).log_softmax(1)).sum(1)
            checks.finite("the loss", losses)
            weights = to_device(torch.sigmoid(-ages).to(losses.dtype), losses.device)  # E(A)
            loss = (weights * losses).mean() + self._pull()
            gradients = torch.autograd.grad(loss, list(affine["student"].values()), allow_unused=True)
        student, moments = self._optimizer.step(affine["student"], gradients, moments, checks.require_finite)
        checks.read()
        teacher = {name: torch.lerp(old, student[name].detach(), self.nu) for name, old in affine["teacher"].items()}
        self._learned = _Learned({"student": student, "teacher": teacher}, running, moments)

    def _logits(self, x: Tensor, checks: Checks, role: str, running: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return a role's logits [B, K]; with `running` statistics, which are updated in place, those of an update."""
        for layer in self._layers.values():
            layer.updating = running is not None
        values = {**self._learned.affine[role], **(self._learned.running[role] if running is None else running)}
        logits: Tensor = functional_call(self._network, values, (x,))
        checks.finite("the network's output", logits.detach())
        return logits

    def _reset(self) -> None:
        source = {**dict(self._network.named_parameters()), **dict(self._network.named_buffers())}
        statistics = [
            f"{layer}.{part}".lstrip(".") for layer in self._layers for part in ("running_mean", "running_var")
        ]
        affine = {role: {name: source[name].detach().clone() for name in self._names} for role in ROLES}
        running = {role: {name: source[name].clone() for name in statistics} for role in ROLES}
        for value in affine["student"].values():
            value.requires_grad_()
        self._learned = _Learned(affine, running, self._optimizer.init(affine["teacher"]))
        self._memory, self._seen = self._empty.copy(), 0
        self._anchor_here()

    def _tensors(self) -> dict[str, Tensor]:
        """Return the adapter's own tensors of fixed shape, by their names in the state."""
        moments = prefixed("optimizer", self._learned.moments)
        return {**self.trained(), **self.normalisation(), **moments, **self._anchor_state()}

    def _state(self) -> dict[str, Tensor]:
        return {**self._tensors(), **prefixed("memory", self._memory.state()), "seen": torch.tensor(self._seen)}

    def _varies(self, name: str) -> bool:
        return name.startswith("memory.")

    def _load(self, state: dict[str, Tensor]) -> None:
        prefix, own = "memory.", self._tensors()
        memory = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        samples = memory["samples"] = memory["samples"].to(own[f"teacher.{self._names[0]}"].device)
        if samples.numel() and samples.dtype not in {value.dtype for value in self.model.parameters()}:
            raise ValueError(
                f"state 'memory.samples' of RoTTA: {samples.dtype} is no dtype of the network's parameters"
            )
        self._memory = self._empty.loaded(memory)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._seen = int(state["seen"])


def _flat(by_role: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of both roles, as "<role>.<name>"."""
    return {f"{role}.{name}": value for role, values in by_role.items() for name, value in values.items()}
