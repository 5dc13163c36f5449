"""auto: the choice against an independent loop, what it never does, and when probes begin."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import chi2
from torch import Tensor, nn

from fedtta import tta
from fedtta.models.two_head import TwoHead
from fedtta.tta import base
from fedtta.tta.arrays import copied
from fedtta.tta.auto import (
    LEVEL,
    Auto,
    Candidates,
    Gains,
    calibrate_gains,
    chi_square_quantile,
    class_weights,
    likely_shares,
)
from fedtta.tta.drift import DriftTest, outputs
from fedtta.tta.estimates import Calibration, class_shares, judged, with_new_shares
from fedtta.tta.modules import zero_rates
from tests.tta.networks import images, two_head_network

K = 4
ALL = ("none", "personal", "fixed_mix", "t3a", "pausing")
#: As what each predicts; one is not known to need no more of the network than its outputs.
ADAPTERS = {**{name: name for name in ALL}, "pausing": "t3a"}


def network(seed: int = 0) -> TwoHead:
    """Features are the samples themselves; the heads disagree on many."""
    model = TwoHead(nn.Identity(), 5, K).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (model.head.weight, model.personal_head.weight):
            value.copy_(2 * torch.randn(value.shape, generator=draw, dtype=torch.float64))
        model.head.bias.zero_()
    return model.eval()


def samples(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(model: TwoHead, names: tuple[str, ...] = ALL) -> Candidates:
    """Candidates, calibrated on samples whose label is what the personal head says, with exceptions."""
    makers: dict[str, Any] = {
        name: (lambda network, name=name: tta.create(ADAPTERS[name], network, record=False)) for name in names
    }
    x = samples(60, seed=2)
    labels = model.personal_head(x).argmax(1)
    labels[::7] = (labels[::7] + 1) % K
    predicted = {name: tta.create(ADAPTERS[name], model).predict(x).numpy() for name in names}
    return Candidates(makers, calibrate_gains(predicted, labels.numpy()))


def given(p: np.ndarray, q: Sequence[float]) -> np.ndarray:
    """Probabilities given class shares."""
    rows: np.ndarray = p * np.asarray(q)
    return rows / rows.sum(1, keepdims=True)


def shares(p: np.ndarray) -> list[float]:
    """Expectation maximization for a hundred steps."""
    q = [1 / K] * K
    for _ in range(99):
        q = given(p, q).mean(0).tolist()
    return q


def log_likelihood(p: np.ndarray, q: Sequence[float]) -> float:
    return float(np.log(p @ np.asarray(q)).sum())


def variance_of_mean(values: list[float], low: float, high: float) -> float:
    more = [*values, low, high]
    mean = sum(more) / len(more)
    return sum((one - mean) ** 2 for one in more) / len(more) ** 2


def by_hand(
    model: TwoHead, stream: Tensor, probe: int, every: int, caution: float, drift: int = 0
) -> tuple[list[int], Tensor]:
    """The rule as it is stated, sample by sample, with adapters of its own: choices and predictions.

    There may be drift, found after so many samples.
    """
    candidates = made(model)
    own = {name: tta.create(ADAPTERS[name], model) for name in ALL}
    seen, choice, choices, rows = 0, "none", [], []
    past: dict[str, list[np.ndarray]] = {name: [] for name in ALL}
    for position, x in enumerate(stream.split(1)):
        if drift and position == drift:
            past, seen = {name: [] for name in ALL}, 0
            for name in {*ALL} - {choice}:
                own[name].reset()
        elif every and seen >= every:
            if choice != "pausing":
                own["pausing"].reset()
            seen = 0
        running = [name for name in ALL if seen < probe or name in (*ALL[:4], choice)]
        found = {name: own[name].predict(x).numpy() for name in running}
        for name in ALL:
            past[name] = [*past[name], *found[name]][-probe:] if name in running else []
        seen += 1
        if seen % max(1, min(seen, probe) // 20) == 0:
            choice = best_by_hand(candidates, past, running, caution)
        choices.append(ALL.index(choice))
        rows.append(torch.from_numpy(found[choice]))
    return choices, torch.cat(rows)


def best_by_hand(candidates: Candidates, past: dict[str, list[np.ndarray]], running: list[str], caution: float) -> str:
    plain, own = given(np.stack(past["none"]), candidates.gains.weights), candidates.gains.shares
    new = shares(plain)
    unlikely = 2 * (log_likelihood(plain, new) - log_likelihood(plain, own)) > chi2.ppf(1 - LEVEL, K - 1)
    posterior = given(plain, new if unlikely else own)
    best, most = "none", 0.0
    for name in running[1:]:
        known, n = candidates.gains.of[name], len(past[name])
        gains = [
            row[other.argmax()] - row[plain.argmax()]
            for row, other, plain in zip(posterior[-n:], past[name], past["none"][-n:], strict=True)
        ]
        error = math.sqrt(known.variance + variance_of_mean(gains, -1, 1))
        cautious = sum(gains) / n + known.offset - caution * error
        if cautious > most:
            best, most = name, cautious
    return best


@pytest.mark.parametrize(
    ("probe", "every", "caution"), [(30, 0, 0.5), (30, 45, 0.0), (30, 31, 2.0), (60, 70, 0.2), (30, 30, 0.2)]
)
def test_choices_and_predictions_are_those_of_the_rule(probe: int, every: int, caution: float) -> None:
    model, stream = network(), 2 * samples(90)
    choices, expected = by_hand(model, stream, probe, every, caution)
    assert len(set(choices)) > 1
    for size in (1, 7, 90):
        adapter = tta.create("auto", model, candidates=made(model), probe=probe, every=every, caution=caution)
        rows = torch.cat([adapter.predict(part) for part in stream.split(size)])
        assert adapter.report()["choice"].tolist() == choices, size
        torch.testing.assert_close(rows, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("drift", [15, 32])
def test_choices_after_drift_are_those_of_the_rule(drift: int) -> None:
    """Drift in the first probe, and after it."""
    model, stream = network(), 2 * samples(48)
    choices, expected = by_hand(model, stream, 20, 0, 0.2, drift)
    assert len(set(choices)) > 1
    adapter = tta.create("auto", model, candidates=made(model), probe=20, every=0, caution=0.2)
    adapter.drift = Alarm(drift)  # type: ignore[attr-defined]
    rows = torch.cat([adapter.predict(part) for part in stream.split(7)])
    assert adapter.report()["choice"].tolist() == choices
    torch.testing.assert_close(rows, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("choice", ["t3a", "pausing"])
def test_drift_makes_all_candidates_new_but_the_choice(choice: str) -> None:
    model, x = network(), samples(15)
    adapter: Any = tta.create("auto", model, candidates=made(model), probe=20)
    adapter._gains = {name: Calibration(9.0 if name == choice else -9.0, 0.0) for name in ALL}
    adapter.drift = Alarm(12)
    adapter.predict(x)
    for name in ALL:
        alone = tta.create(ADAPTERS[name], model)
        alone.predict(x if name == choice else x[12:])
        state = adapter.candidates[name].state_dict()
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state[key], value)


def test_a_gain_must_exceed_the_margin() -> None:
    """A twin of "none", calibrated to gain 0.3, without caution."""
    makers = dict.fromkeys(("none", "twin"), lambda model: tta.create("none", model))
    twin = Candidates(makers, Gains({"none": Calibration(0.0, 0.0), "twin": Calibration(0.3, 0.0)}))
    for margin, chosen in ((0.25, 1), (0.3, 0), (0.35, 0)):
        adapter = tta.create("auto", network(), candidates=twin, caution=0.0, margin=margin)
        adapter.predict(samples(5))
        assert adapter.report()["choice"].tolist() == [chosen] * 5


@pytest.mark.parametrize("chance", [0.25, 0.1])
def test_calibration_is_that_of_a_loop_over_labelled_samples(chance: float) -> None:
    draw = np.random.default_rng(1)
    predicted = {name: draw.dirichlet([0.5] * K, 40) for name in ("none", "other")}
    labels = draw.choice(K, 40, p=[chance, *[(1 - chance) / 3] * 3])
    if chance < 0.25:
        predicted["none"] = given(predicted["none"], [20, 1, 1, 1])
    found = calibrate_gains(predicted, labels)
    own = [(labels.tolist().count(k) + 0.5) / (40 + 0.5 * K) for k in range(K)]
    assert found.shares == pytest.approx(own)
    assert sum(found.shares) == pytest.approx(1)
    assert (max(found.weights) > 1) == (chance == 0.1), "where the network favours a class that is rare"
    posterior = given(given(predicted["none"], found.weights), own)
    missed = []
    for i, label in enumerate(labels.tolist()):
        c = [float(predicted[name][i].argmax() == label) for name in ("other", "none")]
        v = [posterior[i][predicted[name][i].argmax()] for name in ("other", "none")]
        missed.append((c[0] - v[0]) - (c[1] - v[1]))
    assert found.of["other"].offset == pytest.approx(sum(missed) / 40, abs=1e-4)
    assert found.of["other"].variance == pytest.approx(variance_of_mean(missed, -2, 2), abs=1e-5)
    assert found.of["none"].offset == 0


@pytest.mark.parametrize("degrees", [1, 2, 9, 99])
@pytest.mark.parametrize("share", [0.5, 0.95, 1 - LEVEL])
def test_the_quantile_of_chi_square_is_near_that_of_scipy(degrees: int, share: float) -> None:
    assert chi_square_quantile(share, degrees) == pytest.approx(chi2.ppf(share, degrees), rel=0.05)
    assert chi_square_quantile(share, 9) == pytest.approx(chi2.ppf(share, 9), rel=0.01)


def drawn(q: Sequence[float], seed: int, count: int) -> np.ndarray:
    """Probabilities of a network that knows how classes look, under equal shares; 2 units between their means."""
    draw = np.random.default_rng(seed)
    z = 2 * np.eye(K)[draw.choice(K, count, p=q)] + draw.normal(size=(count, K))
    rows: np.ndarray = np.exp(2 * z)
    return rows / rows.sum(1, keepdims=True)


@settings(max_examples=50)
@hypothesis.given(st.integers(0, 10_000))
def test_own_shares_are_dropped_for_other_classes_alone(seed: int) -> None:
    own = np.array([0.6, 0.3, 0.05, 0.05])
    p = drawn(own[::-1], seed, 60)
    np.testing.assert_array_equal(likely_shares(p, own), class_shares(p))
    np.testing.assert_array_equal(likely_shares(p, np.empty(0)), class_shares(p))
    np.testing.assert_array_equal(likely_shares(p[:1], own), own)  # one sample is no evidence


def test_own_shares_are_dropped_where_the_likelihood_ratio_exceeds_the_quantile() -> None:
    """Shares on the way from the likeliest to others, 3 % below and above scipy's quantile of K - 1 degrees."""
    p = drawn([0.4, 0.3, 0.2, 0.1], 5, 200)
    likeliest, far = class_shares(p), np.array([0.1, 0.1, 0.2, 0.6])

    def excess(way: float, share: float) -> float:
        ratio = 2 * (log_likelihood(p, likeliest) - log_likelihood(p, (1 - way) * likeliest + way * far))
        return ratio - share * float(chi2.ppf(1 - LEVEL, K - 1))

    for share in (0.97, 1.03):
        way = brentq(excess, 0, 1, args=(share,))
        own = (1 - way) * likeliest + way * far
        assert (likely_shares(p, own) is own) == (share < 1)


def test_own_shares_are_dropped_by_mistake_as_rarely_as_stated() -> None:
    own = np.array([0.4, 0.3, 0.2, 0.1])
    wrong = sum(likely_shares(drawn(own, seed, 200), own) is not own for seed in range(400))
    assert wrong <= 12  # binomial, 400 times 1 %: above 12 with probability 0.0003


@settings(max_examples=50)
@hypothesis.given(st.integers(0, 10_000), st.lists(st.floats(0.02, 50), min_size=K, max_size=K))
def test_weights_make_the_shares_of_samples_the_likeliest(seed: int, favour: list[float]) -> None:
    """Of a network that favours classes, on samples without the last one: the slopes, sample by sample."""
    draw, q = np.random.default_rng(seed), np.array([0.5, 0.3, 0.2, 0.0])
    labels = draw.choice(K, 80, p=q)
    z = 2 * np.eye(K)[labels] + draw.normal(size=(80, K))
    p = given(np.exp(2 * z), favour)
    counts = np.bincount(labels, minlength=K)
    own = (counts + 0.5) / (counts + 0.5).sum()
    w = class_weights(p, own, counts)
    slopes = np.zeros(K)
    for row in p:
        slopes += w * row / sum(own * w * row) / len(p)
    np.testing.assert_allclose(slopes[:3], 1, atol=0.02)
    assert slopes[3] <= 1.02
    assert 0 < w[3] <= 1
    assert w[3] == 1 or slopes[3] > 0.98
    assert np.prod(w[labels] ** (1 / 80)) == pytest.approx(1)
    assert likely_shares(given(p, w), own) is own


def test_weights_are_finite_where_a_network_rules_a_class_out() -> None:
    p, labels = np.array([[1.0, 0, 0], [0, 1, 0], [1, 0, 0]]), np.array([0, 1, 2])
    weights = class_weights(p, np.full(3, 1 / 3), np.bincount(labels))
    assert np.isfinite(weights).all()
    assert (weights > 0).all()


def test_one_pass_of_the_network_serves_all_that_need_its_outputs_alone() -> None:
    model, passes = network(), []
    model.encoder.register_forward_hook(lambda *_: passes.append(1))
    adapter = tta.create("auto", model, candidates=made(model, ALL[:4]), probe=20)
    passes.clear()
    for part in samples(50).split(10):
        adapter.predict(part)
    assert len(passes) == 5
    x = samples(7)
    assert torch.equal(adapter.unadapted(x), model(x))  # type: ignore[attr-defined]
    passes.clear()
    adapter.predict(x)
    assert not passes
    adapter.predict(x)
    assert len(passes) == 1


def test_a_batch_at_the_same_place_in_memory_is_another_one() -> None:
    model = network()
    adapter, x = tta.create("auto", model, candidates=made(model, ("none",))), samples(5)
    adapter.predict(x)
    x.copy_(samples(5, seed=8))
    assert torch.equal(adapter.predict(x), model(x).softmax(1))


class Counted(tta.ADAPTERS["none"]):  # type: ignore[misc, name-defined]
    """Predicts as the personal head does and counts calls and resets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, record=False)
        self.calls, self.resets = 0, 0

    def _predict(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.softmax(self.model.personal_head(self.model.features(x)), 1)  # type: ignore[operator]

    def _reset(self) -> None:
        self.resets += 1


def counting(gain: float, **options: Any) -> tuple[Auto, Counted]:
    """auto between "none" and one counted candidate whose gain is large, or largely negative."""
    model = network()
    none = made(model, ("none",))
    gains = Gains({**none.gains.of, "counted": Calibration(gain, 0.0)})
    candidates = Candidates({**none.make, "counted": Counted}, gains)
    adapter = tta.create("auto", model, candidates=candidates, probe=20, **options)
    assert isinstance(adapter, Auto)
    one: Any = adapter.candidates["counted"]
    one.calls = one.resets = 0
    return adapter, one


def test_a_candidate_that_is_not_chosen_runs_in_probes_alone() -> None:
    adapter, one = counting(-9.0, every=60)
    for part in samples(130).split(10):
        adapter.predict(part)
    assert adapter.choice == "none"
    assert (one.calls, one.resets) == (2 + 2 + 1, 2)  # probes begin after 60 and 120 samples


def test_the_choice_goes_on_through_a_probe() -> None:
    adapter, one = counting(9.0, every=60)
    for part in samples(130).split(10):
        adapter.predict(part)
    assert adapter.choice == "counted"
    assert (one.calls, one.resets) == (13, 0)
    assert adapter.report()["choice"].tolist() == [1] * 130


class Alarm(DriftTest):
    """A drift test that fires once, at a sample."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.seen, self.rows = at, 0, np.empty((0, K + 2))

    def update(self, values: np.ndarray) -> list[int]:
        self.rows = np.concatenate((self.rows, values))
        before, self.seen = self.seen, self.seen + len(values)
        return [self.at] if before < self.at <= self.seen else []


def test_drift_begins_a_probe_with_the_next_sample() -> None:
    adapter, one = counting(-9.0, every=0)
    adapter.drift = Alarm(75)
    calls = []
    for part in samples(130).split(10):
        adapter.predict(part)
        calls.append(one.calls)
    assert calls == [1, 2, 2, 2, 2, 2, 2, 3, 4, 5, 5, 5, 5]
    expected = torch.softmax(network()(samples(130)), 1).detach().numpy()
    np.testing.assert_allclose(adapter.drift.rows, outputs(expected), atol=1e-12)


@pytest.mark.parametrize("drift", [17, 40, 62])
def test_where_drift_is_found_in_a_batch_makes_no_difference(drift: int) -> None:
    """While all candidates run, while the choice runs on, and what both have learned by then."""
    model, stream, found = network(), 2 * samples(90), []
    for size in (1, 7, 40, 90):
        adapter = tta.create("auto", model, candidates=made(model), probe=30, every=0, caution=0.0)
        adapter.drift = Alarm(drift)  # type: ignore[attr-defined]
        rows = torch.cat([adapter.predict(part) for part in stream.split(size)])
        found.append((rows, adapter.report()["choice"], adapter.reason))  # type: ignore[attr-defined]
    for rows, choices, reason in found[1:]:
        torch.testing.assert_close(rows, found[0][0], atol=1e-12, rtol=0)
        assert torch.equal(choices, found[0][1])
        assert reason == found[0][2]
    silent = tta.create("auto", model, candidates=made(model), probe=30, every=0, caution=0.0, false_alarms=0.0)
    assert not torch.equal(silent.predict(stream), found[0][0])


def test_the_reason_of_a_choice_is_told() -> None:
    adapter, _ = counting(9.0, every=0)
    assert adapter.reason == "since sample 0 (the first samples)"
    adapter.drift = Alarm(75)
    adapter.predict(samples(80))
    assert (adapter.choice, adapter.reason) == ("counted", "since sample 0 (the first samples)")
    adapter._gains["counted"] = Calibration(-9.0, 0.0)
    adapter.predict(samples(1))
    assert (adapter.choice, adapter.reason) == ("none", "since sample 80 (the samples after drift)")
    adapter._gains["counted"] = Calibration(9.0, 0.0)
    adapter.predict(samples(40))
    adapter._gains["counted"] = Calibration(-9.0, 0.0)
    adapter.predict(samples(1))
    assert adapter.reason == "since sample 121 (later samples)"


def test_a_real_change_begins_a_probe_also_after_a_restart() -> None:
    """Images that turn dark after 400 samples; the adapter's state is moved to another one there."""
    (adapter, one), (other, two) = counting(-9.0, every=0), counting(-9.0, every=0)
    dark = samples(200, 1) * 0
    for part in samples(400).split(20):
        adapter.predict(part)
    before = one.calls
    other.load_state_dict(adapter.state_dict())
    for part in dark.split(20):
        assert torch.equal(adapter.predict(part), other.predict(part))
    assert one.calls - before == two.calls > 0
    assert adapter.drift is not None
    silent, three = counting(-9.0, every=0, false_alarms=0)
    for part in torch.cat([samples(400), dark]).split(20):
        silent.predict(part)
    assert silent.drift is None
    assert three.calls == before


@settings(max_examples=30)
@hypothesis.given(st.integers(0, 50), st.integers(1, 24), st.sampled_from([0.0, 0.5]))
def test_no_gain_no_choice(seed: int, size: int, caution: float) -> None:
    """Of candidates that predict what "none" predicts, and of those without evidence, none is chosen."""
    model = network(seed)
    nothing = Calibration(0.0, 0.0)
    make = dict.fromkeys(("none", "twin"), lambda n: tta.create("none", n))
    twin = Candidates(make, Gains({"none": nothing, "twin": nothing}))
    adapter, x = tta.create("auto", model, candidates=twin, caution=caution), samples(24, seed)
    for part in x.split(size):
        assert torch.equal(adapter.predict(part), model(part).softmax(1))
    assert not adapter.report()["choice"].any()


@settings(max_examples=15)
@hypothesis.given(st.integers(0, 50), st.integers(1, 12))
def test_later_samples_change_nothing(seed: int, cut: int) -> None:
    """Those of the same batch, too."""
    model = network()
    candidates, x = made(model), samples(24, seed)
    one, two = (tta.create("auto", model, candidates=candidates, probe=8, every=12) for _ in range(2))
    other = torch.cat([x[: 2 * cut], samples(24, seed + 1)[2 * cut :]])
    assert torch.equal(one.predict(x)[: 2 * cut], two.predict(other)[: 2 * cut])


def test_among_and_ranges() -> None:
    model = network()
    adapter = tta.create("auto", model, candidates=made(model), among="t3a+personal")
    assert adapter.names == ("none", "t3a", "personal")  # type: ignore[attr-defined]
    for options, words in (
        ({"among": "tent"}, "auto: tent not calibrated; there are: none, personal, fixed_mix, t3a, pausing"),
        ({"probe": 0}, "probe"), ({"every": 5}, "every=5: allowed is 0, or at least probe=200"),
        ({"caution": -1.0}, "caution"), ({"margin": 1.5}, "margin"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            tta.create("auto", model, candidates=made(model), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="auto needs candidates"):
        tta.create("auto", model)
    candidates = made(model)
    other = dataclasses.replace(candidates, gains=Gains(candidates.gains.of, (0.5, 0.5)))
    with pytest.raises(ValueError, match="class shares of 2 classes and 4 weights; the network has 4"):
        tta.create("auto", model, candidates=other)


def test_states_with_a_choice_or_windows_that_do_not_fit_are_refused() -> None:
    model = network()
    adapter = tta.create("auto", model, candidates=made(model), probe=20)
    adapter.predict(samples(9))
    state = adapter.state_dict()
    for name, value in (
        ("choice", torch.tensor(5)), ("since", torch.tensor(10)), ("cause", torch.tensor(4)),
        ("began", torch.tensor(3)), ("drifted", torch.tensor(2)), ("seen", torch.tensor(10)),
        ("memory.none", torch.full((9,), 4.0)), ("memory.t3a", torch.zeros(10)),
        ("memory.none", torch.tensor(0.0)), ("memory.drift.urn", torch.tensor(1)),
        ("memory.unadapted", torch.zeros(9, 3)), ("t3a.counts", torch.zeros(K, dtype=torch.int64)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="state"):
            adapter.load_state_dict({**state, name: value})
    again = adapter.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())


def test_a_state_that_one_candidate_refuses_leaves_the_others_as_they_were() -> None:
    model = network()
    one, other = (tta.create("auto", model, candidates=made(model), probe=20) for _ in range(2))
    one.predict(samples(9))
    other.predict(samples(30, seed=4))
    before, state = one.state_dict(), other.state_dict()
    with pytest.raises(ValueError, match="state"):
        one.load_state_dict({**state, "pausing.counts": torch.zeros(K, dtype=torch.int64)})  # the last candidate
    after = one.state_dict()
    assert not torch.equal(state["t3a.counts"], before["t3a.counts"])
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_reset_forgets_the_drift_test_too() -> None:
    model = network()
    adapter = tta.create("auto", model, candidates=made(model), probe=20)
    before = adapter.state_dict()
    adapter.predict(samples(60))
    adapter.reset()
    after = adapter.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_candidate_that_fails_leaves_the_others_as_they_were() -> None:
    options: dict[str, dict[str, Any]] = {"none": {}, "t3a": {"support": 3}, "tent": {"lr": 1e308}}
    makers: dict[str, Any] = {
        name: (lambda model, name=name: tta.create(name, model, record=False, **options[name])) for name in options
    }
    adapter = Auto(two_head_network(), Candidates(makers, Gains(dict.fromkeys(makers, Calibration(0.0, 0.0)))))
    before = adapter.state_dict()
    with pytest.raises(ValueError, match="left the finite numbers"):
        adapter.predict(images(6))
    after = adapter.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert adapter.report() == {}


def test_what_candidates_have_learned_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = list[Any]()
    makers: dict[str, Any] = {name: (lambda network, name=name: tta.create(name, network)) for name in ("none", "tent")}
    adapter = Auto(two_head_network(), Candidates(makers, Gains(dict.fromkeys(makers, Calibration(0.0, 0.0)))))

    def counted(value: Any) -> Any:
        copies.append(copied(value))
        return copies[-1]

    monkeypatch.setattr(base, "copied", counted)
    state = adapter.state_dict()
    assert "tent.optimizer.step" in state
    assert len(copies) == len(state)


def test_each_candidate_checks_its_own_state() -> None:
    model = TwoHead(nn.BatchNorm1d(5), 5, K).double()
    makers: dict[str, Any] = {
        "none": lambda network: tta.create("none", network),
        "atp": lambda network: tta.create("atp", network, rates=zero_rates(model), mode="online"),
    }
    candidates = Candidates(makers, Gains(dict.fromkeys(makers, Calibration(0.1, 0.0))))
    adapter = tta.create("auto", model, candidates=candidates)
    adapter.predict(samples(9) / 10)
    state = adapter.state_dict()
    assert bool((state["atp.mean.encoder.running_var"] < 0).any())  # a mean direction
    adapter.load_state_dict(state)
    with pytest.raises(ValueError, match="'batches' of ATP holds negative values"):
        adapter.load_state_dict({**state, "atp.batches": torch.tensor(-1)})
    with pytest.raises(ValueError, match="negative values"):
        adapter.load_state_dict({**state, "memory.drift.position": torch.tensor(-1)})


def test_new_shares_are_those_of_a_loop() -> None:
    p = np.random.default_rng(3).dirichlet([0.4] * K, 30)
    np.testing.assert_allclose(class_shares(p), shares(p), atol=1e-4)
    np.testing.assert_allclose(with_new_shares(p), given(p, shares(p)), atol=1e-3)
    assert judged(p, p.argmax(1)).tolist() == p.max(1).tolist()
