"""Class statistics against a loop over classes, samples and positions; what always holds; the copy of a network."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.models.balanced import BalancedBatchNorm, Between, balance, default_momentum, pseudo_labels, sample_moments

K, C = 4, 3
SHAPES: dict[str, tuple[type[nn.modules.batchnorm._BatchNorm], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d-length": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (2, 3)),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=dtype)


def make_layer(
    kind: str = "2d", momentum: float | None = 0.1, gamma: float | None = None, between: Between = "population"
) -> BalancedBatchNorm:
    """A layer whose classes differ already."""
    source = SHAPES[kind][0](C).double()
    source.running_mean, source.running_var = random(C, seed=1), random(C, seed=2).exp()
    with torch.no_grad():
        source.weight.copy_(random(C, seed=3))
        source.bias.copy_(random(C, seed=4))
    layer = BalancedBatchNorm(source, K, momentum, gamma=gamma, between=between)
    layer.class_mean = layer.class_mean + random(K, C, seed=5)
    layer.class_variance = layer.class_variance * random(K, C, seed=6).exp()
    return layer


def looped(layer: BalancedBatchNorm, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The update as the paper prints it (with 1/d a mean over positions), one number after the other."""
    mean, variance = layer.class_mean.clone(), layer.class_variance.clone()
    for k in range(K):
        samples = [i for i in range(len(x)) if int(labels[i]) == k]
        eta = min(layer.momentum, 1 / max(len(samples), 1))
        weights = dict.fromkeys(samples, (1 - layer.gamma) * eta)
        for i in range(len(x)):
            weights[i] = weights.get(i, 0.0) + layer.gamma * min(layer.momentum / K, 1 / len(x))
        for c in range(C):
            old, old_variance = float(layer.class_mean[k, c]), float(layer.class_variance[k, c])
            step, change = 0.0, 0.0
            for i, weight in weights.items():
                positions = x[i, c].flatten().tolist()
                step += weight * sum(z - old for z in positions) / len(positions)
                change += weight * sum((z - old) ** 2 - old_variance for z in positions) / len(positions)
            mean[k, c] = old + step
            variance[k, c] = old_variance - step**2 + change
    return mean, variance


@pytest.mark.parametrize("gamma", [None, 0.1, 1.0])
@pytest.mark.parametrize("batch", [1, 9, 40])
@pytest.mark.parametrize("kind", SHAPES)
def test_update_is_the_papers_sample_by_sample(kind: str, batch: int, gamma: float | None) -> None:
    layer = make_layer(kind, gamma=gamma)
    for step in range(3):
        x = 2 * random(batch, C, *SHAPES[kind][1], seed=10 + step) + 1
        labels = torch.randint(K - 1, (batch,), generator=Generator().manual_seed(step))  # class 3 has no sample
        mean, variance = looped(layer, x, labels)
        layer.update(x, labels)
        torch.testing.assert_close(layer.class_mean, mean, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(layer.class_variance, variance, rtol=1e-11, atol=1e-11)


def test_update_by_hand() -> None:
    # One sample of class 0 with positions 1 and 3, from μ = 0 and σ² = 1, η = 0.1: Δμ = 0.1 · 2 = 0.2;
    # σ² = 1 - 0.2² + 0.1 ((1 + 9)/2 - 1) = 1.36. Class 1 stays. Balanced: μ = 0.1, σ² = (1.36 + 0.01 + 1 + 0.01)/2.
    layer = BalancedBatchNorm(nn.BatchNorm1d(1).double(), 2, 0.1)
    layer.update(torch.tensor([[[1.0, 3.0]]]).double(), torch.tensor([0]))
    assert layer.class_mean.flatten().tolist() == pytest.approx([0.2, 0.0])
    assert layer.class_variance.flatten().tolist() == pytest.approx([1.36, 1.0])
    mean, variance = layer.balanced()
    assert (mean.item(), variance.item()) == pytest.approx((0.1, 1.19))


def test_balanced_statistics_by_hand() -> None:
    # μ_k = 0, 2 and σ²_k = 1, 3: μ = 1, σ² = ((1 + 1) + (3 + 1))/2 = 3, however many samples each class had.
    layer = BalancedBatchNorm(nn.BatchNorm1d(1), 2)
    layer.class_mean, layer.class_variance = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    assert [value.item() for value in layer.balanced()] == [1.0, 3.0]


def test_the_sample_variance_between_classes_by_hand_and_by_numpy() -> None:
    # As above with K - 1: μ = 1, σ² = (1 + 3)/2 + ((0 - 1)² + (2 - 1)²)/1 = 4.
    layer = BalancedBatchNorm(nn.BatchNorm1d(1), 2, between="sample")
    layer.class_mean, layer.class_variance = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    assert [value.item() for value in layer.balanced()] == [1.0, 4.0]
    many = make_layer(between="sample")
    means, variances = many.class_mean.numpy(), many.class_variance.numpy()
    np.testing.assert_allclose(many.balanced()[0].numpy(), means.mean(0), rtol=1e-12)
    np.testing.assert_allclose(many.balanced()[1].numpy(), variances.mean(0) + means.var(0, ddof=1), rtol=1e-12)
    x = random(6, C, 2, 3)
    want = (x.numpy() - means.mean(0)[None, :, None, None]) / np.sqrt(
        (variances.mean(0) + means.var(0, ddof=1))[None, :, None, None] + many.eps
    )
    want = many.weight.detach().numpy()[None, :, None, None] * want + many.bias.detach().numpy()[None, :, None, None]
    np.testing.assert_allclose(many(x).detach().numpy(), want, rtol=1e-11, atol=1e-12)


def test_the_sample_variance_needs_two_classes() -> None:
    with pytest.raises(ValueError, match="between='sample' divides by K - 1 and needs two classes, num_classes=1"):
        balance(nn.BatchNorm1d(2), 1, between="sample")
    assert torch.equal(BalancedBatchNorm(nn.BatchNorm1d(2), 1).balanced()[1], torch.ones(2))


def test_a_class_that_fills_the_batch_takes_its_statistics() -> None:
    # n_k > 1/η: the guard makes η_k = 1/n_k, so r = 1 and the class's statistics become those of its samples.
    layer, x = make_layer(momentum=0.01), random(150, C, 2, 3, seed=7)
    layer.update(x, torch.full((150,), 2))
    torch.testing.assert_close(layer.class_mean[2], x.mean((0, 2, 3)))
    torch.testing.assert_close(layer.class_variance[2], x.var((0, 2, 3), correction=0))


def test_gamma_one_is_a_batchnorm_without_classes() -> None:
    layer = BalancedBatchNorm(nn.BatchNorm2d(C).double(), K, 0.1, gamma=1.0)
    x = random(8, C, 2, 3, seed=8) + 3
    layer.update(x, torch.tensor([0, 0, 0, 0, 0, 0, 1, 2]))
    rate = 0.1 * 8 / K
    mean, variance = layer.balanced()
    torch.testing.assert_close(mean, rate * x.mean((0, 2, 3)))
    second = (1 - rate) * torch.ones(C).double() + rate * (x**2).mean((0, 2, 3))  # moments about 0 mix linearly
    torch.testing.assert_close(variance, second - mean**2)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 60),
    momentum=st.sampled_from([0.01, 0.05, 0.3, 1.0]),
    gamma=st.sampled_from([None, 0.1, 0.7, 1.0]),
    offset=st.sampled_from([0.0, 10.0, -1e4, 1e7]),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 1e5]),
    classes=st.integers(1, K),
)
@example(seed=0, batch=60, momentum=1.0, gamma=None, offset=1e7, scale=0.0, classes=1)
def test_variances_never_turn_negative(
    seed: int, batch: int, momentum: float, gamma: float | None, offset: float, scale: float, classes: int
) -> None:
    draw = Generator().manual_seed(seed)
    layer = BalancedBatchNorm(nn.BatchNorm2d(C), K, momentum, gamma=gamma)
    for _ in range(4):
        x = scale * torch.randn(batch, C, 2, 2, generator=draw) + offset
        labels = torch.randint(classes, (batch,), generator=draw)
        unseen = [k for k in range(K) if k not in labels.tolist()]
        before = layer.class_mean, layer.class_variance
        with pseudo_labels(layer, labels):
            y = layer(x)
        assert bool((layer.class_variance >= 0).all())
        assert bool((layer.balanced()[1] >= 0).all())
        assert bool(torch.isfinite(y).all())
        if not gamma:  # a class without samples keeps its statistics bit for bit
            assert torch.equal(layer.class_mean[unseen], before[0][unseen])
            assert torch.equal(layer.class_variance[unseen], before[1][unseen])


def test_without_the_guard_the_printed_formula_turns_negative() -> None:
    # 60 equal samples at distance 1, η = 0.05: Δμ = 3 and σ² = 1 - 9 + 0.05 · 60 (1 - 1) < 0.
    layer = BalancedBatchNorm(nn.BatchNorm1d(1).double(), 1, 0.05)
    x = torch.ones(60, 1).double()
    eta = layer.momentum
    assert 1 - (eta * x.sum()) ** 2 + eta * ((x**2).sum() - 60) < 0
    layer.update(x, torch.zeros(60, dtype=torch.int64))
    assert (layer.class_mean.item(), layer.class_variance.item()) == pytest.approx((1.0, 0.0))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 20))
def test_order_of_samples_does_not_matter(seed: int, batch: int) -> None:
    draw = Generator().manual_seed(seed)
    x = torch.randn(batch, C, 2, 2, generator=draw, dtype=torch.float64)
    labels, order = torch.randint(K, (batch,), generator=draw), torch.randperm(batch, generator=draw)
    one, other = make_layer(), make_layer()
    one.update(x, labels)
    other.update(x[order], labels[order])
    torch.testing.assert_close(one.class_mean, other.class_mean)
    torch.testing.assert_close(one.class_variance, other.class_variance)


@pytest.mark.parametrize("channels_last", [False, True])
def test_single_precision_keeps_small_variances_on_large_means(channels_last: bool) -> None:
    x = 300 + 0.1 * random(50, C, 4, 4, seed=9)
    labels = torch.arange(50) % K
    exact, layer = (BalancedBatchNorm(nn.BatchNorm2d(C).to(t), K, 1.0) for t in (torch.float64, torch.float32))
    given = x.float().contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    for _ in range(2):
        exact.update(given.double(), labels)
        layer.update(given, labels)
    assert float(exact.class_variance.max()) < 0.02
    torch.testing.assert_close(layer.class_variance.double(), exact.class_variance, rtol=1e-3, atol=0)


def test_sample_moments_are_those_of_positions() -> None:
    x = random(5, C, 2, 3)
    variance, mean = torch.var_mean(x, (2, 3), correction=0)
    torch.testing.assert_close(sample_moments(x), (mean, variance))
    vectors = random(5, C)
    assert torch.equal(sample_moments(vectors)[0], vectors)
    assert sample_moments(vectors)[1].eq(0).all()


@pytest.mark.parametrize("kind", SHAPES)
def test_forward_with_and_without_labels(kind: str) -> None:
    layer, labels = make_layer(kind), torch.tensor([0, 1, 1, 2, 0, 1])
    x = random(6, C, *SHAPES[kind][1], seed=11)

    def normalised(mean: Tensor, variance: Tensor) -> Tensor:
        shape = (1, C) + (1,) * (x.ndim - 2)
        y = (x - mean.view(shape)) / (variance.view(shape) + layer.eps).sqrt()
        return layer.weight.view(shape) * y + layer.bias.view(shape)

    before = layer.class_mean, layer.class_variance
    torch.testing.assert_close(layer(x), normalised(*layer.balanced()))
    torch.testing.assert_close(layer.train()(x), normalised(*layer.balanced()))
    assert before[0] is layer.class_mean
    assert before[1] is layer.class_variance
    mean, variance = looped(layer, x, labels)
    with pseudo_labels(layer, labels):
        y = layer(x)
    balanced = mean.mean(0), variance.mean(0) + mean.var(0, correction=0)
    torch.testing.assert_close(y, normalised(*balanced))
    torch.testing.assert_close(layer(x), y)  # outside the block: the new statistics, no further update


def test_statistics_are_constants_for_the_gradient() -> None:
    layer, x = make_layer(), random(6, C, 2, 3, seed=12).requires_grad_()
    slope = random(6, C, 2, 3, seed=13)
    with pseudo_labels(layer, torch.tensor([0, 1, 1, 2, 0, 1])):
        (layer(x) * slope).sum().backward()
    mean, variance = (value.view(1, C, 1, 1) for value in layer.balanced())
    scale = (variance + layer.eps).rsqrt()
    torch.testing.assert_close(x.grad, slope * scale * layer.weight.view(1, C, 1, 1))
    torch.testing.assert_close(layer.weight.grad, (slope * (x - mean) * scale).sum((0, 2, 3)))
    torch.testing.assert_close(layer.bias.grad, slope.sum((0, 2, 3)))
    assert not layer.class_mean.requires_grad


def test_layer_takes_over_parameters_and_copies_statistics() -> None:
    source = nn.BatchNorm2d(C)
    layer, other = BalancedBatchNorm(source, K), BalancedBatchNorm(source, K)
    assert layer.weight is other.weight is source.weight
    layer.update(random(4, C, 2, 2, dtype=torch.float32), torch.tensor([0, 1, 2, 3]))
    assert torch.equal(other.class_mean, torch.zeros(K, C))
    assert source.running_mean is not None
    assert source.running_mean.eq(0).all()


def test_default_momentum() -> None:
    assert [default_momentum(k) for k in (2, 10, 20, 100, 1000)] == [0.01, 0.01, 0.01, 0.05, 0.5]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 1), norm, nn.ReLU(), nn.Flatten())
    network = nn.Sequential(body, nn.Linear(36, 5), nn.BatchNorm1d(5, affine=False), nn.ReLU(), nn.Linear(5, K))
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean, module.running_var = torch.randn(module.num_features), torch.rand(module.num_features)
    return network.double().eval()


def test_balanced_network_starts_as_the_one_given() -> None:
    network = make_network()
    before = copy.deepcopy(network.state_dict())
    balanced = balance(network, K)
    x = random(7, 3, 5, 5)
    torch.testing.assert_close(balanced(x), network(x))
    assert [name for name, _ in balanced.named_parameters()] == [name for name, _ in network.named_parameters()]
    layer = balanced.get_submodule("0.1")
    assert isinstance(layer, BalancedBatchNorm)
    assert layer is balanced.get_submodule("0.4")  # one layer in two places stays one layer
    assert balanced.get_submodule("2").weight is None
    with pseudo_labels(balanced, torch.arange(7) % K):
        moved = balanced(x)
    assert not torch.allclose(moved, network(x), atol=1e-3)
    with torch.no_grad():
        for value in balanced.parameters():
            value.zero_()
    after = network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(isinstance(module, BalancedBatchNorm) for module in network.modules())


def test_state_of_a_balanced_network_round_trips() -> None:
    network, x = make_network(), random(7, 3, 5, 5)
    balanced = balance(network, K)
    with pseudo_labels(balanced, torch.arange(7) % K):
        balanced(x)
    other = balance(network, K)
    other.load_state_dict(balanced.state_dict())
    assert torch.equal(other(x), balanced(x))


def test_labels_are_gone_when_a_pass_fails() -> None:
    balanced, x = balance(make_network(), K), random(7, 3, 5, 5)
    with (
        pytest.raises(ValueError, match="sees 7 samples, but there are 3 pseudo-labels"),
        pseudo_labels(balanced, torch.tensor([0, 1, 2])),
    ):
        balanced(x)
    before = balanced.state_dict()
    balanced(x)
    assert all(torch.equal(value, before[name]) for name, value in balanced.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "num_classes=0 must be at least 1"),
        ({"num_classes": 2, "momentum": 0.0}, r"momentum=0.0 is outside \(0, 1\]"),
        ({"num_classes": 2, "momentum": 1.5}, r"momentum=1.5 is outside \(0, 1\]"),
        ({"num_classes": 2, "momentum": float("nan")}, "momentum=nan"),
        ({"num_classes": 2, "between": "half"}, "between='half' must be one of population, sample"),
        ({"num_classes": 2, "gamma": -0.1}, r"gamma=-0.1 is outside \[0, 1\]"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(nn.Sequential(nn.BatchNorm1d(3)), **options)  # type: ignore[arg-type]


def test_networks_that_cannot_be_balanced_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no BatchNorm layer to balance"):
        balance(nn.Linear(3, 2), 2)
    network = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match=r"^0 keeps no running statistics"):
        balance(network, 2)
    with pytest.raises(ValueError, match="keeps no running statistics"):
        BalancedBatchNorm(network[0], 2)  # type: ignore[arg-type]


def test_a_layer_alone_is_a_network() -> None:
    layer = balance(nn.BatchNorm1d(3), 2)
    assert isinstance(layer, BalancedBatchNorm)
    assert "num_classes=2, momentum=0.01, gamma=0.0" in repr(layer)
