"""Accuracy without labels: the formula against a loop over samples, and what must hold of any estimate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.tta.estimates import confidences, difference_of_confidences

SHARE = st.floats(0, 1)


def sample(seed: int, count: int, sharp: float, classes: int = 4) -> np.ndarray:
    """Probabilities [n, K], float32."""
    logits = np.random.default_rng(seed).normal(0, sharp, (count, classes))
    rows = np.exp(logits - logits.max(1, keepdims=True))
    return (rows / rows.sum(1, keepdims=True)).astype(np.float32)


def test_it_is_that_of_a_loop_over_samples() -> None:
    labelled, shifted = sample(1, 50, 3.0), sample(2, 80, 1.0)
    labels = np.random.default_rng(3).integers(0, 4, 50)
    right, before, now = 0, 0.0, 0.0
    for row, label in zip(labelled.tolist(), labels.tolist(), strict=True):
        best = max(range(4), key=row.__getitem__)
        right += best == label
        before += row[best] / 50
    for row in shifted.tolist():
        now += max(row) / 80
    found = difference_of_confidences(
        float((labelled.argmax(1) == labels).mean()), confidences(labelled).mean(), confidences(shifted).mean()
    )
    expected = min(1.0, max(0.0, right / 50 - (before - now)))
    assert found == pytest.approx(expected)
    assert now < before


@given(SHARE, SHARE, SHARE)
def test_it_is_a_share_and_falls_with_the_confidence(accuracy: float, before: float, now: float) -> None:
    found = difference_of_confidences(accuracy, before, now)
    assert 0 <= found <= 1
    assert difference_of_confidences(accuracy, before, before) == accuracy
    assert difference_of_confidences(accuracy, before, now / 2) <= found
    if now < before:
        assert found <= accuracy


def test_it_is_right_for_calibrated_networks() -> None:
    """Of which a share C of the predictions is right where their mean confidence is C."""
    draw = np.random.default_rng(4)

    def truth(p: np.ndarray) -> np.ndarray:
        return (draw.random((len(p), 1)) > p.cumsum(1)).sum(1)

    source, target = sample(5, 4000, 3.0), sample(6, 4000, 1.0)
    accuracy = float((source.argmax(1) == truth(source)).mean())
    found = difference_of_confidences(accuracy, confidences(source).mean(), confidences(target).mean())
    real = float((target.argmax(1) == truth(target)).mean())
    assert abs(found - real) < 0.04  # five standard errors of the two accuracies
    assert accuracy - real > 0.2
