from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.tta.roid import (
    ROID,
    prior_corrected,
    sample_weights,
    scaled,
    soft_likelihood_ratio,
    symmetric_cross_entropy,
)
from tests.tta.networks import (
    CLASSES,
    conv_network,
    images,
    mlp_network,
    noise,
    two_head_network,
    vectors,
)

#: With rates at which a few batches show.
OPTIONS = {"lr": 0.05, "momentum_src": 0.8, "momentum_probs": 0.6, "augment": noise, "seed": 3}


def random_logits(n: int, classes: int = 5, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, classes, generator=Generator().manual_seed(seed), dtype=torch.float64)


def plain_softmax(row: list[float]) -> list[float]:
    mass = [math.exp(v - max(row)) for v in row]
    return [m / sum(mass) for m in mass]


def plain_weights(logits: Tensor, average: list[float], temperature: float) -> list[float]:
    """The weights, one sample after the other."""
    rows = [plain_softmax(row) for row in logits.tolist()]

    def norm(v: list[float]) -> float:
        return math.sqrt(sum(a * a for a in v))

    def stretched(values: list[float]) -> list[float]:
        span = max(values) - min(values)
        return [(v - min(values)) / span if span else 0.0 for v in values]

    diversity = stretched(
        [1 - sum(a * b for a, b in zip(p, average, strict=True)) / (norm(p) * norm(average)) for p in rows]
    )
    certainty = stretched([sum(a * math.log(a) for a in p) for p in rows])
    mean = sum(diversity) / len(rows)
    both = zip(diversity, certainty, strict=True)
    return [0.0 if d < mean else math.exp(d * c / temperature) for d, c in both]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), classes=st.integers(2, 6), scale=st.floats(0.1, 8))
def test_losses_weights_and_prior_equal_loops(seed: int, n: int, classes: int, scale: float) -> None:
    first, second = random_logits(n, classes, scale, seed), random_logits(n, classes, scale, seed + 1)
    slr, sce = soft_likelihood_ratio(first), symmetric_cross_entropy(first, second)
    rows = [plain_softmax(row) for row in first.tolist()]
    for i, (p, q) in enumerate(zip(rows, map(plain_softmax, second.tolist()), strict=True)):
        clipped = [min(a, 0.99) for a in p]
        assert float(slr[i]) == pytest.approx(-sum(a * math.log(a / (1 - a) + 1e-5) for a in clipped), abs=1e-9)
        cross = -sum(a * math.log(b) + b * math.log(a) for a, b in zip(p, q, strict=True)) / 2
        assert float(sce[i]) == pytest.approx(cross, abs=1e-9)
    average = plain_softmax(random_logits(1, classes, 1, seed + 2)[0].tolist())
    if scale > 0.5:  # below, diversities are equal up to rounding, and their order is its
        got = sample_weights(first, torch.tensor(average, dtype=torch.float64), 1 / 3)
        assert got.tolist() == pytest.approx(plain_weights(first, average, 1 / 3), abs=1e-6)
        assert float(got.max()) >= 1
    prior = [sum(p[c] for p in rows) / n for c in range(classes)]
    gamma = max(1 / n, 1 / classes) / max(prior)
    corrected = prior_corrected(first.softmax(1))
    for i, p in enumerate(rows):
        mass = [a * (b + gamma) / (1 + gamma * classes) for a, b in zip(p, prior, strict=True)]
        assert corrected[i].tolist() == pytest.approx([m / sum(mass) for m in mass], abs=1e-9)


def test_the_likelihood_ratio_by_hand() -> None:
    # p = (1/2, 1/2): both ratios are 1, so -ln(1 + 1e-5). p = (0.8, 0.2): -(0.8 ln 4 + 0.2 ln 1/4) = -0.6 ln 4.
    logits = torch.tensor([[0.0, 0.0], [math.log(4), 0.0]], dtype=torch.float64)
    assert soft_likelihood_ratio(logits).tolist() == pytest.approx([0, -0.6 * math.log(4)], abs=2e-5)
    # Certain: p is clipped at 0.99, the other's p is 0 and 0 ln 1e-5 = 0; no gradient, all finite.
    certain = torch.tensor([[900.0, 0.0]], requires_grad=True)
    value = soft_likelihood_ratio(certain)
    value.sum().backward()
    assert value.item() == pytest.approx(-0.99 * math.log(99), abs=1e-4)
    assert certain.grad is not None
    assert certain.grad.tolist() == [[0, 0]]


def test_the_gradients_are_those_of_finite_differences() -> None:
    first, second = random_logits(3, scale=1).requires_grad_(), random_logits(3, scale=1, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(soft_likelihood_ratio, (first,))
    assert torch.autograd.gradcheck(symmetric_cross_entropy, (first, second))


def test_weights_by_hand() -> None:
    assert scaled(torch.tensor([1.0, 3.0, 2.0])).tolist() == [0, 1, 0.5]
    assert scaled(torch.tensor([2.0, 2.0])).tolist() == [0, 0]
    # The average is sure of class 0. Sample 2 says so too: diversity 0, weight 0. Sample 1 is as sure of class 1:
    # diversity and certainty 1, weight e^(1/τ). Sample 0 is less diverse than the mean.
    logits = torch.tensor([[1.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    got = sample_weights(logits, torch.tensor([1.0, 0.0]), 0.5)
    assert got.tolist() == pytest.approx([0, math.exp(2), 0])
    assert sample_weights(logits[:1], torch.tensor([0.5, 0.5]), 0.5).tolist() == [1]


def test_prior_by_hand() -> None:
    # Mean (3/4, 1/4), γ = (1/2) / (3/4) = 2/3: (17/12, 11/12) / (7/3) = (17/28, 11/28).
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert prior_corrected(p)[0].tolist() == [1, 0]
    assert prior_corrected(p)[1].tolist() == pytest.approx([17 / 28, 11 / 28])
    even = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    torch.testing.assert_close(prior_corrected(even), even)


def plain_forward(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Run a Sequential whose BatchNorm takes the batch's statistics, or the source's where a channel has one value."""
    for layer in layers:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            many = x.numel() > x.shape[1]
            statistics = (None, None) if many else (layer.running_mean, layer.running_var)
            x = F.batch_norm(x, *statistics, layer.weight, layer.bias, many, 0.0, layer.eps)
        else:
            x = layer(x)
    return x


def plain_roid(
    make: Callable[[], nn.Sequential], batches: list[Tensor], proximal: float, options: dict
) -> list[Tensor]:
    """ROID straight from the paper, sample by sample, with Adam written out."""
    network, source = make(), make()
    norms = [i for i, layer in enumerate(network) if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    parameters = [p for i in norms for p in (network[i].weight, network[i].bias)]
    origin = [p.detach() for i in norms for p in (source[i].weight, source[i].bias)]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters]
    average, results, size = [1 / CLASSES] * CLASSES, [], 0
    for t, x in enumerate(batches):
        logits, size = plain_forward(network, x), max(size, len(x))
        p = torch.softmax(logits, 1)
        weight = plain_weights(logits.detach(), average, options.get("temperature", 1 / 3))
        chosen = [i for i, w in enumerate(weight) if w]
        key = np.random.SeedSequence(options["seed"], spawn_key=(t,)).generate_state(1, np.uint64)[0]
        view = options["augment"](x[chosen], Generator().manual_seed(int(key)))
        q = torch.softmax(plain_forward(network, view), 1)
        loss = sum((a - b).pow(2).sum() for a, b in zip(parameters, origin, strict=True)) * proximal / 2
        for row, i in enumerate(chosen):
            clipped = p[i].clamp(max=0.99)
            one = -(clipped * (clipped / (1 - clipped) + 1e-5).log()).sum()
            if options.get("use_consistency", True):
                one = one - 0.5 * (p[i] * q[row].log()).sum() - 0.5 * (q[row] * p[i].log()).sum()
            loss = loss + weight[i] * one / (size if options.get("divide") == "batch" else len(x))
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for value, g, pair, old in zip(parameters, gradients, moments, origin, strict=True):
                pair[0] = 0.9 * pair[0] + 0.1 * g
                pair[1] = 0.999 * pair[1] + 0.001 * g**2
                root = (pair[1] / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8
                value -= options["lr"] * pair[0] / (1 - 0.9 ** (t + 1)) / root
                value.copy_(options["momentum_src"] * value + (1 - options["momentum_src"]) * old)
        mean = p.detach().mean(0).tolist()
        keep = options["momentum_probs"]
        average = [keep * a + (1 - keep) * b for a, b in zip(average, mean, strict=True)]
        results.append(prior_corrected(p.detach()) if options.get("use_prior_correction", True) else p.detach())
    return results


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_consistency": False},
        {"use_prior_correction": False, "temperature": 2.0},
        {"momentum_src": 1.0},
        {"divide": "batch"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("make", "stream"), [(conv_network, images), (mlp_network, vectors)])
def test_a_stream_equals_the_definition(make: Callable, stream: Callable, changes: dict) -> None:
    batches = list(stream(30).split([8, 1, 9, 12]))
    for proximal in (0.0, 2.0):
        options = {**OPTIONS, **changes}
        roid = ROID(make(), num_classes=CLASSES, proximal=proximal, **options)
        got = [roid.predict(batch) for batch in batches]
        for mine, want in zip(got, plain_roid(make, batches, proximal, options), strict=True):
            torch.testing.assert_close(mine, want, atol=1e-8, rtol=0)
    report = roid.report()
    assert report["loss_weight"].shape == report["entropy"].shape == (30,)
    assert 0 < int((report["loss_weight"] == 0).sum()) < 30


def test_a_short_last_batch_is_divided_by_the_size_of_the_full_ones() -> None:
    """The gradient of the short batch is n/B times that of the default; Adam's first moment shows it."""
    x, views = images(12), {"augment": lambda x, generator: x + 0.1}
    usual, published = (make_roid(divide=divide, momentum_src=1.0, **views) for divide in ("samples", "batch"))
    for roid in (usual, published):
        roid.predict(x[:9])
    before = published.state_dict()
    first = {name: value for name, value in before.items() if name.endswith(".first")}
    assert first
    assert all(torch.equal(value, usual.state_dict()[name]) for name, value in first.items())
    usual.predict(x[9:])
    published.predict(x[9:])
    for name, old in first.items():
        slope, small = ((roid.state_dict()[name] - 0.9 * old) / 0.1 for roid in (usual, published))
        torch.testing.assert_close(small, slope * 3 / 9, atol=1e-12, rtol=0)
    assert set(before) - set(usual.state_dict()) == {"largest.step"}
    resumed = make_roid(divide="batch", momentum_src=1.0, **views)
    resumed.load_state_dict(before)
    resumed.predict(x[9:])
    assert same(resumed.state_dict(), published.state_dict())


def make_roid(**changes: object) -> ROID:
    return ROID(two_head_network(), **{**OPTIONS, **changes})  # type: ignore[arg-type]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_weight_ensembling_pulls_all_the_way_back() -> None:
    roid, source = make_roid(momentum_src=0.0), two_head_network()
    roid.predict(images(9))
    assert torch.equal(roid.trained()["encoder.1.weight"], source.encoder[1].weight)


def test_what_is_shared() -> None:
    roid = make_roid()
    assert torch.equal(roid.domain()["encoder.1"][0], two_head_network().encoder[1].running_mean)
    x = images(20)
    roid.predict(x)
    assert set(roid.shared("all")) == {f"encoder.{i}.{part}" for i in (1, 4) for part in ("weight", "bias")}
    assert roid.shared("statistics") == {}
    first = two_head_network().encoder[0](x)  # the domain is that of the images, not of their views
    torch.testing.assert_close(roid.domain()["encoder.1"][0], first.mean((0, 2, 3)).detach())
    torch.testing.assert_close(roid.domain()["encoder.1"][1], first.var((0, 2, 3), correction=0).detach())
