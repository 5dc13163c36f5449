from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta.tta.arrays import softmax_entropy
from fedtta.tta.fedthe import FedTHE, adam_schedule, running_average, solve_weight, weight_gradient
from tests.tta import reference
from tests.tta.streams import make_stream

SHORT = 24  # samples where the length of the stream is not what a test is about: the reference is slow


def run(adapter, x: Tensor, size: int) -> Tensor:
    return torch.cat([adapter.predict(part) for part in x.split(size)])


@functools.cache
def expected(count: int, sharpness: float = 6.0, **options: Any) -> tuple[Tensor, Tensor]:
    """What the reference says of the first samples of the stream."""
    stream = make_stream(sharpness=sharpness)
    outputs = (one[:count] for one in (stream.x, stream.logits_global, stream.logits_personal))
    return reference.fedthe(*outputs, stream.known, **options)


@pytest.mark.parametrize("size", [1, 7, 60])
def test_equals_the_reference_for_any_batch_size(stream, size):
    adapter = FedTHE(stream.model, stream.known)
    rows, weights = expected(len(stream.x))
    assert torch.allclose(run(adapter, stream.x, size), rows, rtol=0, atol=1e-9)
    assert torch.allclose(adapter.report()["weight"], weights, rtol=0, atol=1e-9)
    assert weights.std() > 0.05  # the stream moves the weight, so the comparison means something


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "em"},
        {"objective": "fa"},
        {"objective": "half"},
        {"beta": 1.0},
        {"alpha": 1.0, "beta": 0.0},
        {"steps": 3, "lr": 0.01},
    ],
)
def test_options_equal_the_reference(stream, options):
    adapter = FedTHE(stream.model, stream.known, **options)
    rows, weights = expected(SHORT, **options)
    assert torch.allclose(run(adapter, stream.x[:SHORT], 16), rows, rtol=0, atol=1e-9)
    assert torch.allclose(adapter.report()["weight"], weights, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sharpness", [0.1, 30.0, 300.0])
def test_unsure_and_certain_heads_equal_the_reference(sharpness):
    """Adam blows up the tiny gradients of certain heads; 1 - λ_s then has few digits in the reference, too."""
    stream = make_stream(sharpness=sharpness)
    adapter = FedTHE(stream.model, stream.known)
    rows, weights = expected(SHORT, sharpness)
    assert torch.allclose(adapter.predict(stream.x[:SHORT]), rows, rtol=0, atol=1e-8)
    assert torch.allclose(adapter.report()["weight"], weights, rtol=0, atol=1e-6)


def test_float32_in_float32_out_with_float64_inside():
    narrow = make_stream(torch.float32)
    rows = FedTHE(narrow.model, narrow.known).predict(narrow.x)
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.double(), expected(len(narrow.x))[0], atol=1e-4)


@pytest.mark.parametrize("size", [1, 7, 60])
def test_published_history_equals_the_reference(stream, size):
    """With a state that is saved and loaded at every border of batches."""
    rows, weights = expected(len(stream.x), beta=0.1, batch=size)
    state, found = FedTHE(stream.model, stream.known).state_dict(), []
    for part, want in zip(stream.x.split(size), weights.split(size), strict=True):
        adapter = FedTHE(stream.model, stream.known, beta=0.1, history="batch")
        adapter.load_state_dict(state)
        found.append(adapter.predict(part))
        assert torch.allclose(adapter.report()["weight"], want, rtol=0, atol=1e-9)
        state = adapter.state_dict()
    assert torch.allclose(torch.cat(found), rows, rtol=0, atol=1e-9)
    assert (weights - expected(len(stream.x), beta=0.1)[1]).abs().max() > 0.01


def test_history_per_batch_never_moves_at_batch_size_one(stream):
    adapter = FedTHE(stream.model, stream.known, history="batch")
    run(adapter, stream.x, 1)
    assert adapter.per == "batch"
    assert torch.equal(adapter.state_dict()["history"], stream.x[0])


def test_history_per_batch_leaves_out_the_first_feature_of_each_batch(stream):
    """Batches (x0 x1 x2), (x3 x4): the history is x0, then takes x1, x2, x4 and never x3."""
    adapter = FedTHE(stream.model, stream.known, history="batch")
    x = stream.x
    adapter.predict(x[:3])
    adapter.predict(x[3:5])
    history = x[0]
    for i in (1, 2, 4):
        history = 0.1 * x[i] + 0.9 * history
    assert torch.allclose(adapter.state_dict()["history"], history, atol=1e-14)


def test_history_of_algorithm_2_takes_every_feature(stream):
    adapter = FedTHE(stream.model, stream.known)
    run(adapter, stream.x[:5], 2)
    history = stream.x[0]
    for row in stream.x[:5]:
        history = 0.1 * row + 0.9 * history
    assert torch.allclose(adapter.state_dict()["history"], history, atol=1e-14)


def test_two_scalars_stay_opposite_so_that_one_is_enough():
    """Adam by torch on (a_g, a_l) with an arbitrary loss of e."""
    pair = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([pair], lr=0.3)
    for step in range(10):
        adam.zero_grad()
        e = torch.softmax(pair, 0)[0]
        (math.sin(step) * e + e**3).backward()
        adam.step()
        assert float(pair.detach().sum()) == pytest.approx(0, abs=1e-15)


def test_schedule_is_adam():
    """Folded bias corrections against torch.optim.Adam on one scalar with given gradients."""
    gradients = [0.3, -1e-9, 2.0, 0.0, -0.7]
    value = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([value], lr=0.05)
    position = moment = square = 0.0
    for gradient, (scale, shift) in zip(gradients, adam_schedule(5, 0.05), strict=True):
        value.grad = torch.tensor([gradient], dtype=torch.float64)
        adam.step()
        moment, square = 0.9 * moment + gradient, 0.999 * square + gradient**2
        position -= scale * moment / (math.sqrt(square) + shift)
        assert position == pytest.approx(float(value.detach()), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(-0.9, 0.9), st.floats(0.1, 5))
def test_gradient_equals_finite_differences(seed, t, sharpness):
    random = np.random.default_rng(seed)
    first, second = sharpness * random.normal(size=(2, 6, 1))
    trust, pull = 0.7, 0.2
    middle, reach = (first + second) / 2, (first - second) / 2

    def loss(at: float) -> float:
        return float(trust * softmax_entropy(middle + at * reach)[1][0] + pull * at)

    slope = weight_gradient(np.array([t]), middle, reach, trust * reach, np.array([pull]))
    assert float(slope[0]) == pytest.approx((loss(t + 1e-5) - loss(t - 1e-5)) / 2e-5, abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 40), st.floats(0, 1))
def test_running_average_is_the_recurrence(seed, count, rate):
    random = np.random.default_rng(seed)
    features, state = random.normal(size=(count, 3)), random.normal(size=3)
    averages = [state]
    for row in features:
        averages.append(rate * row + (1 - rate) * averages[-1])
    assert np.allclose(running_average(features, state, rate), averages, atol=1e-13)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.01, 1.0, 100.0, 1e4]))
def test_weight_is_in_range_and_the_sources_agree(seed, sharpness):
    """The same lines on numpy and on torch (what an accelerator runs), for any size of logit."""
    random = np.random.default_rng(seed)
    first, second = sharpness * random.normal(size=(2, 6, 4))
    trust, gap = random.random(4), random.normal(size=4)
    inputs = (first, second, trust, (1 - trust) * gap)
    e = solve_weight(*inputs, adam_schedule(20, 0.1))
    assert ((e >= 0) & (e <= 1)).all()
    elsewhere = solve_weight(*map(torch.from_numpy, inputs), adam_schedule(20, 0.1))
    assert np.allclose(e, elsewhere.numpy(), atol=1e-9)


def test_swapping_the_heads_turns_the_weight_around(stream):
    known = replace(
        stream.known,
        descriptor_local=stream.known.descriptor_global,
        descriptor_global=stream.known.descriptor_local,
    )
    one, two = FedTHE(stream.model, stream.known), FedTHE(stream.model, known)
    one.interpolate(stream.x, stream.logits_global, stream.logits_personal)
    two.interpolate(stream.x, stream.logits_personal, stream.logits_global)
    assert torch.allclose(one.report()["weight"], 1 - two.report()["weight"], atol=1e-9)


def test_weigh_and_interpolate_move_the_same_history(stream):
    one, two = FedTHE(stream.model, stream.known), FedTHE(stream.model, stream.known)
    outputs = stream.x, stream.logits_global, stream.logits_personal
    one.interpolate(*outputs)
    assert torch.equal(two.weigh(*outputs), one.report()["weight"])
    assert torch.equal(one.state_dict()["history"], two.state_dict()["history"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"descriptor_local": None}, "descriptor_local"),
        ({"descriptor_global": torch.zeros(3)}, "descriptor_global has shape"),
        ({"descriptor_local": torch.full((12,), math.nan)}, "descriptor_local holds values that are not finite"),
    ],
)
def test_bad_statistics_are_named(stream, change, message):
    with pytest.raises(ValueError, match=message):
        FedTHE(stream.model, replace(stream.known, **change))
