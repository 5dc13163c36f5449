"""Which limits are on, and what results may count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedtta.messages.replies import Evaluated, EvaluationResult, RefinedRates, Summarized
from fedtta.server.limits import EvaluationLimits, Limits, RatesLimits, SharedLimits, StatisticsLimits, TrainLimits
from fedtta.server.rates import _summary
from fedtta.server.rounds import Outcome, Replied
from fedtta.settings import Settings
from tests.server.test_nodes import IDENTITY

KINDS = [TrainLimits, StatisticsLimits, RatesLimits, SharedLimits]
ALONE: list[dict[str, Any]] = [{"secure_aggregation": True}, {"aggregation": "krum"}, {"aggregation": "fedmedian"}]


def why_refused(settings: Settings, *totals: int, own: int = 40) -> list[str | None]:
    """Return why results on as many samples do not count, of clients with `own` test samples."""
    replies = [
        Evaluated(
            num_examples=own,
            checked=own,
            leaked=0,
            results=[EvaluationResult(label="fedavg", shift="natural", correct=0, total=total, seconds=0.1)],
        )
        for total in totals
    ]
    return EvaluationLimits.of(settings).refused(replies, [replace(IDENTITY, sizes=[5, 4, own])] * len(totals))


@pytest.mark.parametrize("kind", KINDS)
def test_limits_are_on_by_default_and_each_can_be_turned_off(kind: type[Limits]) -> None:
    default = kind.of(Settings())
    assert (default.share, default.factor) == (3.0, 3.0)
    assert kind.of(Settings(max_share=0.0)).share == 0
    assert kind.of(Settings(clip_factor=0.0)).factor == 0


@pytest.mark.parametrize("settings", ALONE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_robust_aggregations_and_secure_aggregation_do_without(kind: type[Limits], settings: dict[str, Any]) -> None:
    limits = kind.of(Settings(**settings))
    assert (limits.share, limits.factor) == (0, 0)


@pytest.mark.parametrize("settings", [{}, *ALONE], ids=str)
def test_results_are_limited_whatever_the_aggregation(settings: dict[str, Any]) -> None:
    """They are neither masked nor averaged by it."""
    reasons = why_refused(Settings(**settings), 40, 40, 10**18)
    assert reasons == [None, None, f"fedavg, natural: total = {10**18}, the client has 40 test samples"]


def test_results_on_other_images_than_the_clients_own() -> None:
    assert why_refused(Settings(), 200, 220, 600, own=40) == [None] * 3, "at most 3 times the median total"
    assert why_refused(Settings(), 200, 220, 700, own=40)[:2] == [None] * 2
    assert why_refused(Settings(), 200, 220, 700, own=40)[2] is not None
    assert why_refused(Settings(max_share=0.0), 200, 220, 700, own=40) == [None] * 3


def test_a_client_with_most_samples_makes_no_accuracy_of_rates_above_one() -> None:
    """The third client counts as 3 * 10 = 30 samples, of which 90 % = 27 are right: (5 + 5 + 27) / 50."""
    replies = [
        RefinedRates(rates={"a": np.zeros(())}, num_examples=n, loss=1.0, correct=right, seconds=0.1)
        for n, right in ((10, 5), (10, 5), (100, 90))
    ]
    limited = [one.reply for one in RatesLimits(3.0, 3.0)(replies)]
    assert [(one.num_examples, one.correct) for one in limited] == [(10, 5), (10, 5), (30, 27)]
    outcome = Outcome([0, 1, 2], [], [Replied(i, 1, one, 0) for i, one in enumerate(limited)])
    assert _summary(outcome, False)["accuracy"] == 37 / 50
    assert RatesLimits(0.0, 3.0)(replies)[2].reply == replies[2]


def test_a_distribution_that_is_pulled_back_still_sums_to_one() -> None:
    """The clients' median of each number does not; adapters refuse a mean that sums to anything else."""
    draw = np.random.default_rng(0)
    tables = [draw.dirichlet(np.full(9, 5.0)).reshape(3, 3) for _ in range(9)] + [np.diag([1.0, 0.0, 0.0])]
    counts = {"validation_total": 4, "validation_correct": 1, "personal_validation_correct": 2, "seconds": 0.1}
    replies = [Summarized(statistics={"confusion": one}, num_examples=5, **counts) for one in tables]
    limited = StatisticsLimits(3.0, 2.0)(replies)
    assert [i for i, one in enumerate(limited) if one.reason] == [9]
    found = limited[9].reply.statistics["confusion"]
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found >= 0).all()
    assert found[0, 0] < 0.8


def test_a_noisy_distribution_that_is_pulled_back_stays_within_the_radius() -> None:
    """Its sum may be near 0, by which it must not be divided: one client would decide the mean of all."""
    steps = (-0.1, -0.1, 0.0, 0.1, 0.1)
    priors = [np.array([0.5 + step, 0.5]) for step in steps] + [np.array([0.5, -99.5])]
    counts = {"validation_total": 4, "validation_correct": 1, "seconds": 0.1}
    replies = [Summarized(statistics={"label_prior": one}, num_examples=5, **counts) for one in priors]
    # the median is (0.5, 0.5), the distances are 0.1, 0.1, 0, 0.1, 0.1, 100: the radius is 9.9 times 0.1
    limited = StatisticsLimits(3.0, 9.9, noisy=True)(replies)
    assert [i for i, one in enumerate(limited) if one.reason] == [5]
    np.testing.assert_allclose(limited[5].reply.statistics["label_prior"], [0.5, -0.49], rtol=1e-9)  # sums to 0.01
