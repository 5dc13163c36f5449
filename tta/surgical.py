"""Surgical adaptation: entropy minimisation in one block of the network, chosen on labelled validation data.

Surgical Fine-Tuning Improves Adaptation to Distribution Shifts (Lee, Chen, Tajwar, Kumar, Yao, Liang, Finn, ICLR 2023)
found that tuning one block can beat tuning all. This is its form without labels at test time, the baseline of Adaptive
Test-Time Personalization for Federated Learning (Bao, Wei, Wang, He, NeurIPS 2023, section 6.1: "uses the validation
data to decide which blocks to adapt"). For every batch, from the source weights w_G, network in evaluation mode:

    w[l] = w_G[l] - η ∂/∂w[l] mean_b H(p(f(x_b; w_G)))      parameters l of the block
    w[l] = w_G[l] + η (batch statistic - w_G[l])            running means and variances of the block's BatchNorms

and the batch is predicted with w; nothing is carried on. It is ATP with the rate η for the modules of one block and 0
for all others, so the steps are those of `atp` (the clamp of variances included).

Defaults: η = 0.1 and one step, those of ATP's code; the paper chose its own on validation data and does not report it.

Decisions and deviations:

- A block is a layer with parameters of its own together with the normalisation layers that follow it, in order of
  definition. On ATP's CNN these are the paper's five; of a ResNet ATP takes the four stages and the last layer instead.
- ATP's code never moves running statistics: `adapt="params"` is what it computes. The default moves them, since the
  paper counts them among a block's modules.
- In a federated run the clients measure `block_scores` with the defaults, whatever the options of a row; with
  `adapt="params"` the block can be another than the one that its own scores would choose (`block` sets it).
- Personal and rotation head and frozen parameters are in no block.
"""

from __future__ import annotations

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn

from fedtta.models.layers import by_block
from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.atp import adapted, directions
from fedtta.tta.base import Adapter
from fedtta.tta.checks import Checks, check_choice, check_least, check_number
from fedtta.tta.modules import module_tensors
from fedtta.tta.statistics import Statistics


def blocks(model: nn.Module) -> dict[str, list[str]]:
    """Return the blocks of a network: name of the first layer → names of the block's tensors, in order of definition.

    Tensors are parameters that may be trained and the running statistics of BatchNorm layers.

    Raises
    ------
    ValueError
        There are none.
    """
    found = by_block(model, list(module_tensors(model)))
    if not found:
        raise ValueError(f"{type(model).__name__} has no block to adapt")
    return found


def block_scores(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    lr: float = 0.1,
    steps: int = 1,
    adapt: Literal["all", "params"] = "all",
    batch_size: int = 20,
) -> Tensor:
    """Return the accuracy after adapting each block alone, batch by batch.

    Parameters
    ----------
    model : nn.Module
        w_G; left as it is, but for evaluation mode.
    x : Tensor [n, ...]
        Validation samples, n at least 1.
    y : Tensor [n], integer
        Their labels. No adapter sees them.
    lr, steps, adapt
        See `Surgical`; choose them as they will be at test time.
    batch_size : int
        As at test time, at least 1; the last batch may be smaller. 20 is the paper's.

    Returns
    -------
    Tensor [blocks], float64
        In [0, 1], in the order of `blocks(model)`.

    Raises
    ------
    ValueError
        There is no sample, labels do not fit, or an option is out of range.
    """
    if len(x) == 0:
        raise ValueError("block_scores needs at least one labelled sample, x is empty")
    if y.shape != (len(x),) or y.is_floating_point():
        raise ValueError(f"labels must be integers of shape ({len(x)},), got {y.dtype} of shape {tuple(y.shape)}")
    check_least(1, batch_size=batch_size)
    scores = []
    for block in range(len(blocks(model))):
        adapter = Surgical(model, block=block, lr=lr, steps=steps, adapt=adapt, record=False)
        predicted = torch.cat([adapter.predict(batch).argmax(1) for batch in x.split(batch_size)])
        scores.append((predicted == y).double().mean())
    return torch.stack(scores)


class Surgical(Adapter):
    """Entropy descent in one block, from the source weights for every batch (see the module).

    Defined per batch: a sample's prediction depends on the others in its batch, not on earlier batches. `report()` has
    the `entropy` of every sample's returned prediction, in nats.

    Parameters
    ----------
    model : nn.Module
        Gives logits [B, K], for a two-head model those of the global head.
    statistics : Statistics or None
        Its `block_scores` [blocks], see the function of that name, choose the block where `block` is -1.
    block : int
        Index into `blocks(model)`, or -1: the block of the highest score, the first of equal ones.
    lr : float
        η, finite, 0 or more.
    steps : int
        Steps a batch, at least 1.
    adapt : "all" or "params"
        "params": weights and biases alone, the running statistics stay, as in ATP's code; "all": both.
    record : bool
        Keep the report.

    Raises
    ------
    ValueError
        An option is out of range, there are no scores where they are needed, or they do not fit the network.
    """

    name = "surgical"
    paper = "Surgical Fine-Tuning Improves Adaptation to Distribution Shifts (ICLR 2023)"
    adapts = "one block of layers"
    per = "batch"
    needs = frozenset({"block_scores"})

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        block: int = -1,
        lr: float = 0.1,
        steps: int = 1,
        adapt: Literal["all", "params"] = "all",
        record: bool = True,
    ) -> None:
        check_choice("adapt", adapt, ("all", "params"))
        check_number("lr", lr, 0, math.inf)
        check_least(1, steps=steps)
        super().__init__(model, record=record)
        self.steps, self.adapt = steps, adapt
        names = blocks(model)
        #: Name of the block, as `blocks` has it.
        self.block = _chosen(list(names), block, getattr(statistics, "block_scores", None))
        moved = set(names[self.block])
        self._network = copy.deepcopy(model)
        for name, value in self._network.named_parameters():
            value.requires_grad_(name in moved)  # the others need no gradient
        own = module_tensors(self._network)
        self._rates = {name: lr if name in moved else 0.0 for name in own}
        self._source = {name: own[name].detach().clone() for name in own if name in moved}

    def _predict(self, x: Tensor) -> Tensor:
        self._set(self._source)
        checks = Checks()
        for _ in range(self.steps):
            h = directions(self._network, x, self.adapt, checks)
            self._set(adapted(self._network, h, self._rates))
        logits = checks.finite("the adapted network's output", self._network(x))
        checks.read()
        self._note(entropy=entropy_of_logits(logits))
        return torch.softmax(logits, 1)

    def _set(self, values: dict[str, Tensor]) -> None:
        """Copy values of the block's tensors into the private network."""
        for name, value in module_tensors(self._network).items():
            if name in self._source:
                value.detach().copy_(values[name])


def _chosen(names: list[str], block: int, scores: Tensor | None) -> str:
    """Return the name of the block to adapt; raise ValueError where option or scores do not allow it."""
    if not -1 <= block < len(names):
        raise ValueError(f"block={block} must be 0..{len(names) - 1} ({', '.join(names)}), or -1: by the scores")
    if block >= 0:
        return names[block]
    if scores is None:
        raise ValueError(f"block=-1 needs the statistic block_scores; else give block=0..{len(names) - 1}")
    numbers = torch.as_tensor(scores).tolist()
    if torch.as_tensor(scores).shape != (len(names),) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"block_scores must be {len(names)} finite numbers, one a block, got {numbers}")
    return names[numbers.index(max(numbers))]
