"""Means, spreads and counts against hand-computed numbers and loops over samples."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.server.report import METRICS, WEIGHT_BINS, Evaluation, Metric, Results, matrix, table
from fedtta.server.report.collaboration import Scores, mixing_rounds, plain_mixing
from fedtta.server.report.events import Adapted
from fedtta.server.report.scores import Cell, Row, client_accuracy, verdict
from tests.report.runs import adapt_round, adapted, evaluation, results_of

# Method a on x: clients 3/4 = .75, 1/2 = .5 and one without samples; mean .625, sd .125, by samples 4/6.
#          on y: 1/4 = .25 and 9/12 = .75; mean .5, sd .25, by samples 10/16.
# Average (.625 + .5) / 2 = .5625; sd over distributions .0625; by samples (.6667 + .625) / 2 = .64583.
BY_HAND = [
    evaluation("a", "x", 0, 3, 4),
    evaluation("a", "x", 1, 1, 2),
    evaluation("a", "x", 2, 0, 0),
    evaluation("a", "y", 0, 1, 4),
    evaluation("a", "y", 1, 9, 12),
    evaluation("b", "x", 0, 1, 1),
    evaluation("b", "empty", 0, 0, 0),
]
METRIC = {metric.name: metric for metric in METRICS}


def test_table_by_hand(tmp_path: Path) -> None:
    results = results_of(tmp_path, BY_HAND)
    first, second = table(results)
    assert list(first.cells) == ["x", "y"]  # no client has a sample on "empty"
    x, y = first.cells["x"], first.cells["y"]
    assert x is not None
    assert y is not None
    assert (x.mean, x.sd, x.clients) == (0.625, 0.125, 2)
    assert (y.mean, y.sd) == (0.5, 0.25)
    assert (first.average, first.average_sd) == (0.5625, 0.0625)
    # b has no samples on y: an average over fewer distributions does not compare.
    assert second.cells["y"] is None
    assert (second.mean("y"), second.average, second.average_sd) == (None, None, None)
    weighted, _ = table(results, METRIC["sample_accuracy"])
    assert weighted.mean("x") == pytest.approx(4 / 6)
    assert weighted.average == pytest.approx((4 / 6 + 10 / 16) / 2)
    seconds, _ = table(results, METRIC["seconds"])
    assert seconds.mean("x") == pytest.approx(1.0 / 6)  # half a second for each of two clients, 6 samples
    assert client_accuracy(results) == {"a": {0: 0.5, 1: 0.625}, "b": {0: 1.0}}


def test_mean_weight_is_over_samples(tmp_path: Path) -> None:
    low, high = [0] * WEIGHT_BINS, [0] * WEIGHT_BINS
    low[0], high[19] = 3, 1  # the second client gives no mean: the center of its bin, .975, counts
    events = [
        evaluation("a", "x", 0, 1, 3, weight_histogram=low, weight_mean=0.01),
        evaluation("a", "x", 1, 1, 1, weight_histogram=high),
        evaluation("b", "x", 0, 1, 1),
    ]
    first, second = table(results_of(tmp_path, events), METRIC["weight_mean"])
    assert first.mean("x") == pytest.approx((3 * 0.01 + 0.975) / 4)
    assert second.mean("x") is None


def test_a_metric_is_one_line(tmp_path: Path) -> None:
    metric = Metric("calibration_error", "Calibration error in %", "samples", scale=100, digits=1, best="lowest")
    events = [
        evaluation("a", "x", 0, 1, 3, calibration_error=0.1),
        evaluation("a", "x", 1, 1, 1, calibration_error=0.3),
        evaluation("b", "x", 0, 1, 1, calibration_error=0.05),
        evaluation("c", "x", 0, 1, 1),
    ]
    rows = table(results_of(tmp_path, events), metric)
    assert [row.mean("x") for row in rows] == [pytest.approx((3 * 0.1 + 0.3) / 4), 0.05, None]
    assert metric.top(row.mean("x") for row in rows) == "5.0"
    assert [metric.show(row.mean("x")) for row in rows] == ["15.0", "5.0", "–"]


def test_a_method_after_two_trainings_has_a_row_for_each(tmp_path: Path) -> None:
    other = evaluation("a", "x", 0, 1, 4, training="balanced_softmax")
    results = results_of(tmp_path, [evaluation("a", "x", 0, 2, 4), other, evaluation("b", "x", 0, 2, 4)])
    assert [row.label for row in table(results)] == ["a (cross_entropy)", "a (balanced_softmax)", "b"]
    assert [row.average for row in table(results)] == [0.5, 0.25, 0.5]


@given(st.lists(st.integers(0, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=8))
def test_cell_invariants(pairs: list[tuple[int, int]]) -> None:
    entries = [Evaluation("t", "m", "s", i, correct, total) for i, (correct, total) in enumerate(pairs)]
    results = Results(evaluations=entries)
    kept = [correct / total for correct, total in pairs if total]
    if not kept:
        assert all(not row.cells and row.average is None for row in table(results))
        return
    (row,) = table(results)
    cell = row.cells["s"]
    assert cell is not None
    assert cell.mean == statistics.fmean(kept) == row.average
    assert cell.sd == pytest.approx(float(np.std(kept)), abs=1e-12)
    weighted = table(results, METRIC["sample_accuracy"])[0].mean("s")
    assert weighted == pytest.approx(sum(correct for correct, _ in pairs) / sum(total for _, total in pairs))


# bbn with pfedbbn, two clients: round 1 in fog, client 0: 3/4 of class 0; client 1: 1/2 of class 1.
#                  round 2 in snow, client 0: 1/4 of class 0 and 1/1 of class 1; client 1: 0/1 of class 1.
# Global 6/12; classes 4/8 and 2/4, of mean .5; fog 4/6, snow 2/6; client 0: 5/9, client 1: 1/3. Class 2 is absent.
FULL = [
    adapted(1, 0, [3, 0, 0], [4, 0, 0]),
    adapted(1, 1, [0, 1, 0], [0, 2, 0]),
    adapted(2, 0, [1, 1, 0], [4, 1, 0], corruption="snow"),
    adapted(2, 1, [0, 0, 0], [0, 1, 0], corruption="snow"),
]
# tent with pfedbbn: only round 1; class 0 is all right, class 1 all wrong.
SHORT = [
    adapted(1, 0, [4, 0, 0], [4, 0, 0], method="tent"),
    adapted(1, 1, [0, 0, 0], [0, 2, 0], method="tent"),
]
# tent with fedavg: both rounds, but without client 1 in the second one.
FEWER = [dict(entry, method="tent", collaboration="fedavg") for entry in FULL[:3]]


def test_matrix_by_hand(tmp_path: Path) -> None:
    found = matrix(results_of(tmp_path, [*FULL, *SHORT, *FEWER]))
    assert found is not None
    assert (found.methods, found.collaborations) == (("bbn", "tent"), ("pfedbbn", "fedavg"))
    assert (found.corruptions, found.classes, found.clients) == (("fog", "snow"), ("0", "1", "2"), 2)
    assert [outcome.label for outcome in found.outcomes] == ["bbn · pfedbbn", "tent · pfedbbn", "tent · fedavg"]
    full, short, fewer = found.outcomes
    assert full.scores.accuracy == full.scores.mean_class == 0.5
    assert full.scores.per_class.tolist() == pytest.approx([0.5, 0.5, math.nan], nan_ok=True)
    assert full.scores.per_corruption.tolist() == pytest.approx([4 / 6, 2 / 6])
    assert full.scores.per_client.tolist() == pytest.approx([5 / 9, 1 / 3])
    assert full.rounds == (1, 2)
    assert full.correct.tolist() == [[3, 1, 0], [1, 1, 0]]
    assert full.total.tolist() == [[4, 2, 0], [4, 2, 0]]
    assert full.seconds == 2.0
    assert (full.gap, short.gap, fewer.gap) == ("", "after 1 of 2 rounds", "1 sample fewer")
    # 66.7 of the cell that stopped early is no best value, and no cell with fedavg is complete
    assert found.tops("accuracy") == {"pfedbbn": "50.0", "fedavg": None}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from("xy"), st.integers(1, 3), st.integers(0, 2),
            st.sampled_from(["fog", "snow"]), st.integers(0, 1), st.booleans(),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_matrix_against_a_loop_over_samples(samples: list[tuple[str, str, int, int, str, int, bool]]) -> None:
    entries = []
    for place in {sample[:5] for sample in samples}:
        here = [sample for sample in samples if sample[:5] == place]
        total = [sum(sample[5] == label for sample in here) for label in range(2)]
        correct = [sum(sample[5] == label and sample[6] for sample in here) for label in range(2)]
        entries.append(Adapted(*place, correct, total, 0.0))
    found = matrix(Results(adapted=entries))
    assert set(found.cells if found else ()) == {sample[:2] for sample in samples}
    for pair, outcome in found.cells.items() if found else ():
        here = [sample for sample in samples if sample[:2] == pair]

        def accuracy(position: int, value: object, of: list[tuple[str, str, int, int, str, int, bool]] = here) -> float:
            flags = [sample[6] for sample in of if sample[position] == value]
            return sum(flags) / len(flags) if flags else math.nan

        scores = outcome.scores
        assert scores.accuracy == pytest.approx(sum(sample[6] for sample in here) / len(here))
        per_class = [accuracy(5, label) for label in range(2)]
        assert scores.per_class.tolist() == pytest.approx(per_class, nan_ok=True)
        assert scores.mean_class == pytest.approx(np.nanmean(per_class))
        assert scores.per_client.tolist() == pytest.approx([accuracy(3, n) for n in range(found.clients)], nan_ok=True)
        names = found.corruptions
        assert scores.per_corruption.tolist() == pytest.approx([accuracy(4, name) for name in names], nan_ok=True)
        for number, counts in zip(outcome.rounds, outcome.total, strict=True):
            assert counts.sum() == sum(sample[2] == number for sample in here)
        most = max(len({sample[2] for sample in samples if sample[:2] == other}) for other in found.cells)
        assert len(outcome.rounds) + outcome.missing == most


def test_corruptions_are_in_the_order_of_the_first_client(tmp_path: Path) -> None:
    events = [
        adapted(1, 1, [1], [1], corruption="snow"), adapted(1, 0, [1], [1], corruption="frost"),
        adapted(2, 0, [1], [1], corruption="fog"), adapted(2, 1, [1], [1], corruption="frost"),
    ]  # fmt: skip
    found = matrix(results_of(tmp_path, events))
    assert found is not None
    assert found.corruptions == ("frost", "fog", "snow")


def test_without_samples_nothing_is_zero(tmp_path: Path) -> None:
    assert matrix(results_of(tmp_path, [])) is None
    assert matrix(results_of(tmp_path, [adapted(1, 0, [0, 0], [0, 0])])) is None
    empty = Scores(np.zeros((2, 1, 3), np.int64), np.zeros((2, 1, 3), np.int64))
    assert np.isnan([empty.accuracy, empty.mean_class, *empty.per_client, *empty.per_class]).all()


def test_the_middle_round_of_the_weights_is_that_of_the_paper(tmp_path: Path) -> None:
    events = [adapt_round(number, [[1.0]]) for number in range(75, 0, -1)] + [adapt_round(1, [[1.0]], method="tent")]
    chosen = mixing_rounds(results_of(tmp_path, events))
    assert [entry.round for entry in chosen["bbn", "pfedbbn"]] == [1, 40, 75]
    assert [entry.round for entry in chosen["tent", "pfedbbn"]] == [1]


def test_uniform_and_identity_weights_are_plain(tmp_path: Path) -> None:
    def said(*weights: list[list[float]]) -> str:
        events = [adapt_round(number, one) for number, one in enumerate(weights, start=1)]
        return plain_mixing(results_of(tmp_path, events).adapt_rounds)

    equal, own, mixed = [[0.5, 0.5]] * 2, [[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.4], [0.5, 0.5]]
    assert said(equal, equal) == "all weights are equal"
    assert said(own) == "each client uses only its own model"
    assert said(mixed) == said(equal, own) == ""


def test_the_verdict_says_where_adaptation_pays_and_where_it_does_not() -> None:
    def row(label: str, **means: float | None) -> Row:
        cells = {shift: None if mean is None else Cell(mean, 0.0, 3) for shift, mean in means.items()}
        return Row("t", label, label, cells, None, None)

    plain = row("fedavg", own=0.80, other=0.75, tie=0.5, empty=None)
    better = row("btfl", own=0.85, other=0.70, tie=0.5, empty=0.9)
    best = row("tent", own=0.862, other=None, tie=0.4, empty=0.9)
    assert verdict([better, plain, best]) == (
        "Better than fedavg, the unadapted global model, on own (tent +6.2 points). "
        "No method is better than fedavg on other, tie: adaptation does not pay there."
    )
    assert verdict([plain]) == verdict([better, best]) == ""
