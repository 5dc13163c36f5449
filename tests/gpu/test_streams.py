"""An agent's predictions go before its training: a stream of high priority, and nothing that two streams race for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedtta.client.agent.live import Live
from fedtta.client.config import Limits
from fedtta.models import accelerator
from fedtta.models.accelerator import ahead, clock
from tests.client import tiny
from tests.gpu.cases import served, trained
from tests.gpu.devices import differences, gpu, on_host
from tests.gpu.pretended import PretendedGPU

CPU = torch.device("cpu")
PIXELS = tiny.images(8).pixels.astype(np.float32) / 255


@pytest.fixture(autouse=True)
def _new_stream() -> Iterator[None]:
    """Each GPU gets a stream of its own."""
    accelerator._first_stream.cache_clear()
    yield
    accelerator._first_stream.cache_clear()


def live(device: torch.device, adapter: str = "btfl") -> Live:
    return Live(served(device, adapter), Limits(), lambda text: None)


def undone(one: Live) -> None:
    with one.undone_on_error():
        one.predict(PIXELS)
        raise ZeroDivisionError


def answers(one: Live, count: int) -> dict[str, object]:
    """Answers to requests of one image, with all that an agent does to a model in between."""
    found = {f"{i}": one.predict(PIXELS[i % 8 : i % 8 + 1])[0] for i in range(count)}
    with pytest.raises(ZeroDivisionError):
        undone(one)
    state = one.state()
    one.reset()
    one.load(state, count)
    return {**found, "last": one.predict(PIXELS)[0]}


@pytest.mark.parametrize("adapter", ["btfl", "tent"])
def test_answers_beside_a_training_are_those_of_the_cpu(adapter: str) -> None:
    """A training is done in another thread while the agent answers."""
    expected, stop = on_host(answers(live(CPU, adapter), 12)), threading.Event()
    failed: list[BaseException] = []

    def train() -> None:
        try:
            while not stop.is_set():
                trained("fedavg", there.device)
        except BaseException as error:
            failed.append(error)

    with gpu() as there:
        one, other = live(there.device, adapter), threading.Thread(target=train)
        other.start()
        try:
            found = on_host(answers(one, 12))
        finally:
            stop.set()
            other.join()
    assert not failed
    assert differences(found, expected) == []


def test_predictions_run_on_the_stream_of_high_priority_and_wait_for_no_training() -> None:
    with PretendedGPU() as there:
        one = live(there.device)
        streams = there.streams
        assert [stream.priority for stream in streams.made] == [0, -1]
        default, first = streams.made
        torch.ones(3, device=there.device).add_(1)  # a training's work, queued
        waited = first.after[default]
        streams.used.clear()
        answers(one, 3)
        assert set(streams.used) == {first}
        assert first.after[default] == waited < default.given
        assert streams.current is default


def test_on_a_cpu_no_stream_is_made() -> None:
    with PretendedGPU() as there:
        answers(live(CPU), 2)
        with ahead(CPU, received=True):
            pass
        assert len(there.streams.made) == 1
        assert not there.waits
        assert clock(CPU) <= clock("cpu")


def test_what_nothing_orders_is_refused() -> None:
    """The check can fail, in each of the three ways that `ahead` prevents."""
    with PretendedGPU() as there:
        x = torch.ones(3, device=there.device)
        with ahead(there.device, received=True):
            x + 1
        x.add_(1)
        with pytest.raises(RuntimeError, match="may not have written yet"), ahead(there.device):
            x + 1
        with ahead(there.device, received=True):
            y = x + 1
        (y + 1).add_(x)  # the host has waited
        stream = there.streams.made[-1]
        with there.streams.within(stream):
            x.add(1)
        with pytest.raises(RuntimeError, match="may not have read yet"):
            x.add_(1)
        torch.cuda.synchronize()
        x.add_(1)


def test_the_clock_waits_for_the_device() -> None:
    with PretendedGPU() as there:
        late = torch.ones(3, device=there.device).to("cpu", non_blocking=True)
        assert late.isnan().all()
        assert clock(there.device) > 0
        assert late.tolist() == [1, 1, 1]
        assert there.waits.total() == 1
