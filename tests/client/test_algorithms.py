"""Rules of local training against loops written out here, in float64 with plain gradient steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtta.client.algorithms.apfl import APFL
from fedtta.client.algorithms.base import LocalContext, gradients
from fedtta.client.algorithms.ditto import Ditto
from fedtta.client.algorithms.fedavg import FedAvg
from fedtta.client.algorithms.fedrep import FedRep
from fedtta.client.algorithms.fedrod import FedRoD
from fedtta.client.algorithms.training import TrainingSet, balanced_softmax, train_network
from fedtta.models import TwoHead
from fedtta.settings import Settings
from tests.client.tiny import changed, image_set, network, settings, snapshot

RATE, DECAY, BATCH, COUNT, EPOCHS = 0.05, 0.1, 4, 9, 2
both = pytest.mark.parametrize("norm", [False, True])


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def options(**changes: Any) -> Settings:
    values = {"learning_rate": RATE, "weight_decay": DECAY, "batch_size": BATCH, "local_epochs": EPOCHS}
    return settings(**{**values, **changes})


class Doubled:
    """An augmentation that draws nothing and returns float64."""

    def draw(self, generator: torch.Generator, n: int) -> Tensor:
        return torch.empty(n, 0)

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        return x.double()


def data64(count: int = COUNT) -> TrainingSet:
    plain = image_set(count)
    return TrainingSet(plain.index, plain.pixels, plain.labels, plain.counts, Doubled())


def network64(norm: bool, seed: int = 0) -> TwoHead:
    return network(norm, seed).double()


def turn(model: TwoHead, seed: int = 3, own: dict[str, Tensor] | None = None, **changes: Any) -> LocalContext:
    data = data64() if next(model.parameters()).dtype == torch.float64 else image_set(COUNT)
    return LocalContext(
        model.eval(), data, balanced_softmax, options(**changes), draw(seed), {} if own is None else own
    )


def batches(epochs: int, generator: torch.Generator, smallest: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = image_set(COUNT)
    for _ in range(epochs):
        for chosen in torch.randperm(COUNT, generator=generator).split(BATCH):
            if len(chosen) >= smallest:
                yield (data.pixels[chosen].float() / 255).double(), data.labels[chosen]


def objective(logits: Tensor, labels: Tensor) -> Tensor:
    adjusted = logits + torch.log(image_set(COUNT).counts.double() + 1)
    return -torch.log_softmax(adjusted, 1).gather(1, labels[:, None]).mean()


def shared(model: TwoHead) -> list[nn.Parameter]:
    return [*model.encoder.parameters(), *model.head.parameters()]


@torch.no_grad()
def descend(weights: Sequence[Tensor], slopes: Sequence[Tensor], decay: float = DECAY) -> None:
    for weight, slope in zip(weights, slopes, strict=True):
        weight -= RATE * (slope + decay * weight)


def assert_close(model: TwoHead, expected: TwoHead) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=name)


@both
def test_joint_is_local_training_and_its_fine_tuning_a_loop(norm: bool) -> None:
    model, twin = network(norm), network(norm)
    loss = FedAvg().train(turn(model))
    assert loss == train_network(twin, image_set(COUNT), balanced_softmax, options(), draw(3))
    assert not changed(snapshot(twin), model)

    model, twin = network64(norm), network64(norm)
    FedAvg().personalize(turn(model, aggregation="fedprox", proximal_mu=5.0))  # the pull is no part of fine-tuning
    twin.train()
    for x, y in batches(1, draw(3), 1 + norm):
        descend(shared(twin), torch.autograd.grad(objective(twin(x), y), shared(twin)))
    assert_close(model, twin)
    before = snapshot(model)
    FedAvg(finetune=False).personalize(turn(model))
    without = turn(model)
    object.__setattr__(without.settings, "finetune_epochs", 0)
    FedAvg().personalize(without)
    assert not changed(before, model)


@both
def test_fedrep_trains_the_head_and_then_the_encoder(norm: bool) -> None:
    model, twin, g = network64(norm), network64(norm), draw(3)
    loss = FedRep(encoder_epochs=2).train(turn(model))
    head, encoder = list(twin.head.parameters()), list(twin.encoder.parameters())
    twin.eval()
    for x, y in batches(EPOCHS, g, 1):
        descend(head, torch.autograd.grad(objective(twin(x), y), head))
    twin.train()
    losses = []
    for x, y in batches(2, g, 1 + norm):
        value = objective(twin(x), y)
        descend(encoder, torch.autograd.grad(value, encoder))
        losses.append((float(value.detach()), len(y)))
    assert_close(model, twin)
    last = losses[len(losses) // 2 :]
    assert loss == pytest.approx(sum(value * n for value, n in last) / sum(n for _, n in last), rel=1e-9)


@both
@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_ditto_over_two_rounds(norm: bool, strength: float) -> None:
    own: dict[str, Tensor] = {}
    v = network64(norm, seed=0)
    for round in (1, 2):
        model, w = network64(norm, seed=round - 1), network64(norm, seed=round - 1)  # received
        local = turn(model, seed=round, own=own)
        object.__setattr__(local.settings, "ditto_lambda", strength)
        loss = Ditto().train(local)
        fedavg = copy.deepcopy(w)
        g = draw(round)
        assert loss == train_network(fedavg, data64(), balanced_softmax, options(), g)
        assert not changed(snapshot(fedavg), model), "the global model is FedAvg's"
        v.train()
        for x, y in batches(EPOCHS, g, 1 + norm):
            slopes = torch.autograd.grad(objective(v(x), y), shared(v))
            pulled = [s + strength * (a.detach() - b) for s, a, b in zip(slopes, shared(v), shared(w), strict=True)]
            descend(shared(v), pulled, decay=0)
        v.eval()
    assert set(own) == {f"ditto.{name}" for name in v.global_state()}
    received = network64(norm, seed=7)
    Ditto().personalize(turn(received, own=own))
    for name, value in v.global_state().items():
        torch.testing.assert_close(received.global_state()[name], value, rtol=1e-9, atol=1e-10, msg=name)


def mixed(alpha: float, v: TwoHead, w: TwoHead) -> TwoHead:
    """α v + (1-α) w with v's buffers."""
    network = copy.deepcopy(v)
    with torch.no_grad():
        for value, a, b in zip(shared(network), shared(v), shared(w), strict=True):
            value.copy_(alpha * a + (1 - alpha) * b)
    return network


@both
@pytest.mark.parametrize("weighs", ["local", "global"])
def test_apfl_over_three_rounds(norm: bool, weighs: str) -> None:
    """α weighs v (the paper), or w; it always moves along <v - w, ∇f(v̄)> (FedTHE's code)."""
    own: dict[str, Tensor] = {}
    v, alpha, alphas = network64(norm, seed=0), 0.5, []
    for round in (1, 2, 3):
        model, w = network64(norm, seed=round - 1), network64(norm, seed=round - 1)
        APFL().train(turn(model, seed=round, own=own, apfl_weighs=weighs))
        w.train()
        for step, (x, y) in enumerate(batches(EPOCHS, draw(round), 1 + norm)):
            share = alpha if weighs == "local" else 1 - alpha  # of v
            mixture = mixed(share, v, w).train()
            slopes = torch.autograd.grad(objective(mixture(x), y), shared(mixture))
            along = sum(
                float(((a - b) * s).sum().detach()) for a, b, s in zip(shared(v), shared(w), slopes, strict=True)
            )
            descend(shared(w), torch.autograd.grad(objective(w(x), y), shared(w)))
            descend(shared(v), [share * s for s in slopes])
            for kept, new in zip(v.buffers(), mixture.buffers(), strict=True):
                kept.copy_(new)
            if step == 0:
                alpha = min(max(alpha - RATE * along, 0.0), 1.0)
        assert_close(model, w.eval())
        assert float(own["apfl.alpha"]) == pytest.approx(alpha, rel=1e-8)
        alphas.append(alpha)
    assert alphas[0] == 0.5, "v and w are equal on the first batch of all"
    assert len(set(alphas)) == 3
    assert set(own) == {"apfl.alpha", *(f"apfl.{name}" for name in v.global_state())}
    received = network64(norm, seed=7)
    expected = mixed(alpha if weighs == "local" else 1 - alpha, v, received).global_state()
    APFL().personalize(turn(received, own=own, apfl_weighs=weighs))
    for name, value in expected.items():
        torch.testing.assert_close(received.global_state()[name], value, rtol=1e-9, atol=1e-10, msg=name)


def test_the_slope_of_alpha_by_finite_differences() -> None:
    v, w, own = network64(True, seed=1), network64(True, seed=2), {}
    APFL().train(turn(copy.deepcopy(v), own=own))
    own |= {f"apfl.{name}": value.clone() for name, value in v.global_state().items()}
    x, y = next(batches(1, draw(5), 2))

    def f(alpha: float) -> float:
        return float(objective(mixed(alpha, v, w).train()(x), y).detach())

    slope = (f(0.5 + 1e-5) - f(0.5 - 1e-5)) / 2e-5
    APFL().train(turn(w, seed=5, own=own, learning_rate=1e-3))
    assert float(own["apfl.alpha"]) == pytest.approx(0.5 - 1e-3 * slope, abs=1e-9)


@pytest.mark.parametrize("weighs", ["local", "global"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_apfl_at_its_ends(share: float, weighs: str) -> None:
    """v has no share: it never moves but for decay, and the client tests with w; it has all: it tests with v."""
    model, own = network64(False), {}
    alpha = share if weighs == "local" else 1 - share
    start = model.global_state()["head.weight"].clone()
    APFL(alpha).train(turn(model, own=own, weight_decay=0.0, apfl_weighs=weighs))
    assert torch.equal(own["apfl.head.weight"], start) == (share == 0)
    received = network64(False, seed=4)
    expected = received.head.weight.clone() if share == 0 else own["apfl.head.weight"]
    APFL().personalize(turn(received, own=own, apfl_weighs=weighs))
    torch.testing.assert_close(received.head.weight, expected)


def test_apfl_mixes_a_tensor_that_two_layers_share() -> None:
    model = network()
    model.encoder.add_module("again", nn.Linear(model.feature_dim, model.feature_dim))
    model.encoder.add_module("twice", nn.Linear(model.feature_dim, model.feature_dim))
    model.encoder.twice.weight = model.encoder.again.weight
    own: dict[str, Tensor] = {}
    for round in (1, 2):
        APFL().train(turn(model, round, own))
    w, v = model.encoder.again.weight.detach().clone(), own["apfl.encoder.again.weight"]
    assert not torch.equal(v, w)
    APFL().personalize(turn(model, 3, own))
    share = float(own["apfl.alpha"])
    torch.testing.assert_close(model.encoder.twice.weight.detach(), share * v + (1 - share) * w)


def test_apfls_global_model_is_fedavgs_bit_for_bit() -> None:
    model, twin = network(norm=True), network(norm=True)
    loss = APFL().train(turn(model, momentum=0.9))
    assert loss == pytest.approx(
        train_network(twin, image_set(COUNT), balanced_softmax, options(momentum=0.9), draw(3)), rel=1e-6
    )
    assert not changed(snapshot(twin), model)


@both
def test_fedrod_trains_both_heads_in_the_same_steps(norm: bool) -> None:
    model, twin = network64(norm), network64(norm)
    FedRoD().train(turn(model))
    twin.train()
    for x, y in batches(EPOCHS, draw(3), 1 + norm):
        z = twin.features(x)
        logits = twin.head(z)
        w = twin.personal_head.weight
        residual = torch.softmax((logits + z @ w.T).detach(), 1) - functional.one_hot(y, 3)
        by_hand = residual.T @ z.detach() / len(y)  # the cross-entropy of the sum, by the personal head alone
        descend([*shared(twin), w], [*torch.autograd.grad(objective(logits, y), shared(twin)), by_hand])
    assert_close(model, twin)


def test_a_parameter_without_a_part_in_the_loss_has_no_gradient() -> None:
    """A parameter that the loss does not contain is left out, and nothing is accumulated."""
    used, unused = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    first, second = gradients(used**2, [used, unused])
    assert first is not None
    assert (first.item(), second) == (6.0, None)
    assert used.grad is None
