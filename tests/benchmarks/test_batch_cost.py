"""What batches cost: the choice of a batch, lines between measured sizes, and timing with a clock that does not run."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.batch_cost import PATIENCE, Cost, measure
from settings import Settings
from tta import Adapter


def test_a_sample_is_taken_with_those_that_make_it_cheaper() -> None:
    # Seconds a sample: 3, 2, 1.05, 1: four at once are within a tenth of the best.
    cost = Cost.of_samples((1, 2, 4, 8), (3, 4, 4.2, 8))
    assert (cost.least, cost.most) == (1, 4)
    assert (cost.unhurried, cost.at_best) == (3, 1.05)
    # A method that tunes sample by sample: larger batches bring nothing, so it answers one by one.
    assert Cost.of_samples((1, 2, 4), (1, 1.98, 3.9)).most == 1


def test_batches_are_taken_whole() -> None:
    cost = Cost.of_batches((1, 2, 4), (3, 4, 6))
    assert (cost.least, cost.most) == (4, 4)
    assert cost.unhurried == cost.at_best == 1.5


def test_between_measured_sizes_and_beyond() -> None:
    cost = Cost.of_samples((2, 4), (3, 4))
    assert [cost(batch) for batch in (1, 2, 3, 4, 6)] == [1.5, 3, 3.5, 4, 6]


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0, 1), (1.0, 1.0)), ((1,), (0.0,))]
)
def test_costs_that_are_none(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="each size needs a time above 0"):
        Cost(sizes, seconds, 1, 1)
    with pytest.raises(ValueError, match="1 <= least <= most"):
        Cost((1,), (1.0,), 2, 1)


class Clock:
    """Stands still but while an adapter works."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker(Adapter):
    """Takes 1 ms and so much for each sample, in every third call a second more."""

    per: ClassVar[Literal["sample", "batch"]] = "sample"

    def __init__(self, clock: Clock, each: float, per: Literal["sample", "batch"] = "sample") -> None:
        super().__init__(nn.Identity())
        self.clock, self.each, self.calls, self.since_reset = clock, each, 0, 0
        self.per = per  # type: ignore[misc]

    def _predict(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.since_reset += 1
        self.clock.now += 0.001 + self.each * len(x) + (1.0 if self.calls > 5 and self.calls % 3 == 0 else 0.0)
        return x.flatten(1)

    def _reset(self) -> None:
        self.since_reset = 0


def test_medians_of_a_clock_that_does_not_run() -> None:
    clock = Clock()
    fast, slow, batches = Worker(clock, 0.002), Worker(clock, PATIENCE / 2), Worker(clock, 0.003, "batch")
    known: dict[str, Any] = {"fast": fast, "slow": slow, "batches": batches}
    settings = Settings(adapt_batch_size=6, eval_batch_size=10)
    x = torch.rand(3, 1, 2, 2)  # shorter than a batch
    costs = measure(known, x, settings, 12, 5, Console(quiet=True), clock)
    assert costs["fast"].sizes == (1, 2, 4, 8, 10)
    assert costs["fast"].seconds == pytest.approx((0.003, 0.005, 0.009, 0.017, 0.021))
    assert (costs["fast"].least, costs["fast"].most) == (1, 4)
    assert costs["slow"].sizes == (1, 2)  # the second one took longer than anyone waits for
    assert costs["slow"].most == 1
    assert costs["batches"].sizes == (1, 2, 4, 6)
    assert (costs["batches"].least, costs["batches"].most) == (6, 6)
    assert costs["batches"](6) == pytest.approx(0.019)
    assert [one.since_reset for one in (fast, slow, batches)] == [0, 0, 0]
    short = measure({"fast": Worker(clock, 0.002)}, x, settings, 6, 1, Console(quiet=True), clock)
    assert short["fast"].sizes == (1, 2, 4, 6)  # what never waits is not timed
