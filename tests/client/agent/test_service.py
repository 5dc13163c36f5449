"""The agent's answers with a fake agent behind them: what is refused and how, in which order, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedtta.client.agent import service
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from tests.client.agent.fake import (
    CLASSES,
    TIMEOUT,
    TRAIN,
    FakeAgent,
    channel,
    first,
    predictor,
    refused,
    request,
    running,
    until,
)


@pytest.fixture
def agent() -> Iterator[tuple[FakeAgent, agent_pb2_grpc.PredictorStub]]:
    with running() as (fake, sockets), channel(sockets.listen) as line:
        yield fake, predictor(line)


def test_slow_scans_keep_nobody_from_asking_for_the_status(agent: Any) -> None:
    """They would take all of the loop's threads, of which there are few."""
    fake, stub = agent
    gate, scan = threading.Event(), fake.rescan
    begun: list[int] = []

    def slow() -> Any:
        begun.append(1)
        assert gate.wait(TIMEOUT)
        return scan()

    fake.rescan = slow
    scans = [stub.Rescan.future(pb.RescanRequest(), timeout=TIMEOUT) for _ in range(40)]
    until(lambda: bool(begun))
    try:
        for one in scans[1:]:
            one.cancel()
        assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT / 4).model_version == "run/ce/3/abcd"
    finally:
        gate.set()
    assert scans[0].result().samples == 61


def test_a_prediction_says_all_that_the_agent_says(agent: Any) -> None:
    _, stub = agent
    stub.Predict(request(0.125, shape=(2, 1, 2, 2)), timeout=TIMEOUT)
    reply = stub.Predict(request(0.25, "mine", (3, 1, 2, 2)), timeout=TIMEOUT)
    assert (reply.id, reply.samples, reply.classes, reply.position) == ("mine", 3, CLASSES, 2)
    assert (reply.model_version, reply.adapted, reply.error) == ("run/ce/3/abcd", True, "")
    probabilities = np.frombuffer(reply.probabilities, "<f4").reshape(3, CLASSES)
    assert probabilities.tolist() == [[0.25, 0.75, 0.0]] * 3
    assert np.frombuffer(reply.weights, "<f4").tolist() == [0.25] * 3


def test_status_snapshot_rollback_reset(agent: Any) -> None:
    _, stub = agent
    status = stub.Status(pb.StatusRequest(), timeout=TIMEOUT)
    assert status == pb.StatusReply(
        model_version="run/ce/3/abcd", adapter="fedthe", classes=["a", "b", "c"], samples=0, unsaved_samples=2,
        waiting=0, holding=True, guard_events={"one-class": 4}, snapshots=["1", "2"], notes=["n"], uptime_seconds=1.5,
        training="train", shape=[1, 2, 2], candidate="shadow run/ce/4/bbbbbbbb",
        refused="run/ce/2/cccccccc: not finite", data_samples=61, data_skipped=1, data_notes=["1 damaged"],
        estimated_accuracy=[0.75, 0.5, 1.0], choice="btfl", choice_reason="since sample 7 (the samples after drift)",
    )  # fmt: skip
    assert stub.Rollback(pb.RollbackRequest(), timeout=TIMEOUT).snapshot == "2"
    assert stub.Rollback(pb.RollbackRequest(snapshot="1"), timeout=TIMEOUT).snapshot == "1"
    text = refused(
        lambda: stub.Rollback(pb.RollbackRequest(snapshot="9"), timeout=TIMEOUT), grpc.StatusCode.INVALID_ARGUMENT
    )
    assert text == "no snapshot '9'; there are: 1, 2"
    assert stub.Reset(pb.ResetRequest(), timeout=TIMEOUT) == pb.SnapshotReply(
        snapshot="3", model_version="run/ce/3/abcd", samples=0
    )
    text = refused(lambda: stub.Snapshot(pb.SnapshotRequest(), timeout=TIMEOUT), grpc.StatusCode.INTERNAL)
    assert "No space left on device" in text


def test_models_and_what_becomes_of_them(agent: Any) -> None:
    fake, stub = agent
    old, new = stub.Models(pb.ModelsRequest(), timeout=TIMEOUT).models
    assert old == pb.Model(
        version="run/ce/3/aaaaaaaa", state="kept", origin="run/ce/3", time=60.0, reason="rolled back",
        check={"accuracy": 0.5, "adapted_offset": 0.0}, snapshots=["1", "2"],
    )  # fmt: skip
    assert (new.version, new.state) == ("run/ce/4/bbbbbbbb", "candidate")
    for call, reply in (
        (stub.Approve, pb.ModelReply(version="run/ce/4/bbbbbbbb", state="served", samples=7)),
        (stub.Reject, pb.ModelReply(version="run/ce/4/bbbbbbbb", state="refused")),
        (stub.RestoreModel, pb.ModelReply(version="run/ce/3/aaaaaaaa", state="served", samples=9)),
    ):
        assert call(pb.ModelRequest(), timeout=TIMEOUT) == reply
    assert stub.RestoreModel(pb.ModelRequest(version="v"), timeout=TIMEOUT).version == "v"
    scanned = stub.Rescan(pb.RescanRequest(), timeout=TIMEOUT)
    assert scanned == pb.RescanReply(samples=61, used=60, skipped=1, notes=["'bad.png': damaged"])
    text = refused(
        lambda: stub.Approve(pb.ModelRequest(version="x"), timeout=TIMEOUT), grpc.StatusCode.INVALID_ARGUMENT
    )
    assert text == "no model x waits to be served"
    assert fake.log.events == [("request refused", {"code": "INVALID_ARGUMENT", "reason": text})]


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (request(np.nan).images, "images hold NaN"),
        (request(shape=(1, 3, 2, 2)).images, "shape [1, 3, 2, 2]: allowed are [B, 1, 2, 2]"),
        (pb.Images(), "images of kind 0"),
        (
            pb.Images(kind=pb.Images.UINT8, shape=[1, 2, 2], values=bytes(4)),
            "shape [1, 2, 2]: allowed are [B, C, H, W]",
        ),
        (pb.Images(kind=pb.Images.UINT8, shape=[0, 1, 2, 2]), "shape [0, 1, 2, 2]"),
        (pb.Images(kind=pb.Images.UINT8, shape=[1, 1, 2, 2], values=bytes(3)), "3 bytes, but"),
        (pb.Images(kind=pb.Images.FLOAT32, shape=[1 << 40, 1, 1 << 20, 1 << 20]), "0 bytes, but"),
    ],
)
def test_bad_images_are_refused_by_name_and_change_nothing(agent: Any, images: pb.Images, told: str) -> None:
    fake, stub = agent
    asked = pb.PredictRequest(images=images)
    assert told in refused(lambda: stub.Predict(asked, timeout=TIMEOUT), grpc.StatusCode.INVALID_ARGUMENT)
    assert fake.seen == []
    stub.Predict(request(), timeout=TIMEOUT)


def test_without_a_model_it_is_the_state_that_is_wrong(agent: Any) -> None:
    fake, stub = agent
    fake.model = False
    text = refused(lambda: stub.Predict(request(), timeout=TIMEOUT), grpc.StatusCode.FAILED_PRECONDITION)
    assert text == "no model has come yet"


def test_too_many_requests_are_told_that_it_is_busy() -> None:
    with running(queue_limit=2) as (fake, sockets), channel(sockets.listen) as line:
        stub = predictor(line)
        fake.gate.clear()
        accepted = [stub.Predict.future(request(0.25), timeout=TIMEOUT)]
        assert fake.begun.acquire(timeout=TIMEOUT)
        for number in (1, 2):
            accepted.append(stub.Predict.future(request(0.25), timeout=TIMEOUT))
            until(lambda number=number: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == number)
        text = refused(lambda: stub.Predict(request(1.0), timeout=TIMEOUT), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert text == "busy: 2 requests wait"
        fake.gate.set()
        assert [first(call.result()) for call in accepted] == [0.25] * 3
        assert first(stub.Predict(request(1.0), timeout=TIMEOUT)) == 1.0  # there is room again


def test_streams_leave_room_for_single_requests() -> None:
    with running(queue_limit=4) as (fake, sockets), channel(sockets.listen) as line:
        stub = predictor(line)
        fake.gate.clear()
        streams = [stub.PredictStream(iter([request(0.25)] * 10), timeout=TIMEOUT) for _ in range(3)]
        assert fake.begun.acquire(timeout=TIMEOUT)
        until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 3)
        single = stub.Predict.future(request(0.5), timeout=TIMEOUT)
        until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 4)
        fake.gate.set()
        assert first(single.result()) == 0.5
        assert [[first(reply) for reply in stream] for stream in streams] == [[0.25] * 10] * 3


def test_a_request_whose_deadline_passes_while_it_waits_is_not_adapted_to(agent: Any) -> None:
    fake, stub = agent
    fake.gate.clear()
    running_one = stub.Predict.future(request(0.25), timeout=TIMEOUT)
    assert fake.begun.acquire(timeout=TIMEOUT)
    refused(lambda: stub.Predict(request(0.5), timeout=0.2), grpc.StatusCode.DEADLINE_EXCEEDED)
    withdrawn = stub.Predict.future(request(0.75), timeout=TIMEOUT)
    until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 1)
    withdrawn.cancel()
    until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 0)
    fake.gate.set()
    assert first(running_one.result()) == 0.25
    assert first(stub.Predict(request(1.0), timeout=TIMEOUT)) == 1.0
    assert fake.seen == [0.25, 1.0]


def test_the_agents_own_deadline_holds_for_callers_without_one() -> None:
    with running(deadline=0.2) as (fake, sockets), channel(sockets.listen) as line:
        fake.gate.clear()
        text = refused(lambda: predictor(line).Predict(request()), grpc.StatusCode.DEADLINE_EXCEEDED)
        assert text == "not answered within 0.2 s"
        replies = list(predictor(line).PredictStream(iter([request(0.5, "late")])))
        assert [(reply.id, reply.error) for reply in replies] == [("late", "not answered within 0.2 s")]


def test_a_stream_is_answered_in_order_and_outlives_a_refused_request(agent: Any) -> None:
    fake, stub = agent
    values = [i / 32 for i in range(20)]
    asked = [request(value, f"r{i}") for i, value in enumerate(values)]
    asked[7] = request(np.nan, "r7")
    asked[8] = pb.PredictRequest(id="r8")
    replies = list(stub.PredictStream(iter(asked), timeout=TIMEOUT))
    assert [reply.id for reply in replies] == [f"r{i}" for i in range(20)]
    assert {reply.id: reply.error for reply in replies if reply.error} == {
        "r7": "images hold NaN", "r8": "images of kind 0: allowed are UINT8 and FLOAT32, and files with ENCODED",
    }  # fmt: skip
    good = [value for i, value in enumerate(values) if i not in (7, 8)]
    assert [first(reply) for reply in replies if not reply.error] == good == fake.seen
    assert [reply.position for reply in replies if not reply.error] == list(range(18))


def test_a_stream_is_read_no_faster_than_it_is_answered(agent: Any) -> None:
    fake, stub = agent
    fake.gate.clear()
    replies = stub.PredictStream((request(i / 512) for i in range(200)), timeout=TIMEOUT)
    assert fake.begun.acquire(timeout=TIMEOUT)
    until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting > 2)
    time.sleep(0.3)  # were it read on, it would be read by now
    assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting <= service.AHEAD + 1
    fake.gate.set()
    assert [first(reply) for reply in replies] == [i / 512 for i in range(200)]


def test_fifty_streams_at_once_lose_and_reorder_nothing() -> None:
    streams, each = 50, 12
    with running(queue_limit=16) as (fake, sockets):
        fake.per = "sample"

        def stream(number: int) -> list[tuple[str, float]]:
            with channel(sockets.listen) as line:
                asked = (request((number * each + i) / 2048, f"{number}.{i}") for i in range(each))
                replies = list(predictor(line).PredictStream(asked, timeout=TIMEOUT))
            assert not [reply.error for reply in replies if reply.error]
            return [(reply.id, first(reply)) for reply in replies]

        with ThreadPoolExecutor(streams) as pool:
            got = list(pool.map(stream, range(streams)))
    expected = [[(f"{n}.{i}", (n * each + i) / 2048) for i in range(each)] for n in range(streams)]
    assert got == expected
    assert sorted(fake.seen) == [i / 2048 for i in range(streams * each)]
    for number in range(streams):  # each stream's in its order
        mine = [v for v in fake.seen if number * each <= v * 2048 < (number + 1) * each]
        assert mine == sorted(mine)


def test_more_streams_than_allowed_are_told_so() -> None:
    with running(max_streams=2) as (_, sockets), channel(sockets.listen) as line:
        stub = predictor(line)
        ended = threading.Event()

        def ask() -> Iterator[pb.PredictRequest]:
            yield request(0.5)
            ended.wait(TIMEOUT)

        streams = [stub.PredictStream(ask(), timeout=TIMEOUT) for _ in range(2)]
        assert [first(next(one)) for one in streams] == [0.5, 0.5]
        text = refused(
            lambda: list(stub.PredictStream(iter([request()]), timeout=TIMEOUT)), grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        assert text == "busy: 2 streams are open"
        ended.set()
        assert [list(one) for one in streams] == [[], []]
        assert len(list(stub.PredictStream(iter([request()] * 3), timeout=TIMEOUT))) == 3


def test_a_stream_that_breaks_leaves_nothing_behind() -> None:
    with running(queue_limit=4) as (fake, sockets), channel(sockets.listen) as line:
        stub = predictor(line)
        for turn in range(5):
            fake.gate.clear()
            ended = threading.Event()

            def ask(ended: threading.Event = ended) -> Iterator[pb.PredictRequest]:
                yield from (request(0.5) for _ in range(6))
                ended.wait(TIMEOUT)

            streams = [stub.PredictStream(ask(), timeout=TIMEOUT) for _ in range(2)]
            assert fake.begun.acquire(timeout=TIMEOUT)
            until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 3)
            for one in streams:
                one.cancel()
            until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 0)
            ended.set()
            fake.gate.set()
            until(lambda turn=turn: len(fake.seen) == turn + 1)
        assert len(list(stub.PredictStream(iter([request()] * 9), timeout=TIMEOUT))) == 9
        assert len(fake.seen) == 5 + 9


def test_a_stop_answers_what_was_accepted_and_takes_no_more() -> None:
    with running() as (fake, sockets), channel(sockets.listen) as line:
        stub = predictor(line)
        fake.gate.clear()
        ended = threading.Event()

        def ask() -> Iterator[pb.PredictRequest]:
            yield request(0.25, "a")
            yield request(0.5, "b")
            ended.wait(TIMEOUT)

        stream = stub.PredictStream(ask(), timeout=TIMEOUT)
        assert fake.begun.acquire(timeout=TIMEOUT)
        until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 1)
        single = stub.Predict.future(request(0.75), timeout=TIMEOUT)
        until(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT).waiting == 2)
        left: list[int] = []
        stopping = threading.Thread(target=lambda: left.append(sockets.stop(TIMEOUT)))
        stopping.start()
        probe = health_pb2_grpc.HealthStub(line)
        until(lambda: probe.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT).status == 2)  # NOT_SERVING
        until(lambda: stub.Predict.future(request(1.0), timeout=0.5).code() is grpc.StatusCode.UNAVAILABLE)
        told = refused(lambda: stub.Predict(request(1.0), timeout=TIMEOUT), grpc.StatusCode.UNAVAILABLE)
        assert "stopping" in told
        fake.gate.set()
        assert [next(stream).id, next(stream).id] == ["a", "b"]
        assert refused(lambda: next(stream), grpc.StatusCode.UNAVAILABLE) == "the agent is stopping"
        assert first(single.result()) == 0.75
        stopping.join(TIMEOUT)
        ended.set()
        assert left == [0]
        assert fake.seen == [0.25, 0.5, 0.75]


def test_a_stop_does_not_wait_for_ever() -> None:
    with running() as (fake, sockets), channel(sockets.relay) as line:
        begun, end = threading.Event(), threading.Event()

        def train(_: Any) -> Any:
            begun.set()
            end.wait(TIMEOUT)
            raise AssertionError("cut off")

        fake.answer = train
        call = agent_pb2_grpc.RelayStub(line).Perform.future(protobuf.to_work(TRAIN.to_record()), timeout=TIMEOUT)
        assert begun.wait(TIMEOUT)
        assert sockets.stop(0.05) == 1
        assert call.exception(TIMEOUT) is not None
        end.set()
