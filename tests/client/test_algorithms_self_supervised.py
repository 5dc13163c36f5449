"""FedICON's rounds and training with rotations, against loops written out here, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedtta.client.algorithms import fedicon as rounds
from fedtta.client.algorithms import find_algorithm
from fedtta.client.algorithms.base import LocalContext
from fedtta.client.algorithms.fedicon import Classifier
from fedtta.client.algorithms.training import contrastive_views
from fedtta.client.algorithms.ttt import TTT
from fedtta.data import DATASETS
from fedtta.models import TwoHead
from fedtta.settings import Settings
from fedtta.tta.contrastive import ContrastiveViews
from tests.client.test_algorithms import (
    assert_close,
    batches,
    both,
    descend,
    draw,
    network64,
    objective,
    options,
    shared,
)
from tests.client.test_algorithms import turn as plain_turn
from tests.client.tiny import network

EPOCHS, TEMPERATURE = 2, 0.3


def turn(model: TwoHead, **changes: Any) -> LocalContext:
    return plain_turn(model, temperature=TEMPERATURE, **changes)


def contrastive(z: Tensor, labels: list[int]) -> Tensor:
    """Eq. 2, anchor by anchor."""
    unit = [row / row.norm() for row in z]
    total, anchors = z.new_zeros(()), 0
    for i, one in enumerate(unit):
        others = [j for j in range(len(unit)) if j != i]
        denominator = torch.stack([torch.exp(one @ unit[j] / TEMPERATURE) for j in others]).sum()
        positives = [j for j in others if labels[j] == labels[i]]
        if positives:
            terms = [torch.log(torch.exp(one @ unit[j] / TEMPERATURE) / denominator) for j in positives]
            total, anchors = total - torch.stack(terms).mean(), anchors + 1
    return total / anchors


@both
@pytest.mark.parametrize(("with_labels", "base"), [(True, 0.0), (False, 0.0), (True, 0.07)])
def test_encoder_rounds(monkeypatch: pytest.MonkeyPatch, norm: bool, with_labels: bool, base: float) -> None:
    views = ContrastiveViews(flip=DATASETS["npz"].flip)
    monkeypatch.setattr(rounds, "contrastive_views", lambda settings: lambda x, g: views(x, g).double())
    model, twin, g = network64(norm), network64(norm), draw(3)
    algorithm = find_algorithm("supervised_contrastive" if with_labels else "self_contrastive")
    loss = algorithm.train(turn(model, base_temperature=base))
    twin.train()
    losses, sizes = [], []
    for x, y in batches(EPOCHS, g, 1 + norm):
        x = x.float()  # what views are made of
        z = twin.features(torch.cat([views(x, g), views(x, g)]).double())
        value = contrastive(z, (y if with_labels else torch.arange(len(y))).repeat(2).tolist())
        value = value * (TEMPERATURE / base) if base else value
        descend(list(twin.encoder.parameters()), torch.autograd.grad(value, list(twin.encoder.parameters())))
        losses.append(value.item())
        sizes.append(len(y))
    half = len(losses) // EPOCHS
    mean = sum(a * b for a, b in zip(losses[half:], sizes[half:], strict=True)) / sum(sizes[half:])
    assert_close(model, twin)
    assert loss == pytest.approx(mean)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    algorithm.personalize(turn(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("dataset", "crop", "flip"), [("digits", 0.6, False), ("cifar10", 0.2, True)])
def test_views_are_those_of_the_data_set(dataset: str, crop: float, flip: bool) -> None:
    settings = Settings(dataset=dataset, views="contrastive")
    assert contrastive_views(settings) == ContrastiveViews(crop_scale=(crop, 1.0), flip=flip)


@both
def test_classifier_rounds_and_the_clients_own_classifier(norm: bool) -> None:
    model, twin, g = network64(norm), network64(norm), draw(3)
    head = list(twin.head.parameters())
    twin.eval()
    Classifier().train(turn(model))
    for x, y in batches(EPOCHS, g, 1):
        descend(head, torch.autograd.grad(objective(twin(x), y), head))
    assert_close(model, twin)
    Classifier().personalize(turn(model, seed=5, classifier_epochs=3))
    g = draw(5)
    for x, y in batches(3, g, 1):
        descend(head, torch.autograd.grad(objective(twin(x), y), head))
    assert_close(model, twin)


@both
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_rotations_are_told_apart_beside_the_classes(norm: bool, weight: float) -> None:
    model, twin = (network(norm, rotation=True).double() for _ in range(2))
    loss, g = TTT().train(turn(model, rotation_weight=weight)), draw(3)
    assert twin.rotation_head is not None
    weights = [*shared(twin), *twin.rotation_head.parameters()]
    twin.train()
    seen: list[float] = []
    # the order of an epoch is drawn first, then each batch's turns
    for _ in range(EPOCHS):
        order = torch.randperm(len(turn(model).data), generator=g)
        for chosen in order.split(options().batch_size):
            if len(chosen) < 1 + norm:
                continue
            data = turn(model).data
            x, y = (data.pixels[chosen].float() / 255).double(), data.labels[chosen]
            value = objective(twin(x), y)
            turns = torch.randint(4, (len(x),), generator=g)
            turned = torch.stack([torch.rot90(one, int(k), (1, 2)) for one, k in zip(x, turns, strict=True)])
            told = functional.cross_entropy(twin.rotation_head(twin.features(turned)), turns)
            slopes = torch.autograd.grad(value + weight * told, weights)
            descend(weights, slopes)
            seen.append(value.item())
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        # `train_network` takes its loss in float32
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)
    assert math.isfinite(loss)
    assert loss > 0
