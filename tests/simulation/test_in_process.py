"""Runs on the grid of this process: the numbers of one client after another, faults, deadlines, arrays by reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from client.phases import perform
from models import load_arrays
from server.events import NoReplies
from settings import Settings, SettingsError
from simulation import blocking, engine, in_process, simulate, worker
from simulation.in_process import InProcessGrid
from tests.server.test_run import SMALL, assert_same_results, events, run

ONE = SMALL.replace(engine="vectorised")


def assert_close(one: Path, other: Path) -> None:
    """Models and statistics are equal but for rounding, and so is what was counted."""
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    for name in files:
        ours, theirs = load_arrays(one / name)[0], load_arrays(other / name)[0]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if key != "dle":  # counts of what lies on one side of a threshold
                np.testing.assert_allclose(value, theirs[key], rtol=1e-3, atol=1e-4, err_msg=key)
    counted = [[e.get("event"), e.get("replied"), e.get("total")] for e in events(one)]
    assert counted == [[e.get("event"), e.get("replied"), e.get("total")] for e in events(other)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"stacked_clients": 2, "model_options": "norm=batch", "methods": "fedavg,fedbn,ditto", "learning_rate": 0.02}],
    ids=["one stack", "two stacks, kept layers and a rule of its own"],
)
def test_a_run_is_that_of_one_client_after_another(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = simulate(ONE.replace(**changes), tmp_path / "one")
    assert_close(folder, run(tmp_path / "other", ONE.replace(**changes)))
    assert (folder / "report.html").is_file()


def test_one_seed_one_result_and_a_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    whole = simulate(ONE.replace(state_dir=str(tmp_path / "a")), tmp_path / "whole")
    again = simulate(ONE, tmp_path / "again")  # private state in memory
    assert_same_results(whole, again)
    begun = ONE.replace(state_dir=str(tmp_path / "b"), methods="fedavg,personal,fixed_mix,fedthe,btfl")
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


def test_a_client_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = in_process.train_together

    def broken(learners: Any, round: int, *more: Any) -> Any:
        results = real(learners, round, *more)
        return [ValueError("sensor unplugged") if round == 2 and i == 1 else one for i, one in enumerate(results)]

    monkeypatch.setattr(in_process, "train_together", broken)
    seen: list[dict] = []
    simulate(ONE.replace(methods="fedavg", rounds=3), tmp_path / "r", [seen.append])
    failed = [event for event in seen if event["event"] == "failed"]
    assert [(event["partition"], event["round"]) for event in failed] == [(1, 2)]
    assert "sensor unplugged" in failed[0]["reason"]
    assert [event["replied"] for event in seen if event["event"] == "round"] == [[0, 1, 2], [0, 2], [0, 1, 2]]


def test_too_little_memory_fails_clients_and_not_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(in_process, "train_together", short)
    with pytest.raises(NoReplies, match=r"out of memory \(in one of 3 clients that train at once: stacked-clients\)"):
        simulate(ONE.replace(methods="fedavg", node_timeout=0.1), tmp_path / "r")


def test_bad_work_is_answered_one_after_another() -> None:
    grid = InProcessGrid(2, 10)
    content = RecordDict({"config": ConfigRecord({"nonsense": 1})})
    messages = [Message(content, dst_node_id=node, message_type="train") for node in (1, 2)]
    replies = list(grid.send_and_receive(messages))
    assert [reply.has_error() for reply in replies] == [True, True]
    assert "nonsense" in str(replies[0].error.reason)


def test_what_nobody_waits_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, asked = InProcessGrid(3, 10), []
    monkeypatch.setattr(blocking, "PULL_SECONDS", 0.0)
    monkeypatch.setattr(worker, "perform", lambda work, node: asked.append(node.partition) or perform(work, node))
    content = RecordDict({"config": ConfigRecord({"run": "r"})})
    messages = [Message(content, dst_node_id=node, message_type="query.identify") for node in (1, 2, 3)]
    tickets = list(grid.push_messages(messages))
    assert len(list(grid.pull_messages(tickets[1:]))) == 1  # one a pull, for the deadline's sake
    assert asked == [1]
    assert list(grid.pull_messages(tickets[:1])) == []
    assert list(grid.pull_messages(tickets)) == []
    assert list(grid.get_node_ids()) == [1, 2, 3]
    assert list(grid.send_and_receive(messages, timeout=0.0)) == []


def test_which_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.engine(SMALL) == "ray"
    assert engine.engine(ONE) == "vectorised"
    monkeypatch.setattr(engine, "resolve_device", lambda name: type("Device", (), {"type": "cuda"}))
    assert engine.engine(SMALL) == "vectorised"
    assert engine.engine(SMALL.replace(engine="ray")) == "ray"
    assert engine.engine(SMALL.replace(model="cct-4/3x2")) == "ray"  # it has dropout
    assert engine.engine(SMALL.replace(model="resnet18", image_size=32)) == "ray"  # it is large
    assert engine.engine(SMALL, our_app=False) == "flower"
    with pytest.raises(SettingsError, match="engine = 'fast': allowed are auto, ray, flower, vectorised"):
        SMALL.replace(engine="fast")


def test_another_client_app_and_flowers_own_nodes_are_refused(tmp_path: Path) -> None:
    from flwr.app import Context
    from flwr.clientapp import ClientApp

    from server.app import main

    with pytest.raises(SettingsError, match="allowed is engine = 'flower'"):
        simulate(ONE, tmp_path / "r", client_app=ClientApp())
    for name in ("ray", "vectorised"):
        config = Settings(engine=name).flat()
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        with pytest.raises(SettingsError, match=f"engine = '{name}': .* allowed are auto, flower"):
            main(InProcessGrid(1, 1), context)
