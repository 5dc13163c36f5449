"""`gpu`: parts in processes of their own, what is kept of them, and its page; the parts themselves run in `.ci/run`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from docs import generated
from fedtta.benchmarks.__main__ import main
from fedtta.benchmarks.gpu import command as gpu
from fedtta.benchmarks.gpu import parts as gpu_parts
from fedtta.benchmarks.gpu import process
from fedtta.benchmarks.gpu.process import Case, GpuPart, NotPretended, Run
from fedtta.benchmarks.provenance import RESULTS
from fedtta.benchmarks.speed import loops, options
from fedtta.benchmarks.speed.measurement import Ratio
from fedtta.server.events import RunError
from fedtta.settings import SettingsError
from fedtta.tta import Adapter

MEASURE = process.measure


def measured_here(*arguments: Any) -> None:
    """`measure` with a GPU of which a name is all there is."""
    named = mock.patch.object(torch.cuda, "get_device_name", return_value="pretended")
    with mock.patch.object(process, "pretended_gpu", return_value=named):
        MEASURE(*arguments)


def one(value: float = 1.5) -> Iterator[Ratio | Mapping[str, Any]]:
    yield Ratio("one", value, "s", value, 1.0, "the other", 2.0)
    yield {"extra": value}


def wrong() -> Iterator[Ratio]:
    yield Ratio("before it failed", 1.0, "s", 1.0, 1.0, "the other")
    raise ValueError("3 is none")


def real() -> Iterator[Ratio]:
    raise NotPretended
    yield


def good_cases(run: Run) -> Mapping[str, Case]:
    assert not torch.cuda._is_in_bad_fork(), "a process that was asked for its GPUs cannot be forked"
    assert run.data == {"dataset": "digits"}
    return {"one": lambda _: one(), "graph": lambda _: real()}


def bad_cases(run: Run) -> Mapping[str, Case]:
    return {"wrong": lambda _: wrong(), "nan": lambda _: one(float("nan")), "one": lambda _: one()}


def dying_cases(run: Run) -> Mapping[str, Case]:
    return {
        "one": lambda _: one(),
        "dies": lambda _: [{}] if os.kill(os.getpid(), signal.SIGKILL) else [],
        "later": lambda _: one(),
    }


def slow_cases(run: Run) -> Mapping[str, Case]:
    def sleep(_: float) -> list[Ratio]:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)
        return []

    return {"one": lambda _: one(), "slow": sleep, "later": lambda _: one()}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"good": good_cases, "bad": bad_cases, "dying": dying_cases, "slow": slow_cases}
    own = {name: GpuPart(f"title of {name}", 9, one) for name, one in cases.items()}
    monkeypatch.setattr(gpu, "PARTS", own)
    monkeypatch.setattr(process, "measure", measured_here)
    monkeypatch.setattr(gpu, "PATIENCE", 4)
    monkeypatch.setattr(gpu, "GRACE", 0.5)


def kept(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "gpu-pretended.json").read_text())["parts"])


@pytest.mark.parametrize(
    ("name", "owner", "work"),
    [
        ("equal", options.TrainingStep, "__call__"), ("equal", Adapter, "predict"), ("images", Adapter, "predict"),
        ("views", loops, "tune_and_predict"),
    ],
)  # fmt: skip
def test_networks_and_images_have_the_memory_format_of_runs(
    name: str, owner: Any, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = getattr(owner, work), list[bool]()

    def noted(*given: Any) -> Any:
        values = [*given, *vars(given[0]).values()]
        values += [own for one in values if isinstance(one, nn.Module) for own in one.parameters()]
        images = [one for one in values if isinstance(one, torch.Tensor) and one.ndim == 4]
        seen.extend(one.is_contiguous(memory_format=torch.channels_last) for one in images)
        return real(*given)

    monkeypatch.setattr(owner, work, noted)
    for case in gpu.PARTS[name].cases(Run(torch.device("cpu"), pretended=True)).values():
        list(case(1.0))
    assert seen
    assert all(seen)


def test_a_part_that_fails_costs_no_other(parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--pretend", "--out", str(tmp_path)]
    assert main(["gpu", "--parts", "good", *out]) == 0
    first = kept(tmp_path)["good"]
    assert (first["status"], [row["ratio"] for row in first["ratios"]]) == ("whole", [1.5])
    assert (first["details"], first["not_pretended"], first["data"]) == ({"extra": 1.5}, ["graph"], "digits")
    assert main(["gpu", "--parts", "dying,slow,bad", *out]) == 1
    assert "gpu failed: dying, slow, bad" in capsys.readouterr().err
    found = kept(tmp_path)
    assert list(found) == ["good", "bad", "dying", "slow"]
    assert found["good"] == first
    errors = {name: one["errors"] for name, one in found.items()}
    assert errors["bad"]["wrong"] == "ValueError: 3 is none"
    assert errors["bad"]["nan"].startswith("ValueError: Out of range float values")
    assert "in wrong" in found["bad"]["details"]["traceback of wrong"]
    assert errors["dying"] == {"dies": "its process ended with status -9"}
    assert errors["slow"] == {"slow": "the 4 s of the part were over"}
    assert [len(found[name]["ratios"]) for name in ("bad", "dying", "slow")] == [2, 1, 1]
    assert [found[name]["left_out"] for name in ("bad", "dying", "slow")] == [[], ["later"], ["later"]]
    page = (tmp_path / "gpu-pretended.md").read_text()
    assert "**Pretended: a CPU computed this" in page
    assert "| one | 1.5 | ≤ 2 ✓ | 1.5 s | 1: the other |" in page
    for line in ("Failed: wrong: ValueError: 3 is none", "Not on a pretended GPU: graph.", "lack of time: later."):
        assert f"{line}\n" in page, line


def test_a_case_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first case takes all the time that there is."""
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    clock = [0.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: clock[0])

    def late(seconds: float) -> list[Mapping[str, Any]]:
        clock[0] = 100.0
        return [{"share": seconds}]

    sent: list[tuple[str, Any]] = []
    sender: Any = mock.Mock(send=sent.append)
    part = GpuPart("", 100, lambda run: {"late": late, "one": lambda _: one()})
    measured_here(sender, part, 100, True)
    assert [(kind, value) for kind, value in sent if kind in ("case", "details")] == [
        ("case", "late"), ("details", {"share": 45.0}),
    ]  # fmt: skip
    assert sent[-1][0] == "end"


def test_what_is_pretended_never_looks_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["gpu", "--pretend", "--out", str(RESULTS)]) == 2
    assert "measured results are kept there" in capsys.readouterr().err
    for wrong in (True, False):
        (tmp_path / "gpu.json").write_text(json.dumps({"pretended": wrong, "gpu": "pretended", "parts": {}}))
        with pytest.raises(SettingsError, match=f"pretended = {wrong}; allowed here is {not wrong}"):
            gpu.read_gpu(tmp_path / "gpu.json", not wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu", "--out", str(tmp_path / "out")]) == 1
    assert "there is no GPU here" in capsys.readouterr().err
    assert main(["gpu", "--minutes", "0"]) == 2
    assert "--minutes 0: allowed are numbers above 0" in capsys.readouterr().err
    assert main(["gpu", "--parts", "equal,none"]) == 2
    assert "--parts none: allowed are tests, equal" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    other: dict[str, Any] = {"pretended": False, "gpu": "A", "parts": {"equal": {}}}
    with pytest.raises(SettingsError, match=r"holds parts of A, this is B: choose another --out"):
        gpu.Measuring(Path("gpu.json"), "equal", gpu.PARTS["equal"], False, other)._check("B")


def test_the_page_without_a_gpu_says_so() -> None:
    """The site has the page whether or not a GPU has been measured."""
    content = gpu.read_gpu()
    assert not content["pretended"]
    assert (gpu.NOTHING in generated.kept()["gpu"]) == (content["parts"] == {})
    assert "# GPU" not in generated.kept()["gpu"]
    assert "results/gpu.md" in generated.pages()


def test_all_parts_fit_into_25_minutes_and_each_into_ten() -> None:
    seconds = [part.seconds for part in gpu.PARTS.values()]
    assert sum(seconds) <= 25 * 60 - 10 * len(seconds)  # and ten seconds for the start of each
    assert max(seconds) < 600


def test_parts_share_the_minutes_that_there_are(
    parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two parts of nine seconds each; more minutes than they take do not make them longer."""
    monkeypatch.setattr(gpu.Measuring, "run", lambda self: "whole")
    for minutes, seconds in (("0.15", 5), ("0.3", 9), ("24", 9)):
        assert main(["gpu", "--parts", "good,bad", "--pretend", "--out", str(tmp_path), "--minutes", minutes]) == 0
        assert capsys.readouterr().out.count(f", at most {seconds} s\n") == 2


def test_tests_are_counted_and_failures_named(tmp_path: Path) -> None:
    path = tmp_path / "test_few.py"
    path.write_text("import os\ndef test_a(): assert os.environ['FEDTTA_TEST_DEVICE'] == 'cuda'\ndef test_b(): 1 / 0\n")
    found: list[Any] = []
    with pytest.raises(RunError, match="2 tests: pytest ended with status 1, 1 failed"):
        found.extend(gpu_parts.tested([str(path)], False, 60))  # keeps what came before the error
    counts, names, ratio, output = found
    assert counts == {"outcomes": {"FAILED": 1, "PASSED": 1}}
    assert [name.rpartition("/")[2] for name in names["not passed"]] == ["test_few.py::test_b"]
    assert (ratio.ours, ratio.other, ratio.mark) == (1, 2, "✗")
    assert "ZeroDivisionError" in output["output"]


def test_a_result_beyond_its_tolerance_fails() -> None:
    expected = torch.tensor([[0.5, 0.5]])
    assert gpu_parts.apart("x", expected + 1e-5, expected, 1e-4).mark == "✓"
    for wrong in (expected + 1e-3, expected * float("nan")):
        with pytest.raises(RunError, match="x: a probability differs from the CPU's by"):
            gpu_parts.apart("x", wrong, expected, 1e-4)


def test_work_is_repeated_as_long_as_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 2))
    monkeypatch.setattr(gpu_parts.time, "perf_counter", lambda: next(ticks))
    assert gpu_parts.timed_within(lambda: None, 7.0) == [2, 2, 2]
    assert gpu_parts.timed_within(lambda: None, 0.0) == [2]
