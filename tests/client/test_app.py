"""Requests through the ClientApp: a client's life, with both backends of private state, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedtta.client.app import app
from fedtta.messages.flower import CONTENT
from fedtta.messages.replies import Evaluated, Summarized, Trained
from fedtta.messages.requests import AdapterRow, Evaluate, Identify, Request, Summarize, Train, TrainingTask
from fedtta.settings import Settings, SettingsError
from tests.client.folders import OWN, folder
from tests.client.through_app import SETTINGS, about, ask, bits, initial, node
from tests.flower import request as message_of

TASK = TrainingTask("ce")
ROWS = [AdapterRow("fedavg", "none"), AdapterRow("fedthe[beta=1]", "fedthe", {"beta": 1.0}), AdapterRow("btfl", "btfl")]


def training(round: int = 1, settings: Settings = SETTINGS, run: str = "run1", **changes: Any) -> Train:
    return Train(**{"round": round, "task": TASK, "arrays": initial(), **about(settings, run), **changes})


def live(context: Context, settings: Settings = SETTINGS) -> tuple[Trained, Summarized, Evaluated]:
    """Two training rounds, the statistics round, evaluation."""
    arrays, common = initial(), about(settings)
    for round in (1, 2):
        trained = ask(context, training(round, settings, arrays=arrays))
        arrays = trained.arrays
    known = ask(context, Summarize(round=3, task=TASK, arrays=arrays, **common))
    shifts, statistics = ["original", "mixture"], known.statistics
    request = Evaluate(round=3, task=TASK, arrays=arrays, statistics=statistics, rows=ROWS, shifts=shifts, **common)
    return trained, known, ask(context, request)


def test_identify_says_the_name_and_what_kind_of_data() -> None:
    identity = ask(node(2), Identify(**about()))
    assert identity.name == "2"
    assert identity.classes == [str(digit) for digit in range(10)]
    assert identity.shifts == ["original", "mixture"]
    assert identity.saved == {}
    assert identity.role == "both"
    assert ask(node(2, role="target"), Identify(**about())).role == "target"


def test_a_node_config_may_name_data_of_its_own(tmp_path: Path) -> None:
    folder(tmp_path / "images", {"blue": 12, "rouge": 12})
    config = {"name": "site-a", "data": f"folder:{tmp_path / 'images'}", "class-map": "rouge=red"}
    identity = ask(node(None, None, **config), Identify(**about(OWN.replace(state_dir=str(tmp_path / "state")))))
    assert (identity.name, identity.own_data, identity.samples, identity.classes_present) == ("site-a", True, 24, 2)


def test_a_clients_life() -> None:
    context = node()
    trained, known, evaluated = live(context)
    assert {n: (a.shape, a.dtype) for n, a in trained.arrays.items()} == {
        n: (a.shape, a.dtype) for n, a in initial().items()
    }
    assert {n: (a.shape, str(a.dtype)) for n, a in known.statistics.items()} == {
        "descriptor": ((64,), "float64"), "dle": ((64,), "float64"),
        "entropy_local": ((1,), "float64"), "entropy_global": ((1,), "float64"),
    }  # fmt: skip
    assert evaluated.leaked == 0
    assert evaluated.checked == evaluated.num_examples > 0
    found = {(one.label, one.shift): one for one in evaluated.results}
    assert set(found) == {(row.label, shift) for row in ROWS for shift in ("original", "mixture")}
    assert all((one.weight_mean is None) is (label == "fedavg") for (label, _), one in found.items())
    assert evaluated.checked == found["btfl", "original"].total + found["btfl", "mixture"].total
    # private state stays in the context, which Flower keeps at the node
    assert sorted(context.state) == ["ce@2", "ce@3"]
    assert ask(context, Identify(**about())).saved == {"ce": [2, 3]}


def test_a_state_directory_gives_the_same_bits_and_survives_a_new_context(tmp_path: Path) -> None:
    expected = [bits(reply) for reply in live(node())]
    context, settings = node(), SETTINGS.replace(state_dir=str(tmp_path / "a"))
    assert [bits(reply) for reply in live(context, settings)] == expected
    assert not context.state
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert files == [f"a/run1/1/ce@{round}.safetensors" for round in (2, 3)]

    class Forgetful:
        """A node that is started for every message; its own config names the directory."""

        def __getattr__(self, name: str) -> Any:
            return getattr(node(**{"state-dir": str(tmp_path / "b")}), name)

    assert [bits(reply) for reply in live(Forgetful())] == expected  # type: ignore[arg-type]
    assert (tmp_path / "b" / "run1" / "1").is_dir()


def test_the_nodes_own_config_wins_over_the_request(tmp_path: Path) -> None:
    context = node(**{"state-dir": str(tmp_path / "node")})
    ask(context, training(settings=SETTINGS.replace(state_dir=str(tmp_path / "server"))))
    assert (tmp_path / "node").is_dir()
    assert not (tmp_path / "server").exists()
    # but only where it lives, not what is computed
    with pytest.raises(SettingsError, match="node config has seed, rol; allowed are name, data, class-map, role, part"):
        ask(node(seed=99, rol="target"), training())


def test_a_client_without_statistics_says_so() -> None:
    sizes = {"descriptor": 64, "dle": 64, "entropy_local": 1, "entropy_global": 1}
    zeros = {name: np.zeros(size) for name, size in sizes.items()}
    more: dict[str, Any] = {"rows": [AdapterRow("a", "none")], "shifts": ["original"], **about()}
    with pytest.raises(ValueError, match="this client has no statistics of round 3"):
        ask(node(), Evaluate(round=3, task=TASK, arrays=initial(), statistics=zeros, **more))


REQUESTS = {
    "identify": lambda: Identify(**about()),
    "train": training,
    "statistics": lambda: Summarize(round=1, task=TASK, arrays=initial(), **about()),
    "evaluate": lambda: Evaluate(round=1, task=TASK, arrays=initial(), rows=ROWS, shifts=["original"], **about()),
}


@pytest.mark.parametrize(
    ("context", "told"),
    [
        (node(partition=None), "the node config lacks name"),
        (node(partition=4), "name = '4': allowed are '0' to '3'"),
        (node(partition=-1), "name = '-1': allowed are '0' to '3'"),
        (node(name="site-a"), "name = 'site-a': allowed are '0' to '3'"),
        (node(name="../a"), "name = '../a': allowed are 1 to 64 letters"),
        (node(device="tpu"), "device = 'tpu': allowed are auto, cpu"),
    ],
)
@pytest.mark.parametrize("kind", list(REQUESTS))
def test_a_node_that_is_set_up_wrongly_is_told_what_is_wrong(context: Context, told: str, kind: str) -> None:
    with pytest.raises(ValueError, match=told):
        ask(context, REQUESTS[kind]())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"leaning-rate": 0.1}, "unknown setting 'leaning-rate'.*did you mean learning-rate.*there are:"),
        ({"learning-rate": -1.0}, "learning-rate = -1.0: allowed is more than 0"),
        ({"learning-rate": "fast"}, "learning-rate = 'fast': allowed is a value of type float"),
        ({"optimizer": "lion"}, "optimizer = 'lion': allowed are sgd, adam"),
    ],
)
def test_a_bad_setting_in_a_request_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    request = replace(training(), settings=json.dumps({**SETTINGS.flat(), **changes}))
    with pytest.raises(SettingsError, match=told):
        ask(node(), request)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (training(settings=SETTINGS.replace(dataset="mnist")), "unknown data set 'mnist'; there are: digits"),
        (training(settings=SETTINGS.replace(model="vgg")), "unknown model 'vgg'; there are: cnn"),
        (training(task=TrainingTask("ce", "fedavg", "focal")), "unknown objective 'focal'; there are: cross_entropy"),
        (training(task=TrainingTask("ce", "scaffold")), "unknown local algorithm 'scaffold'; there are: apfl"),
        (training(settings=SETTINGS.replace(state_dir="x"), run="../up"), "run identity '../up'"),
        (training(settings=SETTINGS.replace(state_dir="x"), task=TrainingTask("../up")), "key '../up'"),
    ],
)
def test_unknown_names_list_what_exists(
    request_: Request, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        ask(node(), request_)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_bad_model_leaves_the_private_state_unchanged() -> None:
    context = node()
    ask(context, training())
    before = {n: a.numpy().tobytes() for n, a in context.state.array_records["ce@1"].items()}
    arrays = initial()
    arrays["head.bias"] = np.where(np.arange(10) == 3, np.inf, arrays["head.bias"]).astype(np.float32)
    with pytest.raises(ValueError, match=r"head\.bias holds values that are not finite"):
        ask(context, training(2, arrays=arrays))
    assert list(context.state) == ["ce@1"]
    assert {n: a.numpy().tobytes() for n, a in context.state.array_records["ce@1"].items()} == before


def test_a_message_of_another_kind_is_refused() -> None:
    content = RecordDict({"config": ConfigRecord({CONTENT: "{}"})})
    with pytest.raises(ValueError, match="No train function registered with name 'backwards'"):
        app(message_of(kind="train.backwards", content=content), node())
    with pytest.raises(ValueError, match=r"settings = .*: Field required"):
        app(message_of(kind="query.identify", content=content), node())


def test_importing_the_app_imports_no_torch() -> None:
    """A SuperNode starts a process for every message; what needs no torch must not wait for it."""
    heavy = (
        "torch",
        "torchvision",
        "scipy",
        "sklearn",
        "PIL",
        "fedtta.models",
        "fedtta.data",
        "fedtta.client.device",
        "fedtta.client.node",
    )
    code = f"import sys, fedtta.client.app; print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_replies_answer_their_message() -> None:
    content = RecordDict({"config": ConfigRecord({CONTENT: json.dumps(Identify(**about()).to_record().values)})})
    message = message_of(kind="query.identify", content=content)
    reply = app(message, node())
    assert isinstance(reply, Message)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
