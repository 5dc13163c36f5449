"""The evaluation round: one event a result, and replies that are refused while the run goes on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Evaluated, EvaluationResult, Summarized
from fedtta.messages.requests import Evaluate, Request
from fedtta.models import build
from fedtta.server.evaluation import evaluation_round, statistics_round, statistics_shapes
from fedtta.server.events import Leak
from fedtta.server.methods import Training, plan
from fedtta.settings import Settings
from tests.server.test_nodes import raises
from tests.server.test_rounds import START, Place
from tests.transports import Client

RESULT = EvaluationResult(label="fedavg", shift="original", correct=3, total=4, seconds=0.5)
(CE,) = plan(Settings(methods="fedavg"))


def evaluated(num_examples: int = 4, leaked: int = 0, **changes: object) -> Evaluated:
    return Evaluated(
        num_examples=num_examples, checked=4, leaked=leaked, results=[replace(RESULT, **changes)]  # type: ignore[arg-type]
    )  # fmt: skip


def evaluate(
    *replies: Evaluated | None,
    training: Training = CE,
    trained: Collection[int] = (0, 1, 2, 3),
    unlabelled: Collection[int] = (),
    arrays: Arrays = START,
    **settings: object,
) -> Place:
    place = Place({i: (lambda r: lambda _: r)(one) if one else raises for i, one in enumerate(replies)}, **settings)
    for partition in unlabelled:
        client = place.nodes.identities[partition]
        place.nodes.identities[partition] = replace(client, labelled=False, role="target")
    evaluation_round(place.federation, training, arrays, None, {}, ["original"], trained)
    return place


def test_a_result_is_an_event_with_its_further_metrics_if_there_are_any() -> None:
    place = evaluate(evaluated(), evaluated(metrics={"ece": 0.25, "accuracy": 9.0}), evaluated(correct=0, total=0))
    plain, more, none = place.of("evaluation")
    told = {"training": "cross_entropy", "method": "fedavg", "shift": "original", "correct": 3, "total": 4}
    told |= {"accuracy": 0.75, "weight_histogram": None, "weight_mean": None, "seconds": 0.5}
    assert plain == {**plain, **told, "partition": 0}
    assert set(plain) == {*told, "partition", "event", "at"}
    assert more == {**more, **told, "partition": 1, "ece": 0.25}
    assert none["accuracy"] is None
    (check,) = place.of("leak_check")
    assert (check["checked"], check["leaked"]) == (12, 0)


def test_a_robust_mean_of_noisy_distributions_may_have_any_sum() -> None:
    """Noise of 0.5 on each share, which `statistics=2/0.25` adds, is more than all shares together."""

    settings = Settings(aggregation="fedmedian", differential_privacy="statistics=2/0.25", methods="em", clients=3)
    (training,) = plan(settings)
    model = build("cnn", num_classes=2, image_size=16, in_channels=1, seed=0)
    zeros = {name: np.zeros(shape) for name, (shape, _) in statistics_shapes(training.needs, model).items()}

    def client(prior: list[float]) -> Client:
        statistics = {**zeros, "label_prior": np.array(prior)}
        counts = {"validation_total": 0, "validation_correct": 0, "seconds": 0.1}
        return lambda _: Summarized(statistics=statistics, num_examples=5, **counts)

    priors = ([-0.5, 0.25], [-0.75, 0.5], [1.0, -1.0])
    place = Place({i: client(prior) for i, prior in enumerate(priors)})
    place.federation = replace(place.federation, settings=settings)
    means = statistics_round(place.federation, training, START, model, range(3))
    # the medians are -0.5 and 0.25; a share is not negative
    assert means["label_prior"].tolist() == [0.0, 1.0]


def test_estimates_are_a_field_of_the_event() -> None:
    place = evaluate(evaluated(estimates={"doc": [0.5, 0.25, 1.0]}), evaluated(estimates={"guess": [0.5, 0.5, 0.5]}))
    (one,) = place.of("evaluation")
    assert one["estimates"] == {"doc": [0.5, 0.25, 1.0]}
    ((_, partition, reason),) = place.incidents()
    assert partition == 1
    assert "unknown estimates ['guess']" in reason


def test_rows_whose_adapters_diverged_are_noted() -> None:
    diverged = evaluated(correct=1, metrics={"not_finite": 3.0})
    place = evaluate(evaluated(), diverged, diverged)
    (note,) = place.of("note")
    words = "6 predictions of 2 of 3 clients are not finite and count as wrong"
    assert note["text"] == f"cross_entropy: fedavg on original: {words}"
    assert [event.get("not_finite") for event in place.of("evaluation")] == [None, 3, 3]


def test_a_bad_reply_is_refused_by_node_and_reason_and_the_others_count() -> None:
    beyond = evaluated(metrics={"not_finite": 4.0})
    place = evaluate(evaluated(), evaluated(correct=5), evaluated(shift="fog"), None, beyond)
    assert [(kind, partition) for kind, partition, _ in place.incidents()] == [
        ("refused", 1), ("refused", 2), ("failed", 3), ("refused", 4),
    ]  # fmt: skip
    assert "and 1 are wrong" in place.incidents()[3][2]
    assert place.incidents()[0][2] == "fedavg, original: correct = 5, more than total = 4"
    assert [one["partition"] for one in place.of("evaluation")] == [0]
    (note,) = place.of("note")
    assert note["text"] == "cross_entropy: accuracies of 1 of 5 clients only; missing: 1, 2, 3, 4"


def test_the_request_has_the_rows_and_the_round_after_the_last() -> None:
    place = evaluate(evaluated(), rounds=7)
    (request,) = place.transport.requests(Evaluate)
    assert (request.round, request.shifts, [row.label for row in request.rows]) == (8, ["original"], ["fedavg"])
    assert isinstance(request, Request)
    assert set(request.arrays) == set(START)


def test_a_leak_ends_the_run_unless_it_was_asked_for() -> None:
    with pytest.raises(Leak, match="1 of 4 test samples had been trained on"):
        evaluate(evaluated(leaked=1))
    (note,) = evaluate(evaluated(leaked=1), split="published").of("note")
    assert "1 of 4 test samples (25.0 %) had been trained on" in note["text"]


def test_a_client_without_labels_gets_no_model_of_which_layers_stay_on_the_others() -> None:
    (training,) = plan(Settings(methods="fedbn", model_options="norm=batch"))
    own = replace(evaluated(), results=[replace(RESULT, label="fedbn")])
    arrays = {**START, **{f"norm.{name}": np.zeros(2) for name in ("weight", "bias", "running_mean", "running_var")}}
    place = evaluate(own, own, own, training=training, unlabelled=[1, 2], arrays=arrays)
    assert len(place.transport.requests(Evaluate)) == 1
    assert [one["partition"] for one in place.of("evaluation")] == [0]
    (note,) = place.of("note")
    assert note["text"] == "fedbn: without labels, 1, 2 cannot have its model: some layers stay on clients that train"
    alone = evaluate(own, training=training, unlabelled=[0], arrays=arrays)  # no reason to end a run that has trained
    assert (len(alone.of("note")), alone.transport.requests(Evaluate)) == (1, [])


def test_a_client_without_labels_gets_the_model_and_has_no_results() -> None:
    (training,) = plan(Settings(methods="fedavg,fedavg_ft"))
    own = replace(evaluated(), results=[RESULT, replace(RESULT, label="fedavg_ft")])
    place = evaluate(own, Evaluated(checked=0, leaked=0, results=[]), own, training=training, unlabelled=[1, 2])
    first, second, _ = place.transport.requests(Evaluate)
    assert [row.label for row in first.rows] == ["fedavg", "fedavg_ft"]
    assert ([row.label for row in second.rows], second.shifts) == (["fedavg"], [])  # the other needs its labels
    assert set(second.arrays) == set(START)
    assert {one["partition"] for one in place.of("evaluation")} == {0}
    ((kind, partition, reason),) = place.incidents()
    assert (kind, partition) == ("refused", 2)
    assert "unknown results" in reason


def test_a_client_that_never_trained_is_sent_the_part_that_the_others_keep() -> None:
    (training,) = plan(Settings(methods="fedper"))
    network = {"encoder.w": np.zeros(2, np.float32), "head.weight": np.ones(2, np.float32)}
    place = Place({0: raises, 1: lambda _: replace(evaluated(), results=[replace(RESULT, label="fedper")])})
    evaluation_round(place.federation, training, network, None, {}, ["original"], {0})
    assert [list(request.arrays) for request in place.transport.requests(Evaluate)] == [["encoder.w"], list(network)]


def test_what_an_agent_did_with_the_model_is_an_event() -> None:
    place = evaluate(replace(evaluated(), served="refused: 3 classes are never predicted"), evaluated())
    (event,) = place.of("served")
    told = {"training": "cross_entropy", "partition": 0, "served": "refused: 3 classes are never predicted"}
    assert event == {**event, **told}
