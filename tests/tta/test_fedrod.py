"""FedRoD's prediction: the sum of both heads' logits, whatever came before."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.tta.networks import images, two_head_network, weights
from tests.tta.streams import D, K, make_stream
from tta.fedrod import FedRoD


@pytest.mark.parametrize("batch", [1, 7, 60])
def test_against_a_loop_at_any_batch_size(batch: int) -> None:
    stream = make_stream()
    adapter = FedRoD(stream.model, stream.known)
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
    torch.testing.assert_close(FedRoD(model).predict(x), torch.softmax(model.eval()(x), 1))


def test_nothing_is_learned_and_nothing_changes() -> None:
    model, x = two_head_network(), images(9)
    before, asks = weights(model), [value.requires_grad for value in model.parameters()]
    adapter = FedRoD(model)
    first = adapter.predict(x)
    bad = x.clone()
    bad[3] = math.nan
    with pytest.raises(ValueError, match=r"\[3\]"):
        adapter.predict(bad)
    assert adapter.predict(x[:0]).shape == (0, 4)
    fresh = FedRoD(model, record=False)
    fresh.load_state_dict(adapter.state_dict())
    adapter.reset()
    for again in (adapter, fresh):
        assert torch.equal(again.predict(x), first)
        assert again.report() == {}
    assert adapter.per == "sample"
    assert adapter.state_dict() == {}
    assert [value.requires_grad for value in model.parameters()] == asks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="fedrod needs a two-head model; Linear has no features, head, personal_head"):
        FedRoD(nn.Linear(3, 2))
    model = make_stream().model
    with torch.no_grad():
        model.personal_head.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"output for samples \[0, 1\] of the batch is not finite"):
        FedRoD(model).predict(torch.ones(2, D, dtype=torch.float64))
