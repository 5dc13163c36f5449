"""`speed`: each part in its smallest form, and what is kept."""

from __future__ import annotations

import functools
import json
import statistics as averages
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.benchmarks.__main__ import main
from fedtta.benchmarks.speed import adapters, command, federation, mixing, options, pieces, sources
from fedtta.benchmarks.speed.measurement import Measured, Part, Ratio
from fedtta.data import CORRUPTIONS
from fedtta.models import build
from fedtta.server.events import RunError
from fedtta.settings import Settings, SettingsError
from fedtta.tta.registry import ADAPTERS

CPU = torch.device("cpu")


def ratio(what: str, value: float, target: float | None = None, least: bool = False) -> Ratio:
    return Ratio(what, value, "s", value, 1.0, "the other", target, least)


def test_a_target_is_reached_from_above_or_from_below() -> None:
    assert [ratio("a", value, 2.0).mark for value in (1.9, 2.0, 2.1)] == ["✓", "✓", "✗"]
    assert [ratio("a", value, 2.0, least=True).mark for value in (1.9, 2.0, 2.1)] == ["✗", "✓", "✓"]
    assert (ratio("a", 1.0).mark, ratio("a", 1.0).wanted) == ("", "")
    assert (ratio("a", 1.0, 2.0).wanted, ratio("a", 1.0, 2.0, least=True).wanted) == ("≤ 2", "≥ 2")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Parts that were measured, and whether with --quick; there are two."""
    found: list[tuple[str, bool]] = []

    def part(name: str, value: float) -> Part:
        def measure(quick: bool) -> Measured:
            found.append((name, quick))
            return Measured([ratio(name, value, 2.0)], {"extra": [1, 2]})

        return Part(f"title of {name}", measure)

    monkeypatch.setattr(command, "PARTS", {"one": part("one", 1.0), "two": part("two", 3.0)})
    return found


def test_parts_are_measured_and_kept_in_one_file(
    asked: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["speed", "--parts", "two", "--out", str(tmp_path)]) == 0
    assert main(["speed", "--parts", "one", "--quick", "--out", str(tmp_path)]) == 0
    assert asked == [("two", False), ("one", True)]
    content = json.loads((tmp_path / "speed.json").read_text())
    assert list(content) == ["one", "two"]
    assert (content["two"]["ratios"][0]["ratio"], content["two"]["details"]) == (3.0, {"extra": [1, 2]})
    assert content["two"]["hardware"]
    assert "| two | 3 | ≤ 2 ✗ | 3 s | 1: the other |" in command.speed_page(content)
    assert "title of two" in capsys.readouterr().out
    assert main(["speed", "--parts", "one,three", "--out", str(tmp_path)]) == 2
    assert "--parts three: allowed are one, two" in capsys.readouterr().err
    (tmp_path / "speed.json").write_text('{"one": {"ratios": [{"what": 1}]}}')
    assert main(["speed", "--parts", "one", "--out", str(tmp_path)]) == 2
    assert "speed.json cannot be read" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_a_part_that_fails_is_not_kept(asked: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(quick: bool) -> Measured:
        raise RunError("1 lost")

    monkeypatch.setitem(command.PARTS, "two", Part("", measure))
    assert main(["speed", "--out", str(tmp_path)]) == 1
    assert list(command.read_speed(tmp_path / "speed.json")) == ["one"]


def test_committed_measurements_are_those_of_the_parts() -> None:
    content = command.read_speed()
    assert list(content) == list(command.PARTS)
    assert content["deployment"]["details"]["medians"]["over_floor"] == 1.1270554914749733
    assert content["mixing"]["details"]["costs"][0]["seconds"] == 1.4419200880001881
    assert content["agent"]["details"]["cases"][0]["latencies"][0]["p50_ms"] == 1.9425799982855096
    assert content["rounds"]["details"]["20 clients, CNN, CIFAR-10, Ray"]["ratio_median"] == 1.0430043702426022
    assert [one["ratio"] for one in content["bbn"]["ratios"]] == [2.319044072560044, 2.3498583474207813]
    assert len(content["adapters"]["ratios"]) == 51


def test_adapters_beside_the_bare_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: ADAPTERS[name] for name in ("none", "btfl", "memo", "tent")}
    monkeypatch.setattr(adapters, "ADAPTERS", few)
    make_setup = adapters.make_setup
    monkeypatch.setattr(adapters, "make_setup", lambda *about: replace(make_setup(*about), memorised=60))
    monkeypatch.setattr(adapters, "STREAMS", {1: 2, 64: 64})
    found = adapters.adapters(quick=True).ratios
    assert [one.what for one in found] == ["btfl, batch 1", "memo, batch 1", "btfl, batch 64"]  # Tent does not fit
    assert all(one.ratio > 0 and one.ours > 0 for one in found)
    assert found[0].target == 2.0
    measured = adapters.methods(quick=True)
    assert set(measured.details["adapters"]) == {"none", "btfl"}
    assert (measured.details["model_options"], measured.ratios[0].ratio) == ("norm=batch", 1.0)
    with pytest.raises(SettingsError, match=r"model-options = 'depth=8': .*depth"):
        adapters.measure(adapters.make_setup("cnn", "depth=8", 2, 1), 1, ["btfl"])


def test_seconds_are_multiples_of_btfl(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(setup: Any, repeats: int, only: Any) -> dict[str, adapters.Cost]:
        return {name: adapters.Cost(0.0, value, 1.0, 1.0, 0.0) for name, value in times.items()}

    times = {"none": 1.0, "ttt": 6.0, "memo": 20.0, "fedthe": 1.0, "btfl": 2.0}
    monkeypatch.setattr(adapters, "measure", measure)
    found = {one.what: one for one in adapters.seconds(quick=True).ratios}
    assert (found["memo, cnn"].ratio, found["memo, cnn"].ours) == (10.0, 20.0)
    assert found["memo, cnn"].than == "BTFL; the paper: 9.3 times BTFL"  # 160.99 / 17.30
    assert found["fedthe, cnn"].ratio == 0.5


@functools.cache
def trained(rotation_head: bool) -> adapters.Client:
    """A client for all adapters with such a network; most of the time is its statistics."""
    setup = replace(adapters.make_setup("cnn", None, 4, 2), memorised=60)
    return adapters.Client.of(setup, rotation_head)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("none", 1, 0),
        ("fedthe", 1, 0),  # its gradient is analytic
        ("btfl", 1, 0),
        ("em", 1, 0),
        ("tent", 1, 1),
        ("bbn", 4, 2),  # teacher twice, student, source; gradients of student and teacher
        ("fedicon", 3, 2),  # two views, then the image
        ("memo", 3 * 32 + 1, 3 * 32),  # three steps on 32 views, then the image
        ("ttt", 32 + 1, 32),
    ],
)
def test_images_through_the_network_per_predicted_image(name: str, forward: int, backward: int) -> None:
    client = trained(ADAPTERS[name].needs >= {"rotation_head"})
    x = torch.rand(4, 3, adapters.SIDE, adapters.SIDE, generator=torch.Generator().manual_seed(2))
    assert adapters.count_passes(client, name, x, 2) == (forward, backward)
    assert not client.device.model.encoder._forward_hooks


def test_bbn_beside_a_plain_pass() -> None:
    measured = adapters.bbn(quick=True)
    assert [one.target for one in measured.ratios] == [3.5, None]
    assert all(one.ratio > 0 for one in measured.ratios)
    assert measured.details["timings"][0]["ratio"] == 1
    model = build("shallow-cnn", 10, seed=0).eval()
    gradients = adapters.plain_pass(model, torch.rand(4, 3, 32, 32), torch.arange(4))
    missing = [name for (name, _), g in zip(model.named_parameters(), gradients, strict=True) if g is None]
    assert missing == ["personal_head.weight"]


def test_mixing_is_checked_and_its_memory_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = mixing.mixing(quick=True)
    steps = ["W of FedAMP", "W of pFedGraph", "D of pFedBBN", "W of pFedBBN", "mixtures"]
    assert [one["step"] for one in measured.details["costs"]] == steps
    assert measured.ratios[-1].ratio >= 1, "the mixtures themselves are counted"
    assert measured.details["channels"] == 64 + 128 + 256 + 512
    held = np.ones(1 << 20)
    result, cost = mixing.cost_of("sum", lambda: held[: 1 << 16] + 1)
    assert result.nbytes <= cost.peak_bytes < 2 * result.nbytes
    monkeypatch.setattr(mixing, "fedamp_weights", lambda shared: np.eye(len(shared)))
    with pytest.raises(RuntimeError, match="W of FedAMP: differs from the formula"):
        mixing.measure(mixing.make_inputs(10, 400, 2))


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

    monkeypatch.setattr("fedtta.simulation.simulate", simulate)
    found = {one.what: one for one in federation.rounds(quick=False).ratios}
    assert found["100 clients, CNN, Ray"].ratio == pytest.approx(3.5 / 2)
    assert found["100 clients, CNN, one process"].ratio == pytest.approx(3.5 / 4)
    assert found["100 clients, CNN, Ray"].target == 1.10
    assert found["20 clients, CNN, CIFAR-10, Ray"].target == 1.25
    assert {one.engine for one in asked} == {"ray", "flower", "vectorised"}
    monkeypatch.setattr(federation, "validation_seconds", lambda settings: settings.clients / 30)  # 0.1 s
    flower, ray, own = federation.shipping(quick=False).ratios
    assert (flower.ratio, ray.ratio, own.ratio) == (pytest.approx(1.35), pytest.approx(1.35), 0.0)
    assert asked[-1].model == "resnet18"
    (one,) = federation.engines(quick=True).ratios
    assert one.what.startswith("100 clients, CNN, digits, one process over Ray")
    assert (one.ratio, one.ours) == (1.0, pytest.approx(averages.median([3 / 3, 3 / 4])))
    lost = True
    with pytest.raises(RunError, match="round 1: 2 of 3 replied"):
        federation.rounds(quick=True)


def test_validation_takes_time() -> None:
    assert 0 < federation.validation_seconds(Settings(clients=2, device="cpu")) < 60


def test_memory_of_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(federation.BASE, "fraction", 0.2)
    (found,) = federation.memory(quick=True).ratios
    assert found.what == "2 rounds in one process: MB a round after 1"
    assert found.ours > 50


def test_a_devices_images_are_read_within_the_bound() -> None:
    measured = sources.sources(quick=True)
    (found,) = measured.ratios
    assert found.what == "60 images of 16 x 16, scanned and read once"
    assert (found.other, found.mark) == (1 + sources.BEYOND, "✓")
    assert measured.details["peak_mib"] >= measured.details["before_mib"] > 50
    assert min(measured.details[f"{name}_seconds"] for name in ("scan", "rescan", "epoch")) > 0


def test_options_are_timed_beside_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "NETWORKS", ("shallow-cnn",))
    monkeypatch.setattr(options, "BATCH", 4)
    found = options.options(quick=True).ratios
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
    referred, sent = pieces.aggregation(quick=True).ratios
    assert (referred.what, sent.what) == (
        "FedAvg of 20 replies, by reference",
        "FedAvg of 20 replies, as they are sent",
    )
    found = pieces.data_path(quick=True).ratios
    assert len(found) == len(CORRUPTIONS) + 4
    assert all(one.ratio > 0 for one in (referred, sent, *found))
