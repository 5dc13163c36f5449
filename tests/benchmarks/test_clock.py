"""The simulated clock: cases by hand, and against a simulation of every event on integer times."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.arrivals import Taken, schedule


def spans(taken: list[Taken]) -> list[tuple[int, int, float]]:
    return [(one.first, one.stop, one.start) for one in taken]


def test_one_at_a_time_by_hand() -> None:
    # 2.5 intervals a sample, two can wait. At 2.5 samples 1 and 2 wait. At 5 it is 3, 4 and, just now, 5: the device
    # takes 3 before 5 overwrites it; 2 was overwritten by 4. At 7.5 it is 6 and 7; at 10 it takes 8, as it did 3.
    taken = schedule(9, 1, lambda batch: 2.5 * batch, queue=2)
    assert spans(taken) == [(0, 1, 0), (1, 2, 2.5), (3, 4, 5), (6, 7, 7.5), (8, 9, 10)]
    assert [one.end for one in taken] == [2.5, 5, 7.5, 10, 12.5]


def test_what_waits_is_taken_at_once_by_hand() -> None:
    # 1 + b/2 a batch of b: one sample alone is too slow, two at once are just fast enough; nothing is missed.
    taken = schedule(8, 1, lambda batch: 1 + batch / 2, queue=4, most=4)
    assert spans(taken) == [(0, 1, 0), (1, 2, 1.5), (2, 4, 3), (4, 6, 5), (6, 8, 7)]


def test_batches_of_a_fixed_size_by_hand() -> None:
    # Three at a time in 4 intervals: 0 to 2 from 2 on; at 6 samples 3, 4, 5; at 10 sample 6 has been overwritten by 9,
    # which is not scored but comes; 7 is the last one and is not kept waiting for company.
    taken = schedule(8, 1, lambda batch: 4.0, queue=3, least=3, most=3)
    assert spans(taken) == [(0, 3, 2), (3, 6, 6), (7, 8, 10)]


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
    taken = schedule(samples, interval, lambda batch: cost[batch - 1], queue, least, most)
    assert spans(taken) == tick_by_tick(*device)


@given(devices(), st.floats(0.01, 10))
def test_order_sizes_and_waiting(device: tuple[int, int, list[int], int, int, int], unit: float) -> None:
    samples, ticks, cost, queue, least, most = device
    interval = ticks * unit
    taken = schedule(samples, interval, lambda batch: cost[batch - 1] / 3, queue, least, most)
    answered = [place for one in taken for place in range(one.first, one.stop)]
    assert answered == sorted(set(answered))  # in order of arrival, none twice
    missed = set(range(samples)) - set(answered)
    assert len(answered) + len(missed) == samples
    assert not samples or answered[0] == 0
    for before, after in itertools.pairwise(taken):
        assert before.end <= after.start
    for one in taken:
        size = one.stop - one.first
        assert size <= most
        assert size >= least or one.stop == samples
        assert one.end == one.start + cost[size - 1] / 3
        assert (one.stop - 1) * interval <= one.start <= (one.first + queue) * interval


@given(st.integers(0, 60), st.floats(0.001, 10), st.floats(0.01, 0.99), st.integers(1, 5), st.integers(0, 3))
def test_who_is_fast_enough_misses_nothing(samples: int, interval: float, share: float, batch: int, spare: int) -> None:
    # One by one a sample's interval is enough, in batches that of the batch; then nobody waits for more than a batch.
    seconds = share * batch * interval
    taken = schedule(samples, interval, lambda size: seconds, queue=batch + spare, least=batch, most=batch)
    assert [place for one in taken for place in range(one.first, one.stop)] == list(range(samples))
    assert all(one.end <= (one.first + 2 * batch) * interval for one in taken)
