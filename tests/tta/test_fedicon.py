from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.fedicon import FedICON
from tests.tta.networks import CLASSES, images, noise, two_head_network, vectors

LR = 0.2  # large: the steps must show
OPTIONS: dict[str, Any] = {"lr": LR, "momentum": 0.9, "augment": noise, "seed": 3, "batch_size": 6}
MODES = ["offline", "online"]


def plain_network(dtype: torch.dtype = torch.float64) -> TwoHead:
    """Without BatchNorm, with dropout and one parameter that no output uses."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(108, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 6), nn.ReLU())
        encoder.register_parameter("spare", nn.Parameter(torch.ones(2)))
        return TwoHead(encoder, 6, CLASSES).to(dtype)


NETWORKS = {"plain": plain_network, "batchnorm": two_head_network}


def generator_of(seed: int, *key: int) -> Generator:
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state[0]))


def step(network: TwoHead, optimiser: torch.optim.Optimizer, x: Tensor, generator: Generator) -> float:
    """One step of eq. 5 as anyone would write it: torch.optim.SGD, training mode, the loss anchor by anchor."""
    for layer in network.encoder.modules():
        layer.train(isinstance(layer, nn.BatchNorm2d))
    z = network.features(noise(torch.cat((x, x)), generator))
    z = z / z.norm(dim=1, keepdim=True)
    loss = torch.zeros((), dtype=x.dtype)
    for i in range(len(z)):
        others = [torch.exp(z[i] @ z[a] / 0.5) for a in range(len(z)) if a != i]
        positive = torch.exp(z[i] @ z[(i + len(x)) % len(z)] / 0.5)
        loss = loss - torch.log(positive / torch.stack(others).sum()) / len(z)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    network.eval()
    return float(loss.detach())


def reference(
    network: TwoHead, stream: list[Tensor], mode: str, epochs: int, head: str = "global"
) -> tuple[list[Tensor], list[float], TwoHead]:
    """The method: predictions of each call, losses, and the network that is left."""
    network, rows, losses = copy.deepcopy(network), [], []
    optimiser = torch.optim.SGD(network.encoder.parameters(), lr=LR, momentum=0.9)
    for position, x in enumerate(stream):
        if mode == "online":
            for repeat in range(epochs if len(x) > 1 else 0):
                losses.append(step(network, optimiser, x, generator_of(3, position, repeat)))
        else:
            for epoch in range(epochs):
                order = torch.randperm(len(x), generator=generator_of(3, epoch))
                for number, chosen in enumerate(order.split(6)):
                    if len(chosen) > 1:
                        losses.append(step(network, optimiser, x[chosen], generator_of(3, epoch, number)))
        with torch.no_grad():
            z = network.features(x)
            rows.append(torch.softmax(network.head(z) if head == "global" else network.personal_head(z), 1))
    return rows, losses, network


@pytest.mark.parametrize("head", ["global", "personal"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_it_equals_the_reference(kind: str, mode: Any, epochs: int, head: Any) -> None:
    network, x = NETWORKS[kind](), images(20)
    stream = list(x.split([7, 1, 12])) if mode == "online" else [x[:19]]  # 19 images: the last batch has one
    want, losses, left = reference(network, stream, mode, epochs, head)
    adapter = FedICON(network, mode=mode, epochs=epochs, head=head, **OPTIONS)
    for batch, rows in zip(stream, want, strict=True):
        torch.testing.assert_close(adapter.predict(batch), rows, atol=1e-9, rtol=0)
    torch.testing.assert_close(adapter.report()["loss"], torch.tensor(losses, dtype=x.dtype), atol=1e-9, rtol=0)
    if mode == "online":
        state = adapter.state_dict()
        for name, value in left.encoder.state_dict().items():
            torch.testing.assert_close(state[f"encoder.{name}"], value, atol=1e-9, rtol=0)


def test_steps_lower_the_loss() -> None:
    adapter = FedICON(two_head_network(), epochs=60, lr=0.1, augment=noise)
    adapter.predict(images(12))
    assert float(adapter.report()["loss"].view(6, 10).mean(1).diff().max()) < 0  # mean of every ten steps


def test_lr_0_moves_running_statistics_only() -> None:
    network, x = plain_network(), images(8)
    want = torch.softmax(network.eval()(x), 1).detach()
    assert torch.equal(FedICON(network, lr=0.0, augment=noise).predict(x), want)
    moved = FedICON(two_head_network(), lr=0.0, augment=noise)
    before = moved.state_dict()
    moved.predict(x)
    changed = {name for name, value in moved.state_dict().items() if not torch.equal(value, before[name])}
    parts = ("running_mean", "running_var", "num_batches_tracked")
    statistics = {f"encoder.{layer}.{part}" for layer in (1, 4) for part in parts}
    assert {name for name in changed if not name.endswith(".velocity")} == {*statistics, "optimizer.step", "batches"}


def test_frozen_parameters_are_tuned_too() -> None:
    network: Any = two_head_network()
    network.encoder[0].weight.requires_grad_(False)
    adapter = FedICON(network, **OPTIONS)
    adapter.predict(images(8))
    assert not torch.equal(adapter.state_dict()["encoder.0.weight"], network.encoder[0].weight)


def test_a_batch_of_one_is_predicted_and_teaches_nothing() -> None:
    network, x = two_head_network(), images(5)
    adapter = FedICON(network, **OPTIONS)
    adapter.predict(x[:4])
    before = adapter.state_dict()
    assert adapter.predict(x[4:]).shape == (1, CLASSES)
    after = adapter.state_dict()
    assert int(after.pop("batches")) == int(before.pop("batches")) + 1
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert adapter.report()["loss"].shape == (1,)
    offline = FedICON(network, mode="offline", **OPTIONS)
    assert torch.equal(offline.predict(x[4:]), torch.softmax(network(x[4:]), 1).detach())
    assert offline.report() == {}


def test_offline_carries_nothing_from_call_to_call() -> None:
    x = images(13)
    adapter = FedICON(two_head_network(), mode="offline", **OPTIONS)
    first = adapter.predict(x)
    for other in (images(9, seed=5), x[:0]):
        assert adapter.predict(other).shape == (len(other), CLASSES)
        assert torch.equal(adapter.predict(x), first)
    assert adapter.state_dict() == {}
    reseeded = FedICON(two_head_network(), mode="offline", **{**OPTIONS, "seed": 4})
    assert not torch.equal(reseeded.predict(x), first)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"augment": lambda x, generator: x / 0}, r"output for samples \[0, 1, 2, 3, 4, 5, 6, 7\]"),
        ({"lr": 1e308, "epochs": 2}, "left the finite numbers|not finite"),
    ],
)
def test_a_failure_keeps_the_state(attributes: dict[str, Any], message: str) -> None:
    x = images(8)
    adapter = FedICON(two_head_network(), **{**OPTIONS, **attributes})
    good = FedICON(two_head_network(), **{**OPTIONS, "epochs": attributes.get("epochs", 1)})
    good.predict(x)
    before = good.state_dict()
    adapter.load_state_dict(before)
    with pytest.raises(ValueError, match=message):
        adapter.predict(x)
    assert all(torch.equal(before[name], value) for name, value in adapter.state_dict().items())
    assert adapter.report() == {}


def test_one_running_statistic_that_overflows_is_refused() -> None:
    """The channel's variance is infinite in float32, its normalised values are 0: all features are finite."""
    encoder = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 6), nn.ReLU())
    adapter, x = FedICON(TwoHead(encoder, 6, CLASSES), **OPTIONS), images(6, dtype=torch.float32)
    x[:, 1] *= 1e25
    with pytest.raises(ValueError, match=r"the batch makes 0\.running_var not finite"):
        adapter.predict(x)


def test_models_without_something_to_tune_are_refused() -> None:
    with pytest.raises(ValueError, match="no features, head, personal_head"):
        FedICON(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="no encoder with parameters"):
        FedICON(TwoHead(nn.Identity(), 6, 4))
    norm = TwoHead(nn.BatchNorm1d(5), 5, 4).double()  # the encoder is itself a BatchNorm
    assert FedICON(norm, augment=noise).predict(vectors(6)).shape == (6, 4)
