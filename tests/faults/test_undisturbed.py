"""Three nodes with agents, TLS and keys, every phase there is: the bits of one process, then answers from the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtta.client.resources import federation_of
from fedtta.models import load_arrays
from fedtta.settings import Settings
from fedtta.simulation import deployment
from tests.faults.stage import PATIENCE, stage
from tests.integration.test_deployment import SHARED, size, told
from tests.server.test_run import assert_same_results, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(6 * PATIENCE)]

NODES = 3
RUNS: dict[str, Settings] = {
    # FedICON's three phases, a training that keeps a model of the client's own, two with personal heads, ATP's rates,
    # which are so large that they change predictions; what is served in the end comes from the last training
    "train": SHARED.replace(
        methods="fedicon[mode=offline],fedicon,ditto,fedavg,personal,btfl,atp,atp[mode=online],fedthe", fraction=0.3,
        model_options="norm=batch", rounds=1, local_epochs=8, personal_epochs=2, learning_rate=0.1, classifier_rounds=1,
        classifier_epochs=1, rates_rounds=2, rates_learning_rate=1.0, shifts="original,corrupted",
    ),
    # a network that travels once; its temperature is set so that W depends on what the clients send
    "adapt": SHARED.replace(
        methods="bbn", model="resnet20-bn", model_options="depth=8;width=4", rounds=0,
        collaborations="pfedbbn[temperature=1]", stream_mix="iid", stream_size=40, stream_batch=20, stream_rounds=2,
    ),
}  # fmt: skip


def test_every_phase_over_grpc_has_the_bits_of_one_process(tmp_path: Path) -> None:
    runs = {name: settings.replace(clients=NODES, run_name=name) for name, settings in RUNS.items()}
    with stage(tmp_path, NODES) as made:
        for name, settings in reversed(runs.items()):  # what is served in the end comes from "train"
            made.run(settings).result(PATIENCE)
            assert made.events(name)[-1]["status"] == "completed"
            # on a machine so busy that Flower takes a node for gone, nothing below would hold
            assert not [event for event in made.events(name) if event["event"] in ("failed", "late", "left", "refused")]
        federation = federation_of(runs["train"])
        for i in range(NODES):
            images = federation.images.pixels[federation.splits[i].test[:20]]
            status, reply = deployment.ask(f"unix:{made.sockets}/a{i}", images)
            assert status.adapter.startswith("fedthe")
            assert reply is not None
            right = deployment.predicted(reply) == federation.images.labels[federation.splits[i].test[:20]]
            assert right.mean() > 0.5
    for name, settings in runs.items():
        alone = settings.replace(state_dir=str(tmp_path / "state" / name))
        assert_same_results(made.results(name), run(tmp_path / "alone" / name, alone))
        # agents say what they serve
        assert [one for one in told(made.results(name)) if one["event"] != "served"] == told(tmp_path / "alone" / name)
    adapted_together(made.results("adapt"))
    kept_by_the_stages(made.results("train"))


def adapted_together(ours: Path) -> None:
    """The network travels once, and clients' weights differ."""
    assert len({str(event["correct"]) for event in told(ours, "adapted")}) > 1
    rounds = told(ours, "adapt_round")
    weights = [np.array(event["weights"]) for event in rounds]
    assert [w.shape for w in weights] == [(NODES, NODES)] * 2
    assert len({w.tobytes() for w in weights}) == 2
    down = [event["bytes_down"] for event in rounds]
    assert down[0] == NODES * size(ours / "model.safetensors")
    assert 0 < down[1] < rounds[1]["bytes_up"]  # a mixture down; what is mixed and statistics up
    assert {event["context_bytes"] for event in rounds} == {0}


def kept_by_the_stages(ours: Path) -> None:
    """Arrays that a stage of FedICON or Ditto does not aggregate stay on the nodes."""
    rounds = told(ours, "round")
    encoder, classifier = (event for event in rounds if event["training"] == "fedicon")
    (ditto,) = (event for event in rounds if event["training"] == "ditto")
    arrays = load_arrays(ours / "model.safetensors")[0]
    head = sum(value.nbytes for name, value in arrays.items() if name.startswith("head."))
    whole = sum(value.nbytes for value in arrays.values())
    assert (encoder["bytes_up"], classifier["bytes_up"]) == (NODES * (whole - head), NODES * head)
    assert encoder["bytes_down"] == classifier["bytes_down"] == NODES * whole  # each stage's first message
    assert ditto["bytes_up"] == ditto["bytes_down"] == NODES * whole
    assert {event["method"] for event in told(ours, "evaluation")} == set(RUNS["train"].methods.split(","))
