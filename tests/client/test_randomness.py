"""Layers that draw by themselves depend on the client's seed, not on who was trained before in this process."""

from __future__ import annotations

import copy

import torch

from fedtta.client.algorithms.training import cross_entropy, generator, process_draws_by, train_network
from fedtta.models import build
from tests.client.tiny import CLASSES, image_set, settings


def test_dropout_follows_the_generator_and_leaves_the_process_as_it_was() -> None:
    drop, x, cpu = torch.nn.Dropout(0.5), torch.ones(100), torch.device("cpu")
    masks = []
    for seed, before in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(before)
        with process_draws_by(generator(seed, "local", 3), cpu):
            masks.append(drop(x))
        after = torch.rand(3)
        torch.manual_seed(before)
        assert torch.equal(after, torch.rand(3))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_a_network_with_dropout_trains_to_the_same_bits_whatever_ran_before() -> None:
    data = image_set(12)
    start = build("cct-4/3x2", CLASSES, in_channels=data.pixels.shape[1], image_size=data.pixels.shape[-1], seed=0)
    trained = []
    for before in (1, 2):
        torch.manual_seed(before)
        model = copy.deepcopy(start)
        train_network(model, data, cross_entropy, settings(local_epochs=2), generator(7, "local"))
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
