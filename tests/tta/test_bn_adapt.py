from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta.tta.bn_adapt import BatchStatistics, BNAdapt, with_batch_statistics
from fedtta.tta.collaborator import batchnorm_layers
from tests.tta.networks import conv_network, images, mlp_network, two_head_network, vectors

Statistics = dict[str, tuple[Tensor, Tensor]]


def by_hand(network: Any, x: Tensor, prior: int) -> tuple[Tensor, Statistics]:
    """The network layer by layer, every channel of every BatchNorm on its own: probabilities and statistics."""
    n, used = len(x), {}
    for name, layer in network.named_children():
        if name not in batchnorm_layers(network):
            x = layer(x)
            continue
        means, variances, y = [], [], torch.empty_like(x)
        for c in range(x.shape[1]):
            values = x[:, c].flatten()
            mean = values.sum() / len(values)
            variance = ((values - mean) ** 2).sum() / len(values)
            mean = (prior * layer.running_mean[c] + n * mean) / (prior + n)
            variance = (prior * layer.running_var[c] + n * variance) / (prior + n)
            y[:, c] = (x[:, c] - mean) / torch.sqrt(variance + layer.eps) * layer.weight[c] + layer.bias[c]
            means.append(mean)
            variances.append(variance)
        x, used[name] = y, (torch.stack(means), torch.stack(variances))
    return torch.softmax(x, 1).detach(), used


def assert_domains_equal(got: Statistics, want: Statistics) -> None:
    assert list(got) == list(want)
    for name in want:
        for i in range(2):
            torch.testing.assert_close(got[name][i], want[name][i].detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("prior", [0, 1, 16])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_it_equals_the_formula_channel_by_channel(kind: str, prior: int) -> None:
    network, x = (conv_network(), images(7)) if kind == "conv" else (mlp_network(), vectors(7))
    want, statistics = by_hand(network, x, prior)
    adapter = BNAdapt(network, prior=prior)
    torch.testing.assert_close(adapter.predict(x), want, atol=1e-12, rtol=0)
    assert_domains_equal(adapter.domain(), statistics)


def test_hand_derived_numbers() -> None:
    """A BatchNorm alone, source N(0, 1), values 1 and 3: mean 2, biased variance 1; with N = 2: mean 1, variance 1."""
    layer = nn.BatchNorm1d(1, eps=1e-14).double().eval()
    head = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [0.0]]))
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    for prior, normal in ((0, [-1.0, 1.0]), (2, [0.0, 2.0])):
        got = BNAdapt(nn.Sequential(layer, head), prior=prior).predict(x)[:, 0]
        torch.testing.assert_close(got, torch.sigmoid(torch.tensor(normal, dtype=torch.float64)))


def test_without_a_prior_it_is_torch_in_training_mode() -> None:
    network, x = two_head_network(), images(5)
    twin = copy.deepcopy(network).train()
    with torch.no_grad():
        want = torch.softmax(twin(x), 1)
    torch.testing.assert_close(BNAdapt(network).predict(x), want, atol=1e-14, rtol=0)


def test_a_large_prior_is_the_source() -> None:
    network, x = conv_network(), images(5)
    with torch.no_grad():
        want = torch.softmax(network(x), 1)
    torch.testing.assert_close(BNAdapt(network, prior=10**12).predict(x), want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("prior", [0, 16])
def test_one_value_a_channel_is_normalised_by_the_source(prior: int) -> None:
    """One vector has no variance; one image has many values a channel, and needs no fallback."""
    network: Any = mlp_network()
    x = vectors(1)
    with torch.no_grad():
        want = torch.softmax(network(x), 1)
    adapter = BNAdapt(network, prior=prior)
    assert torch.equal(adapter.predict(x), want)
    assert_domains_equal(adapter.domain(), {"1": (network[1].running_mean, network[1].running_var)})
    network, x = conv_network(), images(1)
    want, _ = by_hand(network, x, prior)
    torch.testing.assert_close(BNAdapt(network, prior=prior).predict(x), want, atol=1e-12, rtol=0)


def test_batches_do_not_depend_on_each_other() -> None:
    network, x = conv_network(), images(9)
    adapter = BNAdapt(network)
    adapter.predict(x[:4])
    assert torch.equal(adapter.predict(x[4:]), BNAdapt(network).predict(x[4:]))


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(0.1, 10), offset=st.floats(-5, 5), seed=st.integers(0, 99))
def test_batch_statistics_forget_the_scale_of_their_input(scale: float, offset: float, seed: int) -> None:
    """Every feature of a BatchNorm that comes first may be scaled and moved: ε aside, nothing changes."""
    network = nn.Sequential(nn.BatchNorm1d(5, eps=1e-14), nn.Linear(5, 4)).double()
    x = vectors(6, seed)
    moved = BNAdapt(network).predict(scale * x + offset)
    torch.testing.assert_close(moved, BNAdapt(network).predict(x), atol=1e-9, rtol=0)


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(6)))
def test_the_order_within_a_batch_does_not_matter(order: list[int]) -> None:
    x = images(6)
    got = BNAdapt(conv_network()).predict(x[order])
    torch.testing.assert_close(got, BNAdapt(conv_network()).predict(x)[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("affine", [True, False])
def test_the_layer_and_its_gradient_are_torchs(kind: Any, affine: bool) -> None:
    layer = kind(3, affine=affine).double().train()
    shape: Any = {nn.BatchNorm1d: (4, 3, 6), nn.BatchNorm2d: (4, 3, 2, 5), nn.BatchNorm3d: (4, 3, 2, 2, 2)}[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer_of_ours = BatchStatistics(copy.deepcopy(layer))
    for input_, module in ((ours, layer_of_ours), (theirs, layer)):
        (module(input_) ** 3).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("prior", [0, 3])
def test_groups_are_batches_of_their_own(prior: int) -> None:
    layer: Any = nn.BatchNorm2d(3).double()
    nn.init.uniform_(layer.running_var, 0.5, 2)
    together, alone = BatchStatistics(layer, prior), BatchStatistics(layer, prior)
    x = images(12)
    together.groups = 4
    want = torch.cat([alone(x[i : i + 3]) for i in range(0, 12, 3)])
    assert torch.equal(together(x), want)
    together.groups = 1
    assert not torch.allclose(together(x), want)


def test_a_layer_in_two_places_stays_one_layer() -> None:
    layer = nn.BatchNorm1d(5)
    network: Any = nn.Sequential(layer, nn.Linear(5, 5), layer)
    network, layers = with_batch_statistics(network)
    assert network[0] is network[2]
    assert list(layers) == ["0"]
    alone, layers = with_batch_statistics(nn.BatchNorm1d(5))
    assert alone is layers[""]


def test_bad_options_and_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="prior=-1"):
        BNAdapt(conv_network(), prior=-1)
    with pytest.raises(ValueError, match="no BatchNorm"):
        BNAdapt(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="0 keeps no running statistics"):
        BNAdapt(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)))
