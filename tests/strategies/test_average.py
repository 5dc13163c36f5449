import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import weighted_mean


def test_by_hand() -> None:
    clients = [{"p": np.array([0.0, 1.0])}, {"p": np.array([1.0, 4.0])}]
    np.testing.assert_array_equal(weighted_mean(clients)["p"], [0.5, 2.5])
    # (3·0 + 1·1)/4 and (3·1 + 1·4)/4
    np.testing.assert_array_equal(weighted_mean(clients, [3, 1])["p"], [0.25, 1.75])


@given(st.integers(1, 9), st.integers(0, 1000), st.sampled_from(["float32", "float64"]))
def test_one_client_is_identity_and_equal_clients_too(n: int, seed: int, dtype: str) -> None:
    value = np.random.default_rng(seed).normal(size=(3, 2)).astype(dtype)
    mean = weighted_mean([{"a": value}] * n)["a"]
    assert mean.dtype == value.dtype
    np.testing.assert_allclose(mean, value, rtol=1e-6)
    np.testing.assert_array_equal(weighted_mean([{"a": value}], [7])["a"], value)


# not as small as 1e-300: numpy multiplies values and weights before it divides, and loses them
@given(st.lists(st.just(0.0) | st.floats(1e-9, 100), min_size=2, max_size=6), st.integers(0, 99))
def test_against_numpy_average_and_permutation(weights: list[float], seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(len(weights), 4))
    if sum(weights) == 0:
        weights[0] = 1.0
    clients = [{"a": value} for value in values]
    mean = weighted_mean(clients, weights)["a"]
    np.testing.assert_allclose(mean, np.average(values, axis=0, weights=weights), atol=1e-12)
    order = draw.permutation(len(weights))
    other = weighted_mean([clients[i] for i in order], [weights[i] for i in order])["a"]
    np.testing.assert_allclose(mean, other, atol=1e-12)
    assert (mean <= values.max(0)).all()
    assert (mean >= values.min(0)).all()


@given(st.integers(1, 40), st.sampled_from([0.0, 1.0, 0.1]))
def test_a_mean_of_equal_values_is_that_value_to_the_last_bit(n: int, value: float) -> None:
    # 20 · (0.05 · 1.0), added one by one, is 1.0000000000000002
    np.testing.assert_array_equal(weighted_mean([{"a": np.full(3, value)}] * n)["a"], np.full(3, value))


@pytest.mark.parametrize(
    ("second", "part"),
    [
        ({"b": np.zeros(2)}, "names"),
        ({"a": np.zeros(1)}, r"float64\(1,\) does not fit float64\(2,\)"),
        ({"a": np.zeros(2, np.float32)}, "float32"),
    ],
)
def test_what_does_not_fit_is_refused(second: dict[str, np.ndarray], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        weighted_mean([{"a": np.zeros(2)}, second])


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [np.nan, 1.0], [0.0, 0.0]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        weighted_mean([{"a": np.zeros(2)}] * 2, weights)


def test_nothing_to_average() -> None:
    with pytest.raises(ValueError, match="nothing"):
        weighted_mean([])
