"""What every adapter of two heads has in common, and the ones that do not adapt."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import tta
from models.two_head import TwoHead
from tests.tta.streams import make_stream

NAMES = ["none", "personal", "fixed_mix", "fedthe", "btfl"]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_rows_are_probabilities_and_the_report_keeps_the_order(stream, name):
    adapter = tta.create(name, stream.model, stream.known)
    rows = torch.cat([adapter.predict(part) for part in stream.x.split(13)])
    assert rows.shape == (60, 5)
    assert rows.dtype == torch.float64
    assert torch.allclose(rows.sum(1), torch.ones(60, dtype=torch.float64), atol=1e-14)
    assert (rows >= 0).all()
    weight = adapter.report()["weight"]
    whole = tta.create(name, stream.model, stream.known)
    assert torch.allclose(whole.predict(stream.x), rows, rtol=0, atol=1e-12)
    assert torch.allclose(whole.report()["weight"], weight, rtol=0, atol=1e-12)
    assert ((weight >= 0) & (weight <= 1)).all()


def test_state_round_trip_continues_the_stream(stream, name):
    one = tta.create(name, stream.model, stream.known)
    one.predict(stream.x[:25])
    two = tta.create(name, stream.model, stream.known)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.predict(stream.x[25:]), two.predict(stream.x[25:]))
    assert len(two.report()["weight"]) == 35


def test_a_state_is_a_copy(stream, name):
    adapter = tta.create(name, stream.model, stream.known)
    adapter.predict(stream.x[:20])
    state = adapter.state_dict()
    kept = {key: value.clone() for key, value in state.items()}
    adapter.predict(stream.x[20:])
    assert all(torch.equal(state[key], kept[key]) for key in state)


def test_reset_starts_again(stream, name):
    adapter = tta.create(name, stream.model, stream.known)
    first = adapter.predict(stream.x)
    adapter.reset()
    assert torch.equal(adapter.predict(stream.x), first)
    assert len(adapter.report()["weight"]) == 60


def test_record_false_keeps_no_report(stream, name):
    adapter = tta.create(name, stream.model, stream.known, record=False)
    adapter.predict(stream.x)
    assert adapter.report() == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_sample_is_named_and_changes_nothing(stream, name, value):
    adapter, twin = (tta.create(name, stream.model, stream.known) for _ in range(2))
    adapter.predict(stream.x[:20])
    twin.predict(stream.x[:20])
    bad = stream.x[20:30].clone()
    bad[4, 2] = value
    with pytest.raises(ValueError, match=r"\[4\]"):
        adapter.predict(bad)
    assert torch.equal(adapter.predict(stream.x[20:]), twin.predict(stream.x[20:]))
    assert torch.equal(adapter.report()["weight"], twin.report()["weight"])


def test_an_empty_batch_changes_nothing(stream, name):
    adapter, twin = (tta.create(name, stream.model, stream.known) for _ in range(2))
    assert adapter.predict(stream.x[:0]).shape == (0, 5)
    adapter.predict(stream.x[:9])
    twin.predict(stream.x[:9])
    assert adapter.predict(stream.x[:0]).shape == (0, 5)
    assert torch.equal(adapter.predict(stream.x[9:]), twin.predict(stream.x[9:]))


def test_images_through_an_encoder(name):
    """[B, C, H, W] through a real network, in float32, weights untouched."""
    torch.manual_seed(0)
    model = TwoHead(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 4, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    known = tta.Statistics(torch.rand(4), torch.rand(4), torch.rand(4), torch.rand(4), 0.5, 0.9)
    rows = tta.create(name, model, known).predict(torch.rand(5, 3, 8, 8))
    assert rows.shape == (5, 3)
    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["fedthe", "btfl"])
def test_a_state_of_another_shape_is_refused(stream, name):
    adapter = tta.create(name, stream.model, stream.known)
    state = {key: torch.zeros(3) for key in adapter.state_dict()}
    with pytest.raises(ValueError, match="state"):
        adapter.load_state_dict(state)


def test_a_network_that_explodes_is_named():
    stream = make_stream()
    with torch.no_grad():
        stream.model.personal_head.weight.fill_(1e308)
    adapter = tta.FedTHE(stream.model, stream.known)
    with pytest.raises(ValueError, match="not finite"):
        adapter.predict(100 * stream.x[:3])
    assert not adapter.state_dict()["has_history"]


def test_a_model_with_one_head_is_refused():
    with pytest.raises(ValueError, match="personal_head"):
        tta.Personal(nn.Linear(3, 2))


def test_heads_by_hand(stream):
    """The global head, the personal head and the two ways to average them."""
    first, second = torch.softmax(stream.logits_global, 1), torch.softmax(stream.logits_personal, 1)
    assert torch.equal(tta.NoAdaptation(stream.model).predict(stream.x), first)
    assert torch.equal(tta.Personal(stream.model).predict(stream.x), second)
    mixed = tta.FixedMix(stream.model, e=0.25)
    assert torch.allclose(mixed.predict(stream.x), 0.25 * first + 0.75 * second, atol=1e-15)
    assert mixed.report()["weight"].tolist() == [0.25] * 60
    logits = 0.25 * stream.logits_global + 0.75 * stream.logits_personal
    assert torch.equal(tta.FixedMix(stream.model, e=0.25, mix="logits").predict(stream.x), torch.softmax(logits, 1))


@pytest.mark.parametrize("options", [{"e": 1.1}, {"e": math.nan}, {"mix": "heads"}])
def test_bad_mixtures_are_named(stream, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        tta.FixedMix(stream.model, **options)


@pytest.mark.parametrize(
    ("name", "options"), [("fedthe", {}), ("btfl", {}), ("btfl", {"rectify": "product"}), ("btfl", {"rectify": "none"})]
)
def test_what_an_accelerator_runs_equals_the_cpu(stream, name, options, monkeypatch):
    """The maths on torch tensors, as on an accelerator, where a CPU uses numpy."""
    expected = tta.create(name, stream.model, stream.known, **options)
    rows = [expected.predict(part) for part in stream.x.split(25)]
    for module in ("arrays", "fedthe", "btfl"):
        monkeypatch.setattr(f"tta.{module}.from_tensor", lambda tensor: tensor.detach().double())
    adapter = tta.create(name, stream.model, stream.known, **options)
    for part, row in zip(stream.x.split(25), rows, strict=True):
        assert torch.allclose(adapter.predict(part), row, rtol=0, atol=1e-10)
    columns = expected.report()
    assert all(torch.allclose(value, columns[key], atol=1e-10) for key, value in adapter.report().items())
    adapter.load_state_dict(adapter.state_dict())
