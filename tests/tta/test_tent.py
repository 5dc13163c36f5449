from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta.tta.arrays import entropy_of_logits
from fedtta.tta.bn_adapt import BNAdapt
from fedtta.tta.tent import Tent
from tests.tta.networks import CLASSES, conv_network, images, mlp_network, two_head_network, vectors

LR = 0.05  # large: the steps must show


def reference(
    network: nn.Module, batches: list[Tensor], optimizer: str = "adam", lr: float = LR, steps: int = 1, mu: float = 0.0
) -> tuple[list[Tensor], nn.Module]:
    """Tent as anyone would write it: torch in training mode, torch.optim, the entropy sample by sample."""
    network = copy.deepcopy(network).train()
    trained = [p for m in network.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for p in m.parameters()]
    start = [p.detach().clone() for p in trained]
    descent = {
        "adam": lambda: torch.optim.Adam(trained, lr=lr),
        "sgd": lambda: torch.optim.SGD(trained, lr=lr, momentum=0.9),
    }[optimizer]()
    rows = []
    for x in batches:
        for _ in range(steps):
            logits = network(x)
            loss = torch.zeros((), dtype=x.dtype)
            for row in logits:
                p = torch.softmax(row, 0)
                loss = loss - (p * torch.log(p)).sum() / len(x)
            loss = loss + mu / 2 * sum(((p - old) ** 2).sum() for p, old in zip(trained, start, strict=True))
            network.zero_grad()
            loss.backward()
            descent.step()
        rows.append(torch.softmax(logits, 1).detach())
    return rows, network


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_it_equals_the_reference(kind: str, optimizer: Any, steps: int, mu: float) -> None:
    network, x = (conv_network(), images(15)) if kind == "conv" else (mlp_network(), vectors(15))
    batches = list(x.split([6, 2, 7]))
    want, adapted = reference(network, batches, optimizer, steps=steps, mu=mu)
    tent = Tent(network, optimizer=optimizer, lr=LR, steps=steps, proximal=mu)
    for batch, rows in zip(batches, want, strict=True):
        torch.testing.assert_close(tent.predict(batch), rows, atol=1e-10, rtol=0)
    for name, value in tent.trained().items():
        torch.testing.assert_close(value.detach(), adapted.get_parameter(name).detach(), atol=1e-10, rtol=0)


def both_kinds() -> Any:
    """BatchNorm2d behind a convolution, BatchNorm1d behind a linear layer."""
    torch.manual_seed(3)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(5, CLASSES)).double()


def test_batchnorm2d_alone_is_trained_as_in_the_published_code() -> None:
    network, batches = both_kinds(), list(images(15).split([6, 2, 7]))
    want = copy.deepcopy(network).train()
    trained = [p for m in want.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    descent = torch.optim.Adam(trained, lr=LR)
    tent, plain = Tent(network, lr=LR, layers="batchnorm2d"), Tent(network, lr=LR)
    for x in batches:
        p = torch.softmax(want(x), 1)
        descent.zero_grad()
        (-(p * p.log()).sum() / len(x)).backward()
        descent.step()
        torch.testing.assert_close(tent.predict(x), p.detach(), atol=1e-10, rtol=0)
        plain.predict(x)
    assert set(tent.trained()) == {"1.weight", "1.bias"}
    assert set(plain.trained()) == {"1.weight", "1.bias", "5.weight", "5.bias"}
    for name, value in tent.trained().items():
        torch.testing.assert_close(value.detach(), want.get_parameter(name).detach(), atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match="no BatchNorm2d layer of Sequential has weights that may be trained"):
        Tent(mlp_network(), layers="batchnorm2d")


def test_what_is_trained_is_batchnorms_weights_and_biases_only() -> None:
    network = two_head_network()
    tent = Tent(network, lr=LR)
    names = {f"encoder.{i}.{part}" for i in (1, 4) for part in ("weight", "bias")}
    assert set(tent.trained()) == names
    assert tent.normalisation() == {}
    before = tent.shared("all")
    tent.predict(images(6))
    after = tent.shared("all")
    assert all(bool((after[name] != before[name]).all()) for name in names)


def test_the_first_prediction_is_bn_adapts_and_the_second_is_not() -> None:
    network, x = conv_network(), images(12)
    tent, plain = Tent(network, lr=LR), BNAdapt(network)
    torch.testing.assert_close(tent.predict(x[:6]), plain.predict(x[:6]), atol=1e-14, rtol=0)
    assert float((tent.predict(x[6:]) - plain.predict(x[6:])).abs().max()) > 1e-3


def test_domain_is_that_of_the_last_forward_pass() -> None:
    """The first BatchNorm's input does not change: its mean and biased variance, straight from the convolution."""
    network: Any = conv_network()
    x = images(8)
    tent = Tent(network, lr=LR, steps=2)
    assert torch.equal(tent.domain()["1"][0], network[1].running_mean)
    assert torch.equal(tent.domain()["5"][1], network[5].running_var)
    tent.predict(x)
    with torch.no_grad():
        values = network[0](x).transpose(0, 1).flatten(1)  # (C, B H W)
    torch.testing.assert_close(tent.domain()["1"][0], values.mean(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(tent.domain()["1"][1], values.var(1, correction=0), atol=1e-12, rtol=0)


def test_one_step_follows_the_finite_difference_gradient() -> None:
    network: Any = mlp_network()
    x = vectors(6)

    def loss(bias: Tensor) -> float:
        moved: Any = copy.deepcopy(network).train()
        with torch.no_grad():
            moved[1].bias.copy_(bias)
            p = torch.softmax(moved(x), 1)
        return float(-(p * p.log()).sum(1).mean())

    start = network[1].bias.detach()
    slopes = []
    for i in range(len(start)):
        step = torch.zeros_like(start)
        step[i] = 1e-5
        slopes.append((loss(start + step) - loss(start - step)) / 2e-5)
    tent = Tent(network, optimizer="sgd", lr=LR)
    tent.predict(x)
    got = (start - tent.trained()["1.bias"].detach()) / LR
    torch.testing.assert_close(got, torch.tensor(slopes, dtype=torch.float64), atol=1e-8, rtol=0)


def test_steps_lower_the_entropy() -> None:
    x = images(10)
    tent = Tent(conv_network(), lr=0.02)
    for _ in range(10):
        tent.predict(x)
    entropy = tent.report()["entropy"].view(10, 10).mean(1)  # (batch)
    assert bool((entropy[1:] < entropy[:-1]).all())


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_one_vector_adapts_with_the_sources_statistics(optimizer: Any) -> None:
    network: Any = mlp_network()
    x = vectors(1)
    with torch.no_grad():
        want = torch.softmax(network(x), 1)
    tent = Tent(network, optimizer=optimizer, lr=LR)
    assert torch.equal(tent.predict(x), want)
    assert not torch.equal(tent.trained()["1.bias"], network[1].bias)
    twin = copy.deepcopy(network).eval()  # its gradient is that of the network in evaluation mode
    entropy_of_logits(twin(x)).mean().backward()
    step = network[1].bias - tent.trained()["1.bias"]
    assert torch.equal(step.detach().sign(), twin[1].bias.grad.sign())


def test_a_failing_second_step_undoes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(6)
    tent = Tent(conv_network(), lr=LR, steps=2)
    tent.predict(x)
    before, calls = tent.state_dict(), []
    descend = tent._step

    def fails(x: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return descend(x, *more)

    monkeypatch.setattr(tent, "_step", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        tent.predict(x)
    after = tent.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert tent.report()["entropy"].shape == (6,)


def test_entropy_is_finite_with_a_finite_gradient_where_a_class_is_certain() -> None:
    logits = torch.tensor([[2000.0, 0.0], [0.0, 0.0]], requires_grad=True)
    entropy = entropy_of_logits(logits)
    torch.testing.assert_close(entropy.detach(), torch.tensor([0.0, 2.0]).log().clamp(min=0))
    entropy.sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


@settings(max_examples=25, deadline=None)
@given(logits=st.lists(st.lists(st.floats(-50, 50), min_size=CLASSES, max_size=CLASSES), min_size=1, max_size=4))
def test_entropy_lies_between_0_and_ln_k(logits: list[list[float]]) -> None:
    entropy = entropy_of_logits(torch.tensor(logits, dtype=torch.float64))
    assert bool((entropy >= -1e-12).all())
    assert bool((entropy <= torch.log(torch.tensor(CLASSES)) + 1e-12).all())
