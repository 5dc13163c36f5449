from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtta.tta import ATP, atp
from tests.tta.atp_networks import (
    CLASSES,
    KINDS,
    batch,
    close,
    moved,
    network,
    some_rates,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["batch", "online"])
def test_streams_by_brute_force(kind: str, mode: str) -> None:
    model = network(kind)
    rates = {**some_rates(model), "head.weight": 3.0}
    variance = "encoder.norm.running_var" if kind == "conv" else "encoder.1.running_var"
    rates[variance] = 5.0  # large enough for the clamp to act
    adapter = ATP(model, rates, mode)  # type: ignore[arg-type]
    seen: list[dict[str, Tensor]] = []
    norms, clamped = [], 0
    for step, n in enumerate((5, 1, 7, 3)):
        x = batch(kind, n, seed=step)[0]
        seen.append(atp.directions(model, x))
        part = seen if mode == "online" else seen[-1:]
        mean = {name: torch.stack([h[name] for h in part]).mean(0) for name in rates}
        steps = {name: rates[name] * mean[name] for name in rates}
        norms.append([steps[name].norm().item() for name in rates])
        other = moved(model, steps)
        value = other.state_dict()[variance]
        clamped += int((value < 0).sum())
        value.clamp_(min=0)
        close(adapter.predict(x), torch.softmax(other(x), 1))
    assert clamped > 0
    assert adapter.names == list(rates)
    assert adapter.report()["update_norms"].shape == (4, len(rates))
    np.testing.assert_allclose(adapter.report()["update_norms"].numpy(), norms, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_modes_agree_on_the_first_batch_only(kind: str) -> None:
    model = network(kind)
    rates = some_rates(model)
    each, online = ATP(model, rates), ATP(model, rates, "online")
    for step in range(2):
        x = batch(kind, seed=step)[0]
        assert torch.equal(each.predict(x), online.predict(x)) == (step == 0)


@pytest.mark.parametrize("mode", ["batch", "online"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_rates_predict_what_the_network_predicts(mode: str, dtype: torch.dtype) -> None:
    model, x = network("conv", dtype), batch("conv", dtype=dtype)[0]
    adapter = ATP(model, atp.zero_rates(model), mode)  # type: ignore[arg-type]
    with torch.no_grad():
        want = torch.softmax(model.eval()(x), 1)
    got = adapter.predict(x)
    assert got.dtype == dtype
    assert torch.equal(got, want)
    assert not adapter.report()["update_norms"].any()
    if mode == "online":  # the stream counts all the same
        state = adapter.state_dict()
        assert int(state["batches"]) == 1
        assert all(torch.equal(state[f"mean.{name}"], h) for name, h in atp.directions(model, x).items())


def test_an_empty_batch_is_no_batch() -> None:
    model, x = network("conv"), batch("conv")[0]
    h = atp.directions(model, x[:0])
    assert list(h) == atp.modules(model)
    assert not any(value.any() for value in h.values())
    for mode in ("batch", "online"):
        adapter, same = (ATP(model, some_rates(model), mode) for _ in range(2))  # type: ignore[arg-type]
        assert adapter.predict(x[:0]).shape == (0, CLASSES)
        assert adapter.report() == {}
        assert torch.equal(adapter.predict(x), same.predict(x))


def test_inference_mode_changes_nothing() -> None:
    model, (x, y) = network("conv"), batch("conv")
    rates = some_rates(model)
    want = ATP(model, rates, "online"), atp.refine(model, x, y, rates, 0.1)
    adapter = ATP(model, rates, "online")
    with torch.inference_mode():
        first, refined = adapter.predict(x * 1), atp.refine(model, x * 1, y * 1, rates, 0.1)
    assert torch.equal(first, want[0].predict(x))
    assert torch.equal(adapter.predict(x + 1), want[0].predict(x + 1))
    assert refined == want[1]


def test_a_failed_batch_is_forgotten() -> None:
    model, x = network("conv"), batch("conv")[0]
    adapter = ATP(model, some_rates(model), "online")
    adapter.predict(x)
    before = adapter.state_dict()
    huge = x.clone()
    huge[2] = 1.5e308  # infinite as soon as the network scales it
    with pytest.raises(ValueError, match=r"samples \[2\] of the batch is not finite"):
        adapter.predict(huge)
    far = ATP(model, {**atp.zero_rates(model), "encoder.fc.weight": 1e308, "head.weight": 1e308}, "online")
    with pytest.raises(ValueError, match="the adapted network's output for samples"):
        far.predict(x)
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())
    assert int(far.state_dict()["batches"]) == 0
    assert len(adapter.report()["update_norms"]) == 1
