"""kill -9 of an agent that predicts and saves: what it comes back with is readable, and the loss is the stated one."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from fedtta.benchmarks.speed.served import sample_images
from fedtta.benchmarks.speed.streams import batches, requests
from fedtta.messages import agent_pb2 as pb
from tests.faults.device import Device, device
from tests.faults.stage import PATIENCE, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]


@pytest.fixture(scope="module")
def stream() -> list[pb.PredictRequest]:
    """Requests of a sample each."""
    return requests(batches(sample_images(400), 1))


def probabilities(replies: list[pb.PredictReply]) -> NDArray[np.float32]:
    """Return [n, K] of n replies to a sample each."""
    return np.array([np.frombuffer(reply.probabilities, "<f4") for reply in replies])


def saved(made: Device) -> int:
    """Return the samples that are in the newest snapshot, as the manifest says, without asking the agent."""
    snapshots = json.loads((made.state / "manifest.json").read_text(encoding="utf-8"))["snapshots"]
    return int(snapshots[-1]["samples"]) if snapshots else 0


def test_killed_while_it_predicts_it_goes_on_from_its_last_save(stream: list[pb.PredictRequest]) -> None:
    save, sent, last = 32, 150, 200
    killed = threading.Event()

    def sending() -> Iterator[pb.PredictRequest]:
        yield from stream[:sent]
        killed.wait()  # however fast it answers, the stream has not ended

    with device(adapter="fedthe", **{"save-every-samples": save}) as made:
        undisturbed = probabilities([made.predict(request) for request in stream[:last]])
        made.stub.Reset(pb.ResetRequest(), timeout=PATIENCE)

        def replied(count: int) -> None:
            if count == 100:
                wait_until(lambda: saved(made) > 0, "a save")  # however much faster it answers than it saves
                made.kill()
                killed.set()

        replies = made.until_killed(sending(), replied)
        # what waits is predicted in batches: equal to float32's rounding
        np.testing.assert_allclose(probabilities(replies), undisturbed[: len(replies)], atol=1e-5)
        back = made.restart()
        assert 0 < back.samples == saved(made)
        assert not [note for note in back.notes if "refused" in note]
        # as if the samples since the last save had never come
        again = probabilities([made.predict(request) for request in stream[back.samples : last]])
        np.testing.assert_allclose(again, undisturbed[back.samples :], atol=1e-5)


def test_killed_while_it_saves_it_has_what_was_saved(stream: list[pb.PredictRequest]) -> None:
    """It saves as often as it can; a temporary file that is left shows that a save was cut short."""
    cut_short = promised = 0
    order = random.Random(1)
    with device(adapter="fedthe", **{"save-every-samples": 1}) as made:
        for _ in range(5):
            promised = killed_in_a_save(made, stream, promised + order.randrange(1, 70))
            cut_short += bool(list(made.state.rglob("*.tmp")))
            back = made.restart()
            assert back.samples >= promised
            assert not [note for note in back.notes if "refused" in note], list(back.notes)
        reply = made.predict(stream[0])
        assert reply.position == back.samples
        assert np.isfinite(probabilities([reply])).all()
    assert cut_short


def killed_in_a_save(made: Device, stream: list[pb.PredictRequest], least: int) -> int:
    """Kill it when at least so many samples are saved and a file is being written; return the samples saved before."""
    promised = []

    def watch() -> None:
        while saved(made) < least:  # however much faster it answers than it saves
            pass
        promised.append(saved(made))
        while not list(made.state.rglob("*.tmp")):
            pass
        made.kill()

    thread = threading.Thread(target=watch)
    thread.start()
    made.until_killed(itertools.cycle(stream))
    thread.join()
    return promised[0]
