"""MEMO: marginal entropy minimisation over random views, on all weights, for each test sample alone.

MEMO: Test Time Robustness via Adaptation and Augmentation (Zhang, Levine, Finn, NeurIPS 2022), Algorithm 1, as a
baseline of Test-Time Robust Personalization for Federated Learning (Jiang and Lin, ICLR 2023, appendix B, Algorithm 3;
32 views, 3 steps of SGD at 5e-4, appendix C.1):

    w ← w - η ∇_w H(1/V Σ_v p(ŷ(x_v; w))),   plain SGD, from the same w for every sample

All parameters are tuned, as copies, also those with requires_grad = False. The network is used in evaluation mode, so
BatchNorm keeps its running statistics. New views are drawn at every step, from a generator that depends on (seed,
position in the stream, step) only.

Samples are independent. On a CPU they are tuned one after the other, the views of one in a batch (`by_loop`); on a GPU
many at once, as a vmap of the gradient (`by_vmap`). Both compute the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedtta.models.memory import budget, in_parts, saved_bytes
from fedtta.tta.augmix import AugMix
from fedtta.tta.base import Adapter
from fedtta.tta.checks import check_choice, check_least, check_number
from fedtta.tta.heads import HEADS, check_two_heads
from fedtta.tta.statistics import Statistics
from fedtta.tta.views import Augment, augmented, seeded

MODES = ("auto", "loop", "vmap")
CPU_CHUNK = 8  # samples of a vmap on a CPU
LARGEST_CHUNK = 256  # samples of a vmap on a GPU, if memory allows
MEMORY_SHARE = 0.25  # of what this process plans with

#: How logits [V, K] are read off a network, given x [V, ...] and a scalar e; only "global" takes any network.
READOUTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "global": lambda model, x, e: model(x),
    "personal": lambda model, x, e: model.personal_head(model.features(x)),
    "mix": lambda model, x, e: _mix(model, model.features(x), e),
}


def _mix(model: Any, z: Tensor, e: Tensor) -> Tensor:
    """Return e ŷ^g + (1 - e) ŷ^l for features z [V, d]."""
    return e * model.head(z) + (1 - e) * model.personal_head(z)


def marginal_entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy, in nats, of the mean over views of class probabilities [V, K]."""
    return torch.special.entr(probabilities.mean(0)).sum()


def marginal_entropy_of_logits(logits: Tensor) -> Tensor:
    """Return `marginal_entropy(softmax(logits [V, K]))`; its gradient is finite also where p = 0."""
    log_mean = logits.log_softmax(1).logsumexp(0) - math.log(len(logits))  # [K]
    return -(log_mean.exp() * log_mean).sum()


@dataclass(frozen=True)
class Tuning:
    """How weights are tuned on a sample.

    Parameters
    ----------
    views : int
        V, views a step, at least 1.
    steps : int
        SGD steps a sample; 0 tunes nothing.
    lr : float
        η, constant, finite and not negative.
    augment : callable
        `augment(x, generator) -> views`: see `Augment`.
    seed : int
        Of the views, not negative.
    mode : str
        "loop", "vmap", or "auto": vmap on a GPU, a loop on a CPU.
    chunk : int or None
        Samples tuned together; None: 1 in a loop, in a vmap as many as a quarter of this process's share of the GPU's
        memory holds. Fewer where the memory does not suffice.
    """

    views: int
    steps: int
    lr: float
    augment: Augment = field(default_factory=AugMix)
    seed: int = 0
    mode: str = "auto"
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_least(1, views=self.views)
        check_least(0, steps=self.steps, seed=self.seed)
        check_number("lr", self.lr, 0, math.inf)
        check_choice("mode", self.mode, MODES)
        check_least(1, chunk=1 if self.chunk is None else self.chunk)

    def generator(self, position: int, step: int) -> Generator:
        """Return the CPU generator for the views of the sample at `position`, at `step`."""
        return seeded(self.seed, position, step)

    def views_of(self, x: Tensor, position: int) -> Tensor:
        """Return views [B, steps, V, ...] of the samples x [B, ...], the first of which is at `position`."""
        shape = (len(x), self.steps, self.views, *x.shape[1:])
        generators = [self.generator(position + i, step) for i in range(len(x)) for step in range(self.steps)]
        if not generators:
            return x.new_empty(shape)
        copies = x.repeat_interleave(self.steps * self.views, 0)  # [B steps V, ...]
        return augmented(self.augment, copies, *generators).view(shape)


class Readout(nn.Module):
    """A network and a way to read logits off it, as one module: `functional_call` exchanges its weights."""

    def __init__(self, model: nn.Module, head: Literal["global", "personal", "mix"]) -> None:
        super().__init__()
        check_choice("head", head, tuple(READOUTS))
        if head != "global":
            check_two_heads(model, f"the {head} readout")
        self.model = model
        self.read = READOUTS[head]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return logits [V, K] of x [V, ...]; `weight` (scalar) is e where heads are mixed."""
        return self.read(self.model, x, weight)


def by_loop(readout: Readout, views: Tensor, x: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Tune on each sample and predict it; the reference that `by_vmap` equals.

    Parameters
    ----------
    readout : Readout
        Where tuning starts; left as it is.
    views : Tensor [B, steps, V, ...]
        Fresh views for each step.
    x : Tensor [B, ...]
        The samples themselves, at least one.
    weight : Tensor [B]
        e of each sample.
    lr : float
        η.

    Returns
    -------
    (Tensor [B, K], Tensor [B, steps])
        Logits with the tuned weights; the loss before each step, in nats.
    """
    start = {name: value.detach() for name, value in readout.named_parameters()}
    tuned = {name: value.clone().requires_grad_() for name, value in start.items()}
    leaves = list(tuned.values())
    logits, losses = [], views.new_zeros(views.shape[:2])
    for i in range(len(x)):
        torch._foreach_copy_(leaves, list(start.values()))
        for step in range(views.shape[1]):
            with torch.enable_grad():
                loss = marginal_entropy_of_logits(functional_call(readout, tuned, (views[i, step], weight[i])))
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            losses[i, step] = loss.detach()
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:  # a parameter that this readout does not use
                    leaf.sub_(gradient, alpha=lr)
        logits.append(functional_call(readout, tuned, (x[i : i + 1], weight[i])))
    return torch.cat(logits), losses


def by_vmap(readout: Readout, views: Tensor, x: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Return what `by_loop` does, for all samples at once: B copies of the weights are in memory."""
    # cuDNN's BatchNorm refuses channels-last images within vmap, and convolutions give those where their weights are so
    start = {name: value.detach().contiguous() for name, value in readout.named_parameters()}

    def loss_of(params: dict[str, Tensor], batch: Tensor, e: Tensor) -> Tensor:
        return marginal_entropy_of_logits(functional_call(readout, params, (batch, e)))

    def one(views: Tensor, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        params, losses = start, []
        for batch in views:  # [V, ...]
            gradients, loss = grad_and_value(loss_of)(params, batch, e)
            params = {name: value - lr * gradients[name] for name, value in params.items()}
            losses.append(loss)
        logits = functional_call(readout, params, (x.unsqueeze(0), e)).squeeze(0)  # [K]
        return logits, torch.stack(losses) if losses else views.new_zeros(0)

    return vmap(one)(views.contiguous(), x.contiguous(), weight)


def sample_bytes(readout: Readout, x: Tensor, weight: Tensor, tuning: Tuning) -> int:
    """Estimate the memory that one sample takes in `by_vmap`.

    What one image's forward pass saves for the backward pass (weights aside), times the views, doubled for
    the gradients on the way back, and weights, gradients and updated weights once each for the sample.
    """
    params = {name: value.detach().clone().requires_grad_() for name, value in readout.named_parameters()}
    weights = list(params.values())
    saved = saved_bytes(lambda: functional_call(readout, params, (x[:1], weight[0])), weights)
    return 2 * tuning.views * (saved + tuning.steps * x[:1].nbytes) + 3 * sum(value.nbytes for value in weights)


def tune_and_predict(
    readout: Readout, x: Tensor, weight: Tensor, position: int, tuning: Tuning
) -> tuple[Tensor, Tensor]:
    """Tune on every sample of a stream's next batch and predict it with its own tuned weights.

    Parameters
    ----------
    readout : Readout
        Where tuning starts; left bit for bit as it is.
    x : Tensor [B, ...]
        Samples; B may be 0.
    weight : Tensor [B]
        e of each sample, a constant.
    position : int
        Of the first sample in the stream.
    tuning : Tuning
        Views, steps, rate, seed and how to compute.

    Returns
    -------
    (Tensor [B, K], Tensor [B, steps])
        Logits with the tuned weights; the loss before each step, in nats.

    Raises
    ------
    ValueError
        Tuning left the finite numbers (the rate is too high); the message names the samples.
    """
    if len(x) == 0:
        return readout(x, weight.new_ones(())), x.new_zeros(0, tuning.steps)
    vectorised = x.is_cuda if tuning.mode == "auto" else tuning.mode == "vmap"
    solve = by_vmap if vectorised else by_loop
    with torch.inference_mode(False), torch.no_grad():  # the solvers switch gradients on where they need them
        x, weight = x.clone(), weight.clone()  # tensors of a caller's inference mode have no gradients

        def solved(part: slice) -> tuple[Tensor, Tensor]:
            views = tuning.views_of(x[part], position + part.start)
            return solve(readout, views, x[part], weight[part], tuning.lr)

        chunk = tuning.chunk or (_vmap_chunk(readout, x, weight, tuning) if vectorised else 1)
        parts = in_parts(len(x), chunk, solved)
    logits, losses = (torch.cat(part) for part in zip(*parts, strict=True))
    finite = torch.isfinite(logits).all(1)  # [B]
    if not bool(finite.all()):
        bad = torch.nonzero(~finite).flatten().tolist()
        raise ValueError(f"tuning at lr={tuning.lr} left the finite numbers for samples {bad} of the batch")
    return logits, losses


def _vmap_chunk(readout: Readout, x: Tensor, weight: Tensor, tuning: Tuning) -> int:
    """Return how many samples a vmap takes at once on this device."""
    if not x.is_cuda:
        return CPU_CHUNK
    memory = MEMORY_SHARE * budget(x.device)
    return max(1, min(LARGEST_CHUNK, int(memory / sample_bytes(readout, x, weight, tuning))))


class MEMO(Adapter):
    """Marginal entropy minimisation with one test point: every sample starts from the given weights.

    Parameters
    ----------
    model : nn.Module
        The network; a `TwoHead` where `head` is "personal". All its parameters are tuned (as copies),
        whatever their `requires_grad`.
    statistics : Statistics or None
        Not needed.
    head : str
        Which head predicts and is tuned: "global" (`model(x)`) or "personal".
    views, steps, lr, augment, seed, mode, chunk
        See `Tuning`; no augment means `AugMix()`, which needs images [B, C, H, W].
    record : bool
        Keep the report: "loss" [n, steps], the marginal entropy (nats) of each sample before each step.
    """

    name = "memo"
    paper = "MEMO: Test Time Robustness via Adaptation and Augmentation (NeurIPS 2022)"
    adapts = "all parameters, for one sample"
    needs = frozenset({"gradients"})
    views = AugMix

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        head: Literal["global", "personal"] = "global",
        views: int = 32,
        steps: int = 3,
        lr: float = 5e-4,
        augment: Augment | None = None,
        seed: int = 0,
        mode: Literal["auto", "loop", "vmap"] = "auto",
        chunk: int | None = None,
        *,
        record: bool = True,
    ) -> None:
        super().__init__(model, record=record)
        check_choice("head", head, tuple(HEADS))
        self.tuning = Tuning(views, steps, lr, augment or AugMix(), seed, mode, chunk)
        self._readout = Readout(model, head)
        self._position = 0

    def _predict(self, x: Tensor) -> Tensor:
        unused = x.new_ones(len(x))  # there is nothing to mix
        logits, losses = tune_and_predict(self._readout, x, unused, self._position, self.tuning)
        self._note(loss=losses)
        self._position += len(x)
        return logits.softmax(1)

    def _reset(self) -> None:
        self._position = 0

    def _state(self) -> dict[str, Tensor]:
        return {"position": torch.tensor(self._position)}

    def _load(self, state: dict[str, Tensor]) -> None:
        self._position = int(state["position"])
