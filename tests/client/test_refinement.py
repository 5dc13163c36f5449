"""Refining rates on a client: the steps of `fedtta.tta.atp` over shuffled batches, by an independent loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedtta.client.adaptation import refine_rates
from fedtta.client.algorithms.training import generator
from fedtta.client.state import MemoryState
from fedtta.models import TwoHead, build
from fedtta.tta.atp import Adapt, refine_with_loss, zero_rates
from tests.client import tiny

BATCHNORM = {"depth": 8, "width": 4}


def network() -> TwoHead:
    return build("resnet20-bn", tiny.CLASSES, image_size=tiny.SIZE, seed=3, **BATCHNORM)


def labelled(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images_ = tiny.images(count)
    return images_.batch(np.arange(count)), torch.tensor(images_.labels)


@pytest.mark.parametrize("variant", ["all", "params", "stats"])
@pytest.mark.parametrize(("epochs", "count"), [(1, 12), (3, 11)])
def test_epochs_of_shuffled_batches_one_step_each(variant: Adapt, epochs: int, count: int) -> None:
    model = network()
    before = tiny.snapshot(model)
    x, y = labelled(count)
    settings = tiny.settings(rates_epochs=epochs, rates_batch_size=5, rates_learning_rate=0.3)
    given = {name: 0.01 * number for number, name in enumerate(zero_rates(model))}
    made = refine_rates(model, x, y, given, variant, settings, generator(1, "rates", 2, 0))

    draw, rates = generator(1, "rates", 2, 0), given
    for _ in range(epochs):
        order = torch.randperm(count, generator=draw).tolist()
        losses, right = [], 0
        for begin in range(0, count, 5):
            chosen = order[begin : begin + 5]
            step = refine_with_loss(network(), x[chosen], y[chosen], rates, 0.3, variant)  # always w_G
            rates, right = step.rates, right + step.correct
            losses += [step.loss] * len(chosen)
    assert made.rates == rates
    assert list(made.rates) == list(zero_rates(model))
    assert made.loss == pytest.approx(sum(losses) / count, abs=1e-12)
    assert (made.correct, made.total) == (right, count)
    assert not tiny.changed(before, model)
    assert given == {name: 0.01 * number for number, name in enumerate(zero_rates(model))}


def test_no_validation_samples() -> None:
    x, y = labelled(4)
    with pytest.raises(ValueError, match="rates are refined on validation samples, and there are none"):
        refine_rates(network(), x[:0], y[:0], zero_rates(network()), "all", tiny.settings(), generator(1, "rates"))


def device(**changes):
    return tiny.device(model=network(), rates_batch_size=6, rates_learning_rate=0.2, **changes)


def test_a_device_refines_on_its_validation_split_in_an_order_of_seed_round_and_client() -> None:
    client = device()
    arrays = tiny.global_arrays(client.model)
    rates, metrics = client.refine_rates(2, arrays, {}, "all")
    indices = client.federation.splits[0].validation
    images = client.federation.images
    x, y = images.batch(indices), torch.from_numpy(images.labels[indices])
    x = x.contiguous(memory_format=torch.channels_last)
    draw = generator(client.settings.seed, "rates", 2, 0)
    expected = refine_rates(network(), x, y, zero_rates(network()), "all", client.settings, draw)
    assert rates == expected.rates  # no rates at first means all zero
    assert set(metrics) == {"num-examples", "loss", "correct", "seconds", "context-bytes"}
    assert metrics["num-examples"] == len(indices)
    assert (metrics["loss"], metrics["correct"]) == (expected.loss, expected.correct)
    again, _ = device().refine_rates(2, arrays, dict.fromkeys(rates, 0.0), "all")
    assert again == rates
    assert rates != device().refine_rates(3, arrays, {}, "all")[0]  # another round, another order
    # it leaves no trace on the device
    assert not tiny.state_of(client).entries
    assert isinstance(client.memory, MemoryState)
    assert not client.memory.entries
    assert tiny.same(tiny.global_arrays(client.model), arrays)


@pytest.mark.parametrize("change", [{"nothing.weight": 0.1}, {"head.bias": math.nan}])
def test_rates_that_do_not_fit_are_refused(change: dict[str, float]) -> None:
    client = device()
    rates = {**zero_rates(client.model), **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        client.refine_rates(1, tiny.global_arrays(client.model), rates, "all")


def test_a_network_that_does_not_fit_is_refused() -> None:
    client = device()
    arrays = tiny.global_arrays(client.model)
    arrays["head.bias"] = arrays["head.bias"].astype(np.float64)
    with pytest.raises(ValueError, match=r"head\.bias: dtype float64 does not fit float32"):
        client.refine_rates(1, arrays, {}, "all")
