"""Adapters on test streams: against an independent loop, labels out of reach, no trained sample among them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedtta import tta
from fedtta.client import adapters
from fedtta.client.adapters import AdapterContext
from fedtta.client.evaluation import Labelled, calibrate_row, evaluate_row, gains_of
from fedtta.data import Federation, Stream, check_no_leak, stream
from fedtta.data.split import Split
from fedtta.messages.replies import WEIGHT_BINS as BINS
from fedtta.messages.requests import AdapterRow as Row
from fedtta.models import TwoHead
from fedtta.server.methods import parse_rows
from fedtta.settings import Settings
from fedtta.tta.atp import modules
from fedtta.tta.augmix import AugMix
from fedtta.tta.auto import Candidates, calibrate_gains
from fedtta.tta.roid import PlainViews
from fedtta.tta.ttt import CropAndFlip
from fedtta.tta.views import Views
from tests.client.tiny import Client as Device
from tests.client.tiny import Task, device, federation, global_arrays, images, network, settings

Arrays = dict[str, np.ndarray]
SHIFTS = ["original", "corrupted", "natural", "out_of_client", "mixture", "synthetical"]
ROWS = [
    Row("fedavg", "none"),
    Row("personal", "personal"),
    Row("half", "fixed_mix", {"e": 0.5}),
    Row("fedthe", "fedthe"),
    Row("fedthe[beta=1]", "fedthe", {"beta": 1.0}),
    Row("btfl", "btfl"),
    Row("memo", "memo", {"views": 2, "steps": 1, "lr": 0.05}),
    Row("fedthe_plus", "fedthe_plus", {"views": 2, "tune_steps": 1, "tune_lr": 0.05}),
]

TUNING = ("memo", "fedthe_plus")


@pytest.fixture(scope="module")
def trained() -> tuple[Device, Arrays, Arrays]:
    """A client of three after two rounds and the statistics round; all settings' streams have a natural set."""
    clients = [device(partition, natural=images(40, seed=8, name="natural")) for partition in range(3)]
    arrays = global_arrays(network(seed=1))
    for round in (1, 2):
        sent = [client.train(round, Task("t", objective="balanced_softmax"), arrays)[0] for client in clients]
        arrays = {name: np.mean([one[name] for one in sent], 0, dtype=np.float64).astype(np.float32) for name in arrays}
    local = [client.statistics(3, Task("t"), arrays)[0] for client in clients]
    return clients[1], arrays, {name: np.mean([one[name] for one in local], 0) for name in local[0]}


def with_settings(client: Device, **changes: Any) -> Device:
    return Device(dataclasses.replace(client.inner, settings=client.settings.replace(**changes)))


def prepared(client: Device, arrays: Arrays, means: Arrays) -> tuple[TwoHead, tta.Statistics]:
    """A network of the test's own with the client's personal head, and what the client knows."""
    private = client.state.load("t", 3)
    assert private is not None
    model = network()
    model.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
    with torch.no_grad():
        model.personal_head.weight.copy_(torch.tensor(private["personal_head.weight"]))
    known = tta.Statistics(
        descriptor_local=torch.tensor(private["statistics.descriptor"]),
        descriptor_global=torch.tensor(means["descriptor"]),
        dle_local=torch.tensor(private["statistics.dle"]),
        dle_global=torch.tensor(means["dle"]),
        entropy_local=private["statistics.entropy_local"].item(),
        entropy_global=private["statistics.entropy_global"].item(),
    )
    return model, known


def by_hand(
    client: Device, arrays: Arrays, means: Arrays, row: Row, shift: str
) -> tuple[int, int, torch.Tensor | None]:
    """The whole stream at once through an adapter on a network of the test's own."""
    model, known = prepared(client, arrays, means)
    samples = stream(client.federation, client.partition, shift, seed=1, severity=5, natural=client.natural)
    tuning = {"augment": AugMix(flip=False), "seed": 1} if row.adapter in TUNING else {}  # npz is never mirrored
    adapter = tta.create(row.adapter, model, known, **tuning, **row.options)
    predicted = adapter.predict(samples.x).argmax(1)
    return int((predicted == samples.y).sum()), len(samples), adapter.report().get("weight")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_results_are_those_of_an_independent_loop(trained: tuple[Device, Arrays, Arrays], row: Row) -> None:
    client, arrays, means = trained
    client = with_settings(client, eval_batch_size=3)  # several batches a stream
    check, results = client.evaluate(3, Task("t"), arrays, means, [row], SHIFTS)
    assert check["leaked"] == 0
    assert check["checked"] == sum(result["total"] for result in results) > 0
    for shift, result in zip(SHIFTS, results, strict=True):
        correct, total, weight = by_hand(client, arrays, means, row, shift)
        assert (result["method"], result["shift"]) == (row.label, shift)
        assert (result["correct"], result["total"]) == (correct, total)
        assert result["seconds"] >= 0
        if row.adapter in ("fedthe", "btfl", "fedthe_plus"):
            assert weight is not None
            assert result["weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-5)
            assert sum(result["weight_histogram"]) == total
            bins = np.minimum((weight.numpy() * BINS).astype(int), BINS - 1)
            np.testing.assert_allclose(result["weight_histogram"], np.bincount(bins, minlength=BINS), atol=1)
        else:
            assert set(result) == {"method", "shift", "correct", "total", "seconds"}


def test_rows_share_one_trained_state_and_do_not_touch_each_other(trained: tuple[Device, Arrays, Arrays]) -> None:
    """Also rows that tune the network: each one's results are the same alone, in this order and in the other."""
    client, arrays, means = trained
    before = client.state.load("t", 3)

    def found(rows: list[Row]) -> dict[tuple[str, str], dict[str, Any]]:
        _, results = client.evaluate(3, Task("t"), arrays, means, rows, ["corrupted", "original"])
        return {(r["method"], r["shift"]): {k: v for k, v in r.items() if k != "seconds"} for r in results}

    together = found(ROWS)
    assert found(ROWS[::-1]) == together
    assert {key: value for row in ROWS for key, value in found([row]).items()} == together
    after = client.state.load("t", 3)
    assert before is not None
    assert after is not None
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(np.array_equal(arrays[name], value) for name, value in global_arrays(client.model).items())


def test_an_unknown_adapter_lists_what_exists(trained: tuple[Device, Arrays, Arrays]) -> None:
    client, arrays, means = trained
    with pytest.raises(ValueError, match=r"unknown adapter 'magic'; there are: .*btfl.*personal"):
        client.evaluate(3, Task("t"), arrays, means, [Row("x", "magic")], ["original"])


def test_an_unknown_shift_lists_what_exists(trained: tuple[Device, Arrays, Arrays]) -> None:
    client, arrays, means = trained
    with pytest.raises(ValueError, match=r"unknown shift 'nowhere'.*there are: original"):
        client.evaluate(3, Task("t"), arrays, means, [Row("x", "none")], ["nowhere"])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda x: torch.ones(1, 3), r"ValueError: .*none predicted shape \(1, 3\); allowed is \(\d+, 3\)"),
        (lambda x: torch.ones(len(x), 4), r"ValueError: .*none predicted shape \(\d+, 4\); allowed is \(\d+, 3\)"),
        (lambda x: torch.ones(len(x)), r"ValueError: .*none predicted shape \(\d+,\)"),
        (lambda x: {}["nothing"], "RuntimeError: .*KeyError: 'nothing'"),
    ],
)
def test_a_broken_adapter_is_named(
    answer: Any, told: str, trained: tuple[Device, Arrays, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, arrays, means = trained
    monkeypatch.setattr(tta.ADAPTERS["none"], "_predict", lambda self, x: answer(x))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        client.evaluate(3, Task("t"), arrays, means, [Row("personal", "personal"), Row("mine", "none")], ["original"])
    assert re.match(told, f"{caught.type.__name__}: {caught.value}")
    assert str(caught.value).startswith("mine on original: ")


def writes_to_its_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.model(x.mul_(0.5)).softmax(1)


def writes_to_the_network(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.model.head.bias.add_(1)
    return self.model(x).softmax(1)


@pytest.mark.parametrize(
    ("predict", "told"),
    [
        (writes_to_its_input, "mine on original: the adapter changes its images in place, which other rows share"),
        (writes_to_the_network, "mine on original: the adapter changes the network in place, which other rows share"),
        (lambda self, x: self.model(x), r"mine on original: \d+ of \d+ rows do not sum to one: .* not logits"),
    ],
)
def test_an_adapter_that_would_falsify_other_rows_or_its_own_is_refused(
    predict: Any, told: str, trained: tuple[Device, Arrays, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, arrays, means = trained
    monkeypatch.setattr(tta.ADAPTERS["none"], "_predict", predict)
    with pytest.raises(ValueError, match=told):
        client.evaluate(3, Task("t"), arrays, means, [Row("mine", "none"), Row("personal", "personal")], ["original"])


@pytest.mark.parametrize("estimate", [False, True])
def test_an_adapter_that_draws_from_the_process_gives_the_same_whatever_ran_before(
    estimate: bool, trained: tuple[Device, Arrays, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with dropout; other rows, clients and workers have drawn before. Estimates are calibrated first."""
    client, arrays, means = trained
    client = with_settings(client, estimate_accuracy=estimate)
    drawn: list[torch.Tensor] = []

    def draws(self: Any, x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(len(x), 3).softmax(1))
        return drawn[-1]

    monkeypatch.setattr(tta.ADAPTERS["none"], "_predict", draws)
    for before in (1, 2):
        torch.manual_seed(before)
        client.evaluate(3, Task("t"), arrays, means, [Row("mine", "none")], ["original", "corrupted"])
    half = len(drawn) // 2
    assert half == 2 + estimate
    assert all(torch.equal(*pair) for pair in zip(drawn[:half], drawn[half:], strict=True))
    original, corrupted = drawn[half - 2 : half]
    assert original.shape == corrupted.shape
    assert not torch.equal(original, corrupted)


def diverging(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Predict class 0 for the first four samples of a batch, and NaN for the others."""
    p = torch.eye(3)[:1].repeat(len(x), 1)
    p[4:] = torch.nan
    return p


@pytest.mark.parametrize("estimate", [False, True])
def test_predictions_that_are_not_finite_are_wrong_and_counted(
    estimate: bool, trained: tuple[Device, Arrays, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other rows go on; NaN must not count as the class whose number argmax gives."""
    client, arrays, means = trained
    client = with_settings(client, eval_batch_size=50, estimate_accuracy=estimate)
    rows, y = [Row("personal", "personal"), Row("mine", "none")], stream_of(client, "original").y
    _, (undisturbed, _) = client.evaluate(3, Task("t"), arrays, means, rows, ["original"])
    monkeypatch.setattr(tta.ADAPTERS["none"], "_predict", diverging)
    reply = client.inner.evaluate(client.evaluation(3, Task("t"), arrays, means, rows, ["original"]))
    other, mine = reply.results
    assert (other.correct, other.metrics) == (undisturbed["correct"], {})
    assert (mine.correct, mine.total) == (int((y[:4] == 0).sum()), len(y))
    assert mine.metrics == {"not_finite": len(y) - 4}
    assert (bool(other.estimates), mine.estimates) == (estimate, {})


@pytest.mark.parametrize("adapter", ["tent", "shot", "cotta", "ttt"])
def test_an_adapter_that_diverges_loses_its_own_row_alone(adapter: str) -> None:
    """A rate beyond all sense: some refuse the step, some the output that comes of it; the network is as it was."""
    model, samples = network(norm=True, seed=4), stream(federation(), 0, "corrupted", seed=1)
    if adapter == "ttt":
        model.rotation_head = torch.nn.Linear(model.feature_dim, 4)
    context = AdapterContext(model, settings(adapt_batch_size=5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = evaluate_row(Row("x", adapter, {"lr": 3e38}), context, samples)
    assert 0 < result.metrics["not_finite"] <= result.total - result.correct
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_auto_never_chooses_a_candidate_that_diverges(
    trained: tuple[Device, Arrays, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, arrays, means = trained
    model, known = prepared(client, arrays, means)
    x = torch.tensor(client.federation.images.pixels[:40] / np.float32(255))
    samples = Labelled(x, torch.tensor(client.federation.images.labels[:40]), True)
    row, context = Row("auto", "auto", {"among": "personal+t3a"}), AdapterContext(model, client.settings, known)
    assert list(gains_of(row, context, samples).of) == ["none", "personal", "t3a"]
    monkeypatch.setattr(tta.ADAPTERS["t3a"], "_predict", diverging)
    assert list(gains_of(row, context, samples).of) == ["none", "personal"]
    monkeypatch.setattr(tta.ADAPTERS["none"], "_predict", diverging)
    with pytest.raises(ValueError, match="network's prediction"):
        gains_of(row, context, samples)


def test_tune_samples_limits_methods_that_take_gradients_only(trained: tuple[Device, Arrays, Arrays]) -> None:
    client, arrays, means = trained
    client = with_settings(client, tune_samples=3)
    check, results = client.evaluate(3, Task("t"), arrays, means, ROWS, ["original"])
    totals = {result["method"]: result["total"] for result in results}
    assert {name: total for name, total in totals.items() if total == 3} == {"memo": 3, "fedthe_plus": 3}
    assert set(totals.values()) == {3, 8}
    assert check["checked"] == 8
    first_three = by_hand_first(client, arrays, means, ROWS[-1], 3)
    assert results[-1]["correct"] == first_three
    _, all_of_them = with_settings(client, tune_samples=99).evaluate(
        3, Task("t"), arrays, means, ROWS[-1:], ["original"]
    )
    assert all_of_them[0]["total"] == 8


def by_hand_first(client: Device, arrays: Arrays, means: Arrays, row: Row, count: int) -> int:
    """Correct predictions of the first samples of the original stream, by way of a shorter stream."""
    samples = stream(client.federation, client.partition, "original", seed=1)
    cut = Stream("original", samples.x[:count], samples.y[:count], samples.index[:count], samples.source[:count])
    model, known = prepared(client, arrays, means)
    return evaluate_row(row, AdapterContext(model, settings(), known), cut).correct


def options_of(monkeypatch: pytest.MonkeyPatch, row: Row, given: Settings) -> dict[str, Any]:
    """What `evaluate_row` asks the registry for."""
    seen: dict[str, Any] = {}

    def create(name: str, model: Any, statistics: Any, *_: Any, **options: Any) -> tta.Adapter:
        seen.update(options)
        return tta.create("none", model, statistics)

    monkeypatch.setattr(adapters, "create", create)
    samples = stream(federation(), 0, "original", seed=1)
    evaluate_row(row, AdapterContext(network(), given, tta.Statistics()), samples)
    return seen


@pytest.mark.parametrize(
    ("row", "on", "expected"),
    [
        (Row("btfl", "btfl", {"strength": 4.0}), True, 3),
        (Row("btfl", "btfl", {"leave_one_out": 0}), True, 0),
        (Row("btfl", "btfl"), False, 0),
        (Row("btfl", "btfl", {"reading": "published", "leave_one_out": 0}), True, 0),
        (Row("fedthe", "fedthe"), True, 0),
        (Row("fedavg", "none"), True, 0),
    ],
)
def test_leave_one_out_reaches_btfl_alone(monkeypatch: pytest.MonkeyPatch, row: Row, on: bool, expected: int) -> None:
    options = options_of(monkeypatch, row, settings(leave_one_out=on))
    assert options.pop("leave_one_out", 0) == expected
    assert options == {name: value for name, value in row.options.items() if name != "leave_one_out"}


def test_the_published_btfl_gets_the_number_of_clients(trained: tuple[Device, Arrays, Arrays]) -> None:
    """As the need that its class declares; a row that names a number keeps it."""
    model, known = prepared(*trained)
    published = {"reading": "published"}
    for options, expected in ((published, 3), ({**published, "leave_one_out": 0}, 0), ({}, 0)):
        made = adapters.make_adapter(Row("btfl", "btfl", options), AdapterContext(model, settings(), known))
        assert made.reading.leave_one_out == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", [Row("btfl", "btfl"), Row("btfl", "btfl", {"reading": "published"})])
def test_the_own_share_is_that_of_the_clients_that_replied(row: Row, trained: tuple[Device, Arrays, Arrays]) -> None:
    """Of 3 clients 2 replied in the statistics round: (2 p - p_l) / 1 is the other's, (3 p - p_l) / 2 no client's.

    For the third, told 0, p is already the mean over the others.
    """
    model, known = prepared(*trained)
    given = settings(leave_one_out="reading" not in row.options)
    for clients in (2, 0):
        told = dataclasses.replace(known, clients=clients)
        made = adapters.make_adapter(row, AdapterContext(model, given, told))
        assert made.reading.leave_one_out == clients  # type: ignore[attr-defined]


@pytest.mark.parametrize("adapter", TUNING)
@pytest.mark.parametrize(("dataset", "flip"), [("cifar10", True), ("digits", False), ("npz", False)])
def test_random_views_follow_the_seed_and_the_data_set(
    monkeypatch: pytest.MonkeyPatch, adapter: str, dataset: str, flip: bool
) -> None:
    given = settings(dataset=dataset, seed=12)
    options = options_of(monkeypatch, Row("x", adapter), given)
    assert vars(options.pop("augment")) == vars(AugMix(flip=flip))
    assert options == {"seed": 12}
    assert options_of(monkeypatch, Row("x", adapter, {"seed": 3}), given)["seed"] == 3


@pytest.mark.parametrize(
    ("adapter", "views"),
    [
        ("cotta", Views), ("rotta", Views), ("roid", PlainViews), ("bbn", Views), ("tsa", Views), ("ttt", CropAndFlip),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("dataset", "flip"), [("cifar10", True), ("digits", False)])
def test_views_of_the_methods_for_streams_do_too(
    monkeypatch: pytest.MonkeyPatch, adapter: str, views: Callable[..., Any], dataset: str, flip: bool
) -> None:
    options = options_of(monkeypatch, Row("x", adapter), settings(dataset=dataset, seed=12))
    assert options.pop("augment") == views(flip=flip)
    assert options == {"seed": 12}


@pytest.mark.parametrize(("dataset", "flip"), [("cifar10", True), ("digits", False)])
@pytest.mark.parametrize("row", ["bbn", "bbn[augment=student]", "bbn[augment=teacher]", "cotta[augment=none]"])
def test_a_row_that_names_who_sees_the_views_gets_those_of_the_data_set(row: str, dataset: str, flip: bool) -> None:
    """Digits are never mirrored, whichever network sees the views, and "none" is no other kind of views."""
    (parsed,) = parse_rows(row)
    made: Any = adapters.make_adapter(
        parsed.as_requested(), AdapterContext(network(norm=True), settings(dataset=dataset))
    )
    assert made.augment == Views(flip=flip)
    assert getattr(made, "_teacher_sees_views", False) == ("teacher" in row)


def test_methods_per_batch_meet_batches_of_their_own_size() -> None:
    """8 test samples in batches of 5 and 3, whatever the size for methods that go sample by sample."""
    model = network(norm=True, seed=4)
    samples = stream(federation(), 0, "original", seed=1)
    assert len(samples) == 8
    row = Row("bn", "bn_adapt")
    given = settings(adapt_batch_size=5, eval_batch_size=2)
    result = evaluate_row(row, AdapterContext(model, given), samples)
    adapter = tta.create("bn_adapt", model)
    predicted = torch.cat([adapter.predict(part).argmax(1) for part in samples.x.split(5)])
    assert result.correct == int((predicted == samples.y).sum())
    assert (result.total, result.weight_mean, result.weight_histogram) == (8, None, None)


def test_rates_go_to_the_rows_that_name_their_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(norm=True, seed=4)
    samples = stream(federation(), 0, "corrupted", seed=1)
    rates = {variant: dict.fromkeys(modules(model), rate) for variant, rate in (("all", 0.1), ("params", 0.2))}
    context = AdapterContext(model, settings(), rates=rates)
    given: list[Any] = []

    def create(name: str, model: Any, statistics: Any, rates: Any, store: Any, *_: Any, **options: Any) -> tta.Adapter:
        given.append(rates)
        return tta.create(name, model, statistics, rates, store, **options)

    monkeypatch.setattr(adapters, "create", create)
    for options in ({}, {"mode": "online"}, {"adapt": "params"}):
        evaluate_row(Row("atp", "atp", options), context, samples)
    assert given == [rates["all"], rates["all"], rates["params"]]
    with pytest.raises(ValueError, match="atp needs learned adaptation rates"):
        evaluate_row(Row("atp", "atp", {"adapt": "stats"}), context, samples)


@pytest.mark.parametrize("heads", [True, False])
def test_estimates_are_calibrated_on_a_fresh_adapter_over_labelled_samples(heads: bool) -> None:
    """Tent learns from a stream: by a loop over two adapters, one a split, and the definition of each estimate."""
    world, model = federation(), network(norm=True, seed=4)
    given, row = settings(adapt_batch_size=5, estimate_accuracy=True), Row("tent", "tent", {"lr": 0.5})
    x, y = (torch.tensor(one) for one in (world.images.pixels[60:99] / np.float32(255), world.images.labels[60:99]))
    samples = stream(world, 0, "corrupted", seed=1)
    known = calibrate_row(row, AdapterContext(model, given), Labelled(x, y, heads))
    found = evaluate_row(row, AdapterContext(model, given), samples, known).estimates
    assert list(found) == [
        "doc",
        "atc_confidence",
        "atc_entropy",
        *(["heads"] if heads else []),
        "unadapted",
        "label_shift",
    ]
    sets = []
    for images_ in (x, samples.x):
        adapter = tta.create("tent", model, lr=0.5)
        p = torch.cat([adapter.predict(part) for part in images_.split(5)]).double()
        with torch.no_grad():
            z = model.features(images_)
            sets.append((p, model.head(z).argmax(1), model.personal_head(z).argmax(1)))
    (p, plain, personal), (q, plain_now, personal_now) = sets
    accuracy = float((p.argmax(1) == y).double().mean())
    assert 0 < accuracy < 1
    expected = {
        "doc": accuracy + float(q.amax(1).mean() - p.amax(1).mean()),
        "unadapted": accuracy
        + float((q.argmax(1) == plain_now).double().mean() - (p.argmax(1) == plain).double().mean()),
    }
    if heads:
        agree = [float((one == other).double().mean()) for one, other in ((plain_now, personal_now), (plain, personal))]
        expected["heads"] = accuracy + agree[0] - agree[1]
    for name, score in (
        ("atc_confidence", lambda p: p.amax(1)),
        ("atc_entropy", lambda p: -torch.special.entr(p).sum(1)),
    ):
        threshold = score(p).sort().values[int((p.argmax(1) != y).sum())]
        expected[name] = float((score(q) >= threshold).double().mean())
    for name, value in expected.items():
        assert found[name][0] == pytest.approx(min(1.0, max(0.0, value)), abs=1e-6), name
        assert found[name][1] <= found[name][0] <= found[name][2]


def test_estimates_are_given_where_they_are_asked_for(trained: tuple[Device, Arrays, Arrays]) -> None:
    """And change no result; methods that see the first samples of a stream see as many of the validation split."""
    client, arrays, means = trained
    asked = with_settings(client, estimate_accuracy=True, tune_samples=3)
    replies = [
        one.inner.evaluate(one.evaluation(3, Task("t"), arrays, means, ROWS, SHIFTS))
        for one in (asked, with_settings(client, tune_samples=3))
    ]
    for with_them, without in zip(*(reply.results for reply in replies), strict=True):
        assert (len(with_them.estimates), without.estimates) == (6, {})
        assert (with_them.correct, with_them.weight_mean) == (without.correct, without.weight_mean)
    nothing = calibrate_row(ROWS[0], AdapterContext(client.model, asked.settings), no_samples())
    assert nothing.known == {}


@pytest.mark.parametrize("labels", ["own", "the personal head's"])
def test_auto_chooses_by_labelled_samples(trained: tuple[Device, Arrays, Arrays], labels: str) -> None:
    """As an adapter whose candidates were calibrated by hand: the validation split as it is, and a flattering one."""
    client, arrays, means = trained
    given = client.settings.replace(adapt_batch_size=4)
    row = Row("auto", "auto", {"among": "personal+fedthe+t3a", "probe": 8, "caution": 0.0})
    model, known = prepared(client, arrays, means)
    split = client.federation.splits[client.partition].validation if labels == "own" else slice(40)
    x = torch.tensor(client.federation.images.pixels[split] / np.float32(255))
    y = torch.tensor(client.federation.images.labels[split])
    if labels == "own":
        _, results = with_settings(client, adapt_batch_size=4).evaluate(3, Task("t"), arrays, means, [row], SHIFTS)
        correct = [result["correct"] for result in results]
    else:
        y = tta.create("personal", model).predict(x).argmax(1)
        calibrated = calibrate_row(row, AdapterContext(model, given, known), Labelled(x, y, True))
        streams = [stream_of(client, shift) for shift in SHIFTS]
        context = AdapterContext(model, given, known)
        correct = [evaluate_row(row, context, one, calibrated).correct for one in streams]
    makers = {
        name: (lambda network, name=name: tta.create(name, network, known))
        for name in ("none", "personal", "fedthe", "t3a")
    }
    predicted = {name: make(model).predict(x).numpy() for name, make in makers.items()}
    candidates, choices = Candidates(makers, calibrate_gains(predicted, y.numpy())), list[int]()
    for shift, count in zip(SHIFTS, correct, strict=True):
        samples = stream_of(client, shift)
        adapter = tta.create("auto", model, candidates=candidates, probe=8, caution=0.0)
        rows = torch.cat([adapter.predict(part) for part in samples.x.split(4)])
        assert count == int((rows.argmax(1) == samples.y).sum())
        choices += adapter.report()["choice"].tolist()
    assert labels == "own" or any(choices)


def stream_of(client: Device, shift: str) -> Stream:
    return stream(client.federation, client.partition, shift, seed=1, severity=5, natural=client.natural)


def test_auto_needs_validation_samples_and_candidates_that_can_be_made(trained: tuple[Device, Arrays, Arrays]) -> None:
    client, arrays, means = trained
    for options, words in (({"among": "auto"}, "auto cannot be a candidate"), ({"among": "em"}, "label_prior")):
        with pytest.raises(ValueError, match=words):
            client.evaluate(3, Task("t"), arrays, means, [Row("auto", "auto", options)], ["original"])
    with pytest.raises(ValueError, match="auto: this client has no validation samples to calibrate candidates on"):
        calibrate_row(Row("auto", "auto"), AdapterContext(client.model, settings()), no_samples())


def no_samples() -> Labelled:
    return Labelled(torch.empty(0, 3, 16, 16), torch.empty(0, dtype=torch.int64), True)


def test_leave_one_out_takes_the_own_share_out(trained: tuple[Device, Arrays, Arrays]) -> None:
    """The same as giving BTFL the mean over the other two clients."""
    client, arrays, means = trained
    private = client.state.load("t", 3)
    assert private is not None
    others = {**means, "dle": np.clip((3 * means["dle"] - private["statistics.dle"]) / 2, 0, 1)}
    rows = [Row("btfl", "btfl")]
    _, on = with_settings(client, leave_one_out=True).evaluate(3, Task("t"), arrays, means, rows, ["mixture"])
    _, off = client.evaluate(3, Task("t"), arrays, others, rows, ["mixture"])
    _, plain = client.evaluate(3, Task("t"), arrays, means, rows, ["mixture"])
    assert on[0]["weight_mean"] == pytest.approx(off[0]["weight_mean"], rel=1e-12)
    assert on[0]["weight_mean"] != plain[0]["weight_mean"]


class _Noting:
    """An adapter that writes down what it is shown and told."""

    def __init__(self, adapter: tta.Adapter, log: list[torch.Tensor]) -> None:
        self.adapter, self.log, self.per = adapter, log, adapter.per
        self.takes_whole_set = adapter.takes_whole_set

    def reset(self) -> None:
        self.adapter.reset()

    def predict(self, *args: torch.Tensor) -> torch.Tensor:
        (x,) = args
        self.log += [x.clone(), self.adapter.predict(x)]
        return self.log[-1]

    def report(self, *names: str) -> dict[str, Any]:
        return self.adapter.report()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_labels_are_out_of_an_adapters_reach(
    trained: tuple[Device, Arrays, Arrays], monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    client, arrays, means = trained
    samples = stream(client.federation, client.partition, "mixture", seed=1, natural=client.natural)
    poisoned = dataclasses.replace(samples, y=(samples.y + 1) % 3)
    model, known = prepared(client, arrays, means)
    logs: list[list[torch.Tensor]] = []

    def create(*args: Any, **options: Any) -> Any:
        logs.append([])
        return _Noting(tta.create(*args, **options), logs[-1])

    monkeypatch.setattr(adapters, "create", create)
    context = AdapterContext(model, settings(eval_batch_size=4), known)
    results = [evaluate_row(row, context, one) for one in (samples, poisoned)]
    assert len(logs[0]) == len(logs[1]) > 2
    assert all(torch.equal(one, other) for one, other in zip(*logs, strict=True))
    assert results[0].correct + results[1].correct <= results[0].total
    assert results[0].weight_histogram == results[1].weight_histogram


# -- the leak check


def leaky(world: Federation, client: int, moved: int) -> Federation:
    """A federation whose first `moved` test samples of a client are in its training split as well."""
    splits = list(world.splits)
    one = splits[client]
    splits[client] = Split(np.sort(np.concatenate([one.train, one.test[:moved]])), one.validation, one.test)
    return Federation(world.images, tuple(splits), world.seed)


@pytest.mark.parametrize(("client", "shift", "expected"), [(0, "original", 3), (1, "original", 0), (1, "corrupted", 0)])
def test_test_samples_in_a_training_split_are_counted_once(client: int, shift: str, expected: int) -> None:
    one = device(client, world=leaky(federation(), 0, 3))
    arrays = global_arrays(one.model)
    means, _ = one.statistics(1, Task("t"), arrays)
    check, _ = one.evaluate(1, Task("t"), arrays, means, [Row("a", "none")], [shift])
    assert check == {"checked": 8, "leaked": expected}


def test_a_leak_at_another_client_is_seen_in_the_out_of_client_stream() -> None:
    one = device(1, world=leaky(federation(), 0, 8))
    arrays = global_arrays(one.model)
    means, _ = one.statistics(1, Task("t"), arrays)
    samples = stream(one.federation, 1, "out_of_client", seed=1)
    check, _ = one.evaluate(1, Task("t"), arrays, means, [Row("a", "none")], ["out_of_client"])
    assert check["leaked"] == check_no_leak(samples, one.federation) > 0


def test_samples_that_were_trained_on_in_an_earlier_round_are_remembered() -> None:
    """The published code redraws the split in every round; a device would notice."""
    moved = federation(seed=77)  # another split of the same images_
    before = device(0, world=moved)
    arrays, _ = before.train(1, Task("t"), global_arrays(network()))
    after = device(0, state=before.state)
    for round in (2, 3):
        arrays, _ = after.train(round, Task("t"), arrays)
    means, _ = after.statistics(4, Task("t"), arrays)
    check, _ = after.evaluate(4, Task("t"), arrays, means, [Row("a", "none")], ["original"])
    overlap = np.intersect1d(moved.splits[0].train, after.federation.splits[0].test)
    assert len(overlap) > 0
    assert check == {"checked": 8, "leaked": len(overlap)}


def test_natural_samples_come_from_elsewhere_and_count_as_checked() -> None:
    one = device(natural=images(40, seed=8, name="natural"))
    arrays = global_arrays(one.model)
    means, _ = one.statistics(1, Task("t"), arrays)
    check, results = one.evaluate(1, Task("t"), arrays, means, [Row("a", "none")], ["natural"])
    assert check == {"checked": results[0]["total"], "leaked": 0}
    assert results[0]["total"] > 0


def test_a_client_without_test_samples_counts_as_one_example() -> None:
    """Flower weights by the number of examples, which must not be zero in total; else it is the number of samples."""
    one = device()
    arrays = global_arrays(one.model)
    means, _ = one.statistics(1, Task("t"), arrays)
    for shifts, expected in (([], (1, 0)), (["original"], (8, 8))):
        reply = one.inner.evaluate(one.evaluation(1, Task("t"), arrays, means, [Row("a", "none")], shifts))
        assert (reply.num_examples, reply.checked) == expected
