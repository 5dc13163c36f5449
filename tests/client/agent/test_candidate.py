"""Whether a new model may be served: what its check and its trial refuse, and what they must not refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client.agent.candidate import LEAST, MOST, Check, Samples, Shadow, check, spaced
from fedtta.client.agent.live import Live
from fedtta.client.config import Acceptance
from fedtta.client.serving import Served
from fedtta.models import TwoHead
from tests.client.agent.world import labels, sample_images, served

LIMITS = Acceptance()


def changed(change: Callable[[TwoHead], None], adapter: str = "none") -> Served:
    """The trained client's model with a change of its network."""
    network = copy.deepcopy(served(adapter).network)
    with torch.no_grad():
        change(network)
    return replace(served(adapter), network=network)


def one_class(network: TwoHead) -> None:
    network.head.bias[3] += 1000


def rolled(network: TwoHead) -> None:
    """Every class is taken for its neighbour."""
    network.head.weight.copy_(network.head.weight.roll(1, 0))
    network.head.bias.copy_(network.head.bias.roll(1, 0))


def unsure(network: TwoHead) -> None:
    network.head.weight.mul_(1e-3)
    network.head.bias.mul_(1e-3)


def nan(network: TwoHead) -> None:
    network.head.weight[2, 1] = torch.nan


def overflow(network: TwoHead) -> None:
    """Finite weights whose output is not."""
    network.head.weight.fill_(3e38)


def samples(count: int = 60, known: bool = True) -> Samples:
    return Samples(sample_images(0, count), labels(0, count) if known else None)


def verdict(candidate: Served, before: Served | None, on: Samples, **limits: float) -> Check:
    return check(candidate, before, on, replace(LIMITS, **limits))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_good_model_is_accepted_with_figures(known: bool, before: bool) -> None:
    found = verdict(served("none"), served("none") if before else None, samples(known=known))
    assert found.reason == ""
    assert found.figures["samples"] == 60
    assert found.figures["one_class"] < 0.5
    assert ("agreement" in found.figures) == before
    assert found.figures.get("agreement", 1.0) == 1.0
    assert ("accuracy" in found.figures) == known
    assert ("served_accuracy" in found.figures) == (known and before)
    if known:
        p = torch.softmax(served("none").network(torch.from_numpy(sample_images(0, 60).astype(np.float32) / 255)), 1)
        right = (p.argmax(1).numpy() == labels(0, 60)).mean()
        assert found.figures["accuracy"] == found.figures.get("served_accuracy", right) == pytest.approx(right)
        assert found.figures["confidence"] == pytest.approx(float(p.max(1).values.mean()), abs=1e-6)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [(nan, "head.weight: not finite"), (overflow, "its output is not finite"), (one_class, "it predicts '3' for 100%")],
)
def test_what_no_device_serves(change: Callable[[TwoHead], None], reason: str, known: bool) -> None:
    for before in (None, served("none")):
        assert reason in verdict(changed(change), before, samples(known=known)).reason
    if change is not one_class:  # which takes samples to see
        assert reason in verdict(changed(change), None, Samples.none((3, 16, 16))).reason


def test_private_values_are_finite_too() -> None:
    good = served("fedthe")
    assert good.statistics is not None
    bad = replace(good.statistics, **{"descriptor_local": torch.full_like(good.statistics.descriptor_local, torch.nan)})
    assert "not finite" in verdict(replace(good, statistics=bad), None, samples()).reason


def test_an_adapter_that_lacks_what_it_needs_says_so() -> None:
    lacking = replace(served("fedthe"), statistics=None)
    assert verdict(lacking, None, samples()).reason.startswith("its adapter does not predict: ")


def test_a_less_accurate_model_is_refused_where_labels_are_known() -> None:
    found = verdict(changed(rolled), served("none"), samples())
    assert found.reason.startswith("accuracy 0.0")
    assert "on 60 validation samples, the served model has 0." in found.reason
    assert verdict(changed(rolled), None, samples()).reason == ""  # nothing to compare with
    assert verdict(served("none"), changed(rolled), samples()).reason == ""  # better


def test_the_margin_decides_but_never_for_one_sample() -> None:
    x, right = sample_images(0, 10), served("none").network(torch.from_numpy(sample_images(0, 10) / np.float32(255)))
    y = right.argmax(1).numpy()
    worse = y.copy()
    worse[0] = (worse[0] + 1) % 10  # the candidate's predictions differ from these in `wrong` places

    def against(wrong: int, margin: float) -> str:
        pixels, truth = x, y.copy()
        other = changed(rolled)
        both = Samples(np.concatenate([pixels[:wrong]]), truth[:wrong])
        return verdict(other, served("none"), both, margin=margin).reason

    assert against(1, 0.0) == ""
    assert against(2, 0.05).startswith("accuracy 0.000 on 2")
    assert against(10, 1.0) == ""


def test_without_labels_agreement_and_confidence_count() -> None:
    found = verdict(changed(rolled), served("none"), samples(known=False))
    assert found.reason == "it agrees with the served model on 0% of 60 samples"
    assert verdict(changed(rolled), served("none"), samples(known=False), agreement=0.0).reason == ""
    assert "close to guessing" in verdict(changed(unsure), served("none"), samples(known=False)).reason
    assert verdict(changed(unsure), served("none"), samples(known=True)).reason == ""  # as accurate


def test_few_samples_do_not_condemn() -> None:
    few = samples(LEAST - 1, known=False)
    assert verdict(changed(one_class), served("none"), few).reason == ""
    assert verdict(changed(rolled), served("none"), few).reason == ""


def test_a_device_of_one_class_may_have_a_model_that_predicts_it() -> None:
    every = np.full(60, 3)
    pixels = sample_images(0, 60)
    assert verdict(changed(one_class), None, Samples(pixels, every)).reason == ""
    assert verdict(changed(one_class), changed(one_class), Samples(pixels)).reason == ""  # as the served one does
    assert "usual is 0%" in verdict(changed(one_class), None, Samples(pixels, np.full(60, 4))).reason
    assert verdict(changed(one_class), None, Samples(pixels), one_class=1.0).reason == ""


def test_models_of_other_classes_are_not_compared() -> None:
    other = replace(changed(rolled), classes=tuple("abcdefghij"))
    found = verdict(other, served("none"), samples(known=False))
    assert (found.reason, "agreement" in found.figures) == ("", False)


@pytest.mark.parametrize("adapter", ["fedthe", "tent", "cotta", "bbn"])
def test_a_check_leaves_both_models_as_they_are(adapter: str) -> None:
    before, after = served(adapter).digest(), changed(unsure, adapter)
    digest = after.digest()
    check(after, served(adapter), samples(), LIMITS)
    assert (served(adapter).digest(), after.digest()) == (before, digest)


def test_samples_are_spread_over_a_large_split() -> None:
    index = np.arange(10, 10 + 5 * MOST)
    chosen = spaced(index)
    assert (len(chosen), chosen[0], chosen[-1]) == (MOST, 10, index[-1])
    assert spaced(np.arange(3)).tolist() == [0, 1, 2]


def trial(model: Served, labelled: bool = False, wanted: int = 40) -> Shadow:
    return Shadow(Live(model, None, lambda text: None), wanted, labelled)


def answered(pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return torch.softmax(served("none").network(torch.from_numpy(pixels)), 1).numpy()


@pytest.mark.parametrize(
    ("change", "labelled", "reason"),
    [
        (lambda network: None, False, ""),
        (one_class, False, "in shadow it predicted '3' for 100% of 40 samples"),
        (rolled, False, "in shadow it agreed on 0% of 40 samples"),
        (rolled, True, ""),  # its accuracy has been measured, and the served model may be the wrong one
    ],
)
def test_a_trial_ends_after_its_samples(change: Any, labelled: bool, reason: str) -> None:
    shadow = trial(changed(change), labelled)
    for begin in range(0, 40, 10):
        assert not shadow.ended
        pixels = sample_images(begin, 10).astype(np.float32) / np.float32(255)
        shadow.predict(pixels, answered(pixels))
    assert shadow.ended
    found = shadow.result(LIMITS)
    assert found.reason == reason
    assert found.figures["shadow_samples"] == 40
    if reason == "" and not labelled:
        assert found.figures["shadow_agreement"] == 1.0


def test_a_trial_that_fails_ends_and_raises_nothing() -> None:
    shadow = trial(served("none"))
    shadow.predict(np.zeros((2, 1, 4, 4), np.float32), np.zeros((2, 10), np.float32))
    assert shadow.ended
    assert shadow.result(LIMITS).reason.startswith("failed in shadow: ")
