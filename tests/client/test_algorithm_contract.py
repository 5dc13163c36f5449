"""What holds for every rule of local training: what a turn changes, keeps and refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtta.client.algorithms import ALGORITHMS, find_algorithm
from fedtta.client.algorithms.apfl import APFL
from fedtta.client.algorithms.base import LocalContext
from fedtta.client.algorithms.fedrep import FedRep
from fedtta.client.algorithms.training import balanced_softmax
from fedtta.models import TwoHead
from fedtta.server.trainings import PROXIMAL
from tests.client.tiny import changed, image_set, network, settings, snapshot

COUNT, BATCH, EPOCHS = 9, 4, 2
EVERY = list(ALGORITHMS)
both = pytest.mark.parametrize("norm", [False, True])
#: Beginnings of the names that a rule leaves as they are; the personal head, for those that are not here.
LEFT = {
    "fedrod": (),
    "supervised_contrastive": ("head.", "personal_head."),
    "self_contrastive": ("head.", "personal_head."),
    "classifier": ("encoder.", "personal_head."),
}


def made_for(name: str, norm: bool = False, seed: int = 0) -> TwoHead:
    """A network with all that a rule trains."""
    return network(norm, seed, rotation=name == "ttt")


def turn(
    model: Any, seed: int = 3, own: dict[str, Tensor] | None = None, count: int = COUNT, **changes: Any
) -> LocalContext:
    options = settings(**{"learning_rate": 0.05, "batch_size": BATCH, "local_epochs": EPOCHS, **changes})
    draw = torch.Generator().manual_seed(seed)
    return LocalContext(model.eval(), image_set(count), balanced_softmax, options, draw, {} if own is None else own)


def test_rules_by_name() -> None:
    assert set(EVERY) == {
        "fedavg", "personalized", "fedrep", "ditto", "apfl", "fedrod",
        "ttt", "supervised_contrastive", "self_contrastive", "classifier",
    }  # fmt: skip
    assert find_algorithm("apfl") is ALGORITHMS["apfl"]
    assert {name for name in EVERY if ALGORITHMS[name].uses_personal_head} == {"fedavg", "personalized", "ttt"}
    with pytest.raises(ValueError, match="unknown local algorithm 'scaffold'; there are: apfl, ditto, fedavg"):
        find_algorithm("scaffold")
    for bad in (lambda: FedRep(0), lambda: APFL(-0.1), lambda: APFL(float("nan"))):
        with pytest.raises(ValueError, match="allowed is"):
            bad()


@both
@pytest.mark.parametrize("name", EVERY)
def test_what_a_turn_changes(name: str, norm: bool) -> None:
    model = made_for(name, norm)
    grads = {n: p.requires_grad for n, p in model.named_parameters()}
    before, local = snapshot(model), turn(model, momentum=0.9)
    loss = find_algorithm(name).train(local)
    assert loss > 0
    assert not model.training
    left = LEFT.get(name, ("personal_head.",))
    assert changed(before, model) == {key for key in before if not key.startswith(left)}
    if norm and name == "ttt":  # a batch of turned images follows every batch
        assert int(model.state_dict()["encoder.norm.num_batches_tracked"]) == 2 * 2 * EPOCHS
    elif norm and name != "classifier":  # 9 samples in batches of 4: the last one is left out
        epochs = 1 if name == "fedrep" else EPOCHS
        assert int(model.state_dict()["encoder.norm.num_batches_tracked"]) == 2 * epochs
    find_algorithm(name).personalize(local)
    assert not model.training
    assert {n: p.requires_grad for n, p in model.named_parameters()} == grads
    assert bool(local.own) == (name in ("ditto", "apfl"))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("frozen", ["encoder.conv.", "encoder."])
def test_frozen_layers_stay_as_they_are(name: str, frozen: str) -> None:
    """A network of one's own may freeze what was pretrained, or all of its encoder."""
    model = made_for(name)
    for key, value in model.named_parameters():
        value.requires_grad_(not key.startswith(frozen))
    before, local = snapshot(model), turn(model, momentum=0.9, weight_decay=0.1)
    for _ in range(2):  # APFL's two models differ from the second round on
        find_algorithm(name).train(local)
    find_algorithm(name).personalize(local)
    left = (frozen, *LEFT.get(name, ("personal_head.",)))
    assert changed(before, model) == {key for key in before if not key.startswith(left)}


@pytest.mark.parametrize("name", EVERY)
def test_the_server_knows_which_rules_have_a_proximal_term(name: str) -> None:
    free, pulled = made_for(name), made_for(name)
    find_algorithm(name).train(turn(free))
    find_algorithm(name).train(replace(turn(pulled), proximal_mu=10.0))
    assert bool(changed(snapshot(free), pulled)) == (name in PROXIMAL)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("autocast", [False, True])
def test_two_rounds_are_the_same_bits_after_storage(name: str, autocast: bool) -> None:
    """Whatever torch's global seed, and with private tensors that went through numpy."""
    results = []
    for store in (False, True):
        torch.manual_seed(int(store))
        own: dict[str, Tensor] = {}
        for round in (1, 2):
            model = made_for(name, True, round)
            find_algorithm(name).train(turn(model, seed=round, own=own, autocast=autocast))
            if store:
                own = {key: torch.tensor(value.numpy().copy()) for key, value in own.items()}
        find_algorithm(name).personalize(turn(model, seed=9, own=own, autocast=autocast))
        results.append((model, own))
    (one, first), (other, second) = results
    assert not changed(snapshot(one), other)
    assert all(torch.equal(first[key], second[key]) for key in {*first, *second})
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in one.parameters())


@pytest.mark.parametrize("name", EVERY)
def test_divergence_is_an_error_and_leaves_no_trace(name: str) -> None:
    model, own = made_for(name), {}
    find_algorithm(name).train(turn(model, own=own))
    kept = {key: value.clone() for key, value in own.items()}
    with torch.no_grad():
        model.encoder.fc.weight *= 1e3
    with pytest.raises(FloatingPointError, match="diverged"):
        find_algorithm(name).train(turn(model, own=own, learning_rate=1e38))
    assert set(own) == set(kept)
    assert all(torch.equal(own[key], kept[key]) for key in kept)


@pytest.mark.parametrize("name", EVERY)
def test_batchnorm_needs_two_samples(name: str) -> None:
    model = made_for(name, norm=True)
    before = snapshot(model)
    if name == "classifier":  # the encoder stays in evaluation mode
        assert find_algorithm(name).train(turn(model, batch_size=1)) > 0
        return
    with pytest.raises(ValueError, match=r"batch-size = 1.*BatchNorm"):
        find_algorithm(name).train(turn(model, batch_size=1))
    assert not changed(before, model)
    one = turn(model, count=1)
    assert find_algorithm(name).train(one) == 0
    assert changed(before, model) == ({"head.weight", "head.bias"} if name == "fedrep" else set())
    find_algorithm(name).personalize(one)


@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_private_tensors_that_do_not_fit_are_refused(name: str) -> None:
    own: dict[str, Tensor] = {}
    before = snapshot(network())
    find_algorithm(name).personalize(turn(model := network()))
    assert not changed(before, model), "a client that never trained tests with what it received"
    find_algorithm(name).train(turn(model, own=own))
    for key, message in ((f"{name}.head.bias", r"missing \['head.bias'\]"), ("apfl.alpha", "apfl.alpha = None")):
        if key in own:
            with pytest.raises(ValueError, match=message):
                find_algorithm(name).train(turn(network(), own={k: value for k, value in own.items() if k != key}))
    if name == "apfl":
        with pytest.raises(ValueError, match="no model that belongs to it"):
            APFL().train(turn(network(), own={"apfl.alpha": own["apfl.alpha"]}))
        with pytest.raises(ValueError, match="expected is one number from 0 to 1"):
            APFL().personalize(turn(network(), own={**own, "apfl.alpha": torch.tensor([1.5])}))
