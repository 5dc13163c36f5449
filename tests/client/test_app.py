"""Messages through the ClientApp's own dispatch: a client's life, with both backends, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from client.app import app
from settings import Settings, SettingsError
from tests.flower import record, request

CLIENTS = 4
SETTINGS = Settings(
    dataset="digits", fraction=0.15, image_size=16, clients=CLIENTS, partition="iid", model="cnn", local_epochs=1,
    learning_rate=0.05, device="cpu", shifts="original,mixture",
)  # fmt: skip


TASK = {"training": "ce", "rule": "joint", "objective": "cross_entropy", "wanted": list[str]()}


def node(partition: Any = 1, clients: Any = CLIENTS, **config: Any) -> Context:
    """What Flower hands to a node's ClientApp, with an empty run config as in its simulation."""
    numbers = {"partition-id": partition, "num-partitions": clients}
    given = {key: value for key, value in numbers.items() if value is not None}
    return Context(run_id=1, node_id=1, node_config={**given, **config}, state=RecordDict(), run_config={})


def ask(context: Context, kind: str, records: dict[str, Any] | None = None, **changes: Any) -> RecordDict:
    """Send a message as the server does: all settings, the envelope, and records of arrays."""
    config = {**SETTINGS.flat(), "run": "run1", **TASK, **changes}
    content = RecordDict({"config": ConfigRecord(config), **(records or {})})
    return app(request(kind=kind, content=content), context).content


def initial() -> ArrayRecord:
    from models import build

    model = build("cnn", 10, image_size=16, seed=5)
    return record(**{name: value.numpy() for name, value in model.global_state().items()})


def live(context: Context, **changes: Any) -> tuple[RecordDict, RecordDict, RecordDict]:
    """Two training rounds, the statistics round, evaluation."""
    arrays = initial()
    for round in (1, 2):
        trained = ask(context, "train", {"arrays": arrays}, **{"server-round": round}, **changes)
        arrays = trained.array_records["arrays"]
    known = ask(context, "train.statistics", {"arrays": arrays}, **{"server-round": 3}, **changes)
    evaluated = ask(
        context,
        "evaluate",
        {"arrays": arrays, "statistics": known.array_records["statistics"]},
        **{"server-round": 3, "shifts-resolved": ["original", "mixture"]},
        labels=["fedavg", "fedthe[beta=1]", "btfl"],
        adapters=["none", "fedthe", "btfl"],
        options=["{}", '{"beta": 1.0}', "{}"],
        bases=["global"] * 3,
        **changes,
    )
    return trained, known, evaluated


def bits(content: RecordDict) -> Any:
    arrays = {key: {n: a.numpy().tobytes() for n, a in r.items()} for key, r in content.array_records.items()}
    metrics = {n: v for r in content.metric_records.values() for n, v in r.items() if not n.endswith("seconds")}
    return arrays, metrics


def test_identify_says_which_partition_and_what_kind_of_data() -> None:
    identity = ask(node(2), "query.identify").config_records["identity"]
    assert identity["partition-id"] == 2
    assert identity["num-partitions"] == CLIENTS
    assert identity["classes"] == [str(digit) for digit in range(10)]
    assert identity["shifts"] == ["original", "mixture"]
    assert set(identity) == {
        "partition-id", "num-partitions", "classes", "channels", "mean", "std", "sizes", "shifts", "note",
        "role", "corruptions", "stream-rounds", "kept-keys", "kept-tags",
    }  # fmt: skip


def test_a_clients_life() -> None:
    context = node()
    trained, known, evaluated = live(context)
    sent = trained.array_records["arrays"]
    assert {n: (a.shape, a.dtype) for n, a in sent.items()} == {n: (a.shape, a.dtype) for n, a in initial().items()}
    assert sorted(trained) == ["arrays", "metrics"]
    assert sorted(known) == ["metrics", "statistics"]
    assert {n: (tuple(a.shape), a.dtype) for n, a in known.array_records["statistics"].items()} == {
        "descriptor": ((64,), "float64"), "dle": ((64,), "float64"),
        "entropy_local": ((1,), "float64"), "entropy_global": ((1,), "float64"),
    }  # fmt: skip
    assert list(evaluated) == ["metrics"]
    metrics = evaluated.metric_records["metrics"]
    assert metrics["leaked"] == 0
    assert metrics["checked"] == metrics["num-examples"] > 0
    names = {"correct", "total", "seconds"}
    weighted = names | {"weight_histogram", "weight_mean"}
    rows = {"fedavg": names, "fedthe[beta=1]": weighted, "btfl": weighted}
    expected = {f"{row}|{shift}|{n}" for row, ns in rows.items() for shift in ("original", "mixture") for n in ns}
    assert set(metrics) == expected | {"leaked", "checked", "num-examples"}
    assert metrics["checked"] == metrics["btfl|original|total"] + metrics["btfl|mixture|total"]
    # private state stays in the context, which Flower keeps at the node
    assert sorted(context.state) == ["ce@2", "ce@3"]


def test_a_state_directory_gives_the_same_bits_and_survives_a_new_context(tmp_path: Path) -> None:
    expected = [bits(content) for content in live(node())]
    context = node()
    assert [bits(content) for content in live(context, **{"state-dir": str(tmp_path / "a")})] == expected
    assert not context.state
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert files == [f"a/run1/1/ce@{round}.safetensors" for round in (2, 3)]

    class Forgetful:
        """A node that is started anew for every message; its own config names the directory."""

        def __getattr__(self, name: str) -> Any:
            return getattr(node(**{"state-dir": str(tmp_path / "b")}), name)

    assert [bits(content) for content in live(Forgetful())] == expected  # type: ignore[arg-type]
    assert (tmp_path / "b" / "run1" / "1").is_dir()


def test_the_nodes_own_config_wins_over_the_message(tmp_path: Path) -> None:
    context = node(**{"state-dir": str(tmp_path / "node")})
    ask(context, "train", {"arrays": initial()}, **{"server-round": 1, "state-dir": str(tmp_path / "server")})
    assert (tmp_path / "node").is_dir()
    assert not (tmp_path / "server").exists()
    # but only where it lives, not what is computed
    other = node(seed=99, **{"learning-rate": 5.0})
    trained = ask(other, "train", {"arrays": initial()}, **{"server-round": 1})
    assert bits(trained) == bits(ask(node(), "train", {"arrays": initial()}, **{"server-round": 1}))


def test_a_client_without_statistics_says_so() -> None:
    context = node()
    zeros = record(**{n: np.zeros(64 if n in ("descriptor", "dle") else 1) for n in
                      ("descriptor", "dle", "entropy_local", "entropy_global")})  # fmt: skip
    with pytest.raises(ValueError, match="this client has no statistics of round 3"):
        ask(
            context, "evaluate", {"arrays": initial(), "statistics": zeros},
            **{"server-round": 3, "shifts-resolved": ["original"]}, labels=["a"], adapters=["none"], options=["{}"],
            bases=["global"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("context", "told"),
    [
        (node(partition=None), "the node config lacks partition-id"),
        (node(clients=None), "the node config lacks num-partitions"),
        (node(clients=7), "clients = 4: this node is one of 7"),
        (node(partition=4), "partition-id = 4: allowed are 0 to 3"),
        (node(partition=-1), "partition-id = -1: allowed are 0 to 3"),
        (node(device="tpu"), "device = 'tpu': allowed are auto, cpu"),
    ],
)
@pytest.mark.parametrize("kind", ["query.identify", "train", "train.statistics", "evaluate"])
def test_a_node_that_is_set_up_wrongly_is_told_what_is_wrong(context: Context, told: str, kind: str) -> None:
    envelope = {"server-round": 1, "labels": ["a"], "adapters": ["none"], "options": ["{}"], "bases": ["global"]}
    with pytest.raises(ValueError, match=told):
        ask(context, kind, {"arrays": initial(), "statistics": initial()}, **envelope)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"leaning-rate": 0.1}, "unknown setting 'leaning-rate'.*did you mean learning-rate.*there are:"),
        ({"learning-rate": -1.0}, "learning-rate = -1.0: allowed is more than 0"),
        ({"learning-rate": "fast"}, "learning-rate = 'fast': allowed is a value of type float"),
        ({"optimizer": "lion"}, "optimizer = 'lion': allowed are sgd, adam"),
    ],
)
def test_a_bad_setting_in_a_message_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        ask(node(), "train", {"arrays": initial()}, **{"server-round": 1}, **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dataset": "mnist"}, "unknown data set 'mnist'; there are: digits"),
        ({"model": "vgg"}, "unknown model 'vgg'; there are: cnn"),
        ({"objective": "focal"}, "unknown objective 'focal'; there are: cross_entropy"),
        ({"state-dir": "x", "run": "../up"}, "run identity '../up'"),
        ({"state-dir": "x", "training": "../up"}, "key '../up'"),
    ],
)
def test_unknown_names_list_what_exists(
    changes: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        ask(node(), "train", {"arrays": initial()}, **{"server-round": 1}, **changes)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_bad_model_leaves_the_private_state_unchanged() -> None:
    context = node()
    ask(context, "train", {"arrays": initial()}, **{"server-round": 1})
    before = {n: a.numpy().tobytes() for n, a in context.state.array_records["ce@1"].items()}
    arrays = initial()
    spoiled = arrays["head.bias"].numpy().copy()
    spoiled[3] = np.inf
    arrays = record(**{**{name: array.numpy() for name, array in arrays.items()}, "head.bias": spoiled})
    with pytest.raises(ValueError, match=r"head\.bias holds values that are not finite"):
        ask(context, "train", {"arrays": arrays}, **{"server-round": 2})
    assert list(context.state) == ["ce@1"]
    assert {n: a.numpy().tobytes() for n, a in context.state.array_records["ce@1"].items()} == before


def test_columns_of_rows_must_have_one_length() -> None:
    with pytest.raises(ValueError, match="zip"):
        ask(
            node(), "evaluate", {"arrays": initial(), "statistics": initial()},
            **{"server-round": 1, "shifts-resolved": ["original"]}, labels=["a", "b"], adapters=["none"],
            options=["{}"], bases=["global"],
        )  # fmt: skip


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="No train function registered with name 'backwards'"):
        ask(node(), "train.backwards")


def test_importing_the_app_imports_no_torch() -> None:
    """A SuperNode starts a process for every message; what needs no torch must not wait for it."""
    heavy = ("torch", "torchvision", "scipy", "sklearn", "PIL", "models", "data", "client.device")
    code = f"import sys, client.app; print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_replies_answer_their_message() -> None:
    message = request(
        kind="query.identify", content=RecordDict({"config": ConfigRecord({**SETTINGS.flat(), "run": "r"})})
    )
    reply = app(message, node())
    assert isinstance(reply, Message)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
