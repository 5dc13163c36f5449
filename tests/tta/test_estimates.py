"""Accuracy without labels: formulas against loops over samples, what must hold of any estimate, and coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.tta.estimates import (
    ESTIMATES,
    Calibration,
    calibrate,
    calibrations,
    confidences,
    difference_of_confidences,
    estimates,
    of_others,
    signals,
    slid,
)

SHARE = st.floats(0, 1)
SEED = st.integers(0, 1000)


def sample(seed: int, count: int, sharp: float, classes: int = 4) -> np.ndarray:
    """Probabilities [n, K], float32."""
    logits = np.random.default_rng(seed).normal(0, sharp, (count, classes))
    rows = np.exp(logits - logits.max(1, keepdims=True))
    return (rows / rows.sum(1, keepdims=True)).astype(np.float32)


def truth(p: np.ndarray, seed: int = 4) -> np.ndarray:
    """Labels of which a share of p_k is k: the network is calibrated."""
    return (np.random.default_rng(seed).random((len(p), 1)) > p.cumsum(1)).sum(1)


def known(seed: int, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Signals of labelled samples, and which are right: a network, its adapted predictions, and a personal head."""
    p, plain, personal = sample(seed, count, 2.0), sample(seed + 1, count, 2.0), sample(seed + 2, count, 2.0)
    plain[::2], personal[::3] = p[::2], plain[::3]
    return signals(p, plain, personal), p.argmax(1) == truth(p, seed)


# The formulas


def test_signals_are_those_of_a_loop_over_samples() -> None:
    p, plain, personal = (sample(seed, 30, 3.0) for seed in (1, 2, 3))
    p[0] = [0, 1, 0, 0]  # 0 ln 0 is 0
    found = signals(p, plain, personal)
    assert list(found) == ["confidence", "entropy", "unadapted", "judged", "heads"]
    for i, row in enumerate(p.tolist()):
        best, other, third = (max(range(4), key=one[i].tolist().__getitem__) for one in (p, plain, personal))
        assert found["confidence"][i] == row[best]
        assert found["entropy"][i] == pytest.approx(sum(q * math.log(q) for q in row if q), abs=1e-12)
        assert found["unadapted"][i] == (best == other)
        assert found["heads"][i] == (other == third)
        assert found["judged"][i].tolist() == [*plain[i].tolist(), best]
    assert set(signals(p)) == {"confidence", "entropy"}
    assert set(signals(p, plain)) == {"confidence", "entropy", "unadapted", "judged"}


def stand_ins(values: np.ndarray) -> list[float]:
    """v by sample; where it follows from the class shares, these are found by a loop."""
    if values.ndim == 1:
        return list(values.tolist())
    rows, shares = values[:, :-1].tolist(), [0.25] * 4
    for _ in range(500):
        new = [[p * share for p, share in zip(row, shares, strict=True)] for row in rows]
        new = [[one / sum(row) for one in row] for row in new]
        shares = [sum(row[k] for row in new) / len(new) for k in range(4)]
    return [row[int(k)] for row, k in zip(new, values[:, -1], strict=True)]


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_is_that_of_a_loop_over_samples(name: str) -> None:
    """For atc by the definition: the first threshold, from below, with the share of errors below it."""
    (source, right), (target, _) = known(1, 50), known(7, 80)
    signal, thresholded = ESTIMATES[name]
    scores, shifted = (stand_ins(one[signal]) for one in (source, target))
    if thresholded:
        errors = sum(not one for one in right)
        t = next(t for t in sorted(scores) if sum(one < t for one in scores) == errors)
        expected = sum(one >= t for one in shifted) / 80
    else:
        expected = sum(right) / 50 + sum(shifted) / 80 - sum(scores) / 50
    found = calibrate(name, source[signal], right).estimate(target[signal]).accuracy
    tolerance = 1e-3 if name == "label_shift" else 1e-12  # a hundred steps, not five hundred
    assert found == pytest.approx(min(1.0, max(0.0, expected)), abs=tolerance)


def test_the_interval_is_that_of_two_means_with_one_more_sample_at_either_end() -> None:
    (source, right), (target, _) = known(1, 50), known(7, 80)
    found = calibrate("unadapted", source["unadapted"], right).estimate(target["unadapted"], 0.9)
    missed, seen = [*(right - source["unadapted"]), -1, 1], [*target["unadapted"], 0, 1]
    means = sum(missed) / 52, sum(seen) / 82
    variance = sum((one - means[0]) ** 2 for one in missed) / 52**2 + sum((one - means[1]) ** 2 for one in seen) / 82**2
    assert found.high - found.accuracy == pytest.approx(1.6448536 * math.sqrt(variance))
    assert found.accuracy - found.low == pytest.approx(1.6448536 * math.sqrt(variance))


def test_the_interval_of_a_threshold_reaches_over_its_own_error() -> None:
    """30 of 100 are wrong, c - v is -1 for 9 samples and 1 for 9: one error more or less is √(20 / 102 / 102) 100."""
    scores, right = np.arange(100.0), np.arange(100) >= 30
    right[[1, 3, 5, 7, 9, 11, 13, 15, 17]], right[[81, 83, 85, 87, 89, 91, 93, 95, 97]] = True, False
    found = calibrate("atc_confidence", scores, right)
    assert found.threshold == 30
    assert found.variance == pytest.approx(20 / 102 / 102)
    assert found.around == (25.0, 35.0)  # 4.38, rounded up
    at = found.estimate(np.repeat([28.0, 32.0, 50.0], [6, 4, 30]))  # all are at least 25, three quarters at least 35
    error = math.sqrt(((1 - 3 / 4) / 2) ** 2 + np.repeat([0.0, 1.0], [7, 35]).var() / 42)
    assert at.accuracy == 34 / 40
    assert at.low == pytest.approx(0.85 - 1.959964 * error)
    assert at.high == 1.0


def test_difference_of_confidences_is_the_estimate_from_means() -> None:
    labelled, shifted = sample(1, 50, 3.0), sample(2, 80, 1.0)
    right = labelled.argmax(1) == np.random.default_rng(3).integers(0, 4, 50)
    before, now = confidences(labelled), confidences(shifted)
    found = difference_of_confidences(float(right.mean()), float(before.mean()), float(now.mean()))
    assert found == pytest.approx(calibrate("doc", before, right).estimate(now).accuracy)
    assert now.mean() < before.mean()


def test_a_client_without_labels_takes_the_mean_threshold_and_offset() -> None:
    others = [Calibration(0.1, 0.5, 0.4, (0.3, 0.5)), Calibration(0.3, 0.5, 0.8, (0.7, 0.9))]
    window = np.array([0.3, 0.5, 0.7, 0.9])
    found = of_others(others, window, 0.5)
    assert found.accuracy == pytest.approx(0.2 + 2 / 4)  # the threshold is 0.6
    each = 0.1 + 3 / 4, 0.3 + 1 / 4  # by each of them
    spread = ((each[0] - each[1]) ** 2 / 2) * 1.5
    own = np.array([0, 0, 1, 1, 0, 1]).var() / 6
    # The upper quartile of Student's distribution is 1 with one degree of freedom, and √(2/3) with two.
    assert found.accuracy - found.low == pytest.approx(math.sqrt(spread + 0.6744898**2 * own))
    third = of_others([*others, Calibration(0.2, 0.5, 0.6)], window, 0.5)  # by it, 0.7
    assert third.accuracy == pytest.approx(0.7)
    assert third.high - 0.7 == pytest.approx(math.sqrt(2 / 3 * 0.15**2 * 4 / 3 + 0.6744898**2 * own))
    plain = of_others([Calibration(0.1, 0.5), Calibration(0.1, 0.5)], window)
    assert plain.accuracy == pytest.approx(0.1 + 0.6)


def test_a_window_keeps_the_last_values() -> None:
    first, second = {"a": np.arange(5.0)}, {"a": np.arange(5.0, 8.0), "b": np.zeros(3)}
    window = slid(slid({}, first, 6), second, 6)
    assert window["a"].tolist() == [2, 3, 4, 5, 6, 7]
    assert len(window["b"]) == 3
    assert first["a"].tolist() == [0, 1, 2, 3, 4]
    assert estimates(calibrations(*known(1, 20)), {}) == {}
    assert estimates(calibrations(*known(1, 20)), {"confidence": np.empty(0)}) == {}


# What holds of any


@given(SEED, st.integers(1, 60), st.integers(1, 60))
def test_an_estimate_is_a_share_inside_its_interval(seed: int, labelled: int, count: int) -> None:
    found = estimates(calibrations(*known(seed, labelled)), known(seed + 9, count)[0])
    assert list(found) == list(ESTIMATES)
    for one in found.values():
        assert 0 <= one.low <= one.accuracy <= one.high <= 1


@given(SEED, st.integers(1, 60), st.booleans())
def test_on_the_labelled_samples_it_is_their_accuracy(seed: int, count: int, coarse: bool) -> None:
    """Also where scores tie; without ties the correction of a threshold is 0."""
    source, right = known(seed, count)
    if coarse:
        source |= {name: np.round(source[name], 1) for name in ("confidence", "entropy")}
    for name, one in calibrations(source, right).items():
        assert one.estimate(source[ESTIMATES[name][0]]).accuracy == pytest.approx(right.mean(), abs=1e-12)
        if ESTIMATES[name][1] and len(set(source[ESTIMATES[name][0]])) == count:
            assert one.offset == pytest.approx(0, abs=1e-12)


@given(SEED, SEED)
def test_the_order_of_samples_does_not_matter(seed: int, order: int) -> None:
    source, right = known(seed, 40)
    target, mixed = known(seed + 9, 40)[0], np.random.default_rng(order).permutation(40)
    shuffled = {name: values[mixed] for name, values in source.items()}
    found = estimates(calibrations(source, right), target)
    again = estimates(calibrations(shuffled, right[mixed]), {name: values[mixed] for name, values in target.items()})
    for name, one in found.items():
        assert (one.accuracy, one.low, one.high) == pytest.approx(
            (again[name].accuracy, again[name].low, again[name].high), abs=1e-12
        )


@given(SEED, st.floats(0, 0.5), st.sampled_from([name for name in ESTIMATES if name != "label_shift"]))
def test_it_rises_with_the_signal_and_with_the_accuracy(seed: int, more: float, name: str) -> None:
    source, right = known(seed, 40)
    signal = ESTIMATES[name][0]
    values = known(seed + 9, 30)[0][signal]
    found = calibrate(name, source[signal], right).estimate(values).accuracy
    assert calibrate(name, source[signal], right).estimate(values + more).accuracy >= found
    better = right | (np.arange(40) % 3 == 0)
    assert calibrate(name, source[signal], better).estimate(values).accuracy >= found - 1e-12


@given(SHARE, SHARE, SHARE)
def test_the_difference_of_confidences_falls_with_the_confidence(accuracy: float, before: float, now: float) -> None:
    found = difference_of_confidences(accuracy, before, now)
    assert 0 <= found <= 1
    assert difference_of_confidences(accuracy, before, before) == accuracy
    assert difference_of_confidences(accuracy, before, now / 2) <= found
    if now < before:
        assert found <= accuracy


@pytest.mark.parametrize("right", [True, False])
def test_samples_that_are_all_right_or_all_wrong(right: bool) -> None:
    scores = np.linspace(0.2, 1, 20)
    for name in ("atc_confidence", "atc_entropy"):
        found = calibrate(name, scores, np.full(20, right)).estimate(scores)
        assert found.accuracy == right
        assert found.low < found.high  # 20 samples leave a doubt


# Where the assumption holds


def test_doc_and_atc_are_right_for_calibrated_networks() -> None:
    source, target = sample(5, 4000, 3.0), sample(6, 4000, 1.0)
    right = source.argmax(1) == truth(source)
    real = float((target.argmax(1) == truth(target, 8)).mean())
    found = calibrate("doc", confidences(source), right).estimate(confidences(target)).accuracy
    assert abs(found - real) < 0.04  # five standard errors of the two accuracies
    assert right.mean() - real > 0.2


def test_label_shift_is_right_of_a_head_that_knows_only_its_own_classes() -> None:
    """Confidence follows such a head to classes that it has never seen; the unadapted network does not."""
    draw = np.random.default_rng(5)

    def shown(classes: list[int], count: int = 2000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        y = draw.choice(classes, count)
        logits = draw.normal(0, 1, (count, 4)) + 2 * np.eye(4)[y]  # a Gaussian a class: softmax(2 x) is exact
        plain = np.exp(2 * logits)
        own = plain * [1, 1, 1e-6, 1e-6]
        return plain / plain.sum(1, keepdims=True), own / own.sum(1, keepdims=True), y

    (plain, own, y), (plain_now, own_now, y_now) = shown([0, 1]), shown([0, 2, 3])
    right, real = own.argmax(1) == y, float((own_now.argmax(1) == y_now).mean())
    found = estimates(calibrations(signals(own, plain), right), signals(own_now, plain_now))
    assert right.mean() - real > 0.5
    assert found["doc"].accuracy - real > 0.3
    assert found["atc_entropy"].accuracy - real > 0.3
    assert abs(found["label_shift"].accuracy - real) < 0.04
    assert found["label_shift"].low <= real <= found["label_shift"].high


def drawn(name: str, draw: np.random.Generator, count: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Signals whose mean falls with the shift, and which samples are right, so that the assumption holds."""
    if name == "doc":  # right as often as sure
        v = np.clip(draw.normal(0.7 - shift, 0.15, count), 0.05, 0.95)
        return v, draw.random(count) < v
    if name == "unadapted":  # one in ten samples is wrong although the predictions agree
        v = draw.random(count) < 0.8 - shift
        return v.astype(float), v & (draw.random(count) >= 0.1 / (0.8 - shift))
    scores = draw.normal(0.7 - shift, 1, count)  # right above 0; close to it, one in ten is an exception
    return scores, (scores >= 0) ^ (draw.random(count) < 0.1 * (np.abs(scores) < 0.5))


@pytest.mark.parametrize("shift", [0.0, 0.4])
@pytest.mark.parametrize("name", ["doc", "unadapted", "atc_confidence"])
def test_intervals_cover_the_accuracy_as_often_as_they_say(name: str, shift: float) -> None:
    """95 % of 400 draws, less four standard errors; not all of them, which intervals twice as wide would do."""
    draw = np.random.default_rng(3)
    real, hits = drawn(name, draw, 400_000, shift)[1].mean(), 0
    for _ in range(400):
        found = calibrate(name, *drawn(name, draw, 150, 0.0)).estimate(drawn(name, draw, 100, shift)[0])
        hits += found.low <= real <= found.high
    assert 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400) <= hits / 400 < 0.998


@pytest.mark.parametrize("count", [2, 3, 5, 10, 20])
def test_intervals_by_other_clients_cover_that_of_one_more(count: int) -> None:
    """Clients are right as often as they are sure, up to an offset of their own; 95 % less four standard errors."""
    draw, hits = np.random.default_rng(7), 0

    def client(samples: int) -> tuple[np.ndarray, np.ndarray, float]:
        v, offset = draw.uniform(0.4, 0.7, samples), float(draw.normal(0, 0.08))
        return v, draw.random(samples) < v + offset, 0.55 + offset

    for _ in range(400):
        others = [calibrate("doc", *client(150)[:2]) for _ in range(count)]
        window, _, real = client(100)
        found = of_others(others, window)
        hits += found.low <= real <= found.high
    assert 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400) <= hits / 400 < 0.998


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_intervals_of_a_threshold_hold_where_few_are_wrong_or_right(share: float) -> None:
    """30 labelled samples, of which hardly one differs from the others; with a threshold, one side has no more."""
    draw, hits = np.random.default_rng(5), 0
    for _ in range(400):
        scores, window = draw.random(30), draw.random(300)
        found = calibrate("atc_confidence", scores, scores >= 1 - share).estimate(window)
        hits += found.low <= share <= found.high
    assert hits / 400 >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400)
