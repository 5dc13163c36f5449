"""The naive loops against ours and against integrals known in closed form; the inputs; the record of timings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import heads
from benchmarks.__main__ import parser
from benchmarks.speed import naive
from models import TwoHead
from tta.btfl import BTFL
from tta.fedthe import FedTHE


@pytest.fixture(scope="module")
def inputs() -> heads.Inputs:
    return heads.make_inputs(60, seed=3)


@pytest.mark.parametrize("batch", [1, 7, 60])
@pytest.mark.parametrize("method", ["BTFL", "FedTHE"])
def test_naive_and_ours_agree(inputs: heads.Inputs, method: str, batch: int) -> None:
    adapter, loop = heads.METHODS[method]
    ours = adapter(TwoHead(torch.nn.Identity(), heads.FEATURES, heads.CLASSES), inputs.statistics)
    for dtype in (torch.float32, torch.float64):
        heads.check(method, ours, inputs.outputs(dtype), batch, loop(*inputs.outputs(torch.float64), inputs.statistics))


def test_a_difference_is_refused_by_sample(inputs: heads.Inputs) -> None:
    ours = BTFL(TwoHead(torch.nn.Identity(), heads.FEATURES, heads.CLASSES), inputs.statistics)
    expected = naive.btfl(*inputs.outputs(torch.float64), inputs.statistics)
    expected[4, 2] += 1e-5
    with pytest.raises(RuntimeError, match="BTFL, batch 7: sample 4 differs from the naive loop by 1e-05"):
        heads.check("BTFL", ours, inputs.outputs(torch.float64), 7, expected)
    expected[4, 2] = float("nan")
    with pytest.raises(RuntimeError, match="sample 4"):
        heads.check("BTFL", ours, inputs.outputs(torch.float64), 7, expected)


def test_naive_posterior_mean_by_hand() -> None:
    # m / (m + 1 - m) = m at τ = 1, whose mean is a/(a+b); uniform m at τ = 2: ∫ m/(2-m) dm = 2 ln 2 - 1.
    assert naive._posterior_mean(3, 5, 1) == pytest.approx(3 / 8, abs=1e-12)
    assert naive._posterior_mean(1, 1, 2) == pytest.approx(2 * torch.tensor(2.0).double().log().item() - 1, abs=1e-12)


def test_inputs_are_like_a_networks_outputs(inputs: heads.Inputs) -> None:
    stream = heads.make_inputs(1000)
    assert bool((stream.z >= 0).all())
    assert 0.4 < float((stream.z == 0).double().mean()) < 0.8
    ours = BTFL(TwoHead(torch.nn.Identity(), heads.FEATURES, heads.CLASSES), stream.statistics)
    ours.interpolate(*stream.outputs(torch.float64))
    counts = torch.as_tensor(ours.report()["event"]).double().unique(return_counts=True)
    assert counts[0].tolist() == [-1, 0, 1]  # internal, none, external
    assert int(counts[1].min()) > 16  # the history is pruned on the way
    again = heads.make_inputs(1000)
    assert torch.equal(stream.logits_personal, again.logits_personal)
    assert not torch.equal(inputs.z[:5], again.z[:5])


def test_measure_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = heads.make_inputs(20)
    monkeypatch.setattr(heads, "make_inputs", lambda samples: small)
    console = Console(width=120, quiet=True)
    heads.run(parser().parse_args(["heads", "--out", str(tmp_path)]), console)
    content = json.loads((tmp_path / "heads.json").read_text())
    keys = [(row["method"], row["dtype"], row["batch"]) for row in content["timings"]]
    assert keys == [(m, t, b) for m in ("BTFL", "FedTHE") for t in ("float32", "float64") for b in (1, 32, 1000)]
    assert [row["target"] for row in content["timings"][:3]] == [0.1, None, 0.01]
    assert all(row["ratio"] == row["naive_seconds"] / row["seconds"] > 0 for row in content["timings"])
    assert {"torch", "numpy", "scipy"} <= set(content["versions"])
    assert content["hardware"]


@pytest.mark.parametrize("fails", [False, True])
def test_cores_and_threads_are_given_back(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    cores, asked = {0, 5}, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, wanted: asked.append(wanted), raising=False)
    threads = torch.get_num_threads()
    try:
        with heads.one_core():
            assert (asked, torch.get_num_threads()) == ([{5}], 1)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (asked, torch.get_num_threads()) == ([{5}, cores], threads)


def test_table_marks_what_reaches_its_target() -> None:
    rows = [heads.Timing("BTFL", "float32", 1, s, 2.0, t) for s, t in ((0.1, 0.1), (0.2, 0.1), (0.3, None))]
    table = heads.rendered(rows)
    assert list(table.columns[-1].cells) == ["✓", "✗", ""]
    assert list(table.columns[5].cells) == ["20", "10", "7"]


def test_fedthe_prediction_of_the_naive_loop_moves_with_history(inputs: heads.Inputs) -> None:
    z, g, p = inputs.outputs(torch.float64)
    whole = naive.fedthe(z[:4], g[:4], p[:4], inputs.statistics)
    alone = naive.fedthe(z[3:4], g[3:4], p[3:4], inputs.statistics)
    assert torch.allclose(whole.sum(1), torch.ones(4, dtype=torch.float64), atol=1e-12)
    assert not torch.allclose(whole[3:], alone, atol=1e-4)
    assert FedTHE is heads.METHODS["FedTHE"][0]
