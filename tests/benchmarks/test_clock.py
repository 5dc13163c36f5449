"""The simulated clock: cases by hand, a simulation of every event on integer times, and costs of batches."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

from fedtta.benchmarks.tables.clock import PATIENCE, Batch, Cost, measure_costs, schedule
from fedtta.settings import Settings
from fedtta.tta import Adapter


def spans(batches: list[Batch]) -> list[tuple[int, int, float]]:
    return [(one.first, one.stop, one.start) for one in batches]


def test_one_at_a_time_by_hand() -> None:
    # 2.5 intervals a sample, two can wait. At 2.5 samples 1 and 2 wait. At 5 it is 3, 4 and, just now, 5: the device
    # takes 3 before 5 overwrites it; 2 was overwritten by 4. At 7.5 it is 6 and 7; at 10 it takes 8, as it did 3.
    batches = schedule(9, 1, lambda batch: 2.5 * batch, queue=2)
    assert spans(batches) == [(0, 1, 0), (1, 2, 2.5), (3, 4, 5), (6, 7, 7.5), (8, 9, 10)]
    assert [one.end for one in batches] == [2.5, 5, 7.5, 10, 12.5]


def test_what_waits_is_taken_at_once_by_hand() -> None:
    # 1 + b/2 a batch of b: one sample alone is too slow, two at once are just fast enough; nothing is missed.
    batches = schedule(8, 1, lambda batch: 1 + batch / 2, queue=4, most=4)
    assert spans(batches) == [(0, 1, 0), (1, 2, 1.5), (2, 4, 3), (4, 6, 5), (6, 8, 7)]


def test_batches_of_a_fixed_size_by_hand() -> None:
    # Three at a time in 4 intervals: 0 to 2 from 2 on; at 6 samples 3, 4, 5; at 10 sample 6 has been overwritten by 9,
    # which is not scored but comes; 7 is the last one and is not kept waiting for company.
    batches = schedule(8, 1, lambda batch: 4.0, queue=3, least=3, most=3)
    assert spans(batches) == [(0, 3, 2), (3, 6, 6), (7, 8, 10)]


def test_a_stream_may_be_empty() -> None:
    assert schedule(0, 1, lambda batch: 1.0, queue=1) == []


@pytest.mark.parametrize(
    "wrong", [{"interval": 0.0}, {"interval": float("nan")}, {"least": 0}, {"least": 3, "most": 3}, {"least": 2}]
)
def test_what_could_never_work_is_refused(wrong: dict[str, float]) -> None:
    known = {"samples": 3, "interval": 1.0, "queue": 2, "least": 1, "most": 1, **wrong}
    with pytest.raises(ValueError, match="1 <= least <= most, queue"):
        schedule(cost=lambda batch: 1.0, **known)  # type: ignore[arg-type]


def tick_by_tick(
    samples: int, interval: int, cost: list[int], queue: int, least: int, most: int
) -> list[tuple[int, int, int]]:
    """Return (first, stop, start) of every batch: at each whole time something arrives, is taken, is overwritten."""
    waiting: deque[int] = deque()
    found, free, arrived = [], 0, 0
    for now in range((samples + queue + 2) * interval + sum(cost) * (samples + 1)):
        if now % interval == 0:
            waiting.append(arrived)
            arrived += 1
        scored = [one for one in waiting if one < samples]
        if free <= now and (len(scored) >= least or (scored and arrived >= samples)):
            batch = [waiting.popleft() for _ in scored[:most]]
            found.append((batch[0], batch[-1] + 1, now))
            free = now + cost[len(batch) - 1]
        while len(waiting) > queue:
            waiting.popleft()
    return found


@st.composite
def devices(draw: st.DrawFn) -> tuple[int, int, list[int], int, int, int]:
    """Draw samples, interval, cost of every batch, queue, least and most."""
    least = draw(st.integers(1, 4))
    most = draw(st.integers(least, 6))
    cost = draw(st.lists(st.integers(1, 30), min_size=most, max_size=most))
    return draw(st.integers(0, 25)), draw(st.integers(1, 6)), cost, draw(st.integers(least, 8)), least, most


@given(devices())
def test_it_is_what_happens_event_by_event(device: tuple[int, int, list[int], int, int, int]) -> None:
    samples, interval, cost, queue, least, most = device
    batches = schedule(samples, interval, lambda batch: cost[batch - 1], queue, least, most)
    assert spans(batches) == tick_by_tick(*device)


@given(devices(), st.floats(0.01, 10))
def test_order_sizes_and_waiting(device: tuple[int, int, list[int], int, int, int], unit: float) -> None:
    samples, ticks, cost, queue, least, most = device
    interval = ticks * unit
    batches = schedule(samples, interval, lambda batch: cost[batch - 1] / 3, queue, least, most)
    answered = [place for one in batches for place in range(one.first, one.stop)]
    assert answered == sorted(set(answered))  # in order of arrival, none twice
    missed = set(range(samples)) - set(answered)
    assert len(answered) + len(missed) == samples
    assert not samples or answered[0] == 0
    for before, after in itertools.pairwise(batches):
        assert before.end <= after.start
    for one in batches:
        size = one.stop - one.first
        assert size <= most
        assert size >= least or one.stop == samples
        assert one.end == one.start + cost[size - 1] / 3
        assert (one.stop - 1) * interval <= one.start <= (one.first + queue) * interval


@given(st.integers(0, 60), st.floats(0.001, 10), st.floats(0.01, 0.99), st.integers(1, 5), st.integers(0, 3))
def test_who_is_fast_enough_misses_nothing(samples: int, interval: float, share: float, batch: int, spare: int) -> None:
    # One by one a sample's interval is enough, in batches that of the batch; no sample waits for more than a batch.
    seconds = share * batch * interval
    batches = schedule(samples, interval, lambda size: seconds, queue=batch + spare, least=batch, most=batch)
    assert [place for one in batches for place in range(one.first, one.stop)] == list(range(samples))
    assert all(one.end <= (one.first + 2 * batch) * interval for one in batches)


def test_a_sample_is_taken_with_those_that_make_it_cheaper() -> None:
    # Seconds a sample: 3, 2, 1.05, 1: four at once are within a tenth of the best.
    cost = Cost.of_samples((1, 2, 4, 8), (3, 4, 4.2, 8))
    assert (cost.least, cost.most) == (1, 4)
    assert (cost.per_single_sample, cost.at_best) == (3, 1.05)
    # A method that tunes sample by sample: larger batches bring nothing, so it answers one by one.
    assert Cost.of_samples((1, 2, 4), (1, 1.98, 3.9)).most == 1


def test_batches_are_taken_whole() -> None:
    cost = Cost.of_batches((1, 2, 4), (3, 4, 6))
    assert (cost.least, cost.most) == (4, 4)
    assert cost.per_single_sample == cost.at_best == 1.5


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
    costs = measure_costs(known, x, settings, 12, 5, Console(quiet=True), clock)
    assert costs["fast"].sizes == (1, 2, 4, 8, 10)
    assert costs["fast"].seconds == pytest.approx((0.003, 0.005, 0.009, 0.017, 0.021))
    assert (costs["fast"].least, costs["fast"].most) == (1, 4)
    assert costs["slow"].sizes == (1, 2)  # the second took longer than PATIENCE
    assert costs["slow"].most == 1
    assert costs["batches"].sizes == (1, 2, 4, 6)
    assert (costs["batches"].least, costs["batches"].most) == (6, 6)
    assert costs["batches"](6) == pytest.approx(0.019)
    assert [one.since_reset for one in (fast, slow, batches)] == [0, 0, 0]
    short = measure_costs({"fast": Worker(clock, 0.002)}, x, settings, 6, 1, Console(quiet=True), clock)
    assert short["fast"].sizes == (1, 2, 4, 6)  # what never waits is not timed
