"""One test-time round on one client: what comes first, what is sent, what stays, and that labels only score."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtta import tta
from fedtta.client.adaptation import Adaptation, adapt, batch_of, score, streams_of
from fedtta.client.adapters import AdapterContext, make_adapter
from fedtta.client.state import DirectoryState, MemoryState
from fedtta.data import CORRUPTIONS
from fedtta.messages.requests import AdapterRow as Row
from fedtta.models import TwoHead, build
from fedtta.tta.collaborator import Collaborator
from tests.client import tiny
from tests.client.tiny import Client as Device

TENT = Row("tent", "tent", {"lr": 0.01})


class Fake(Collaborator):
    """Adds the batch's mean to one trained number and one statistic, and writes down what is done to it."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.gamma, self.mean = torch.ones(1), torch.zeros(1)
        self.batches = torch.zeros((), dtype=torch.int64)
        self.calls: list[str] = []

    def trained(self) -> dict[str, Tensor]:
        return {"gamma": self.gamma}

    def normalisation(self) -> dict[str, Tensor]:
        return {"bn.running_mean": self.mean}

    def domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {"bn": (self.mean, self.gamma)}

    def shared(self, share: Any) -> dict[str, Tensor]:
        self.calls.append(f"shared {share}")
        return super().shared(share)

    def load_shared(self, arrays: Mapping[str, Tensor]) -> None:
        self.calls.append("load_shared")
        super().load_shared(arrays)

    def _predict(self, x: Tensor) -> Tensor:
        self.calls.append("predict")
        self.gamma += x.mean()
        self.mean += x.mean()
        self.batches += 1
        return torch.full((len(x), 2), 0.5)

    def _state(self) -> dict[str, Tensor]:
        return {"gamma": self.gamma, "mean": self.mean, "batches": self.batches}

    def _load(self, state: dict[str, Tensor]) -> None:
        self.calls.append("load_state")
        for name, value in state.items():
            self._state()[name].copy_(value)


X = torch.full((3, 2), 2.0)


def test_first_the_memory_then_the_mixture_then_the_batch() -> None:
    """By hand: γ = 5 from memory, 10 from the others, 10 + 2 after the batch; the start is the network's 1."""
    fake = Fake()
    state = {"gamma": np.array([5.0], np.float32), "mean": np.array([7.0], np.float32), "batches": np.array(4)}
    received = {"gamma": np.array([10.0], np.float32)}
    made = adapt(fake, X, "affine", state, received)
    assert fake.calls == ["shared affine", "load_state", "load_shared", "predict", "shared affine"]
    assert {name: value.tolist() for name, value in made.start.items()} == {"gamma": [1.0]}
    assert {name: value.tolist() for name, value in made.shared.items()} == {"gamma": [12.0]}
    # what was not mixed goes on from the memory
    assert {name: value.tolist() for name, value in made.state.items()} == {
        "gamma": [12.0], "mean": [9.0], "batches": 5,
    }  # fmt: skip
    assert {name: value.tolist() for name, value in made.normalization.items()} == {
        "bn.mean": [9.0],
        "bn.variance": [12.0],
    }
    assert made.probabilities.shape == (3, 2)
    assert made.seconds >= 0
    assert (state["gamma"], received["gamma"]) == (5.0, 10.0)  # not written to


def test_the_first_round_starts_from_the_network() -> None:
    fake = Fake()
    made = adapt(fake, X, "all", None, None)
    assert fake.calls == ["shared all", "predict", "shared all"]
    assert {name: value.tolist() for name, value in made.shared.items()} == {"gamma": [3.0], "bn.running_mean": [2.0]}
    assert {name: value.tolist() for name, value in made.start.items()} == {"gamma": [1.0], "bn.running_mean": [0.0]}


def test_a_mixture_without_memory_is_taken_over() -> None:
    made = adapt(Fake(), X, "affine", None, {"gamma": np.array([10.0], np.float32)})
    assert made.shared["gamma"].tolist() == [12.0]


def test_what_is_returned_is_not_the_adapters_own() -> None:
    fake = Fake()
    made = adapt(fake, X, "all", None, None)
    fake.predict(X)
    assert (
        made.shared["gamma"].tolist()
        == made.state["gamma"].tolist()
        == made.normalization["bn.variance"].tolist()
        == [3.0]
    )


def test_a_mixture_of_another_share_is_refused() -> None:
    with pytest.raises(ValueError, match="are the names of no share"):
        adapt(Fake(), X, "all", None, {"beta": np.ones(1)})


def test_counts_by_hand() -> None:
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
    made = score(probabilities, np.array([0, 1, 1, 1]), 4)
    assert made == ([1, 1, 0, 0], [1, 3, 0, 0])
    assert score(probabilities[:0], np.zeros(0, np.int64), 2) == ([0, 0], [0, 0])


def test_labels_are_no_argument_of_adaptation() -> None:
    """They are seen by `score` alone, which sees probabilities and nothing of the adapter."""
    assert list(inspect.signature(adapt).parameters) == ["adapter", "x", "share", "state", "received"]
    assert list(inspect.signature(tta.Adapter.predict).parameters) == ["self", "x"]
    assert list(inspect.signature(score).parameters) == ["probabilities", "labels", "classes"]
    assert not {"labels", "y"} & set(Adaptation.__dataclass_fields__)


def batchnorm() -> TwoHead:
    return build("resnet20-bn", tiny.CLASSES, image_size=tiny.SIZE, seed=3, depth=8, width=4)


def device(memory: Any = None, **changes: Any) -> Device:
    streams = {"stream_size": 12, "stream_batch": 6, "stream_concentration": 1.0, "collaborations": "none"}
    return tiny.device(model=batchnorm(), memory=memory, **{**streams, **changes})


def adapted(client: Device, round: int, received: Any = None, row: Row = TENT, **more: Any) -> tuple[Any, Any]:
    reply = client.adapt(round, "cell", tiny.global_arrays(batchnorm()), row, shared=received, **more)
    return reply, reply.to_record().values


def test_a_device_is_one_long_lived_adapter_on_its_stream(tmp_path) -> None:
    """A process a message, memory on disk: the same bits as one adapter that never sleeps."""
    lasting = tta.create("tent", batchnorm(), lr=0.01)
    for round in range(1, 6):
        client = device(DirectoryState(tmp_path, "run", "0"))  # a new process
        made, metrics = adapted(client, round)
        stream = streams_of(client.settings, client.federation)
        x, labels, corruption = batch_of(stream, 0, round, client.device)
        expected = lasting.predict(x)
        assert tiny.same(made.shared, {key: value.numpy() for key, value in lasting.shared("all").items()})
        right = (expected.argmax(1).numpy() == labels).sum()
        assert sum(metrics["correct"]) == right
        assert metrics["total"] == np.bincount(labels, minlength=tiny.CLASSES).tolist()
        assert metrics["num-examples"] == 6
        assert CORRUPTIONS[metrics["corruption"]] == corruption
    kept = {path.name for path in (tmp_path / "run" / "0").iterdir()}
    assert kept == {"cell@4.safetensors", "cell@5.safetensors"}  # a resumed server may be one round behind


SHARING = [name for name, info in tta.ADAPTERS.items() if info.collaborates]


@pytest.mark.parametrize("name", SHARING)
def test_every_method_survives_a_process_for_each_message(tmp_path, name: str) -> None:
    """Also with a mixture from others in between: here its own arrays, changed a little."""
    row = Row(name, name)
    lasting = make_adapter(row, AdapterContext(batchnorm(), device().settings), proximal=0.5)
    assert isinstance(lasting, Collaborator)
    received = None
    for round in range(1, 4):
        client = device(DirectoryState(tmp_path, "run", "0"))
        made, metrics = adapted(client, round, received, row, proximal_mu=0.5)
        if received is not None:
            lasting.load_shared({key: torch.tensor(value) for key, value in received.items()})
        x, labels, _ = batch_of(streams_of(client.settings, client.federation), 0, round, client.device)
        assert sum(metrics["correct"]) == int((lasting.predict(x).argmax(1).numpy() == labels).sum())
        shared = {key: value.numpy() for key, value in lasting.shared("all").items()}
        assert tiny.same(made.shared, shared)
        received = {key: value * value.dtype.type(1.01) for key, value in shared.items()}
    assert bool(received) is tta.ADAPTERS[name].shares


def test_an_adapter_that_draws_from_the_process_gives_the_same_whatever_ran_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draws(self: Any, x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(len(x), tiny.CLASSES).softmax(1))
        return drawn[-1]

    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(tta.ADAPTERS["tent"], "_predict", draws)
    for before in (1, 2):
        torch.manual_seed(before)
        adapted(device(), 1)
    assert torch.equal(*drawn)


def test_cells_have_memories_of_their_own() -> None:
    client = device()
    arrays = tiny.global_arrays(client.model)
    for key in ("one", "other"):
        first = client.adapt(1, key, arrays, TENT)
        second = client.adapt(2, key, arrays, TENT)
        alone = device()
        alone.adapt(1, key, arrays, TENT)
        assert tiny.same(second.shared, alone.adapt(2, key, arrays, TENT).shared)
        assert not tiny.same(first.shared, second.shared)
    assert isinstance(client.memory, MemoryState)
    assert {key for key, _ in client.memory.entries} == {"one", "other"}
    assert not tiny.state_of(client).entries


whole = tta.Tent._predict


def adapts_and_raises(self: tta.Tent, x: Tensor) -> Tensor:
    whole(self, x)
    raise ValueError("the output is not finite")


def test_memory_is_unchanged_when_predict_raises(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted(device(DirectoryState(tmp_path, "run", "0")), 1)
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    client = device(DirectoryState(tmp_path, "run", "0"))
    with monkeypatch.context() as patched:
        patched.setattr(tta.Tent, "_predict", adapts_and_raises)
        with pytest.raises(ValueError, match="the output is not finite"):
            adapted(client, 2)
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before
    assert set(before) == {"cell@1.safetensors"}
    # the round is tried again as if nothing had been
    again, _ = adapted(device(DirectoryState(tmp_path, "run", "0")), 2)
    lasting = device()
    adapted(lasting, 1)
    assert tiny.same(again.shared, adapted(lasting, 2)[0].shared)


@pytest.mark.parametrize(
    ("round", "received", "told"),
    [
        (61, None, r"round=30 is not in|round=60 is not in"),
        (1, {"nothing": np.ones(1, np.float32)}, "the names of no share"),
    ],
)
def test_what_does_not_fit_is_refused_and_forgotten(round: int, received: Any, told: str) -> None:
    client = device()
    with pytest.raises(ValueError, match=told):
        adapted(client, round, received)
    assert isinstance(client.memory, MemoryState)
    assert not client.memory.entries


def test_the_network_is_left_as_it_came() -> None:
    client = device()
    adapted(client, 1)
    assert tiny.same(tiny.global_arrays(client.model), tiny.global_arrays(batchnorm()))


def test_a_method_that_cannot_collaborate_is_refused() -> None:
    with pytest.raises(ValueError, match="fixed_mix"):
        adapted(device(), 1, row=Row("fixed_mix", "fixed_mix"))


def test_the_pull_of_fedprox_reaches_the_adapter() -> None:
    """With two steps a batch the second is pulled back to where the first began."""
    row = Row("tent", "tent", {"lr": 0.05, "steps": 2})
    free, pulled, again = (adapted(device(), 1, row=row, proximal_mu=mu)[0].shared for mu in (0.0, 50.0, 0.0))
    assert tiny.same(free, again)
    assert not tiny.same(free, pulled)
