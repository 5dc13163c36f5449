"""Clipping, noise, the setting, and ε against independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedtta.privacy.gaussian import Mechanism, Privacy, clipped, epsilon, noised
from fedtta.settings import SettingsError


def hockey_stick(mu: float, e: float) -> float:
    """δ(ε) = ∫ max(0, p(x) - e^ε q(x)) dx for p = N(μ, 1), q = N(0, 1), by numerical integration."""
    start = e / mu + mu / 2  # where p = e^ε q
    return quad(lambda x: norm.pdf(x - mu) - math.exp(e) * norm.pdf(x), start, start + 40)[0]


@pytest.mark.parametrize("noises", [[1.0], [0.5], [3.0] * 7, [2.0, 4.0, 0.8]])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_epsilon_is_where_the_privacy_loss_has_this_delta(noises: list[float], delta: float) -> None:
    mu = math.sqrt(sum(z**-2 for z in noises))
    assert hockey_stick(mu, epsilon(noises, delta)) == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize("noises", [[1.0], [4.0] * 20, [2.0, 1.5]])
def test_epsilon_agrees_with_another_accountant(noises: list[float]) -> None:
    dp = pytest.importorskip("dp_accounting")
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp.ComposedDpEvent([dp.GaussianDpEvent(z) for z in noises]))
    assert epsilon(noises, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@examples(max_examples=30)
@given(noise=st.floats(0.3, 20), times=st.integers(1, 50))
def test_equal_releases_are_one_with_less_noise_and_cost_more(noise: float, times: int) -> None:
    together = epsilon([noise] * times, 1e-5)
    assert together == pytest.approx(epsilon([noise / math.sqrt(times)], 1e-5), rel=1e-9)
    assert epsilon([noise] * (times + 1), 1e-5) > together > 0
    assert epsilon([], 1e-5) == 0


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20).map(np.array), bound=st.floats(1e-3, 1e3))
def test_clipping_bounds_all_arrays_together_and_keeps_the_direction(values: np.ndarray, bound: float) -> None:
    half = len(values) // 2
    found = clipped({"a": values[:half], "b": values[half:]}, bound)
    joined = np.concatenate([found["a"], found["b"]])
    assert np.linalg.norm(joined) <= bound * (1 + 1e-9)
    if np.linalg.norm(values) <= bound:
        np.testing.assert_array_equal(joined, values)
    else:
        np.testing.assert_allclose(joined * np.linalg.norm(values), values * bound, rtol=1e-9, atol=1e-9)


def test_noise_has_its_deviation_and_differs_each_time() -> None:
    zeros = {"a": np.zeros(20_000)}
    one, other = noised(zeros, 3.0)["a"], noised(zeros, 3.0)["a"]
    assert one.std() == pytest.approx(3.0, rel=0.05)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_the_setting_by_example() -> None:
    privacy = Privacy.parse("statistics=2/0.25; model=4/1; delta=1e-6")
    assert privacy == Privacy({"statistics": Mechanism(2, 0.25), "model": Mechanism(4, 1)}, 1e-6)
    assert Privacy.parse("").mechanisms == {}


@pytest.mark.parametrize(
    "text",
    [
        "model=1", "model=0/1", "model=1/-1", "heads=1/1", "model=a/b", "delta=1", "model=1/nan", "model=1/2/3",
        "model=1e-100/1",
    ],
)  # fmt: skip
def test_what_is_no_mechanism_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="differential-privacy"):
        Privacy.parse(text)
