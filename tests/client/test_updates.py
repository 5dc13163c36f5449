"""What a client sends of a trained model, what it keeps for the next round, and the accuracies that it reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client import updates
from fedtta.client.state import DirectoryState, MemoryState
from fedtta.client.updates import RESIDUAL, outgoing
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Adapted, RefinedRates, Reply, Trained
from fedtta.messages.requests import Adapt, AdapterRow, RefineRates, Train
from fedtta.messages.updates import Format
from tests.client.tiny import Client, Task, device, global_arrays, network, same

ROUNDING: tuple[Format, ...] = ("float16", "int8")
HEAD = ["head.bias", "head.weight"]


def asked(client: Client, how: Format, round: int = 1, task: Task | None = None, arrays: Arrays | None = None) -> Train:
    given = global_arrays(network(seed=9)) if arrays is None else arrays
    return replace(client.request(round, task or Task("ce"), given), update_format=how)


def sent_by(client: Client, request: Train) -> Trained:
    reply = outgoing(client.inner, request, client.inner.train(request))
    assert isinstance(reply, Trained)
    return reply


def decoded(request: Train, reply: Trained) -> Arrays:
    found = request.decoded(reply)
    assert isinstance(found, Trained)
    return found.arrays


def right(client: Client, arrays: Arrays) -> int:
    """Validation samples that a network of these arrays classifies correctly."""
    model = network()
    model.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
    split, images = client.federation.splits[0].validation, client.federation.images
    with torch.no_grad():
        logits = model.eval()(images.batch(split, torch.device("cpu")))
    return int((logits.argmax(1).numpy() == images.labels[split]).sum())


@pytest.mark.parametrize("how", ROUNDING)
def test_an_update_holds_the_trained_model_but_for_what_is_kept(how: Format) -> None:
    plain = sent_by(device(), asked(device(), "float32"))
    assert (plain.scales, plain.trained_correct, plain.decoded_correct) == (None, None, None)
    client = device()
    request = asked(client, how)
    reply = sent_by(client, request)
    found, owed = decoded(request, reply), client.memory.load(f"{RESIDUAL}ce", 1)
    assert set(owed) == {name for name, value in plain.arrays.items() if value.ndim > 1}
    for name, value in plain.arrays.items():
        if name in owed:
            assert reply.arrays[name].dtype == how
            assert np.abs(owed[name]).max() > 0
            np.testing.assert_allclose(found[name] + owed[name], value, rtol=0, atol=1e-6)
        else:
            assert found[name].tobytes() == value.tobytes()
    assert (reply.trained_correct, reply.decoded_correct) == (right(client, plain.arrays), right(client, found))
    assert reply.validation_correct == plain.validation_correct  # of the model that was received


def test_the_two_accuracies_differ_where_rounding_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is decoded as it was sent is as good as that one, whatever was trained."""
    monkeypatch.setattr(updates, "decode", lambda how, sent, arrays, scales: sent)
    client = device(local_epochs=5)
    reply = sent_by(client, asked(client, "int8"))
    assert reply.decoded_correct == reply.validation_correct
    assert reply.trained_correct is not None
    assert reply.trained_correct > reply.validation_correct


@pytest.mark.parametrize("how", ["float32", "changed", *ROUNDING])
def test_frozen_layers_are_sent_in_float32_only(how: Format) -> None:
    model = network()
    for parameter in model.encoder.parameters():
        parameter.requires_grad_(False)
    client = device(model=model)
    request = asked(client, how)
    reply = sent_by(client, request)
    assert sorted(reply.arrays) == (HEAD if how != "float32" else sorted(request.arrays))
    assert list(decoded(request, reply)) == list(request.arrays)
    assert (reply.trained_correct is None) == (reply.decoded_correct is None) == (how not in ROUNDING)


@pytest.mark.parametrize("how", ["changed", *ROUNDING])
def test_arrays_that_the_client_keeps_are_no_part_of_the_update(how: Format) -> None:
    client = device()
    request = asked(client, how, task=Task("ce", "personalized", aggregated=HEAD))
    reply = sent_by(client, request)
    assert sorted(reply.arrays) == HEAD
    whole = {**client.model.global_state()}
    kept = {name: whole[name].numpy() for name in whole if name not in HEAD}  # as trained: they are not decoded
    if how != "changed":
        assert reply.decoded_correct == right(client, {**kept, **decoded(request, reply)})


@pytest.mark.parametrize("how", ROUNDING)
def test_a_reply_that_lends_its_memory_has_the_same_bits(how: Format) -> None:
    one, other = (replace(device(model=network(norm=True)).inner, lends=lends) for lends in (False, True))
    request = asked(Client(one), how, arrays=global_arrays(network(norm=True, seed=9)))
    found = [outgoing(each, request, each.train(request)).to_record() for each in (one, other)]
    assert same(found[0].arrays["arrays"], found[1].arrays["arrays"])
    assert {**found[0].values, "seconds": 0} == {**found[1].values, "seconds": 0}


# -- restarts


def rounds(folder: Path, *numbers: int, lost: bool = False) -> dict[int, Arrays]:
    """Take part in rounds with a device that has just been started; the server is this client's alone."""
    memory = MemoryState() if lost else DirectoryState(folder / "memory", "run1", "0")
    client = device(state=DirectoryState(folder / "state", "run1", "0"), memory=memory)
    found = {}
    for number in numbers:
        request = asked(client, "int8", number, arrays=global_arrays(network(seed=number)))
        found[number] = decoded(request, sent_by(client, request))
    return found


def test_what_is_owed_survives_restarts_and_steps_back_with_a_resumed_run(tmp_path: Path) -> None:
    whole = rounds(tmp_path / "whole", 1, 2, 3)
    cut = {**rounds(tmp_path / "cut", 1, 2), **rounds(tmp_path / "cut", 3)}
    assert all(same(whole[number], cut[number]) for number in whole)
    assert same(whole[3], rounds(tmp_path / "cut", 3)[3])  # the server resumes after round 2
    skipped = rounds(tmp_path / "whole", 5)  # not sampled in round 4: what round 3 has left is owed still
    rounds(tmp_path / "cut", 4)
    assert not same(skipped[5], rounds(tmp_path / "cut", 5)[5])
    assert not same(whole[3], rounds(tmp_path / "cut", 3, lost=True)[3])


# -- differential privacy


@pytest.mark.parametrize("how", ROUNDING)
def test_noise_comes_first_and_what_is_owed_follows_from_noisy_values(
    how: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy: list[Any] = []
    protect = updates.protect

    def noting(*arguments: Any) -> Reply:
        noisy.append(protect(*arguments))
        return noisy[-1]

    monkeypatch.setattr(updates, "protect", noting)
    client = device(differential_privacy="model=1/0.1")
    owed: Arrays = {}
    for number in (1, 2):
        request = asked(client, how, number)
        reply = sent_by(client, request)
        released = noisy[-1].arrays
        found, left = decoded(request, reply), client.memory.load(f"{RESIDUAL}ce", number)
        for name, value in left.items():  # computed from what was released alone
            np.testing.assert_allclose(found[name] + value, released[name] + owed.get(name, 0), atol=1e-6, rtol=0)
        owed = left
        assert (reply.trained_correct, reply.decoded_correct, reply.validation_total) == (None, None, 0)
    assert len(noisy) == 2


def test_only_trained_models_are_compressed() -> None:
    """Replies of test-time rounds, in which each client gets a mixture of its own (FedAMP), leave as they are."""
    client = device(update_format="int8")
    common: dict[str, Any] = {**client.about, "round": 1, "network": "0"}
    adapt = Adapt(cell="tent@fedamp", row=AdapterRow("tent", "tent"), share="all", **common)
    weights = {"head.weight": np.ones((3, 6), np.float32)}
    adapted = Adapted(shared=weights, corruption=0, correct=[], total=[], seconds=0.0)
    rates = RefineRates(variant="all", **common)
    refined = RefinedRates(rates=weights, loss=0.0, correct=0, seconds=0.0)
    assert outgoing(client.inner, adapt, adapted) is adapted
    assert outgoing(client.inner, rates, refined) is refined
