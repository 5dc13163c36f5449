"""The transport of one process beyond the contract: what trains at once, and runs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedtta.client import cohort
from fedtta.client.sites import simulated_nodes
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Identify, Train, TrainingTask
from fedtta.messages.transport import Addressed
from fedtta.models import load_arrays
from fedtta.server.events import NoReplies
from fedtta.settings import Settings, SettingsError, to_json
from fedtta.simulation import engine, simulate, vectorized
from fedtta.simulation.vectorized import VectorizedTransport
from tests.server.test_run import SMALL, assert_same_results, events, run

ONE = SMALL.replace(engine="vectorised", stacked_clients=50, shifts="original,corrupted")


def transport(clients: int, stacked: int) -> VectorizedTransport:
    return VectorizedTransport(simulated_nodes(Settings(clients=clients)), stacked)


def assert_close(one: Path, other: Path) -> None:
    """Models and statistics are equal up to rounding, and counts are equal."""
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    for name in files:
        ours, theirs = load_arrays(one / name)[0], load_arrays(other / name)[0]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if key != "dle":  # counts of values on one side of a threshold
                np.testing.assert_allclose(value, theirs[key], rtol=1e-3, atol=1e-4, err_msg=key)
    counted = [[e.get("event"), e.get("replied"), e.get("total")] for e in events(one)]
    assert counted == [[e.get("event"), e.get("replied"), e.get("total")] for e in events(other)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one stack, with private state in files."""
    folder = tmp_path_factory.mktemp("whole")
    return simulate(ONE.replace(state_dir=str(folder / "state")), folder / "r")


@pytest.mark.parametrize(
    "changes",
    [{}, {"stacked_clients": 2, "model_options": "norm=batch", "methods": "fedavg,fedbn,ditto", "learning_rate": 0.02}],
    ids=["one stack", "two stacks, kept layers and an algorithm of its own"],
)
def test_a_run_matches_that_of_one_client_after_another(whole: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = simulate(ONE.replace(**changes), tmp_path / "one") if changes else whole
    assert_close(folder, run(tmp_path / "other", ONE.replace(**changes)))
    assert (folder / "report.html").is_file()


def test_a_cpu_trains_one_client_after_another_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = SMALL.replace(engine="vectorised", device="cpu", methods="fedavg", rounds=1)
    assert [vectorized.at_once(one), vectorized.at_once(one.replace(stacked_clients=7))] == [1, 7]
    assert_same_results(simulate(one, tmp_path / "one"), run(tmp_path / "other", one))
    monkeypatch.setattr(vectorized, "resolve_device", lambda _: torch.device("cuda", 0))
    assert [vectorized.at_once(one), vectorized.at_once(one.replace(stacked_clients=7))] == [50, 7]


def test_one_seed_one_result_and_a_run_resumes(whole: Path, tmp_path: Path) -> None:
    again = simulate(ONE, tmp_path / "again")  # private state in memory
    assert_same_results(whole, again)
    begun = ONE.replace(state_dir=str(tmp_path / "b"))
    folder = tmp_path / "begun"

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(begun, folder, [stop])
    simulate(begun.replace(resume=str(folder)), folder)
    assert_same_results(whole, folder)


def test_rates_and_collaborations_run_too(tmp_path: Path) -> None:
    adapting = ONE.replace(
        methods="bbn", model="resnet20-bn", model_options="depth=8;width=4", rounds=0, clients=2,
        collaborations="fedavg", stream_mix="iid", stream_size=20, stream_batch=10, stream_rounds=2,
    )  # fmt: skip
    one, other = simulate(adapting, tmp_path / "one"), run(tmp_path / "other", adapting)
    assert_close(one, other)
    rates = ONE.replace(methods="atp", model="shallow-cnn", model_options="", image_size=20, rounds=1, rates_rounds=2)
    assert_close(simulate(rates, tmp_path / "rates"), run(tmp_path / "rates alone", rates))


def test_a_client_that_fails_in_a_stack_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    real = cohort.train

    def broken(devices: Any, requests: Any) -> Any:
        replies = real(devices, requests)
        fails = requests[0].round == 2
        return [ValueError("sensor unplugged") if fails and i == 1 else one for i, one in enumerate(replies)]

    monkeypatch.setattr(cohort, "train", broken)
    seen: list[dict] = []
    simulate(ONE.replace(methods="fedavg", rounds=3), tmp_path / "r", [seen.append])
    failed = [event for event in seen if event["event"] == "failed"]
    assert [(event["partition"], event["round"]) for event in failed] == [(1, 2)]
    assert "sensor unplugged" in failed[0]["reason"]
    assert [event["replied"] for event in seen if event["event"] == "round"] == [[0, 1, 2], [0, 2], [0, 1, 2]]


def test_too_little_memory_fails_clients_and_not_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(cohort, "train", short)
    with pytest.raises(NoReplies, match=r"out of memory \(in one of 3 clients that train at once: stacked-clients\)"):
        simulate(ONE.replace(methods="fedavg", node_timeout=0.1), tmp_path / "r")


def training(round: int, arrays: Any, settings: str = to_json(ONE.replace(clients=6))) -> Train:
    return Train(settings=settings, run="r", round=round, task=TrainingTask("ce"), arrays=arrays)


def test_training_requests_that_differ_in_arrays_only_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[tuple[int, int, bool]]] = []

    def train(devices: Any, requests: Any) -> list[Trained]:
        stacks.append(
            [(d.partition, r.round, r.arrays is requests[0].arrays) for d, r in zip(devices, requests, strict=True)]
        )
        assert not any(value.flags.writeable for one in requests for value in one.arrays.values())
        about: dict[str, Any] = {"validation_total": 0, "validation_correct": 0, "seconds": 0.0, "train_loss": 0.0}
        return [Trained(arrays=one.arrays, **about) for one in requests]

    monkeypatch.setattr(cohort, "train", train)
    monkeypatch.setattr(cohort, "fits", lambda device, request: True)
    shared, own = {"w": np.zeros(2, np.float32)}, {"w": np.ones(2, np.float32)}
    sent = [
        Addressed(1, training(1, shared)), Addressed(2, training(2, shared)), Addressed(3, training(1, own)),
        Addressed(4, training(1, shared)), Addressed(5, training(1, shared)), Addressed(6, training(2, own)),
    ]  # fmt: skip
    answers = list(transport(6, stacked=3).exchange(sent, 60.0))
    assert [answer.node for answer in answers] == [1, 3, 4, 2, 6, 5]  # the last one is alone, and has no such network
    assert [answer.kind for answer in answers] == [""] * 5 + ["failed"]
    assert stacks[0] == [(0, 1, True), (2, 1, False), (3, 1, True)]
    assert stacks[1] == [(1, 2, True), (5, 2, False)]
    assert shared["w"].flags.writeable  # the caller's own array is left as it is


def test_malformed_requests_fail_one_after_another() -> None:
    bad = training(1, {"w": np.zeros(2)}, settings='{"nonsense": 1}')
    answers = list(transport(2, stacked=10).exchange([Addressed(1, bad), Addressed(2, bad)], 60.0))
    assert [answer.kind for answer in answers] == ["failed", "failed"]
    assert all("nonsense" in answer.reason for answer in answers)


def test_requests_that_begin_after_the_timeout_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(request: Any, node: Any) -> Any:
        nonlocal now
        now += 6.0
        raise ValueError(f"client {node.partition}")

    monkeypatch.setattr(vectorized, "perform", slow)
    monkeypatch.setattr(vectorized.time, "monotonic", lambda: now)
    asked = [Addressed(node, Identify(settings="{}", run="r")) for node in (1, 2, 3)]
    answers = list(transport(3, stacked=1).exchange(asked, 10.0))
    assert [(answer.node, answer.kind) for answer in answers] == [(1, "failed"), (2, "failed"), (3, "late")]
    assert answers[2].reason == "no reply within 10 s"


def test_which_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.engine(SMALL) == "ray"
    assert engine.engine(ONE) == "vectorised"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert engine.engine(SMALL) == "ray"
    gpu = SMALL.replace(device="auto")
    assert engine.engine(gpu) == "vectorised"
    assert engine.engine(gpu.replace(methods="fedper,fedprox,btfl")) == "vectorised"
    for serial in ("ditto", "fedavg,ditto", "fedicon", "ttt"):
        assert engine.engine(gpu.replace(methods=serial)) == "ray", serial
    assert engine.engine(gpu.replace(rounds=0)) == "ray"  # it trains nothing
    assert engine.engine(gpu.replace(stacked_clients=1)) == "ray"
    assert engine.engine(gpu.replace(engine="ray")) == "ray"
    assert engine.engine(gpu.replace(model="cct-4/3x2")) == "ray"  # it has dropout
    assert engine.engine(gpu.replace(model="resnet18", image_size=32)) == "ray"  # it is large
    assert engine.engine(SMALL, our_app=False) == "flower"
    with pytest.raises(SettingsError, match="engine = 'fast': allowed are auto, ray, flower, vectorised"):
        SMALL.replace(engine="fast")


def test_another_client_app_and_flowers_own_nodes_are_refused(tmp_path: Path) -> None:
    from flwr.clientapp import ClientApp

    from fedtta.server.app import main
    from tests.flower import LocalGrid

    with pytest.raises(SettingsError, match="allowed is engine = 'flower'"):
        simulate(ONE, tmp_path / "r", client_app=ClientApp())
    for name in ("ray", "vectorised"):
        config = Settings(engine=name).flat()
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        with pytest.raises(SettingsError, match=f"engine = '{name}': .* allowed are auto, flower"):
            main(LocalGrid({}), context)


def test_updates_are_compressed_one_client_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = vectorized.outgoing, list[dict[str, Any]]()

    def broken(device: Any, request: Any, reply: Any) -> Any:
        if isinstance(request, Train) and (request.round, device.partition) == (2, 1):
            raise FloatingPointError("it has changed too much")
        return real(device, request, reply)

    monkeypatch.setattr(vectorized, "outgoing", broken)
    simulate(ONE.replace(methods="fedavg", rounds=3, update_format="int8"), tmp_path / "r", [seen.append])
    (failed,) = [event for event in seen if event["event"] == "failed"]
    assert (failed["partition"], failed["round"]) == (1, 2)
    assert failed["reason"] == "FloatingPointError: it has changed too much"
    rounds = [event for event in seen if event["event"] == "round"]
    assert [event["replied"] for event in rounds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert all(event["bytes_up"] < event["bytes_up_float32"] / 3 for event in rounds)
    assert all(abs(event["trained_accuracy"] - event["decoded_accuracy"]) <= 0.1 for event in rounds)
