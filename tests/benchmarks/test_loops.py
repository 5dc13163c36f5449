"""The naive loops against ours and against integrals known in closed form; inputs; timings."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from fedtta.benchmarks.speed import loops, naive
from fedtta.benchmarks.speed.measurement import one_core
from fedtta.models import TwoHead, build
from fedtta.tta.btfl import BTFL
from fedtta.tta.fedthe import FedTHE


@functools.cache
def made() -> loops.Inputs:
    return loops.make_inputs(30, seed=3)


@functools.cache
def expected(method: str) -> torch.Tensor:
    """What the naive loop predicts."""
    return loops.METHODS[method][1](*made().outputs(torch.float64), made().statistics)


@pytest.fixture
def inputs() -> loops.Inputs:
    return made()


@pytest.mark.parametrize("batch", [1, 7, 30])
@pytest.mark.parametrize("method", ["BTFL", "FedTHE"])
def test_naive_and_ours_agree(inputs: loops.Inputs, method: str, batch: int) -> None:
    ours = loops.METHODS[method][0](TwoHead(torch.nn.Identity(), loops.FEATURES, loops.CLASSES), inputs.statistics)
    for dtype in (torch.float32, torch.float64):
        loops.check_heads(method, ours, inputs.outputs(dtype), batch, expected(method))


def test_a_difference_is_refused_by_sample(inputs: loops.Inputs) -> None:
    ours = BTFL(TwoHead(torch.nn.Identity(), loops.FEATURES, loops.CLASSES), inputs.statistics)
    wrong = expected("BTFL").clone()
    wrong[4, 2] += 1e-5
    with pytest.raises(RuntimeError, match="BTFL, batch 7: sample 4 differs from the naive loop by 1e-05"):
        loops.check_heads("BTFL", ours, inputs.outputs(torch.float64), 7, wrong)
    wrong[4, 2] = float("nan")
    with pytest.raises(RuntimeError, match="sample 4"):
        loops.check_heads("BTFL", ours, inputs.outputs(torch.float64), 7, wrong)


def test_naive_posterior_mean_by_hand() -> None:
    # m / (m + 1 - m) = m at τ = 1, whose mean is a/(a+b); uniform m at τ = 2: ∫ m/(2-m) dm = 2 ln 2 - 1.
    assert naive._posterior_mean(3, 5, 1) == pytest.approx(3 / 8, abs=1e-12)
    assert naive._posterior_mean(1, 1, 2) == pytest.approx(2 * torch.tensor(2.0).double().log().item() - 1, abs=1e-12)


def test_inputs_are_like_a_networks_outputs(inputs: loops.Inputs) -> None:
    stream = loops.make_inputs(1000)
    assert bool((stream.z >= 0).all())
    assert 0.4 < float((stream.z == 0).double().mean()) < 0.8
    ours = BTFL(TwoHead(torch.nn.Identity(), loops.FEATURES, loops.CLASSES), stream.statistics)
    ours.interpolate(*stream.outputs(torch.float64))
    counts = torch.as_tensor(ours.report()["event"]).double().unique(return_counts=True)
    assert counts[0].tolist() == [-1, 0, 1]  # internal, none, external
    assert int(counts[1].min()) > 16  # the history is pruned on the way
    again = loops.make_inputs(1000)
    assert torch.equal(stream.logits_personal, again.logits_personal)
    assert not torch.equal(inputs.z[:5], again.z[:5])


def test_both_methods_are_measured_in_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    small = loops.make_inputs(20)
    monkeypatch.setattr(loops, "make_inputs", lambda samples: small)
    monkeypatch.setattr(loops, "TUNED", {})
    measured = loops.loops(quick=True)
    keys = [(row["method"], row["dtype"], row["batch"]) for row in measured.details["heads"]]
    assert keys == [(m, t, b) for m in ("BTFL", "FedTHE") for t in ("float32", "float64") for b in (1, 32, 1000)]
    assert [row["target"] for row in measured.details["heads"][:3]] == [0.1, None, 0.01]
    assert all(one.ratio == one.other / one.ours > 0 for one in measured.ratios)


@pytest.mark.parametrize("fails", [False, True])
def test_cores_and_threads_are_given_back(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    cores, asked = {0, 5}, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, wanted: asked.append(wanted), raising=False)
    threads = torch.get_num_threads()
    try:
        with one_core():
            assert (asked, torch.get_num_threads()) == ([{5}], 1)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (asked, torch.get_num_threads()) == ([{5}, cores], threads)


def test_fedthe_prediction_of_the_naive_loop_moves_with_history(inputs: loops.Inputs) -> None:
    z, g, p = inputs.outputs(torch.float64)
    whole = naive.fedthe(z[:4], g[:4], p[:4], inputs.statistics)
    alone = naive.fedthe(z[3:4], g[3:4], p[3:4], inputs.statistics)
    assert torch.allclose(whole.sum(1), torch.ones(4, dtype=torch.float64), atol=1e-12)
    assert not torch.allclose(whole[3:], alone, atol=1e-4)
    assert FedTHE is loops.METHODS["FedTHE"][0]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.2, 0.7]], ids=["MEMO", "FedTHE+"])
def test_the_naive_loop_tunes_as_the_adapters_do(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "VIEWS", 4)
    model = build("cnn", 10, seed=3)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    loops.check("both", model, images, torch.tensor(weights))
    monkeypatch.setattr(loops, "ours", lambda *one: lambda: loops.loop(*one)() + 1e-3)
    with pytest.raises(RuntimeError, match="both: ours and the naive loop differ by"):
        loops.check("both", model, images, torch.tensor(weights))


def test_loops_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "VIEWS", 2)
    found = [loops.tuned(name, 1, 1, torch.device("cpu")) for name in loops.TUNED]
    assert [one.what for one in found] == ["MEMO, 2 views, 3 steps, cpu", "FedTHE+, 2 views, 3 steps, cpu"]
    assert all(one.ratio > 0 and one.least for one in found)
