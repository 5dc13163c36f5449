"""`speed`: each part in its smallest form, what is kept, and that two sides that differ are not timed."""

from __future__ import annotations

import json
import statistics as averages
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.speed import adapters, command, federation, loops, options, pieces
from benchmarks.speed.figure import Figure
from data import CORRUPTIONS
from models import build
from server.events import RunError
from settings import Settings

CPU = torch.device("cpu")


def figure(what: str, ratio: float, target: float | None = None, least: bool = False) -> Figure:
    return Figure(what, ratio, "s", ratio, 1.0, "the other", target, least)


def test_a_target_is_reached_from_above_or_from_below() -> None:
    assert [figure("a", ratio, 2.0).mark for ratio in (1.9, 2.0, 2.1)] == ["✓", "✓", "✗"]
    assert [figure("a", ratio, 2.0, least=True).mark for ratio in (1.9, 2.0, 2.1)] == ["✗", "✓", "✓"]
    assert (figure("a", 1.0).mark, figure("a", 1.0).wanted) == ("", "")
    assert (figure("a", 1.0, 2.0).wanted, figure("a", 1.0, 2.0, least=True).wanted) == ("≤ 2", "≥ 2")


def test_parts_are_measured_kept_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, bool]] = []

    def part(name: str, ratio: float) -> Any:
        return f"title of {name}", lambda quick: asked.append((name, quick)) or [figure(name, ratio, 2.0)], False

    monkeypatch.setattr(command, "PARTS", {"one": part("one", 1.0), "two": part("two", 3.0)})
    assert main(["speed", "--parts", "two", "--out", str(tmp_path)]) == 0
    assert main(["speed", "--parts", "one", "--quick", "--out", str(tmp_path)]) == 0
    assert asked == [("two", False), ("one", True)]
    content = json.loads((tmp_path / "speed.json").read_text())
    assert list(content) == ["one", "two"]
    assert content["two"]["figures"][0]["ratio"] == 3.0
    assert "load_average" in content["two"]
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"
    assert "two: 3 (≤ 2)" in (tmp_path / "speed.svg").read_text()
    assert "title of two" in capsys.readouterr().out
    assert main(["speed", "--parts", "one,three", "--out", str(tmp_path)]) == 2
    assert "--parts three: allowed are one, two" in capsys.readouterr().err
    (tmp_path / "speed.json").write_text('{"one": {"figures": [{"what": 1}]}}')
    assert main(["speed", "--parts", "one", "--out", str(tmp_path)]) == 2
    assert "speed.json cannot be read" in capsys.readouterr().err


def test_adapters_beside_the_bare_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS", ("none", "btfl", "memo"))
    monkeypatch.setattr(adapters, "SAMPLES", {1: 2, 64: 64})
    found = adapters.adapters(quick=True)
    assert [one.what for one in found] == ["btfl, batch 1", "memo, batch 1", "btfl, batch 64"]
    assert all(one.ratio > 0 and one.ours > 0 for one in found)
    assert found[0].target == 2.0


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.2, 0.7]], ids=["MEMO", "FedTHE+"])
def test_the_naive_loop_tunes_as_the_adapters_do(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("cnn", 10, seed=3)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    loops.check("both", model, images, torch.tensor(weights))
    monkeypatch.setattr(loops, "ours", lambda *one: lambda: loops.loop(*one)() + 1e-3)
    with pytest.raises(RuntimeError, match="both: ours and the naive loop differ by"):
        loops.check("both", model, images, torch.tensor(weights))


def test_loops_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "VIEWS", 2)
    found = loops.tuning(1, 1, CPU)
    assert [one.what for one in found] == ["MEMO, 2 views, 3 steps, cpu", "FedTHE+, 2 views, 3 steps, cpu"]
    assert all(one.ratio > 0 and one.least for one in found)


def event(wall: float, seconds: list[float], replied: int) -> dict[str, Any]:
    about = {"event": "round", "round": 1, "sampled": list(range(len(seconds))), "replied": list(range(replied))}
    return {**about, "wall_seconds": wall, "train_seconds": seconds}


def test_rounds_are_wall_time_over_training(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    lost = False

    def simulate(settings: Settings, folder: Path, listeners: list[Any]) -> None:
        asked.append(settings)
        for wall in (9.0, 3.0, 4.0):
            listeners[0](event(wall, [1.0, 2.0, 1.0], 2 if lost else 3))

    monkeypatch.setattr("simulation.simulate", simulate)
    found = {one.what: one for one in federation.rounds(quick=False)}
    assert found["100 clients, CNN, Ray"].ratio == pytest.approx(3.5 / 2)
    assert found["100 clients, CNN, one process"].ratio == pytest.approx(3.5 / 4)
    assert found["100 clients, CNN, Ray"].target == 1.10
    assert {one.engine for one in asked} == {"ray", "flower", "vectorised"}
    monkeypatch.setattr(federation, "looking", lambda settings: settings.clients / 30)  # 0.1 s
    flower, ray, own = federation.shipping(quick=False)
    assert (flower.ratio, ray.ratio, own.ratio) == (pytest.approx(1.35), pytest.approx(1.35), 0.0)
    assert asked[-1].model == "resnet18"
    (one,) = federation.engines(quick=True)
    assert one.what.startswith("100 clients, CNN, digits, one process over Ray")
    assert (one.ratio, one.ours) == (1.0, pytest.approx(averages.median([3 / 3, 3 / 4])))
    lost = True
    with pytest.raises(RunError, match="round 1: 2 of 3 replied"):
        federation.rounds(quick=True)


def test_looking_at_validation_pictures_takes_time() -> None:
    assert 0 < federation.looking(Settings(clients=2, device="cpu")) < 60


def test_memory_of_a_small_run() -> None:
    (found,) = federation.memory(quick=True)
    assert found.what == "2 rounds in one process: MB a round after 1"
    assert found.ours > 50


def test_options_are_timed_beside_the_plain_step() -> None:
    found = options.options(quick=True)
    ways = [*options.WAYS, *(options.GPU_WAYS if device() == "cuda" else [])]
    assert [one.what.split(", ", 1)[1] for one in found] == [f"{title}, {device()}" for title in ways]
    assert all(one.ratio > 0 for one in found)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def test_faster_steps_are_the_same_but_for_rounding() -> None:
    ways = options.PLAIN, options.WAYS["fused SGD"], options.WAYS["torch.compile"]
    plain, *others = (options.TrainingStep("cnn", way, CPU, "aot_eager") for way in ways)
    plain()
    for other in others:
        other()
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain.values, other.values, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_makes_the_same_steps() -> None:
    cuda = torch.device("cuda")
    plain, graph = (options.TrainingStep("cnn", way, cuda) for way in (options.PLAIN, options.GPU_WAYS["CUDA graph"]))
    for _ in range(options.WARM):  # made before it was captured
        plain()
    plain(), graph()
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(plain.values, graph.values, strict=True))


def test_pieces() -> None:
    referred, sent = pieces.aggregation(quick=True)
    assert (referred.what, sent.what) == (
        "FedAvg of 20 replies, by reference",
        "FedAvg of 20 replies, as they are sent",
    )
    found = pieces.data_path(quick=True)
    assert len(found) == len(CORRUPTIONS) + 4
    assert all(one.ratio > 0 for one in (referred, sent, *found))
