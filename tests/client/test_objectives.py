"""Local objectives against the formula, sample by sample."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedtta.client.algorithms.training import OBJECTIVES, balanced_softmax, cross_entropy, find_objective


def by_hand(logits: list[list[float]], labels: list[int], counts: list[int]) -> float:
    """-1/B Σ_b ln( (n_y + 1) e^{l_y} / Σ_k (n_k + 1) e^{l_k} ), term by term."""
    losses = []
    for row, label in zip(logits, labels, strict=True):
        masses = [(count + 1) * math.exp(value) for value, count in zip(row, counts, strict=True)]
        losses.append(-math.log(masses[label] / math.fsum(masses)))
    return math.fsum(losses) / len(losses)


@examples(deadline=None, max_examples=50)
@given(
    st.integers(1, 7),
    st.integers(2, 6),
    st.integers(0, 2**31 - 1),
)
def test_balanced_softmax_is_the_formula(batch: int, classes: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits, labels = draw.normal(0, 3, (batch, classes)), draw.integers(classes, size=batch)
    counts = draw.integers(0, 5000, size=classes)
    value = balanced_softmax(torch.tensor(logits), torch.tensor(labels), torch.tensor(counts))
    assert float(value) == pytest.approx(by_hand(logits.tolist(), labels.tolist(), counts.tolist()), rel=1e-12)


def test_a_hand_derived_value() -> None:
    # logits 0 and 0, counts 8 and 0: p_1 = 1 / (9 + 1), so the loss of label 1 is ln 10
    value = balanced_softmax(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([8, 0]))
    assert float(value) == pytest.approx(math.log(10))


def test_equal_counts_are_plain_cross_entropy() -> None:
    logits, labels = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0])
    plain = cross_entropy(logits, labels, torch.tensor([9, 0, 0, 1]))
    assert float(plain) == pytest.approx(by_hand(logits.tolist(), labels.tolist(), [0] * 4), rel=1e-6)
    assert float(balanced_softmax(logits, labels, torch.full((4,), 7))) == pytest.approx(float(plain), rel=1e-6)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_gradients(name: str) -> None:
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    labels, counts = torch.tensor([0, 3, 3]), torch.tensor([10, 0, 3, 1])
    assert torch.autograd.gradcheck(lambda z: OBJECTIVES[name](z, labels, counts), (logits,))


def test_the_gradient_pushes_a_rare_class_harder() -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    balanced_softmax(logits, torch.tensor([1]), torch.tensor([99, 0])).backward()
    assert logits.grad is not None
    # p = (100, 1)/101, gradient p - onehot
    np.testing.assert_allclose(logits.grad.numpy(), [[100 / 101, -100 / 101]], rtol=1e-6)


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(ValueError, match=r"unknown objective 'focal'; there are: cross_entropy, balanced_softmax"):
        find_objective("focal")


def test_names_find_their_function() -> None:
    assert find_objective("balanced_softmax") is balanced_softmax
    assert find_objective("cross_entropy") is cross_entropy
