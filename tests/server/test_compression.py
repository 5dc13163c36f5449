"""Rounds of compressed updates: every aggregation, hostile updates, and what the event of a round says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedtta.messages.arrays import Arrays, array_bytes
from fedtta.messages.replies import Reply, Trained
from fedtta.messages.requests import Request, Train
from fedtta.messages.updates import FORMATS, Format, encode
from fedtta.server.trainings import TrainingStage
from fedtta.strategies import AGGREGATIONS
from tests.server import test_rounds
from tests.server.test_rounds import COUNTS, Place, once
from tests.transports import Client

START: Arrays = {
    "encoder.weight": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4),
    "head.weight": np.zeros((3, 2), np.float32),
    "head.bias": np.zeros(3, np.float32),
    "norm.running_var": np.ones(2, np.float32),
}
MATRICES = ("encoder.weight", "head.weight")
PROMISED = "global_loss"  # q-FFL asks for it


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_rounds, "START", START)


def trained(request: Train, seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    return {
        name: (one + np.abs(draw.normal(0, 0.01, one.shape))).astype(np.float32)
        for name, one in request.expected.items()
    }


def client(seed: int, change: Callable[[Arrays], Arrays] = dict, scale: float | None = None, **fields: Any) -> Client:
    """A client that sends what it has trained in the format that it is asked for."""

    def answer(request: Request) -> Reply:
        assert isinstance(request, Train)
        given: dict[str, Any] = {**COUNTS, "num_examples": 2 + seed % 3, PROMISED: 1.0 + seed, **fields}
        if request.update_format == "float32":
            return Trained(arrays=trained(request, seed), **given)
        update = encode(request.update_format, request.expected, trained(request, seed), {})
        scales = update.scales if scale is None else dict.fromkeys(update.scales, scale)
        return Trained(arrays=change(update.arrays), scales=scales or None, **given)

    return answer


def told(client: Client, how: Format) -> Client:
    """A client that sends in float32 what the server decodes of another one."""

    def answer(request: Request) -> Reply:
        assert isinstance(request, Train)
        asked = Train(**{**request.__dict__, "update_format": how})
        reply = asked.decoded(client(asked))  # type: ignore[arg-type]
        assert isinstance(reply, Trained)
        return reply

    return answer


@pytest.mark.parametrize("how", FORMATS[1:])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_sees_the_decoded_models(aggregation: str, how: Format) -> None:
    sending = {i: client(i) for i in range(7)}
    settings: dict[str, Any] = {"aggregation": aggregation, "rounds": 1}
    compressed = Place(sending, update_format=how, **settings).round()
    plain = Place({i: told(one, how) for i, one in sending.items()}, **settings).round()
    assert [(n, one.dtype, one.tobytes()) for n, one in compressed.items()] == [
        (n, one.dtype, one.tobytes()) for n, one in plain.items()
    ]
    assert compressed["encoder.weight"].tobytes() != START["encoder.weight"].tobytes()


def test_a_part_of_the_network_travels_as_an_update_of_that_part() -> None:
    stage = TrainingStage(local=("head.*",))
    place = Place({i: client(i) for i in range(3)}, update_format="int8")
    new = place.round(stage=stage)
    assert new["head.weight"].tobytes() == START["head.weight"].tobytes()
    (event,) = place.of("round")
    assert event["bytes_up"] == 3 * (8 + 2 * 4)  # one byte for each weight of the encoder, and running variances
    assert event["bytes_up_float32"] == 3 * (8 + 2) * 4


@pytest.mark.parametrize(("how", "size"), [("changed", 4), ("float16", 2), ("int8", 1)])
def test_a_round_says_what_updates_saved_and_cost(how: Format, size: int) -> None:
    counts = {"trained_correct": 3, "decoded_correct": 2}
    clients = {0: client(0, **counts), 1: client(1, trained_correct=4, decoded_correct=4), 2: client(2)}
    place = Place(clients, update_format=how)
    place.round()
    (event,) = place.of("round")
    assert event["bytes_up"] == 3 * ((8 + 6) * size + (3 + 2) * 4)
    assert event["bytes_up_float32"] == 3 * array_bytes(START) == event["bytes_down"]
    assert event["trained_accuracy"] == (3 / 4 + 4 / 4) / 2  # of the two that say so
    assert event["decoded_accuracy"] == (2 / 4 + 4 / 4) / 2


def test_a_round_in_float32_says_what_it_said_before() -> None:
    place = Place({0: client(0), 1: client(1)})
    place.round()
    (event,) = place.of("round")
    assert not {"bytes_up_float32", "trained_accuracy", "decoded_accuracy"} & set(event)
    assert event["bytes_up"] == 2 * array_bytes(START)


def only(name: str, value: np.ndarray) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, name: value}


#: What a hostile client sends, and what the reason says.
HOSTILE: dict[str, tuple[Client, str]] = {
    "a scale of 1e38": (client(9, scale=1e38), "scales."),
    "a scale that is no number": (client(9, scale=float("nan")), "scales."),
    "a scale too large for its neighbours": (client(9, scale=1e29), "numbers up to"),
    "numbers that are none": (client(9, only("head.bias", np.full(3, np.nan, np.float32))), "head.bias: values that"),
    "another shape": (client(9, only("head.weight", np.ones((2, 3), np.int8))), "expected int8[3, 2]"),
    "an unknown array": (client(9, only("other", np.ones((2, 3), np.int8))), "unknown arrays ['other']"),
    "a negative variance": (
        client(9, only("norm.running_var", np.full(2, -1, np.float32))), "norm.running_var: values from -1.0",
    ),
    "more right than there are": (client(9, trained_correct=5, decoded_correct=4), "trained-correct = 5, more than"),
    "more right than there are, decoded": (
        client(9, trained_correct=4, decoded_correct=5), "decoded-correct = 5, more than",
    ),
    "one count of two": (client(9, trained_correct=4), "allowed are both, or neither"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_update_is_refused_by_node_and_reason_and_leaves_no_trace(name: str) -> None:
    hostile, reason = HOSTILE[name]
    honest = {i: client(i) for i in range(4)}
    place = Place({**honest, 4: hostile}, update_format="int8")
    new = place.round()
    ((kind, partition, said),) = place.incidents()
    assert (kind, partition) == ("refused", 4)
    assert reason in said
    without = Place(honest, update_format="int8").round()
    assert {n: one.tobytes() for n, one in new.items()} == {n: one.tobytes() for n, one in without.items()}
    (event,) = place.of("round")
    assert event["replied"] == [0, 1, 2, 3]
    assert event["bytes_up"] == 4 * (14 + 5 * 4)


def test_a_client_that_sends_nothing_has_trained_nothing() -> None:
    """It could as well send zeros: it is one client with the model that was sent."""
    place = Place({0: client(0), 1: client(1), 2: client(2, lambda arrays: {}, 1.0)}, update_format="changed")
    assert place.round()["head.bias"].any()
    assert not place.incidents()


def test_a_round_that_is_repeated_counts_the_last_attempt() -> None:
    fails = client(1, only("head.bias", np.full(3, np.inf, np.float32)))
    place = Place({0: client(0), 1: once(fails, client(1))}, update_format="int8", min_replies=2)
    place.round()
    assert [event["bytes_up"] for event in place.of("round")] == [2 * (14 + 5 * 4)]
