"""Methods that only combine heads, and the maths of two heads on a CPU and elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedtta import tta
from fedtta.tta.heads import check_two_heads, feature_head, features_and_logits, statistic_vector
from tests.tta.networks import images, two_head_network
from tests.tta.streams import D, K, make_stream


def test_heads_by_hand(stream):
    """The global head, the personal head and the two ways to average them."""
    first, second = torch.softmax(stream.logits_global, 1), torch.softmax(stream.logits_personal, 1)
    for kind, want, weight in ((tta.NoAdaptation, first, 1.0), (tta.Personal, second, 0.0)):
        adapter = kind(stream.model)
        assert torch.equal(adapter.predict(stream.x), want)
        assert adapter.report()["weight"].tolist() == [weight] * 60
    mixed = tta.FixedMix(stream.model, e=0.25)
    assert torch.allclose(mixed.predict(stream.x), 0.25 * first + 0.75 * second, atol=1e-15)
    assert mixed.report()["weight"].tolist() == [0.25] * 60
    logits = 0.25 * stream.logits_global + 0.75 * stream.logits_personal
    assert torch.equal(tta.FixedMix(stream.model, e=0.25, mix="logits").predict(stream.x), torch.softmax(logits, 1))


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


@pytest.mark.parametrize("batch", [1, 7, 60])
def test_fedrod_against_a_loop_at_any_batch_size(batch: int) -> None:
    stream = make_stream()
    adapter = tta.FedRoD(stream.model, stream.known)
    rows = torch.cat([adapter.predict(part) for part in stream.x.split(batch)])
    head, own = stream.model.head.requires_grad_(False), stream.model.personal_head.weight.detach()
    for x, row in zip(stream.x.tolist(), rows.tolist(), strict=True):
        logits = [
            sum(x[i] * float(head.weight[k, i] + own[k, i]) for i in range(D)) + float(head.bias[k]) for k in range(K)
        ]
        total = sum(math.exp(value) for value in logits)
        assert row == pytest.approx([math.exp(value) / total for value in logits], abs=1e-12)


def test_a_personal_head_of_zeros_is_the_global_head() -> None:
    model = two_head_network()
    with torch.no_grad():
        model.personal_head.weight.zero_()
    x = images(5)
    torch.testing.assert_close(tta.FedRoD(model).predict(x), torch.softmax(model.eval()(x), 1))


@pytest.mark.parametrize("head", ["head", "personal_head"])
def test_heads_that_are_not_finite_are_refused(head: str) -> None:
    model = make_stream().model
    with torch.no_grad():
        getattr(model, head).weight[0, 0] = math.inf
    kind, x = {"head": "global", "personal_head": "personal"}[head], torch.ones(2, D, dtype=torch.float64)
    for predict in (tta.FedRoD(model).predict, lambda x: features_and_logits(model, x, kind)):
        with pytest.raises(ValueError, match=r"output for samples \[0, 1\] of the batch is not finite"):
            predict(x)


def test_networks_without_fitting_heads_are_refused() -> None:
    model = make_stream().model
    del model.personal_head
    with pytest.raises(
        ValueError, match=r"m needs a network of features and a head; TwoHead has no \['personal_head'\]"
    ):
        feature_head(model, "personal", "m")
    with pytest.raises(ValueError, match="m needs a two-head model; TwoHead has no personal_head"):
        check_two_heads(model, "m")
    model.personal_head = nn.Linear(D, K + 1)
    with pytest.raises(ValueError, match=r"head and personal_head differ in shape: \(5, 12\) and \(6, 12\)"):
        check_two_heads(model, "m")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"h has shape \(0,\), the model has 2 features"),
        (torch.zeros(3), r"h has shape \(3,\), the model has 2 features"),
        (torch.tensor([0.0, math.nan]), "h holds values that are not finite"),
    ],
)
def test_a_statistic_that_does_not_fit_is_named(value: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        statistic_vector("h", value, 2)
