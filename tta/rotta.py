"""RoTTA: robust BatchNorm statistics, and a student that learns from a balanced memory what its teacher says.

Robust Test-Time Adaptation in Dynamic Scenarios (Yuan, Xie, Li, CVPR 2023), section 3. Every batch is predicted by the
teacher as it is. Then its samples enter a memory one after the other (`rotta_memory`), and after every `update_every`
of them, with the memory's samples x of ages A (in memory sizes):

1. student and teacher normalise with robust statistics (`rotta_norm`), which both update from what they are given;
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
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from tta.bn_adapt import check_finite
from tta.collaborator import Collaborator, shared_parameters
from tta.heads import check_number, class_count
from tta.rotta_memory import Memory
from tta.rotta_norm import with_robust_norm
from tta.tent import Descent, entropy_of_logits
from tta.views import Views

ROLES = ("student", "teacher")
#: Endings of the names of state that cannot be negative.
NON_NEGATIVE = ("running_var", "second", "step", "seen")


class _Learned(NamedTuple):
    """All that an update replaces by new values; none of it is changed in place during a batch."""

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
        Any network with BatchNorm; `models.TwoHead` predicts with its global head.
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
        `augment(x [n, ...], generator) -> [n, ...]`, the strong views; None: `tta.views.Views()`, for images.
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
        augment: Callable[[Tensor, Generator], Tensor] | None = None,
        seed: int = 0,
        record: bool = True,
        proximal: float = 0.0,
    ) -> None:
        if update_every < 1 or seed < 0:
            raise ValueError(f"update_every={update_every} must be at least 1, seed={seed} at least 0")
        check_number("alpha", alpha, 0, 1)
        check_number("nu", nu, 0, 1)
        super().__init__(model, record=record, proximal=proximal)
        self.update_every, self.nu, self.seed = update_every, nu, seed
        self.augment = Views() if augment is None else augment
        self._descent = Descent("adam", lr)
        self._empty = Memory(capacity, class_count(model, num_classes), lambda_t, lambda_u)
        self._network, self._layers = with_robust_norm(copy.deepcopy(model).requires_grad_(False), alpha)
        affine = {f"{layer}.{part}".lstrip(".") for layer in self._layers for part in ("weight", "bias")}
        self._names = [name for name in shared_parameters(model) if name in affine]
        if not self._names:
            raise ValueError(f"no BatchNorm layer of {type(model).__name__} has weights that may be trained")
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
        # What is learned is made of ordinary tensors, also where the caller is in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if x.is_inference():
                x = x.clone()
            logits = self._logits(x, "teacher")
            if logits.shape[1] != self._empty.classes:
                raise ValueError(f"the network gives {logits.shape[1]} classes, num_classes={self._empty.classes}")
            entropy = entropy_of_logits(logits)
            before = self._learned, self._memory.copy(), self._seen
            try:
                self._learn(x, logits.argmax(1).tolist(), entropy.tolist())
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
        x, ages = self._memory.content()
        view = self.augment(x, self._generator())
        if view.shape != x.shape:
            raise ValueError(f"augment made {tuple(view.shape)} of a batch of shape {tuple(x.shape)}")
        affine, moments = self._learned.affine, self._learned.moments
        running = {role: {name: v.clone() for name, v in self._learned.running[role].items()} for role in ROLES}
        target = torch.softmax(self._logits(x, "teacher", running["teacher"]), 1)  # [n, K]
        with torch.enable_grad():
            losses = -(target * self._logits(view, "student", running["student"]).log_softmax(1)).sum(1)
            check_finite("the loss", losses)
            loss = (torch.sigmoid(-ages).to(losses) * losses).mean() + self._pull()
            gradients = torch.autograd.grad(loss, list(affine["student"].values()), allow_unused=True)
        student, moments = self._descent.step(affine["student"], gradients, moments)
        teacher = {name: torch.lerp(old, student[name].detach(), self.nu) for name, old in affine["teacher"].items()}
        self._learned = _Learned({"student": student, "teacher": teacher}, running, moments)

    def _logits(self, x: Tensor, role: str, running: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return a role's logits [B, K]; with `running` statistics, which are updated in place, those of an update."""
        for layer in self._layers.values():
            layer.updating = running is not None
        values = {**self._learned.affine[role], **(self._learned.running[role] if running is None else running)}
        logits: Tensor = functional_call(self._network, values, (x,))
        check_finite("the network's output", logits)
        return logits

    def _generator(self) -> Generator:
        """Return the CPU generator of the views of the update that is due."""
        key = np.random.SeedSequence(self.seed, spawn_key=(self._seen // self.update_every - 1,))
        return Generator().manual_seed(int(key.generate_state(1, np.uint64)[0]))

    def _reset(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            source = {**dict(self._network.named_parameters()), **dict(self._network.named_buffers())}
            statistics = [
                f"{layer}.{part}".lstrip(".") for layer in self._layers for part in ("running_mean", "running_var")
            ]
            affine = {role: {name: source[name].detach().clone() for name in self._names} for role in ROLES}
            running = {role: {name: source[name].clone() for name in statistics} for role in ROLES}
            for value in affine["student"].values():
                value.requires_grad_()
            self._learned = _Learned(affine, running, self._descent.start(affine["teacher"]))
            self._memory, self._seen = self._empty.copy(), 0
            self._anchor_here()

    def _tensors(self) -> dict[str, Tensor]:
        """Return our own tensors of fixed shape, by their names in the state."""
        moments = {f"optimizer.{name}": value for name, value in self._learned.moments.items()}
        return {**self.trained(), **self.normalisation(), **moments, **self._anchor_state()}

    def _state(self) -> dict[str, Tensor]:
        memory = {f"memory.{name}": value for name, value in self._memory.state().items()}
        return {**self._tensors(), **memory, "seen": torch.tensor(self._seen)}

    def _load(self, state: dict[str, Tensor]) -> None:
        own = {**self._tensors(), "seen": torch.tensor(self._seen)}
        for name, expected in own.items():
            value = state[name]
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise ValueError(
                    f"state {name!r} of RoTTA: {value.dtype} of shape {tuple(value.shape)} does not fit "
                    f"{expected.dtype} of shape {tuple(expected.shape)}"
                )
            if name.endswith(NON_NEGATIVE) and bool((value < 0).any()):
                raise ValueError(f"state {name!r} of RoTTA holds negative values")
        prefix = "memory."
        with torch.inference_mode(False), torch.no_grad():
            memory = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            memory["samples"] = memory["samples"].to(own[f"teacher.{self._names[0]}"].device)
            self._memory = self._empty.loaded(memory)
            for name, tensor in self._tensors().items():
                tensor.copy_(state[name])
            self._seen = int(state["seen"])


def _flat(by_role: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of both roles, as "<role>.<name>"."""
    return {f"{role}.{name}": value for role, values in by_role.items() for name, value in values.items()}
