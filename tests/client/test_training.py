"""Local training against hand computation and torch's own optimisers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedtta.client.algorithms import training
from fedtta.client.algorithms.training import (
    balanced_softmax,
    cross_entropy,
    epoch,
    generator,
    has_batchnorm,
    mean_loss,
    optimizer,
    proximal_term,
    train_network,
    train_personal_head,
)
from fedtta.data import CropFlip
from fedtta.models import TwoHead
from fedtta.tta.contrastive import ContrastiveViews
from tests.client.tiny import CLASSES, changed, image_set, network, settings, snapshot, training_set


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(classes: int = CLASSES) -> TwoHead:
    """z is the sample itself: training of the global head is logistic regression on one number."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return TwoHead(nn.Flatten(), 1, classes)


# -- epochs


@examples(deadline=None, max_examples=50)
@given(st.integers(1, 100), st.integers(1, 40), st.integers(0, 2**31 - 1))
def test_an_epoch_visits_every_sample_once_with_its_label(count: int, batch_size: int, seed: int) -> None:
    batches = list(epoch(training_set(count), batch_size, draw(seed)))
    seen = [round(float(value) * 255) for x, _ in batches for value in x.flatten()]
    labels = [int(label) for _, batch in batches for label in batch]
    assert sorted(seen) == list(range(count))
    assert labels == [value % CLASSES for value in seen]
    # full batches, then what is left
    assert [len(x) for x, _ in batches] == [batch_size] * (count // batch_size) + [count % batch_size] * (
        count % batch_size > 0
    )


@pytest.mark.parametrize("kind", [CropFlip, ContrastiveViews])
def test_the_bytes_augmented_at_once_are_bounded_and_decide_no_bit(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the batches nor what is drawn after them."""
    plain, seen = image_set(150), list[int]()

    class Noting(kind):
        def apply(self, x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
            seen.append(x.nbytes)
            return super().apply(x, draws)

    data = training.TrainingSet(plain.index, plain.pixels, plain.labels, plain.counts, Noting())
    image = 4 * 3 * 16 * 16
    results = []
    for most in (2**30, 2 * 2 * image + 1, 1):  # all that are drawn at once, two batches, one batch
        monkeypatch.setattr(training, "AUGMENTED_BYTES", most)
        g, batches = draw(), list[torch.Tensor]()
        for x, _ in epoch(data, 2, g):
            batches += [x, torch.rand(1, generator=g)]  # as a step that draws, too
        results.append(batches)
        assert max(seen) == {2**30: 64 * 2 * image, 1: 2 * image}.get(most, 2 * 2 * image)
        seen.clear()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_large_images_are_augmented_in_no_more_memory_than_small_ones() -> None:
    sizes = {edge: 4 * 3 * edge**2 * training.augmented_at_once((3, edge, edge), 32) for edge in (32, 64, 224, 1024)}
    assert sizes == {32: 64 * 32 * 12288, 64: 21 * 32 * 49152, 224: 32 * 602112, 1024: 32 * 12582912}
    assert max(sizes[edge] for edge in (32, 64, 224)) <= training.AUGMENTED_BYTES  # one batch of 1024 x 1024 is more


def test_epochs_are_shuffled_by_the_generator_alone() -> None:
    data, one, other = training_set(40), draw(5), draw(5)
    orders = [[x.flatten().tolist() for x, _ in epoch(data, 8, g)] for g in (one, other, one, draw(6))]
    assert orders[0] == orders[1]
    assert orders[2] != orders[0], "the second epoch of a generator must have an order of its own"
    assert orders[3] != orders[0]


@pytest.mark.parametrize(
    ("count", "smallest", "lengths"),
    [(9, 1, [4, 4, 1]), (9, 2, [4, 4]), (10, 2, [4, 4, 2]), (1, 1, [1]), (1, 2, []), (3, 2, [3]), (8, 2, [4, 4])],
)
def test_a_short_last_batch_is_kept_unless_too_small(count: int, smallest: int, lengths: list[int]) -> None:
    assert [len(x) for x, _ in epoch(training_set(count), 4, draw(), smallest)] == lengths


def test_augmentation_sees_images_in_the_unit_range_and_draws_from_the_generator() -> None:
    seen = []

    class Noting(CropFlip):
        def apply(self, x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
            seen.append((float(x.min()), float(x.max()), x.dtype))
            return super().apply(x, draws)

    plain = training_set(256, (3, 8, 8))
    data = training.TrainingSet(plain.index, plain.pixels, plain.labels, plain.counts, Noting(flip=False))
    batches = [torch.cat([x for x, _ in epoch(data, 16, draw(seed))]) for seed in (1, 1, 2)]
    assert seen[0] == (0.0, 1.0, torch.float32)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_a_generator_depends_on_each_of_its_keys_and_on_nothing_else() -> None:
    def first(*key: Any) -> int:
        return int(torch.randint(2**62, (1,), generator=generator(*key)))

    torch.manual_seed(1)
    values = [first(1, "local", 2, 3)]
    torch.manual_seed(2)
    assert first(1, "local", 2, 3) == values[0]
    values += [first(*key) for key in [(2, "local", 2, 3), (1, "personal", 2, 3), (1, "local", 3, 2), (1, "local", 2)]]
    assert len(set(values)) == len(values)


# -- steps


def test_one_sgd_step_is_the_hand_computation() -> None:
    """Full batch, one epoch: W ← W - η (Xᵀ(p - y)/B + λ W), b likewise, with numpy."""
    data, model = training_set(12), linear()
    w, b = (value.detach().double().numpy().copy() for value in (model.head.weight, model.head.bias))  # [K, 1], [K]
    x, y = np.arange(12)[:, None] / 255, np.eye(CLASSES)[np.arange(12) % CLASSES]
    logits = x @ w.T + b
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    options = settings(batch_size=12, learning_rate=0.3, weight_decay=0.1)
    loss = train_network(model, data, cross_entropy, options, draw())
    np.testing.assert_allclose(
        model.head.weight.detach().numpy(), w - 0.3 * ((p - y).T @ x / 12 + 0.1 * w), rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(
        model.head.bias.detach().numpy(), b - 0.3 * ((p - y).mean(0) + 0.1 * b), rtol=1e-5, atol=1e-7
    )
    assert loss == pytest.approx(float(-np.log((p * y).sum(1)).mean()), rel=1e-6)


def test_the_proximal_term_by_hand() -> None:
    """(0.5 / 2) · ((3 - 1)² + (0 - 2)² + (5 - 4)²) = 2.25, and its gradient μ (w - w_received)."""
    weights = [torch.tensor([3.0, 0.0], requires_grad=True), torch.tensor([[5.0]], requires_grad=True)]
    received = [torch.tensor([1.0, 2.0]), torch.tensor([[4.0]])]
    value = proximal_term(weights, received, 0.5)
    assert isinstance(value, torch.Tensor)
    assert value.item() == 2.25
    value.backward()
    assert [w.grad.flatten().tolist() for w in weights if w.grad is not None] == [[1.0, -1.0], [0.5]]
    assert proximal_term(weights, [], 0.0) == 0.0


def test_two_steps_of_fedprox_are_the_hand_computation() -> None:
    """The first step starts where nothing pulls; the second adds μ (w_1 - w_0). The loss is the objective alone."""
    data, model = training_set(12), linear()
    start = [value.detach().double().numpy().copy() for value in (model.head.weight, model.head.bias)]
    x, y = np.arange(12)[:, None] / 255, np.eye(CLASSES)[np.arange(12) % CLASSES]
    w, b = start
    for _ in range(2):
        p = np.exp(x @ w.T + b) / np.exp(x @ w.T + b).sum(1, keepdims=True)
        objective = float(-np.log((p * y).sum(1)).mean())
        w, b = w - 0.3 * ((p - y).T @ x / 12 + 2 * (w - start[0])), b - 0.3 * ((p - y).mean(0) + 2 * (b - start[1]))
    options = settings(batch_size=12, learning_rate=0.3, weight_decay=0.0, local_epochs=2)
    loss = train_network(model, data, cross_entropy, options, draw(), proximal_mu=2.0)
    np.testing.assert_allclose(model.head.weight.detach().numpy(), w, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(model.head.bias.detach().numpy(), b, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(objective, rel=1e-6)


@pytest.mark.parametrize("norm", [False, True])
def test_fedprox_without_its_pull_is_fedavg_bit_for_bit(norm: bool) -> None:
    models = [network(norm) for _ in range(3)]
    pulls: tuple[dict[str, float], ...] = ({}, {"proximal_mu": 0.0}, {"proximal_mu": 5.0})
    for model, pull in zip(models, pulls, strict=True):
        train_network(model, image_set(40), cross_entropy, settings(local_epochs=2), draw(3), **pull)
    plain, without, pulled = (snapshot(model) for model in models)
    assert all(torch.equal(plain[name], without[name]) for name in plain)
    assert not torch.equal(plain["head.weight"], pulled["head.weight"])


@pytest.mark.parametrize("objective", [cross_entropy, balanced_softmax])
def test_the_loss_of_what_was_received_is_over_all_samples_in_evaluation_mode(objective: Any) -> None:
    data, model = image_set(21), network(norm=True)
    model.train()
    before = snapshot(model)
    loss = mean_loss(model, data, objective, batch_size=8)  # 8 + 8 + 5
    assert not changed(before, model)
    model.eval()
    expected = objective(model(data.pixels.float() / 255), data.labels, data.counts)
    assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_the_reported_loss_weighs_samples_alike_in_the_last_epoch() -> None:
    """With a rate too small to move anything, the loss is the mean over samples, short batch or not."""
    data, model = training_set(10), linear()
    options = settings(batch_size=4, learning_rate=1e-30, weight_decay=0.0, local_epochs=2)
    expected = functional.cross_entropy(model(data.pixels.float() / 255), data.labels)
    assert train_network(model, data, cross_entropy, options, draw()) == pytest.approx(
        float(expected.detach()), rel=1e-5
    )


OPTIMISERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"learning_rate": 0.1, "weight_decay": 0.01}, partial(torch.optim.SGD, lr=0.1, weight_decay=0.01)),
    "momentum": (
        {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adam": (
        {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.1},
        partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", list(OPTIMISERS))
@pytest.mark.parametrize("objective", [cross_entropy, balanced_softmax])
def test_local_training_is_torchs_own_optimiser_over_the_epochs(name: str, objective: Any) -> None:
    changes, make = OPTIMISERS[name]
    data = image_set(20)
    model, twin = network(), network()
    train_network(model, data, objective, settings(local_epochs=3, **changes), draw(4))

    g = draw(4)
    twin.train()
    step = make([p for n, p in twin.named_parameters() if not n.startswith("personal_head")])
    for _ in range(3):
        order = torch.randperm(20, generator=g)
        for chosen in order.split(8):
            logits = twin(data.pixels[chosen].float() / 255)
            if objective is balanced_softmax:
                logits = logits + torch.log(1 + data.counts.float())
            step.zero_grad()
            functional.cross_entropy(logits, data.labels[chosen]).backward()
            step.step()
    for (key, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", list(OPTIMISERS))
def test_optimiser_state_is_fresh_in_every_call(name: str) -> None:
    changes, _ = OPTIMISERS[name]
    head = nn.Linear(2, 2)
    made = [optimizer(list(head.parameters()), settings(**changes)) for _ in range(2)]
    head(torch.ones(1, 2)).sum().backward()
    made[0].step()
    memories = [(step._first, step._second, step._steps) for step in made]
    assert memories[1] == ({}, {}, {})
    assert made[1]._velocity == [None, None]


# -- what a phase may change


@pytest.mark.parametrize("norm", [False, True])
def test_the_personal_phase_changes_the_personal_head_only(norm: bool) -> None:
    model, data = network(norm), image_set(20)
    model.train()  # the phase itself must see to evaluation mode
    before = snapshot(model)
    train_personal_head(model, data, settings(personal_epochs=2, momentum=0.9), draw())
    assert changed(before, model) == {"personal_head.weight"}
    assert not model.training


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("objective", [cross_entropy, balanced_softmax])
def test_local_training_leaves_the_personal_head_alone(norm: bool, objective: Any) -> None:
    model, data = network(norm), image_set(20)
    before = snapshot(model)
    train_network(model, data, objective, settings(momentum=0.9), draw())
    assert changed(before, model) == set(before) - {"personal_head.weight"}
    assert not model.training


def test_the_personal_head_learns_by_plain_cross_entropy_on_frozen_features() -> None:
    model, twin, data = network(norm=True), network(norm=True), image_set(20)
    loss = train_personal_head(model, data, settings(personal_epochs=2, weight_decay=0.01), draw(2))

    twin.eval()
    features = twin.features(data.pixels.float() / 255).detach()
    w, g = twin.personal_head.weight.detach().clone(), draw(2)
    for _ in range(2):
        total = 0.0
        for chosen in torch.randperm(20, generator=g).split(8):
            z, y = features[chosen], functional.one_hot(data.labels[chosen], CLASSES).float()
            p = torch.softmax(z @ w.T, 1)
            total += float(-torch.log((p * y).sum(1)).sum())
            w -= 0.05 * ((p - y).T @ z / len(chosen) + 0.01 * w)
    torch.testing.assert_close(model.personal_head.weight.detach(), w, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(total / 20, rel=1e-4)


def test_no_personal_epochs_change_nothing() -> None:
    model = network()
    before = snapshot(model)
    train_personal_head(model, image_set(5), settings(personal_epochs=0), draw())
    assert not changed(before, model)


# -- BatchNorm, one sample


def test_a_single_sample_moves_a_network_only_without_batchnorm() -> None:
    data, plain, normed = image_set(1), network(), network(norm=True)
    before, normed_before = snapshot(plain), snapshot(normed)
    train_network(plain, data, cross_entropy, settings(), draw())
    loss = train_network(normed, data, cross_entropy, settings(), draw())
    assert "head.bias" in changed(before, plain)
    assert not changed(normed_before, normed)
    assert np.isfinite(loss)
    train_personal_head(normed, data, settings(), draw())  # features in evaluation mode need no second sample
    assert changed(normed_before, normed) <= {"personal_head.weight"}


def test_a_last_batch_of_one_is_dropped_with_batchnorm() -> None:
    data, model = image_set(9), network(norm=True)
    train_network(model, data, cross_entropy, settings(batch_size=4, local_epochs=2), draw())
    assert int(model.state_dict()["encoder.norm.num_batches_tracked"]) == 2 * 2


def test_batches_of_one_are_refused_with_batchnorm() -> None:
    model = network(norm=True)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"batch-size = 1.*BatchNorm"):
        train_network(model, image_set(4), cross_entropy, settings(batch_size=1), draw())
    assert not changed(before, model)


def test_batchnorm_is_told_from_other_normalisations() -> None:
    assert has_batchnorm(network(norm=True))
    assert not has_batchnorm(network())
    assert has_batchnorm(nn.Sequential(nn.Sequential(nn.BatchNorm1d(2))))
    assert not has_batchnorm(nn.Sequential(nn.GroupNorm(1, 2), nn.LayerNorm(2)))


# -- divergence, determinism, precision


@pytest.mark.parametrize("train", ["local", "personal"])
@pytest.mark.parametrize("batch_size", [4, 20])  # with 20, the one step of the epoch spoils what comes after it
def test_divergence_is_an_error(train: str, batch_size: int) -> None:
    model, data = network(), image_set(20)
    with torch.no_grad():
        model.encoder.fc.weight *= 1e3  # large features, so large gradients of the heads
    options = settings(learning_rate=1e38, batch_size=batch_size)
    phase = partial(train_network, model, data, cross_entropy)
    if train == "personal":
        phase = partial(train_personal_head, model, data)
    with pytest.raises(FloatingPointError, match="diverged"):
        phase(options, draw())


def test_equal_generators_give_equal_bits_whatever_the_global_seed() -> None:
    trained = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, data = network(norm=True), image_set(40)
        data = training.TrainingSet(data.index, data.pixels, data.labels, data.counts, CropFlip())
        train_personal_head(model, data, settings(), draw(1))
        train_network(model, data, cross_entropy, settings(), draw(2))
        trained.append(model)
    assert not changed(snapshot(trained[0]), trained[1])


def test_another_generator_gives_another_network() -> None:
    data, models = image_set(40), [network(), network()]
    for seed, model in enumerate(models):
        train_network(model, data, cross_entropy, settings(), draw(seed))
    assert "head.weight" in changed(snapshot(models[0]), models[1])


def test_autocast_trains_float32_weights_close_to_full_precision() -> None:
    data, models = image_set(40), [network(), network()]
    for model, on in zip(models, (False, True), strict=True):
        train_personal_head(model, data, settings(autocast=on), draw())
        loss = train_network(model, data, balanced_softmax, settings(autocast=on), draw())
        assert np.isfinite(loss)
    for (name, full), half in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, full, atol=0.03, rtol=0.03, msg=name)
    assert changed(snapshot(models[0]), models[1]), "autocast had no effect"
