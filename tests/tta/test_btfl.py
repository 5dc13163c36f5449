from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.btfl import BTFL, Reading, detect_event, discretise, prior_path, without_own_share
from fedtta.tta.statistics import Statistics
from tests.tta import reference
from tests.tta.streams import make_stream


def run(adapter: BTFL, x: Tensor, size: int) -> Tensor:
    return torch.cat([adapter.predict(part) for part in x.split(size)])


def assert_equals_reference(stream, adapter: BTFL, size: int, **options) -> dict[str, Tensor]:
    rows = run(adapter, stream.x, size)
    expected, prior = reference.btfl(stream.x, stream.logits_global, stream.logits_personal, stream.known, **options)
    assert torch.allclose(rows, expected.pop("probabilities"), rtol=0, atol=1e-10)
    report = adapter.report()
    for name, column in expected.items():
        assert torch.allclose(report[name].double(), column.double(), rtol=0, atol=1e-10), name
    assert torch.allclose(adapter.state_dict()["prior"], torch.tensor(prior, dtype=torch.float64), atol=1e-12)
    return expected


@pytest.mark.parametrize("size", [1, 7, 60])
def test_equals_the_reference_for_any_batch_size(stream, size):
    expected = assert_equals_reference(stream, BTFL(stream.model, stream.known), size)
    assert {-1, 1} <= set(expected["event"].tolist())  # both events occur, so the comparison means something
    assert expected["weight"].std() > 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"rectify": "product"},
        {"rectify": "none"},
        {"smoothing": 0.0},
        {"smoothing": 0.0, "rectify": "none"},
        {"strength": 4},
        {"strength": 2.5},
        {"strength": 0.5},
        {"strength": 200},
    ],
)
def test_options_equal_the_reference(stream, options):
    assert_equals_reference(stream, BTFL(stream.model, stream.known, **options), 16, **options)


def test_leave_one_out_equals_the_reference(stream):
    assert_equals_reference(stream, BTFL(stream.model, stream.known, leave_one_out=10), 16, clients=10)


def test_leave_one_out_is_the_mean_of_the_others():
    shares = np.array([[0.1, 1.0], [0.4, 0.5], [0.7, 0.3]])
    assert np.allclose(without_own_share(shares.mean(0), shares[0], 3), shares[1:].mean(0))
    assert np.array_equal(without_own_share(np.array([0.1]), np.array([0.9]), 2), [0.0])  # impossible: clipped


def test_dead_and_always_on_units_to_the_letter(stream):
    """p = 0 and p = 1 with s = 0: clipped, so that ln τ is finite."""
    dead = stream.known.dle_local.clone()
    dead[0], dead[1] = 0.0, 1.0
    known = stream._replace(known=replace(stream.known, dle_local=dead))
    assert_equals_reference(known, BTFL(stream.model, known.known, smoothing=0.0), 16, smoothing=0.0)


def test_by_hand():
    """One feature, two classes, s = 0, p^l = 0.8, p^g = 0.4, H̄_l = H̄_g = 0.5, λ = 3.

    Heads: logits (4 z, 0) personal and (0, z) global, so H_l < 0.5 and H_g > 0.5 for z = 0.8 and the other way round
    for no z; swapping the heads' roles gives the external event.
    z = 0.8 is 1 (> 0.549), z = 0.5 is 0: ln τ = ln(0.2/0.6) = -1.0986 and ln(0.8/0.4) = 0.6931.
    """
    model = TwoHead(nn.Identity(), 1, 2).double()
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[0.0], [1.0]]))
        model.head.bias.zero_()
        model.personal_head.weight.copy_(torch.tensor([[4.0], [0.0]]))
    share = torch.tensor([0.8]), torch.tensor([0.4])
    adapter = BTFL(model, Statistics(None, None, *share, 0.5, 0.5), strength=3, smoothing=0, rectify="none")
    # z = 0.5: H_l = H(1/(1+e^-2)) = 0.3654 < 0.5, H_g = H(1/(1+e^-0.5)) = 0.6629 > 0.5, ln τ > 0: internal, b = 2,
    # a + b = 3 is not above λ. Again: b = 3, sum 4 > 3, so (1 + 1/4, 1 + 3/4). Then z = 0.8: ln τ < 0, no event.
    # After that the sum is 3 again and nothing is pruned.
    adapter.predict(torch.tensor([[0.5], [0.5], [0.8], [0.8]], dtype=torch.float64))
    report = adapter.report()
    assert report["event"].tolist() == [-1, -1, 0, 0]
    assert report["prior"].tolist() == [[1, 1], [1, 2], [1.25, 1.75], [1.25, 1.75]]
    assert torch.allclose(report["log_tau"], torch.tensor([0.6931472, 0.6931472, -1.0986123, -1.0986123]).double())
    # e(1, 1, 2) = (1 - τ + τ ln τ)/(1-τ)² = 2 ln 2 - 1
    assert float(report["weight"][0]) == pytest.approx(2 * math.log(2) - 1, abs=1e-12)


def test_events_by_hand():
    means = (0.5, 0.6)
    assert detect_event(0.1, (0.4, 0.7), means) == -1
    assert detect_event(-0.1, (0.6, 0.5), means) == 1
    assert detect_event(0.0, (0.4, 0.7), means) == 0  # τ = 1
    assert detect_event(0.0, (0.6, 0.5), means) == 0
    assert detect_event(0.1, (0.5, 0.7), means) == 0  # H_l = H̄_l: strict
    assert detect_event(0.1, (0.4, 0.6), means) == 0
    assert detect_event(-0.1, (0.5, 0.5), means) == 0
    assert detect_event(-0.1, (0.6, 0.6), means) == 0
    assert detect_event(-0.1, (0.4, 0.7), means) == 0  # the signs disagree


def test_prior_by_hand():
    """λ = 4 from (1, 1): external, external, internal → sum 5 > 4: (1 + 3/5, 1 + 2/5)."""
    path, last = prior_path([1, 1, -1, 0], (1.0, 1.0), Reading(strength=4))
    assert path == [(1, 1), (2, 1), (3, 1), (1.6, 1.4)]
    assert last == (1.6, 1.4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=60), st.floats(2, 40))
def test_prior_stays_in_range(events, strength):
    path, last = prior_path(events, (1.0, 1.0), Reading(strength=strength))
    assert all(min(pair) >= 1 and sum(pair) <= max(strength, 3) + 1e-9 for pair in [*path, last])


def test_equal_frequencies_give_no_event_and_the_prior_mean(stream):
    known = replace(stream.known, dle_global=stream.known.dle_local)
    adapter = BTFL(stream.model, known, rectify="none")
    adapter.predict(stream.x)
    assert torch.equal(adapter.report()["log_tau"], torch.zeros(60, dtype=torch.float64))
    assert torch.allclose(adapter.report()["weight"], torch.full((60,), 0.5, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("mean", [0.0, 0.7])
@pytest.mark.parametrize("rectify", ["power", "product"])
def test_an_entropy_of_zero_gives_no_trust(stream, mean, rectify):
    """Logits so far apart that one probability is 1: u = 0, ln u clipped to -30, also when the mean entropy is 0."""
    adapter = BTFL(stream.model, replace(stream.known, entropy_local=mean, entropy_global=0.9), rectify=rectify)
    certain = torch.zeros(1, 5, dtype=torch.float64)
    certain[0, 2] = 5000.0
    unsure = torch.zeros(1, 5, dtype=torch.float64)  # H = ln 5
    adapter.interpolate(stream.x[:1], unsure, certain)
    trust_g = math.exp(1 - 0.9 / math.log(5))
    log_tau, hat = (float(adapter.report()[name][0]) for name in ("log_tau", "log_tau_hat"))
    p_g, code = 0.2 + 0.6 * stream.known.dle_global, discretise(stream.x[0])
    log_g = float(torch.where(code == 0, p_g.log(), (1 - p_g).log()).sum())
    expected = -trust_g * log_g / 12 if rectify == "power" else log_tau / 12 - 30 - math.log(trust_g)
    assert hat == pytest.approx(expected, abs=1e-12)


def test_float32_in_float32_out_with_float64_inside(stream):
    narrow = make_stream(torch.float32)
    rows = BTFL(narrow.model, narrow.known).predict(narrow.x)
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.double(), BTFL(stream.model, stream.known).predict(stream.x), atol=1e-4)


def test_discretise_is_the_rounded_tanh():
    z = torch.tensor([0.0, 0.549, 0.5494, 3.0, math.atanh(0.5)], dtype=torch.float64)
    assert discretise(z)[:4].tolist() == [0, 0, 1, 1]
    assert isinstance(discretise(z.numpy()), np.ndarray)
    assert np.array_equal(discretise(z.numpy())[:4], [0, 0, 1, 1])
    assert torch.round(torch.tensor(0.5)) == 0  # ties to even


def test_a_network_whose_features_may_be_negative_is_refused(stream):
    model = TwoHead(nn.Identity(), stream.model.feature_dim, stream.model.num_classes, features_nonnegative=False)
    with pytest.raises(ValueError, match="a ReLU before the heads"):
        BTFL(model, stream.known)
    assert "nonnegative" in BTFL.needs


def test_negative_features_are_named_and_change_nothing(stream):
    adapter = BTFL(stream.model, stream.known)
    adapter.predict(stream.x[:10])
    before = adapter.state_dict()["prior"]
    bad = stream.x[:5].clone()
    bad[1, 3] = bad[4, 0] = -0.1
    with pytest.raises(ValueError, match=r"samples \[1, 4\].*negative"):
        adapter.predict(bad)
    assert torch.equal(adapter.state_dict()["prior"], before)
    assert len(adapter.report()["weight"]) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dle_local": None, "entropy_global": None}, r"dle_local \(of this client\), entropy_global"),
        ({"dle_global": torch.full((12,), 1.1)}, r"dle_global holds values outside \[0, 1\]"),
        ({"dle_local": torch.zeros(11)}, "dle_local has shape"),
        ({"dle_local": torch.full((12,), math.nan)}, "dle_local holds values that are not finite"),
        ({"entropy_local": -0.1}, "entropy_local"),
        ({"entropy_global": math.nan}, "entropy_global"),
    ],
)
def test_bad_statistics_are_named(stream, change, message):
    with pytest.raises(ValueError, match=message):
        BTFL(stream.model, replace(stream.known, **change))


@pytest.mark.parametrize("prior", [[0.5, 2.0], [20.0, 20.0]])
def test_a_state_out_of_range_is_refused(stream, prior):
    adapter = BTFL(stream.model, stream.known)
    with pytest.raises(ValueError, match="prior"):
        adapter.load_state_dict({"prior": torch.tensor(prior, dtype=torch.float64)})
    assert adapter.state_dict()["prior"].tolist() == [1, 1]
