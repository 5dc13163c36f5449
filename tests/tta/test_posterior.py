from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import betaln, hyp2f1

from fedtta.tta.posterior import BetaRule, mixing_weight
from tests.tta import reference

SHAPES = st.floats(0.2, 50)
LOGS = st.floats(-700, 700)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES, LOGS)
def test_equals_quadrature_in_the_logit(a, b, log_tau):
    expected = reference.expected_weight(a, b, log_tau)
    assert mixing_weight(a, b, math.exp(log_tau)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("tau", [0.01, 0.5, 1.0, 3.0, 200.0])
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2.5), (3, 1), (7.3, 8.9), (16, 1), (20, 30)])
def test_equals_quadrature_in_m(a, b, tau):
    """As eq. 21 is printed, an integral over m in (0, 1)."""

    def integrand(m: float) -> float:
        density = math.exp((a - 1) * math.log(m) + (b - 1) * math.log1p(-m) - betaln(a, b))
        return density * m / (m + (1 - m) * tau)

    assert mixing_weight(a, b, tau) == pytest.approx(quad(integrand, 0, 1, epsabs=1e-12, limit=200)[0], abs=1e-9)


def test_equals_the_closed_form_by_hand():
    """a = b = 1: e = (1 - τ + τ ln τ)/(1-τ)², from the integral of m/(m + (1-m)τ) over (0, 1)."""
    tau = np.array([0.1, 0.5, 2.0, 10.0])
    assert np.allclose(mixing_weight(1, 1, tau), (1 - tau + tau * np.log(tau)) / (1 - tau) ** 2, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("a", "b"), [(500.0, 500.0), (1e4, 2.5), (1e5, 1e5), (0.05, 0.05), (1e-3, 1e-3), (0.01, 3.3)])
def test_extreme_shapes_equal_the_hypergeometric_function(a, b):
    closed = a / (a + b) * hyp2f1(1, b, a + b + 1, 0.5)
    assert mixing_weight(a, b, 0.5) == pytest.approx(closed, abs=1e-12)


def test_small_shapes_far_out_equal_the_asymptote():
    """For b = 1 and τ → 0: 1 - e → τ^a Γ(1-a) Γ(1+a), because 1 - e = a ∫ τ^a u^(a-1) / (1+u) du over u = m/τ."""
    a, tau = 1e-3, 1e-300
    complement = tau**a * math.gamma(1 - a) * math.gamma(1 + a)
    assert 1 - mixing_weight(a, 1.0, tau) == pytest.approx(complement, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES, LOGS, st.floats(0.01, 3))
def test_identities(a, b, log_tau, step):
    e = mixing_weight(a, b, math.exp(log_tau))
    assert 0 <= e <= 1
    assert e + mixing_weight(b, a, math.exp(-log_tau)) == pytest.approx(1, abs=1e-12)
    assert mixing_weight(a, b, 1.0) == pytest.approx(a / (a + b), abs=1e-12)
    assert mixing_weight(a, b, math.exp(log_tau + step)) <= e + 1e-13
    assert mixing_weight(a + step, b, math.exp(log_tau)) >= e - 1e-13


def test_ends():
    assert mixing_weight(2.0, 3.0, 0.0) == 1
    assert mixing_weight(2.0, 3.0, math.inf) == 0
    assert mixing_weight(2.0, 3.0, 5e-324) == 1


def test_kinds_and_broadcasting():
    assert isinstance(mixing_weight(1.0, 2.0, 3.0), float)
    array = mixing_weight(np.ones((2, 1)), 2.0, np.array([0.5, 1.0, 2.0]))
    assert array.shape == (2, 3)
    assert array.dtype == np.float64
    tensor = mixing_weight(1.0, torch.tensor([2.0, 2.0]), 0.5)
    assert tensor.dtype == torch.float64
    assert tensor[0] == tensor[1] == array[0, 0]
    assert mixing_weight(np.ones(0), 1.0, 1.0).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0, 1.0, 1.0), "a"),
        ((1.0, -1.0, 1.0), "b"),
        ((1.0, math.inf, 1.0), "b"),
        ((1.0, 1.0, -0.1), "tau"),
        ((1.0, 1.0, math.nan), "tau"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        mixing_weight(*arguments)


def test_blocks_and_sources_agree():
    """More rows than one block holds, on numpy and on torch."""
    random = np.random.default_rng(0)
    shapes, log_tau = 1 + 7 * random.random((400, 2)), random.normal(size=400)
    rule = BetaRule(np.array([[1.0, 15.0]]))
    whole = rule.mean(shapes, log_tau)
    single = [rule.mean(shapes[i : i + 1], log_tau[i : i + 1])[0] for i in range(400)]
    elsewhere = rule.mean(torch.from_numpy(shapes), torch.from_numpy(log_tau)).numpy()
    assert np.allclose(whole, single, rtol=0, atol=1e-14)
    assert np.allclose(whole, elsewhere, rtol=0, atol=1e-14)
