"""What an agent tells of itself: beside other work, under the owner's policy, and exactly what happened."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from fedtta.client.agent import audit, local
from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.core import Agent
from fedtta.client.agent.predictions import PredictQueue
from fedtta.client.agent.server import serve
from fedtta.client.policy import Policy, PolicyError
from fedtta.client.relay import relay
from fedtta.messages.replies import WEIGHT_WINDOW, Identity, Reply, Telemetry
from fedtta.messages.requests import Identify, Observe
from fedtta.tta.estimates import with_new_shares
from tests.client.agent.fake import TIMEOUT, channel, predictor, refused, request, running
from tests.client.agent.fake import folder as short_folder
from tests.client.agent.world import EXACT, common, config, labels, sample_images, served

OBSERVE = Observe(settings="", run="watch1")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Make agents, each with a model that was checked on 60 labelled samples, unless `model` is False."""
    made: list[Agent] = []

    def make(model: bool = True, known: bool = True, **changes: Any) -> Agent:
        made.append(Agent(config(tmp_path / str(len(made)), **changes)))
        if model:
            samples = Samples(sample_images(0, 60), labels(0, 60) if known else None)
            assert made[-1]._models.offer(served(made[-1].config.adapter), samples).startswith("promoted")
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def told(agent: Agent) -> Telemetry:
    """The agent's answer as it is after the wire."""
    reply = agent.perform(OBSERVE)
    return Telemetry.from_record(reply.to_record())


def lines(agent: Agent) -> list[dict[str, Any]]:
    return list(audit.lines(agent.config.state_folder))


# Beside other work


def test_it_waits_for_no_training_and_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def slow(request: Any, node: Any, admit: object) -> Reply:
        begun.set()
        assert end.wait(TIMEOUT)
        raise ValueError("cut off")

    monkeypatch.setattr(local, "perform", slow)
    with short_folder() as path, ThreadPoolExecutor(2) as pool:
        agent = Agent(config(path))
        sockets = serve(agent, agent.config)
        node = {"agent": sockets.relay}
        try:
            working = [pool.submit(relay, Identify(**common()), node, TIMEOUT) for _ in range(2)]
            assert begun.wait(TIMEOUT)  # one works, one waits
            with agent._models.predicting:  # as a prediction holds it
                reply: Any = relay(OBSERVE, node, TIMEOUT)
            assert (reply.name, reply.phase) == ("0", "identify")
            assert not [one for one in working if one.done()]
        finally:
            end.set()
        for one in working:
            with pytest.raises(ValueError, match="cut off"):
                one.result(TIMEOUT)
        assert sockets.stop(TIMEOUT) == 0
        assert [line["phase"] for line in lines(agent)] == ["observe", "identify", "identify"]
        agent.close()


def test_it_needs_no_settings_no_data_and_no_model(agents: Any, tmp_path: Path) -> None:
    agent = agents(model=False, data_dir=str(tmp_path / "nowhere"), policy=dataclasses.replace(EXACT, least_clients=99))
    reply = told(agent)
    assert (reply.model, reply.samples, reply.weight, reply.drift) == ("", 0, None, None)
    assert reply.memory > 1 << 20
    assert reply.disk_used > 0
    assert not (agent.config.state_folder / "private" / "watch1").exists()


# The owner's policy


def test_a_device_that_leaves_observe_out_tells_nothing(agents: Any) -> None:
    agent = agents(model=False, policy=Policy(phases="identify,train"))
    with pytest.raises(PolicyError, match=r"^policy phases: observe; allowed is identify,train$"):
        agent.perform(OBSERVE)
    (line,) = lines(agent)
    assert (line["phase"], line["result"], "sent" in line) == ("observe", "policy phases", False)
    assert "observe" in Policy().phases.split(",")


def test_names_rates_and_sizes_hold_for_it(agents: Any) -> None:
    agent = agents(model=False, policy=Policy(messages_per_hour=2))
    with pytest.raises(PolicyError, match=r"^policy names: run '../x'"):
        agent.perform(dataclasses.replace(OBSERVE, run="../x"))
    with pytest.raises(PolicyError, match=r"^policy most-message-mb: settings of"):
        agent.perform(dataclasses.replace(OBSERVE, settings="x" * (2 << 20)))
    for _ in range(2):
        agent.perform(OBSERVE)
    for other in (OBSERVE, Identify(**common())):  # it counts among all messages
        with pytest.raises(PolicyError, match=r"^policy messages-per-hour: 2 in the last hour"):
            agent.perform(other)


def test_what_left_is_recorded_and_displaces_nothing(agents: Any, tmp_path: Path) -> None:
    agent = agents(model=False)
    reply = agent.perform(OBSERVE)
    (line,) = lines(agent)
    assert (line["run"], line["result"]) == ("watch1", "ok")
    assert set(line["sent"][0]["name"].split(",")) == {name.replace("_", "-") for name in reply.to_record().values}
    log = audit.Audit(tmp_path, limit=1000)
    log.write("train", "ok", run="kept")
    log.write("train", "policy phases", run="refused")
    for number in range(100):
        log.write("observe", "ok" if number % 2 else "policy phases", run=f"{number:03}", reason="x" * 80)
    assert {line["run"] for line in audit.lines(tmp_path)} >= {"kept", "refused", "099"}
    assert sorted(path.name for path in tmp_path.glob("audit*")) == [
        "audit-observed.jsonl", "audit-observed.jsonl.1", "audit-refused.jsonl", "audit.jsonl",
    ]  # fmt: skip
    assert log.count(audit.DAY, "observe") == 50


def test_messages_may_arrive_while_others_are_counted(tmp_path: Path) -> None:
    log, end, errors = audit.Audit(tmp_path, limit=1 << 20), threading.Event(), []

    def count() -> None:
        while not end.is_set():
            try:
                log.count(audit.DAY, "observe")
            except RuntimeError as error:
                errors.append(error)
                return

    log._done.extend([(log._clock(), "observe")] * 20_000)
    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(30):
        log.write("observe", "ok")
    end.set()
    thread.join(TIMEOUT)
    assert not errors


# What happened, and no more


@pytest.mark.parametrize("adapter", ["fedthe", "t3a", "none"])
def test_joined_requests_count_as_single_ones(agents: Any, adapter: str) -> None:
    sizes = [1, 7, 40, 3, 60, 100, 2, 30]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    joined, single = agents(adapter=adapter), agents(adapter=adapter)
    queue = PredictQueue(joined, 100, 90)
    with joined._models.predicting:  # until all wait
        futures = [queue.submit(sample_images(*one)) for one in zip(starts, sizes, strict=True)]
    weights: list[float] = []
    for future, start, size in zip(futures, starts, sizes, strict=True):
        reply = single.predict(sample_images(start, size))
        np.testing.assert_allclose(future.result(TIMEOUT).probabilities, reply.probabilities, atol=1e-6)
        weights += [] if reply.weights is None else [float(one) for one in reply.weights]
    queue.close()
    one, other = told(joined), told(single)
    assert one.predictions == other.predictions == sum(sizes) == one.samples
    blocks = [weights[begin : begin + WEIGHT_WINDOW] for begin in range(0, len(weights), WEIGHT_WINDOW)]
    expected = [sum(block) / len(block) for block in blocks if len(block) == WEIGHT_WINDOW]
    assert other.weights == pytest.approx(expected)
    np.testing.assert_allclose(one.weights, other.weights, atol=1e-5)
    assert (one.weight is None) == (adapter != "fedthe")
    if weights:
        assert other.weight == pytest.approx(sum(weights[-WEIGHT_WINDOW:]) / WEIGHT_WINDOW)


@pytest.mark.parametrize(("adapter", "guard"), [("fedthe", True), ("none", True), ("fedthe", False)])
def test_the_estimate_is_that_of_the_unadapted_network(agents: Any, adapter: str, guard: bool) -> None:
    agent, network = agents(adapter=adapter, guard=guard), served(adapter).network
    agent.predict(sample_images(0, WEIGHT_WINDOW - 1))
    assert told(agent).estimated_accuracy is None
    agent.predict(sample_images(0, 50) // 2)  # darker
    if not guard:
        assert told(agent).estimated_accuracy is None  # the network alone predicts nothing
        return

    def confidence(images: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.no_grad():
            rows = torch.softmax(network(torch.from_numpy(images.astype(np.float32) / np.float32(255))), 1).double()
        return sum(max(row) for row in rows.tolist()) / len(rows), rows.argmax(1).numpy()

    before, predicted = confidence(sample_images(0, 60))
    stream = np.concatenate([sample_images(0, WEIGHT_WINDOW - 1), sample_images(0, 50) // 2])
    now, _ = confidence(stream[-WEIGHT_WINDOW:])
    accuracy = sum(int(one == other) for one, other in zip(predicted, labels(0, 60), strict=True)) / 60
    assert told(agent).estimated_accuracy == pytest.approx(min(1, max(0, accuracy - (before - now))), abs=1e-5)
    assert now < before


@pytest.mark.parametrize("guard", [True, False])
def test_the_status_tells_the_estimated_accuracy_of_what_was_predicted(agents: Any, guard: bool) -> None:
    """By a new adapter on the check's samples in batches of 32, then the last 100 predictions."""
    agent, fresh = agents(guard=guard), served("fedthe").build()
    assert agent.status().estimated_accuracy == ()
    rows = np.concatenate([agent.predict(sample_images(begin, 50)).probabilities for begin in (0, 50, 100)])
    if not guard:  # the network alone predicts nothing
        assert agent.status().estimated_accuracy == ()
        return
    network = served("fedthe").network

    def judged(images: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            plain = torch.softmax(network(torch.from_numpy(images.astype(np.float32) / np.float32(255))), 1)
        posterior = with_new_shares(plain.numpy())
        return np.array([row[one] for row, one in zip(posterior, predicted.tolist(), strict=True)])

    shown = torch.from_numpy(sample_images(0, 60).astype(np.float32) / np.float32(255))
    known = torch.cat([fresh.predict(part) for part in shown.split(32)]).numpy().argmax(1)
    offset = (known == labels(0, 60)).mean() - judged(sample_images(0, 60), known).mean()
    expected = judged(sample_images(50, 100), rows[-WEIGHT_WINDOW:].argmax(1)).mean() + offset
    accuracy, low, high = agent.status().estimated_accuracy
    assert accuracy == pytest.approx(expected, abs=0.5 / 60 + 1e-4)
    assert low < accuracy < high or high == 1


def test_without_labels_there_is_no_estimate(agents: Any) -> None:
    agent = agents(known=False)
    agent.predict(sample_images(0, 150))
    assert told(agent).estimated_accuracy is None
    assert agent.status().estimated_accuracy == ()
    assert 0 <= told(agent).drift <= 1


def test_series_start_again_with_a_new_model_and_counts_go_on(agents: Any) -> None:
    agent = agents()
    agent.predict(sample_images(0, 280))
    agent._live.guard.events["noise"] = 3
    first = told(agent)
    assert (len(first.weights), first.drift is None, first.predictions) == (2, False, 280)
    assert first.guard_events["noise"] == 3
    better = dataclasses.replace(served("fedthe"), origin="run1/cross_entropy/3")
    assert agent._models.offer(better, Samples(sample_images(0, 60), labels(0, 60))).startswith("promoted")
    second = told(agent)
    assert second.model != first.model
    assert (second.weights, second.weight, second.drift, second.estimated_accuracy) == ([], None, None, None)
    assert (second.predictions, second.guard_events, second.samples) == (280, first.guard_events, 0)
    agent.predict(sample_images(0, 20))
    third = told(agent)
    assert (third.predictions, third.samples, third.weight is None) == (300, 20, False)
    agent.restore_model()
    assert told(agent).guard_events == first.guard_events


def test_a_request_that_fails_half_way_leaves_no_trace(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents(batch_limit=16)
    agent.predict(sample_images(0, 120))
    before, real, calls = told(agent), agent._live._unadapted, []

    def fails(x: Any) -> Any:
        calls.append(len(x))
        if len(calls) == 3:
            raise ValueError("the network's output is not finite")
        return real(x)

    monkeypatch.setattr(agent._live, "_unadapted", fails)
    with pytest.raises(ValueError, match="not finite"):
        agent.predict(sample_images(120, 40))
    after = told(agent)
    changing = {"uptime": 0.0, "disk_used": 0, "disk_free": 0, "memory": 0}
    assert dataclasses.replace(after, **changing) == dataclasses.replace(before, **changing)


def test_every_request_is_answered_or_refused_once() -> None:
    """Single requests and those of streams; those that wait too long, too."""
    with running(deadline=0.5) as (fake, sockets), channel(sockets.listen) as line:
        stub = predictor(line)
        for _ in range(3):
            stub.Predict(request(), timeout=TIMEOUT)
        for bad in (np.nan, np.inf):
            refused(lambda bad=bad: stub.Predict(request(bad), timeout=TIMEOUT), grpc.StatusCode.INVALID_ARGUMENT)
        wanted = [request(), request(np.nan), request(), request(shape=(1, 3, 2, 2)), request()]
        errors = [bool(reply.error) for reply in stub.PredictStream(iter(wanted), timeout=TIMEOUT)]
        assert errors == [False, True, False, True, False]
        found = fake.telemetry()
        assert (sum(found.latency), found.refusals) == (6, 4)
        assert 0 < found.latency_sum < 6 * TIMEOUT
        fake.gate.clear()
        refused(lambda: stub.Predict(request(), timeout=TIMEOUT), grpc.StatusCode.DEADLINE_EXCEEDED)
        fake.gate.set()  # it is predicted, but its caller has been told otherwise
        stub.Predict(request(), timeout=TIMEOUT)
        found = fake.telemetry()
        assert (sum(found.latency), found.refusals) == (7, 5)


def test_what_a_run_found_in_the_data_is_told(agents: Any) -> None:
    agent = agents(model=False)
    about: dict[str, Any] = {"classes": ["a"], "channels": 3, "mean": [0.5], "std": [0.5], "sizes": [1, 2, 3]}
    agent._scans.take(
        Identity(name="0", shifts=[], note="", role="both", own_data=True, samples=61, skipped=2, **about)
    )
    assert (told(agent).data_samples, told(agent).data_skipped) == (61, 2)
