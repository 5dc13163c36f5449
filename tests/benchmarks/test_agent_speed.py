"""The part `agent`: streams counted by hand; the fabricated model; a real agent, a few samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.benchmarks.speed import agent, served, streams
from fedtta.client.agent.guard import Limits
from fedtta.client.agent.live import Live, as_floats, checked
from fedtta.messages import agent_pb2 as pb
from fedtta.messages.requests import AdapterRow
from fedtta.server.events import RunError
from fedtta.simulation.deployment import sockets_folder
from fedtta.simulation.superlink import FlowerError
from tests.client.agent.fake import channel, predictor, running


def reply(name: int, position: int | None = None, error: str = "", adapted: bool = True) -> pb.PredictReply:
    position = name if position is None else position
    refused = bool(error)
    return pb.PredictReply(id=str(name), samples=0 if refused else 1, position=position, error=error, adapted=adapted)


@pytest.mark.parametrize(
    ("got", "lost", "reordered", "refused"),
    [
        ([reply(0), reply(1), reply(2)], 0, 0, 0),
        ([reply(0), reply(2)], 1, 0, 0),
        ([], 3, 0, 0),
        ([reply(0), reply(2), reply(1)], 0, 1, 0),
        ([reply(2), reply(0), reply(1)], 0, 2, 0),
        ([reply(0), reply(1), reply(1), reply(2)], 0, 1, 0),  # answered twice
        ([reply(0, 5), reply(1, 4), reply(2, 6)], 0, 1, 0),  # in order, but not predicted in order
        ([reply(0), reply(1, 0, "busy"), reply(2)], 0, 0, 1),
    ],
)
def test_replies_of_three_requests_are_counted_by_hand(
    got: Sequence[pb.PredictReply], lost: int, reordered: int, refused: int
) -> None:
    good = [reply(0), reply(1)]
    load = streams.judged([good, got], [2, 3], 0.5)
    assert (load.lost, load.reordered, load.refused) == (lost, reordered, refused)
    assert (load.streams, load.requests) == (2, 5)
    assert load.per_second == (2 + len(got) - refused) / 0.5
    assert bool(load.trouble) == bool(lost or reordered or refused)


def test_unadapted_answers_are_not_timed() -> None:
    with pytest.raises(RunError, match="the guard held back the adapter at sample 7"):
        streams.judged([[reply(0), reply(1, 7, adapted=False)]], [2], 1.0)


def test_batches_leave_out_what_is_left_over() -> None:
    pixels = np.arange(7, dtype=np.uint8)[:, None, None, None]
    assert [part[:, 0, 0, 0].tolist() for part in streams.batches(pixels, 3)] == [[0, 1, 2], [3, 4, 5]]


def test_streams_at_once_send_every_sample_once_and_count_what_is_refused() -> None:
    pixels = np.arange(50, dtype=np.uint8)[:, None, None, None].repeat(2, 2).repeat(2, 3)
    with running() as (fake, sockets):
        fake.per = "sample"
        load = streams.many_streams(sockets.listen, pixels, 7)
        assert (load.streams, load.requests, load.trouble) == (7, 50, "")
        assert sorted(fake.seen) == list(range(50))
        load = streams.many_streams(sockets.listen, pixels[:, :, :, :1], 7)  # images that the agent refuses
        assert (load.lost, load.reordered, load.refused, load.per_second) == (0, 0, 50, 0)
        assert load.trouble == "50 refused"
        with channel(sockets.listen) as line, pytest.raises(RunError, match="one stream of 3 requests: 3 refused"):
            streams.one_stream(predictor(line), streams.requests(streams.batches(pixels[:3, :, :, :1], 1)))


def test_an_agent_that_has_not_seen_all_samples_fails_the_load() -> None:
    pixels = np.zeros((50, 1, 2, 2), np.uint8)
    with running() as (fake, sockets), channel(sockets.listen) as line:
        fake.per = "sample"
        told = fake.status
        fake.status = lambda: replace(told(), samples=0)  # type: ignore[method-assign]
        with pytest.raises(RunError, match="nothing lost or reordered; the agent has seen 0 of 50 samples"):
            agent.loaded(predictor(line), sockets.listen, pixels)


def test_the_fabricated_model_is_like_a_trained_one() -> None:
    made, pixels = served.fabricate(), served.sample_images(200)
    assert made.shape == (3, 32, 32)
    assert made.digest() == served.fabricate().digest()
    known = made.statistics
    assert known is not None
    known.require("both", "descriptor_local", "descriptor_global", "dle_local", "dle_global")
    assert known.entropy_local is not None
    assert known.entropy_global is not None
    # the personal head is sure of its client's classes, and both are far from no idea
    assert 0 < known.entropy_local < known.entropy_global < 0.5 * np.log(10)
    for adapter in ("fedthe", "btfl"):  # the guard finds nothing in the stream
        live = Live(replace(made, row=AdapterRow(adapter, adapter)), Limits(), print)
        answers = [live.predict(as_floats(checked(part, made.shape))) for part in streams.batches(pixels, 20)]
        assert all(adapted for _, _, adapted in answers)
        assert np.concatenate([weights for _, weights, _ in answers]).std() > 0


def test_the_forward_pass_is_timed_batch_by_batch() -> None:
    seconds = agent.forward(served.fabricate(), streams.batches(served.sample_images(6), 2))
    assert len(seconds) == 3
    assert min(seconds) > 0


def test_resident_memory() -> None:
    assert agent._resident("Name:\tx\nVmHWM:\t  9 kB\nVmRSS:\t  2048 kB\n") == 2


def case(adapter: str, guard: bool) -> agent.Case:
    latencies = [agent.Latency(1, 10, 1.25, 2.5, 800.0, 0.5, 2.75, 1000.0)]
    return agent.Case(adapter, guard, 300.0, 310.0, latencies, streams.Load(50, 100, 0, 0, 0, 1234.0))


def test_all_cases_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measure(folder: Path, model: Any, adapter: str, guard: bool, pixels: Any, repeats: int) -> agent.Case:
        seen.append((adapter, guard, pixels.shape, repeats))
        return case(adapter, guard)

    monkeypatch.setattr(agent, "measure", measure)
    monkeypatch.setattr(agent, "imported", lambda: 250.0)
    monkeypatch.setattr(agent, "SAMPLES", 64)
    measured = agent.agent(quick=False)
    assert seen == [(adapter, guard, (64, 3, 32, 32), agent.REPEATS) for adapter, guard in agent.CASES]
    assert {adapter for adapter, _ in agent.CASES} == {"none", "fedthe", "btfl"}
    assert (measured.ratios[1].what, measured.ratios[1].ratio) == ("fedthe, guard on, batch 1", 2.75)
    assert (measured.details["model"], measured.details["samples"], measured.details["imports_mib"]) == ("cnn", 64, 250)
    assert measured.details["torch_build"] in ("CPU", f"CUDA {torch.version.cuda}")
    assert measured.details["cases"][1]["latencies"][0]["over_forward"] == 2.75


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_agent_is_measured_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "STREAMS", 8)
    pids: list[int] = []
    resident = agent.resident
    monkeypatch.setattr(agent, "resident", lambda pid: pids.append(pid) or resident(pid))
    with sockets_folder() as folder:
        found = agent.measure(folder / "0", served.fabricate(), "btfl", True, served.sample_images(64), 1)
        assert [one.requests for one in found.latencies] == [64, 2]
        assert all(0 < one.p50_ms <= one.p99_ms and one.over_forward > 0 for one in found.latencies)
        assert (found.load.streams, found.load.requests, found.load.trouble) == (8, 64, "")
        assert min(found.start_mib, found.end_mib) > 50
        assert not Path(f"/proc/{pids[0]}").exists()
        with (
            pytest.raises(FlowerError, match="unknown key 'adaptor'"),
            served.running(folder / "1", served.fabricate(), {"adaptor": "btfl"}),
        ):
            pass
