"""The command `fleet`: light devices at a real SuperLink, Flower's FedAvg as an app, and what is read of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from safetensors.numpy import load_file

from fedtta.benchmarks.__main__ import main
from fedtta.benchmarks.speed import fedavg_app, fleet
from fedtta.benchmarks.speed.fleet import SERVER, App, Prepared, Used, Watch
from fedtta.messages.arrays import Arrays
from fedtta.server.nodes import sample
from fedtta.settings import Settings
from tests.flower import LocalGrid

DEVICES, ROUNDS = 5, 2


def prepared() -> Prepared:
    draw = np.random.default_rng(1)
    return Prepared({"a": draw.random((3, 4), dtype=np.float32), "b": draw.random(7, dtype=np.float32)})


def mean(one: Prepared, round: int, numbers: list[int]) -> Arrays:
    """The weighted mean of what devices answer, in float64."""
    weights = [one.examples(number) for number in numbers]
    answers = [one.arrays(number, round) for number in numbers]
    return {
        name: sum(w * answer[name].astype(np.float64) for w, answer in zip(weights, answers, strict=True))
        / sum(weights)
        for name in answers[0]
    }  # fmt: skip


def test_a_superlink_trains_on_light_devices(tmp_path: Path) -> None:
    with fleet.fleet_of(tmp_path, DEVICES, "cnn", ROUNDS, database=False) as one:
        taken = one.ours("ours")
        events, model = one.events("ours"), load_file(one.folder("ours") / "model.safetensors")
    assert [event["replied"] for event in events if event["event"] == "round"] == [list(range(DEVICES))] * ROUNDS
    expected = mean(one.prepared, ROUNDS, list(range(DEVICES)))
    assert model.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(model[name], value, rtol=1e-6, atol=1e-7)
    asked = sorted(one.prepared.asked)
    devices = [(number, kind) for number in range(DEVICES) for kind in ["query.identify", *["train"] * ROUNDS]]
    assert asked == sorted([*devices, (0, "evaluate")])
    assert not taken.failures
    assert not taken.lost
    replies = len(asked)
    assert taken.calls["PushMessages"] == taken.calls["ConfirmMessageReceived"] == replies
    # message, records and config; of a trained model the record, its block as an array, and the one chunk of that
    assert taken.calls["PushObject"] == 3 * replies + 3 * DEVICES * ROUNDS
    assert taken.calls["PullObject"] >= 3 * replies + 3 * (DEVICES * ROUNDS + 1)
    assert len(taken.rounds) == ROUNDS
    assert min(taken.rounds) > 0
    assert all(used.peak > 50 and used.seconds > 0 for used in taken.used.values())


def test_flowers_fedavg_gets_the_same_replies(tmp_path: Path) -> None:
    one, path = prepared(), tmp_path / "flower.json"
    np.savez(tmp_path / "initial.npz", allow_pickle=False, **one.initial)

    def answer(number: int) -> Any:
        return lambda message: one(number, message, message.content["config"])

    config = {"nodes": 3, "rounds": 2, "timeout": 60.0, "results": str(path), "initial": str(tmp_path / "initial.npz")}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    fedavg_app.main(LocalGrid({number: answer(number) for number in range(3)}), context)
    assert len(json.loads(path.read_text())) == 2
    with np.load(path.with_suffix(".npz")) as found:
        for name, value in mean(one, 2, [0, 1, 2]).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_silent_devices_answer_everything_but_training() -> None:
    one = prepared()
    one.silent.add(1)
    for kind, answered in (("train", False), ("query.identify", True)):
        message = Message(RecordDict(), dst_node_id=1, message_type=kind)
        assert (one(1, message, {"message": '{"round": 1}', "secret": "s"}) is not None) is answered
    assert one.asked == [(1, "train"), (1, "query.identify")]


def test_devices_differ_and_are_equally_far_from_each_other() -> None:
    one = Prepared({"w": np.zeros(10_000, np.float32)})
    values = [one.arrays(number, 1)["w"] for number in range(4)]
    distances = [float(np.linalg.norm(values[i] - values[j])) for i in range(4) for j in range(i)]
    assert max(distances) < 1.1 * min(distances)
    assert min(value.min() for value in values) >= fleet.STEP


EVENTS = [
    {"event": "run", "at": 1.0}, {"event": "late", "at": 9.0}, {"event": "round", "at": 10.0, "wall_seconds": 4.0},
    {"event": "late", "at": 15.0}, {"event": "failed", "at": 15.0}, {"event": "round", "at": 17.0, "wall_seconds": 5.0},
    {"event": "end", "at": 20.0},
]  # fmt: skip


def test_rounds_and_lost_replies_by_hand() -> None:
    assert fleet.round_seconds(EVENTS) == [4.0, 7.0]  # the second with the checkpoint of the first
    assert fleet.lost_replies(EVENTS) == {"late": 2, "failed": 1}
    assert App([4.0, 7.0], {}, {}, {}).seconds == 5.5


def test_what_a_process_of_a_home_uses(tmp_path: Path) -> None:
    code = "x = b'x' * 200_000_000; sum(range(3_000_000)); print(flush=True); input()"
    command = [sys.executable, "-c", code, "flwr-serverapp"]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "FLWR_HOME": str(tmp_path)}
        ) as process,
        Watch(tmp_path) as watch,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        watch.look()
        process.communicate(b"\n")
    used = watch.used[SERVER]
    assert 200 < used.peak < 400
    assert 0 < used.seconds < 60


def test_the_command_runs_both_apps_and_three_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []

    class Fake:
        def __init__(self, *arguments: Any) -> None:
            ran.append(arguments[1:])
            self.prepared = prepared()

        def taken(self, name: str, seconds: float, peak: float) -> App:
            ran.append((name, sorted(self.prepared.silent)))
            return App([seconds, seconds], {"server": Used(peak, 2.0), "superlink": Used(80.0, 9.0)}, {}, {})

        def flowers(self, name: str) -> App:
            return self.taken(name, 48.0, 400.0)

        def ours(self, name: str, **changed: Any) -> App:
            ran.append(changed)
            return self.taken(name, 24.0, 100.0)

        def looks(self, seconds: float) -> tuple[int, float]:
            return 700, 3.5

    monkeypatch.setattr(fleet, "fleet_of", lambda *arguments: nullcontext(Fake(*arguments)))
    words = ["fleet", "--devices", "20", "--out", str(tmp_path)]
    assert main(words) == 0
    few, silent = {"rounds": 1, "fraction-train": 0.1}, sample(range(20), 0.1, Settings().seed, 1)[1:]
    assert len(silent) == 1
    assert ran == [
        (20, "cnn", 2, False), ("flower", []), {}, ("ours", []), few, ("sampled", []),
        {**few, "round-timeout": 48.0}, ("silent", silent), {"rounds": 1, "round-timeout": 12.0}, ("deadline", []),
    ]  # fmt: skip
    assert main([*words, "--database"]) == 0
    content = json.loads((tmp_path / "fleet.json").read_text())
    assert list(content) == ["20 devices, cnn, in memory", "20 devices, cnn, database"]
    case = content["20 devices, cnn, in memory"]
    ratios = {one["what"]: (one["ratio"], one["target"]) for one in case["ratios"]}
    assert ratios["a round"] == (0.5, 1.0)
    assert ratios["peak memory, server"] == (0.25, None)  # a fifth is the target for large networks only
    assert (ratios["a round, silent"][0], ratios["a round, deadline"][0]) == (0.5, 2.0)
    shown = capsys.readouterr().out
    assert [f"{name}: " in shown for name in ("flower", "ours", "sampled", "silent", "deadline")] == [True] * 5
    assert case["details"]["looks"] == 700


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--devices", "1", "--out", str(tmp_path)]) == 2
    assert "--devices 1: allowed is 2 to 100000" in capsys.readouterr().err
    (tmp_path / "fleet.json").write_text("{")
    assert main(["fleet", "--out", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
