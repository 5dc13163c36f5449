from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.augmix import AugMix
from fedtta.tta.fedthe import FedTHE
from fedtta.tta.fedthe_plus import FedTHEPlus
from fedtta.tta.memo import Tuning
from fedtta.tta.statistics import Statistics

OPTIONS = {"views": 4, "tune_steps": 3, "tune_lr": 0.3, "seed": 5}


def noise(x: Tensor, generator: Generator) -> Tensor:
    """An augmentation for samples of any shape."""
    return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def make_network(norm: nn.Module | None = None) -> TwoHead:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), norm or nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return TwoHead(nn.Sequential(*layers, nn.Linear(36, 6), nn.ReLU()), 6, 4).double()


def batch_norm() -> nn.Module:
    layer = nn.BatchNorm2d(4)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer


def make_statistics() -> Statistics:
    local, everyone = torch.rand(2, 6, generator=Generator().manual_seed(2), dtype=torch.float64)
    return Statistics(descriptor_local=local, descriptor_global=everyone)


def samples(n: int = 7) -> Tensor:
    return torch.rand((n, 3, 8, 8), generator=Generator().manual_seed(1), dtype=torch.float64)


def make_adapter(norm: nn.Module | None = None, **options: object) -> FedTHEPlus:
    return FedTHEPlus(make_network(norm), make_statistics(), **{**OPTIONS, **options})  # type: ignore[arg-type]


def head_weight(z: Tensor, history: Tensor, network: TwoHead, statistics: Statistics) -> Tensor:
    """Lines 1 to 7 of Algorithm 2 for one feature z [d], with autograd and torch.optim.Adam."""
    smooth = 0.3 * z + 0.7 * history
    logits_global, logits_local = network.head(z).detach(), network.personal_head(z).detach()
    similarity = torch.cosine_similarity(logits_global.softmax(0), logits_local.softmax(0), dim=0)
    assert statistics.descriptor_global is not None
    assert statistics.descriptor_local is not None
    far_global = (smooth - statistics.descriptor_global).norm()
    far_local = (smooth - statistics.descriptor_local).norm()
    pair = torch.zeros(2, dtype=z.dtype, requires_grad=True)
    optimiser = torch.optim.Adam([pair], lr=0.1)
    for _ in range(20):
        e = pair.softmax(0)[0]
        p = (e * logits_global + (1 - e) * logits_local).softmax(0)
        entropy = -(p * p.log()).sum()
        loss = similarity * entropy + (1 - similarity) * (e * far_global + (1 - e) * far_local)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return pair.detach().softmax(0)[0]


def reference(network: TwoHead, statistics: Statistics, x: Tensor, tuning: Tuning) -> tuple[Tensor, Tensor]:
    """Algorithm 2 to the letter, one sample after the other: probabilities [B, K] and e* [B]."""
    rows, weights, history = [], [], None
    for position, sample in enumerate(x):
        with torch.no_grad():
            z = network.features(sample[None])[0]
        history = z if history is None else history
        e = head_weight(z, history, network, statistics)
        history = 0.1 * z + 0.9 * history
        tuned = copy.deepcopy(network).requires_grad_(True)
        optimiser = torch.optim.SGD(tuned.parameters(), lr=tuning.lr)

        def probabilities(batch: Tensor, tuned: TwoHead = tuned, e: Tensor = e) -> Tensor:
            features = tuned.features(batch)
            return (e * tuned.head(features) + (1 - e) * tuned.personal_head(features)).softmax(1)

        for step in range(tuning.steps):
            copies = torch.stack([sample] * tuning.views)
            mean = probabilities(tuning.augment(copies, tuning.generator(position, step))).mean(0)
            optimiser.zero_grad()
            (-(mean * mean.log()).sum()).backward()
            optimiser.step()
        rows.append(probabilities(sample[None]).detach())
        weights.append(e)
    return torch.cat(rows), torch.stack(weights)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
@pytest.mark.parametrize("norm", [None, batch_norm()])
@pytest.mark.parametrize("augment", [AugMix(), noise])
def test_it_is_algorithm_2(augment: object, norm: nn.Module | None, mode: str) -> None:
    adapter, x = make_adapter(norm, augment=augment, mode=mode, chunk=3), samples()
    network = make_network(norm).eval()
    want, weight = reference(network, make_statistics(), x, adapter.tuning)
    got = adapter.predict(x)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(adapter.report()["weight"], weight, atol=1e-6, rtol=0)
    untuned = FedTHE(network, make_statistics()).predict(x)
    assert float((got - untuned).abs().max()) > 1e-3


@pytest.mark.parametrize("history", ["sample", "batch"])
def test_weight_and_history_are_fedthes(history: Literal["sample", "batch"]) -> None:
    x, plus = samples(), make_adapter(history=history)
    plain = FedTHE(make_network(), make_statistics(), history=history)
    for part in x.split(3):
        plus.predict(part)
        plain.predict(part)
    for name, value in plain.report().items():
        assert torch.equal(plus.report()[name], value)
    for name, value in plain.state_dict().items():
        assert torch.equal(plus.state_dict()[name], value)
    assert plus.report()["loss"].shape == (7, 3)
    assert plus.per == history


def test_without_steps_it_is_fedthe() -> None:
    x = samples()
    want = FedTHE(make_network(), make_statistics(), objective="em", beta=1.0).predict(x)
    got = make_adapter(tune_steps=0, objective="em", beta=1.0).predict(x)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_a_tuning_that_fails_leaves_history_and_report_as_they_were() -> None:
    adapter = make_adapter(tune_lr=1e308)
    before = adapter.state_dict()
    with pytest.raises(ValueError, match="left the finite numbers"):
        adapter.predict(samples())
    after = adapter.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert adapter.report() == {}


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="descriptor_global"):
        FedTHEPlus(make_network(), Statistics(descriptor_local=torch.zeros(6)))
