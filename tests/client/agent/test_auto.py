"""adapter = "auto" in an agent: its predictions, what outlives the process, what it needs and what it tells."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtta.client.adapters import AdapterContext
from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.core import Agent
from fedtta.client.evaluation import Labelled, gains_of
from fedtta.client.node import make_device
from fedtta.client.serving import Served
from fedtta.messages.replies import Evaluated, Telemetry
from fedtta.messages.requests import AdapterRow, Observe
from fedtta.tta.auto import SERVED, Gains, calibrate_gains
from fedtta.tta.estimates import Calibration
from tests.client.agent.world import (
    config,
    evaluation,
    fork,
    killed,
    labels,
    said,
    sample_images,
    served,
    train,
    trained,
)

OPTIONS = {"probe": 20, "every": 45, "caution": 0.0}
ADAPTER = "auto[probe=20;every=45;caution=0.0]"
#: Such that the stream of `pixels` has several choices: the digits are easy, and all candidates alike on them.
OFFSETS = {"none": 0.0, "personal": 0.05, "fixed_mix": 0.01, "fedthe": 0.018, "btfl": 0.0, "t3a": 0.0}


def model() -> Served:
    """The trained client with auto, whose candidates gain a little more than they did."""
    made = served("auto", **OPTIONS)
    gains = {name: Calibration(OFFSETS[name] + one.offset, one.variance) for name, one in made.gains.of.items()}
    return dataclasses.replace(made, gains=Gains(gains, made.gains.shares))


def pixels(count: int = 150) -> NDArray[np.uint8]:
    """Test images, ever darker and more alike, and then as they are again."""
    clear = sample_images(0, count)
    noise = np.random.default_rng(1).integers(0, 256, clear.shape)
    share = np.where(np.arange(count) < 2 * count // 3, np.linspace(0, 1, count), 0.0)[:, None, None, None]
    return ((1 - share) * clear + share * noise).astype(np.uint8)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with `model`."""
    folder = tmp_path_factory.mktemp("auto")
    agent = agent_of(folder)
    assert agent._models.offer(model(), Samples(sample_images(0, 60), labels(0, 60))).startswith("promoted")
    agent.close()
    return folder / "state"


def agent_of(folder: Path, **changes: Any) -> Agent:
    return Agent(config(folder, **{"adapter": ADAPTER, **changes}))


@pytest.fixture
def agents(start: Path, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Make agents with `model`, each on a folder of its own; they are closed in the end."""
    made: list[Agent] = []

    def make(**changes: Any) -> Agent:
        folder = tmp_path / str(len(made))
        shutil.copytree(start, folder / "state")
        made.append(agent_of(folder, **changes))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def predictions(agent: Agent, images: NDArray[np.uint8], size: int = 7) -> NDArray[np.float32]:
    return np.concatenate([agent.predict(images[i : i + size]).probabilities for i in range(0, len(images), size)])


def kill(agent: Agent) -> None:
    """End an agent as `kill -9` does: what came after its last snapshot is lost."""
    agent._closed = True
    agent._store.close()


def test_predictions_are_the_adapters_whatever_the_size_of_requests(agents: Any) -> None:
    images, made = pixels(), model()
    adapter = made.build()
    expected = adapter.predict(made.images(images.astype(np.float32) / np.float32(255))).numpy()
    assert len(set(adapter.report()["choice"].tolist())) > 2
    told = []
    for size in (1, 7, 150):
        agent = agents(guard=False)
        assert agent.per == "sample"  # so that waiting requests may be joined
        np.testing.assert_allclose(predictions(agent, images, size), expected, rtol=0, atol=1e-5)
        told.append((agent.status().choice, agent.status().choice_reason))
    assert len(set(told)) == 1


def test_the_guard_lets_single_images_be_predicted_adapted(agents: Any) -> None:
    """No candidate goes by batches, so a batch of one is nothing degenerate, and may differ beyond any margin."""
    images = pixels()[:100]  # auto predicts the 96th otherwise, and not narrowly
    rows = [predictions(agents(guard=guard, guard_margin=0.0), images, 1) for guard in (True, False)]
    np.testing.assert_array_equal(*rows)
    plain = model().unadapted(images.astype(np.float32) / np.float32(255))
    assert (rows[0].argmax(1) != plain.argmax(1)).any()


@pytest.mark.parametrize("guard", [True, False])
def test_a_sample_costs_one_pass_of_the_network(agents: Any, guard: bool) -> None:
    agent, passed = agents(guard=guard), []
    agent._live.served.network.encoder.register_forward_hook(lambda _, given, __: passed.append(len(given[0])))
    predictions(agent, pixels())
    assert sum(passed) == 150


@pytest.mark.parametrize("cut", [7, 21, 70, 105])
def test_a_restart_in_the_middle_changes_no_prediction(start: Path, tmp_path: Path, cut: int) -> None:
    """In a probe, between two, with a choice, after drift was looked for; and in another state directory."""
    shutil.copytree(start, tmp_path / "state")
    agent, images = agent_of(tmp_path), pixels()
    predictions(agent, images[:cut])
    agent.snapshot()
    expected = predictions(agent, images[cut:])
    status = agent.status()
    kill(agent)
    (tmp_path / "moved").mkdir()
    (tmp_path / "state").rename(tmp_path / "moved" / "state")
    again = agent_of(tmp_path / "moved")
    assert again.status().samples == cut
    np.testing.assert_array_equal(predictions(again, images[cut:]), expected)
    assert (again.status().choice, again.status().choice_reason) == (status.choice, status.choice_reason)
    again.close()


def predict_for_ever(pipe: Connection, folder: Path) -> None:
    agent = agent_of(folder)
    while True:
        begin = agent.status().samples
        rows = agent.predict(np.roll(pixels(), -begin, 0)[:10]).probabilities
        pipe.send((agent.snapshot().samples, rows))


def test_kill_loses_only_what_was_not_saved(start: Path, tmp_path: Path) -> None:
    for name in ("undisturbed", "killed"):
        shutil.copytree(start, tmp_path / name / "state")
    undisturbed, images = agent_of(tmp_path / "undisturbed"), pixels()
    expected = predictions(undisturbed, np.concatenate((images, images)), 10)
    undisturbed.close()
    for times in (2, 5, 3):
        process, pipe = fork(predict_for_ever, tmp_path / "killed")
        samples, rows = said(pipe, times)
        np.testing.assert_array_equal(rows, expected[samples - 10 : samples])
        killed(process, pipe)


def test_bad_requests_change_nothing(agents: Any) -> None:
    agent = agents()
    predictions(agent, pixels()[:25])
    before, status = agent._live.state(), agent.status()
    floats = sample_images(0, 5).astype(np.float32) / np.float32(255)
    floats[3, 0, 0, 0] = np.nan
    for bad in (floats, sample_images(0, 5)[:, :1], sample_images(0, 5).astype(np.int64), sample_images(0, 0)):
        with pytest.raises(ValueError, match="images"):
            agent.predict(bad)
    real = agent._live.adapter._once.features
    agent._live.adapter._once.features = lambda x: real(x) * np.nan
    with pytest.raises(ValueError, match="the network's output is not finite"):
        agent.predict(sample_images(0, 5))
    del agent._live.adapter._once.features
    after = agent._live.state()
    assert set(before) == set(after)
    assert all(np.array_equal(value, after[name]) for name, value in before.items())
    assert dataclasses.replace(agent.status(), uptime=0.0) == dataclasses.replace(status, uptime=0.0)


def test_a_reset_forgets_the_choice(agents: Any) -> None:
    agent = agents()
    first = predictions(agent, pixels())
    agent.reset()
    assert (agent.status().choice, agent.status().choice_reason) == ("none", "since sample 0 (the first samples)")
    np.testing.assert_array_equal(predictions(agent, pixels()), first)


def test_the_choice_is_told_to_owner_and_server(agents: Any) -> None:
    agent = agents()
    predictions(agent, pixels()[:60])
    status = agent.status()
    assert status.choice in SERVED[1:]
    assert status.choice_reason.startswith("since sample ")
    reply = agent.perform(Observe(settings="", run="watch1"))
    assert Telemetry.from_record(reply.to_record()).choice == status.choice
    other = Agent(config(Path(agent.config.state_dir).parent / "other"))
    assert (other.status().choice, other.status().choice_reason) == ("", "")
    other.close()


# What it needs


def test_gains_are_those_on_the_validation_split_and_part_of_the_model(tmp_path: Path) -> None:
    made = served("auto")
    assert tuple(made.gains.of) == SERVED
    node, request = trained()
    device = make_device(request, node)
    federation = device.federation.in_round(2)
    index = federation.splits[device.partition].validation
    x = torch.from_numpy(federation.images.pixels[index].astype(np.float32) / np.float32(255))
    y = torch.from_numpy(federation.images.labels[index])
    predicted = {}
    for name in SERVED:
        adapter = served(name).build()
        predicted[name] = torch.cat([adapter.predict(part) for part in x.split(256)]).numpy()
    expected = calibrate_gains(predicted, y.numpy())
    for name, one in expected.of.items():
        assert made.gains.of[name].offset == pytest.approx(one.offset, abs=1e-5)
        assert made.gains.of[name].variance == pytest.approx(one.variance, abs=1e-6)
    made.save(tmp_path)
    again = Served.load(tmp_path, torch.device("cpu"))
    assert again.gains == made.gains
    assert list(again.gains.of) == list(made.gains.of)
    assert (
        dataclasses.replace(
            made, gains=Gains({**made.gains.of, "t3a": Calibration(0.5, 0.0)}, made.gains.shares)
        ).digest()
        != made.digest()
    )
    former = dataclasses.replace(made, gains=Gains(made.gains.of))  # which had no class shares, and have their digest
    assert "shares" not in json.loads(former._about())
    former.save(tmp_path)
    assert Served.load(tmp_path, torch.device("cpu")).gains == former.gains
    assert former.build().predict(x[:3]).shape == (3, 10)
    assert "gains" not in json.loads(served("fedthe")._about())  # the digests of other models are what they were


def test_candidates_can_be_named(tmp_path: Path) -> None:
    node, request = trained()
    made = make_device(request, node).serve(request, AdapterRow("auto", "auto", {"among": "tent+personal"}))
    assert tuple(made.gains.of) == ("none", "tent", "personal")
    adapter = made.build()
    assert adapter.per == "batch"
    assert adapter.names == ("none", "tent", "personal")  # type: ignore[attr-defined]


def test_without_labels_no_model_is_served_and_the_reason_is_told(tmp_path: Path) -> None:
    node, request = trained()
    device = make_device(request, node)
    with pytest.raises(ValueError, match=r"auto needs .*, learned from labels of its own, and 0 is a target"):
        dataclasses.replace(device, role="target").serve(request, AdapterRow("auto", "auto"))
    nothing = Labelled(torch.empty(0, 3, 16, 16), torch.empty(0, dtype=torch.int64), True)
    with pytest.raises(ValueError, match="auto: this client has no validation samples to calibrate candidates on"):
        gains_of(AdapterRow("auto", "auto"), AdapterContext(device.model, device.settings), nothing, SERVED)


def test_a_federation_brings_the_model_and_a_kept_one_of_another_adapter_waits_for_it(tmp_path: Path) -> None:
    agent = Agent(config(tmp_path, adapter="fedthe"))
    request, _ = train(agent.perform)
    agent.close()
    agent = Agent(config(tmp_path, adapter="auto"))
    assert agent.status().version == ""
    assert "auto needs candidates that were calibrated on labelled samples; waiting for one" in agent.status().notes[-1]
    without = agent.perform(evaluation(request.arrays, None))  # which the statistics did not come with
    assert isinstance(without, Evaluated)
    assert without.served.startswith("promoted run1/cross_entropy/2/")
    assert tuple(agent._live.served.gains.of) == ("none", "personal", "fixed_mix", "t3a")  # type: ignore[union-attr]
    again = agent.perform(evaluation(request.arrays, request.statistics))
    assert isinstance(again, Evaluated)
    assert again.served.startswith("promoted")
    assert tuple(agent._live.served.gains.of) == SERVED  # type: ignore[union-attr]
    assert agent.predict(sample_images(0, 5)).adapted
    agent.close()
