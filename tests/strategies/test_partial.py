"""Sharing a part of the network: which names, what is sent to whom, and what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.models import TwoHead
from fedtta.strategies.partial import PartialFedAvg, shared_names
from tests.client.tiny import network
from tests.flower import LocalGrid, record, reply, request

NAMES = [
    "encoder.conv.weight", "encoder.conv.bias", "encoder.norm.weight", "encoder.norm.bias",
    "encoder.norm.running_mean", "encoder.norm.running_var", "encoder.group.weight", "head.weight", "head.bias",
]  # fmt: skip
NORM = NAMES[2:6]
OPTIONS: dict[str, Any] = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


def names_of(record: ArrayRecord) -> list[str]:
    return list(record)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*"], [], NAMES),
        ([], [], []),
        (["*"], ["head.*"], NAMES[:7]),
        (["*"], ["kind:batchnorm"], [*NAMES[:2], *NAMES[6:]]),
        (["encoder.*"], [], NAMES[:7]),
        (["encoder.*"], ["kind:batchnorm", "*.bias"], [NAMES[0], NAMES[6]]),
        (["head.bias", "kind:batchnorm"], [], [*NORM, "head.bias"]),
        (["head.*"], ["*"], []),
    ],
)
def test_names_by_hand(include: list[str], exclude: list[str], expected: list[str]) -> None:
    assert shared_names(NAMES, include, exclude) == expected
    assert PartialFedAvg(include, exclude).shared_names(NAMES) == expected


@settings(deadline=None, max_examples=50)
@given(st.permutations(NAMES), st.lists(st.sampled_from(NAMES)), st.lists(st.sampled_from(NAMES)))
def test_plain_names_are_a_difference_of_sets_in_the_order_given(order: list, include: list, exclude: list) -> None:
    assert shared_names(order, include, exclude) == [n for n in order if n in include and n not in exclude]


def test_batchnorm_is_what_the_network_says_it_is() -> None:
    model: TwoHead = network(norm=True)
    shared = shared_names(list(model.global_state()), exclude=["kind:batchnorm"])
    assert set(model.global_state()) - set(shared) == {
        f"encoder.norm.{part}" for part in ("weight", "bias", "running_mean", "running_var")
    }
    with pytest.raises(ValueError, match="exclude: 'kind:batchnorm' matches none of the arrays"):
        shared_names(list(network().global_state()), exclude=["kind:batchnorm"])


def test_bad_patterns_are_named() -> None:
    with pytest.raises(ValueError, match=r"include: 'Head.\*' matches none .* encoder.conv.weight.* and 1 more"):
        shared_names(NAMES, ["Head.*"])
    with pytest.raises(ValueError, match=r"include = 'encoder.\*'; allowed is a list"):
        PartialFedAvg("encoder.*")
    with pytest.raises(ValueError, match="exclude: unknown kind 'kind:layernorm'; there is: kind:batchnorm"):
        PartialFedAvg(exclude=["kind:layernorm"])
    grid = LocalGrid({1: lambda message: None})
    with pytest.raises(ValueError, match=r"exclude: 'tail.\*'"):
        PartialFedAvg(exclude=["tail.*"], **OPTIONS).configure_train(1, record(w=np.ones(1)), ConfigRecord({}), grid)


def arrays_of(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=(2, 3)).astype(np.float32) for name in NAMES}


def sent_to(messages: Any) -> dict[int, Message]:
    return {message.metadata.dst_node_id: message for message in messages}


def test_everything_at_first_and_the_shared_part_later() -> None:
    strategy = PartialFedAvg(exclude=["head.*"], **OPTIONS)
    grid = LocalGrid(dict.fromkeys([1, 2, 3], lambda message: None))
    start = record(**arrays_of(0))
    messages = sent_to(strategy.configure_train(1, start, ConfigRecord({"lr": 0.1}), grid))
    assert all(names_of(message.content["arrays"]) == NAMES for message in messages.values())
    assert strategy.sent_bytes == 3 * 9 * 24
    config = messages[2].content["config"]
    assert (config["shared-names"], config["lr"], config["server-round"]) == (NAMES[:7], 0.1, 1)
    # client 2 fails, client 3 never answers: they are sent everything again
    shared = record(**{name: value for name, value in arrays_of(1).items() if name in NAMES[:7]})
    failed = Message(Error(code=2, reason="broken"), reply_to=request(2))
    arrays, _ = strategy.aggregate_train(1, [reply(shared, node=1), failed])
    assert arrays is not None
    again = sent_to(strategy.configure_train(2, arrays, ConfigRecord({}), grid))
    assert names_of(again[1].content["arrays"]) == NAMES[:7]
    assert names_of(again[2].content["arrays"]) == names_of(again[3].content["arrays"]) == NAMES
    assert strategy.sent_bytes == 7 * 24 + 2 * 9 * 24
    for name, value in arrays_of(0).items():
        expected = arrays_of(1)[name] if name in NAMES[:7] else value
        np.testing.assert_array_equal(again[3].content["arrays"][name].numpy(), expected)


def test_nothing_shared() -> None:
    strategy = PartialFedAvg(include=(), **OPTIONS)
    grid = LocalGrid({5: lambda message: None})
    start = record(**arrays_of(0))
    for round in (1, 2):
        (message,) = strategy.configure_train(round, start, ConfigRecord({}), grid)
        config = ConfigRecord.inflate(message.content["config"].deflate())  # as on the wire
        assert config["shared-names"] == []
        assert len(ArrayRecord.inflate(ArrayRecord().deflate(), {})) == 0
        assert names_of(message.content["arrays"]) == (NAMES if round == 1 else [])
        arrays, metrics = strategy.aggregate_train(round, [reply(ArrayRecord(), 4, 5, loss=2.0)])
        assert arrays is not None
        assert names_of(arrays) == NAMES
        assert all(np.array_equal(arrays[name].numpy(), start[name].numpy()) for name in NAMES)
        assert metrics is not None
        assert metrics["loss"] == 2.0


@pytest.mark.parametrize("exclude", [[], ["kind:batchnorm"]])
def test_means_are_flowers_and_the_rest_is_as_it_was_sent(exclude: list[str]) -> None:
    strategy = PartialFedAvg(exclude=exclude, **OPTIONS)
    grid = LocalGrid(dict.fromkeys([1, 2, 3], lambda message: None))
    strategy.configure_train(1, record(**arrays_of(0)), ConfigRecord({}), grid)
    shared = strategy.shared_names(NAMES)
    counts = (3, 1, 8)

    def replies(names: list[str]) -> list[Message]:
        trained = [{name: arrays_of(k)[name] for name in names} for k in (1, 2, 3)]
        return [reply(record(**t), n, k, loss=float(k)) for k, (t, n) in enumerate(zip(trained, counts, strict=True))]

    ours, metrics = strategy.aggregate_train(1, replies(shared))
    flowers, theirs = FedAvg(**OPTIONS).aggregate_train(1, replies(NAMES))
    assert ours is not None
    assert flowers is not None
    assert metrics == theirs
    for name in NAMES:
        value = ours[name].numpy()
        np.testing.assert_array_equal(value, flowers[name].numpy() if name in shared else arrays_of(0)[name])
        assert value.dtype == np.float32
        if name in shared:
            terms = [arrays_of(k)[name].astype(np.float64) * n / 12 for k, n in zip((1, 2, 3), counts, strict=True)]
            np.testing.assert_allclose(value, sum(terms), rtol=1e-5, atol=1e-6)


def test_replies_that_do_not_fit_are_refused_and_learned_nothing_from() -> None:
    strategy = PartialFedAvg(exclude=["head.*"], **OPTIONS)
    grid = LocalGrid({1: lambda message: None})
    with pytest.raises(ValueError, match="configure_train has to come before"):
        strategy.aggregate_train(1, [])
    strategy.configure_train(1, record(**arrays_of(0)), ConfigRecord({}), grid)
    assert strategy.aggregate_train(1, []) == (None, None)
    with pytest.raises(ValueError, match=r"node 1 .*head.bias: \(2, 3\) instead of absent, head.weight"):
        strategy.aggregate_train(1, [reply(record(**arrays_of(1)))])
    few = {name: value for name, value in arrays_of(1).items() if name in NAMES[:7]}
    few[NAMES[0]] = few[NAMES[0]][:1]
    with pytest.raises(ValueError, match=r"encoder.conv.weight: \(1, 3\) instead of \(2, 3\)"):
        strategy.aggregate_train(1, [reply(record(**few))])
    (message,) = strategy.configure_train(2, record(**arrays_of(0)), ConfigRecord({}), grid)
    assert names_of(message.content["arrays"]) == NAMES
