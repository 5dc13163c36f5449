"""What every adapter promises: the same proofs for each, on a two-head network for images with BatchNorm."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from fedtta import tta
from fedtta.models.two_head import TwoHead
from fedtta.tta import ADAPTERS, Adapter, Collaborator, Statistics
from fedtta.tta.auto import Candidates, Gains
from fedtta.tta.base import NEEDS
from fedtta.tta.collaborator import SHARES
from fedtta.tta.estimates import Calibration
from fedtta.tta.knn_per import Datastore
from fedtta.tta.modules import zero_rates
from fedtta.tta.registry import LIGHT
from tests.tta.networks import CLASSES, images, noise, two_head_network, weights

D = 6  # features of the network
N = 15  # samples of a stream
SMALL = {"views": 3, "augment": noise}  # few and cheap views


@dataclass(frozen=True)
class Case:
    """An adapter with options with which a few small batches teach it something that shows."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        keys = ("scope", "mode", "history", "proximal", "reading", "divide")
        shown = {key: value for key, value in self.options.items() if key in keys}
        return "-".join([self.name, *(f"{key}={value}" for key, value in shown.items())])

    @property
    def kind(self) -> type[Adapter]:
        return ADAPTERS[self.name]

    def make(self, dtype: torch.dtype = torch.float64, model: TwoHead | None = None, **changes: Any) -> Any:
        model = network(dtype) if model is None else model
        rates = {name: 0.1 * (1 - 2 * (i % 2)) for i, name in enumerate(zero_rates(model))}
        return tta.create(self.name, model, known(), rates, store(), candidates(), **{**self.options, **changes})


CASES = [
    Case("none"),
    Case("personal"),
    Case("fixed_mix", {"e": 0.25}),
    Case("fedrod"),
    Case("knn_per"),
    Case("fedthe"),
    Case("fedthe", {"history": "batch"}),
    Case("btfl", {"strength": 4.0}),
    Case("btfl", {"reading": "published", "leave_one_out": 3}),
    Case("memo", {**SMALL, "lr": 0.3}),
    Case("memo", {**SMALL, "lr": 0.3, "mode": "vmap", "head": "personal"}),
    Case("fedthe_plus", {**SMALL, "tune_lr": 0.3}),
    Case("ttt", {**SMALL, "lr": 0.05, "steps": 2}),
    Case("t3a", {"support": 2}),
    Case("t3a", {"support": 0, "prototype": "direction", "head": "personal"}),
    Case("tsa", {"augment": noise, "lr": 0.3}),
    Case("tsa", {"augment": noise, "lr": 0.3, "scope": "sample", "similarity": "dot"}),
    Case("em"),
    Case("bbse"),
    Case("atp"),
    Case("atp", {"mode": "online"}),
    Case("surgical", {"lr": 0.4, "steps": 2}),
    Case("shot", {"lr": 0.05, "steps": 2}),
    Case("fedicon", {"augment": noise, "lr": 0.05, "momentum": 0.9, "epochs": 2}),
    Case("fedicon", {"augment": noise, "lr": 0.05, "mode": "offline", "batch_size": 4}),
    Case("bn_adapt"),
    Case("tent", {"lr": 0.05, "steps": 2}),
    Case("tent", {"lr": 0.05, "optimizer": "sgd", "proximal": 1.0}),
    Case("eata", {"lr": 0.05, "margin": 1.0, "redundancy": 1.0, "fisher_batches": 2, "steps": 2}),
    Case("cotta", {**SMALL, "lr": 0.05, "restore": 0.2, "momentum_teacher": 0.9, "threshold": 1.0, "proximal": 1.0}),
    Case("rotta", {"augment": noise, "lr": 0.05, "capacity": 6, "update_every": 4, "nu": 0.1, "proximal": 1.0}),
    Case("roid", {"augment": noise, "lr": 0.05, "momentum_src": 0.9, "proximal": 1.0}),
    Case("roid", {"augment": noise, "lr": 0.05, "momentum_src": 0.9, "divide": "batch"}),
    Case("auto", {"probe": 8, "every": 12, "caution": 0.0}),
    Case("bbn", {"augment": noise, "lr": 0.05, "h0": 0.99, "momentum": 0.3, "proximal": 0.3}),
]
SHARING = [case for case in CASES if case.kind.collaborates]
VIEWING = [case for case in CASES if "augment" in case.kind.options]
#: Cases in which a sample's own place in its batch plays no part.
UNORDERED = ("none", "personal", "fixed_mix", "fedrod", "knn_per", "em", "bbse", "surgical", "shot", "bn_adapt", "tent")

each = pytest.mark.parametrize("case", CASES, ids=str)
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def network(dtype: torch.dtype = torch.float64) -> TwoHead:
    """`two_head_network` with a rotation head and statistics near those of `images`; it predicts every class."""
    return copy.deepcopy(_network(dtype))


@functools.cache
def _network(dtype: torch.dtype) -> TwoHead:
    model = two_head_network()
    draw = Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        model.rotation_head = nn.Linear(D, 4).double()
    with torch.no_grad():
        for value in (model.head.weight, model.personal_head.weight, *model.rotation_head.parameters()):
            value.copy_(torch.randn(value.shape, generator=draw, dtype=torch.float64))
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.8
        model.train().features(images(40))  # moves the running statistics
        middle = model.eval().features(images(40)).mean(0)
        for head in (model.head, model.personal_head):  # both logits are 0 in the middle of the features
            head.weight.mul_(10)
            head.weight.sub_(torch.outer(head.weight @ middle, middle) / middle.dot(middle))
    return model.to(dtype).eval()


def known() -> Statistics:
    """Statistics of made-up training data, all of them."""
    draw = Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return 0.1 + 0.8 * torch.rand(*shape, generator=draw, dtype=torch.float64)

    prior, pairs = random(CLASSES), random(CLASSES, CLASSES) + 3 * torch.eye(CLASSES)
    scores = torch.tensor([0.2, 0.7, 0.4])
    vectors = (random(D) for _ in range(4))
    return Statistics(*vectors, 0.9, 0.8, prior / prior.sum(), pairs / pairs.sum(), scores)


@functools.cache
def store() -> Datastore:
    with torch.no_grad():
        return Datastore(network().features(images(20, seed=9)), torch.arange(20) % CLASSES)


def candidates() -> Candidates:
    """Such that a choice changes now and then: with and without state, on the network's outputs and on a copy of it."""
    makers: dict[str, Any] = {
        "personal": lambda network: tta.create("personal", network, record=False),
        "none": lambda network: tta.create("none", network, record=False),
        "t3a": lambda network: tta.create("t3a", network, support=2, record=False),
        "tent": lambda network: tta.create("tent", network, lr=0.05, record=False),
    }
    return Candidates(makers, Gains(dict.fromkeys(makers, Calibration(0.1, 0.0))))


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(value, second[name]) for name, value in first.items())


def snapshot(adapter: Any) -> dict[str, Tensor]:
    """Everything that an adapter says it has learned."""
    if not isinstance(adapter, Collaborator):
        return adapter.state_dict()
    domain = {f"{layer}/{i}": part.clone() for layer, pair in adapter.domain().items() for i, part in enumerate(pair)}
    return {**adapter.state_dict(), **adapter.shared("all"), **domain}


def stream(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return list(images(N, dtype=dtype).split([6, 1, 8]))


@functools.cache
def _undisturbed(case: int) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    adapter = CASES[case].make()
    return [adapter.predict(part) for part in stream()], adapter.report(), snapshot(adapter)


def undisturbed(case: Case) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The predictions of `stream`, the report and what has been learned then."""
    return _undisturbed(CASES.index(case))


# Facts


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_facts_of_the_class(name: str) -> None:
    kind = ADAPTERS[name]
    assert kind.name == name
    assert getattr(tta, kind.__name__) is kind
    assert kind.needs <= NEEDS
    assert kind.adapts
    assert kind.options["record"] == (bool, True)
    assert kind.collaborates is issubclass(kind, Collaborator)
    default = Case(name).make()
    assert default.per == kind.per
    assert not default.takes_whole_set
    if kind.whole_set:
        option, value = kind.whole_set
        assert Case(name, {option: value}).make().takes_whole_set
    if kind.collaborates:
        assert kind.shares == bool(default.shared("all"))
    assert (kind.views is not None) == ("augment" in kind.options)
    if kind.views:
        made = kind.views.for_data(flip=False, crop=0.5)
        assert made(images(2), Generator().manual_seed(0)).shape == (2, 3, 6, 6)
        usual, own = kind.views.for_data(flip=True, crop=0.2), getattr(default, "tuning", default).augment
        assert (type(usual), vars(usual)) == (type(own), vars(own)), "a run's views are the method's"


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_no_method_takes_labels(name: str) -> None:
    for _, method in inspect.getmembers(ADAPTERS[name], inspect.isfunction):
        if not method.__name__.startswith("_") or method.__name__ in ("__init__", "_predict", "_adapt"):
            arguments = set(inspect.signature(method).parameters)
            pseudo = method.__name__ == "_adapt" and name == "bbn"  # its own predictions
            assert not arguments & {"y", "targets", "target", *(() if pseudo else ("labels", "label"))}


def test_every_adapter_has_a_case() -> None:
    assert {case.name for case in CASES} == set(ADAPTERS)


def test_unknown_needs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown needs \['labels'\]; there are: batchnorm, "):
        type("Cheat", (Adapter,), {"needs": frozenset({"labels"})})


# Predictions


@each
@both_types
def test_rows_are_probabilities_of_the_models_dtype(case: Case, dtype: torch.dtype) -> None:
    adapter = case.make(dtype)
    for part in stream(dtype):
        rows = adapter.predict(part)
        assert rows.shape == (len(part), CLASSES)
        assert rows.dtype == dtype
        assert not rows.requires_grad
        assert bool((rows >= 0).all())
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(rows.sum(1), torch.ones(len(part), dtype=dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*LIGHT, "knn_per", "bn_adapt", "tent"])
def test_a_network_of_half_precision_serves_methods_that_do_little_arithmetic_of_their_own(
    name: str, dtype: torch.dtype
) -> None:
    adapter = Case(name).make(dtype)
    for part in stream(dtype):
        rows = adapter.predict(part)
        assert rows.dtype == dtype
        torch.testing.assert_close(rows.sum(1), torch.ones(len(part), dtype=dtype), atol=0.02, rtol=0)


@each
def test_results_per_sample_do_not_depend_on_the_batch_size(case: Case) -> None:
    x, results, reports = images(N), [], []
    for size in (N, 1, 7):
        adapter = case.make()
        results.append(torch.cat([adapter.predict(part) for part in x.split(size)]))
        reports.append(adapter.report())
    assert all(bool(torch.isfinite(rows).all()) for rows in results)
    for rows, report in zip(results[1:], reports[1:], strict=True):
        if adapter.per == "sample":
            torch.testing.assert_close(rows, results[0], atol=1e-9, rtol=0)
            torch.testing.assert_close(report, reports[0], atol=1e-8, rtol=0)
    if adapter.per == "batch" and adapter.needs != {"personal_head", "descriptor"}:
        assert not torch.allclose(results[1], results[0], atol=1e-6)


@each
def test_the_order_within_a_batch_does_not_matter_without_random_views(case: Case) -> None:
    if case.name not in UNORDERED and str(case) != "atp":
        return
    x, order = images(N), torch.randperm(N, generator=Generator().manual_seed(0))
    torch.testing.assert_close(case.make().predict(x[order]), case.make().predict(x)[order], atol=1e-9, rtol=0)


@each
def test_an_empty_batch_changes_nothing(case: Case) -> None:
    adapter, nothing, (rows, report, learned) = case.make(), images(0), undisturbed(case)
    assert adapter.predict(nothing).shape == (0, CLASSES)
    for part, want in zip(stream(), rows, strict=True):
        assert torch.equal(adapter.predict(part), want)
        assert adapter.predict(nothing).shape == (0, CLASSES)
    assert same(snapshot(adapter), learned)
    assert same(adapter.report(), report)


@each
def test_inference_mode_gives_the_same_numbers(case: Case) -> None:
    adapter, parts, (want, _, _) = case.make(), stream(), undisturbed(case)
    with torch.inference_mode():
        adapter.reset()
        assert torch.equal(adapter.predict(parts[0] * 1), want[0])
        adapter.load_state_dict(adapter.state_dict())
        assert torch.equal(adapter.predict(parts[1] * 1), want[1])
    adapter.load_state_dict(adapter.state_dict())
    assert torch.equal(adapter.predict(parts[2]), want[2])


@each
def test_the_network_and_the_global_generator_stay_as_they_are(case: Case) -> None:
    model = network()
    model.encoder[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    before, wanted = weights(model), [value.requires_grad for value in model.parameters()]
    layers, state = [id(layer) for layer in model.modules()], torch.get_rng_state()
    adapter = case.make(model=model)
    for part in stream():
        adapter.predict(part)
    assert same(weights(model), before)
    assert [value.requires_grad for value in model.parameters()] == wanted
    assert [id(layer) for layer in model.modules()] == layers
    assert all(value.grad is None for value in model.parameters())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


# State and report


@each
@both_types
def test_a_state_continues_the_stream_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    parts, one, two = stream(dtype), case.make(dtype), case.make(dtype)
    names = list(one.state_dict())
    one.predict(parts[0])
    if isinstance(one, Collaborator):
        one.load_shared({name: value + 0.05 for name, value in one.shared("all").items()})
    one.predict(parts[1])
    state = one.state_dict()
    assert list(state) == names
    two.predict(parts[2])  # a past that must not show
    two.load_state_dict(state)
    assert two.report() == {}
    assert same(snapshot(two), snapshot(one))
    kept = {name: value.clone() for name, value in state.items()}
    for part in (parts[2], parts[0]):
        assert torch.equal(two.predict(part), one.predict(part))
    assert same(snapshot(two), snapshot(one))
    assert same(state, kept)  # a copy


@each
def test_reset_starts_the_stream_again(case: Case) -> None:
    adapter = case.make()
    start = snapshot(adapter)
    first = [adapter.predict(part) for part in stream()]
    report = adapter.report()
    restored = case.make()
    restored.load_state_dict(adapter.state_dict())
    restored.reset()
    assert same(snapshot(restored), start)  # a state that is read does not reach what a reset goes back to
    if isinstance(adapter, Collaborator):
        adapter.load_shared({name: value + 1 for name, value in adapter.shared("all").items()})
    adapter.reset()
    assert adapter.report() == {}
    assert same(snapshot(adapter), start)
    assert all(torch.equal(adapter.predict(part), rows) for part, rows in zip(stream(), first, strict=True))
    assert same(adapter.take_report(), report)
    assert adapter.report() == {}


@each
def test_a_report_is_kept_only_on_request(case: Case) -> None:
    silent, adapter = case.make(record=False), case.make()
    for part in stream():
        silent.predict(part)
        adapter.predict(part)
    assert silent.report() == {}
    whole = {name: len(column) for name, column in adapter.report().items()}
    by_step = {"fedicon": {"loss"}, "atp": {"update_norms"}}.get(case.name, set())  # not by sample
    assert {length for name, length in whole.items() if name not in by_step} <= {N}
    for name, column in adapter.report().items():
        assert same(adapter.report(name, "stranger"), {name: column})
    for name, column in list(adapter.report().items())[-1:]:
        assert same(adapter.take_report(name), {name: column})
        assert adapter.report() == {}


# Refusals


@each
def test_bad_samples_are_named_and_change_nothing(case: Case) -> None:
    adapter, x = case.make(), images(N)
    adapter.predict(x[:6])
    before, report = snapshot(adapter), adapter.report()
    bad = x[6:].clone()
    for value in (math.nan, math.inf):
        bad[3, 1, 2, 2] = value
        with pytest.raises(ValueError, match=r"samples \[3\]"):
            adapter.predict(bad)
    with pytest.raises(TypeError, match="int64"):
        adapter.predict(torch.zeros(2, 3, 6, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="batch dimension"):
        adapter.predict(torch.zeros(6))
    assert same(snapshot(adapter), before)
    assert same(adapter.report(), report)


@each
def test_an_output_that_is_not_finite_changes_nothing(case: Case) -> None:
    if case.name == "none":  # predicts what the network predicts
        return
    model = network()
    adapter = case.make(model=model) if case.name == "t3a" else None  # its prototypes start from the head
    with torch.no_grad():
        model.head.bias.fill_(math.nan)
        model.personal_head.weight.fill_(math.nan)
    broken = adapter or case.make(model=model)
    before = snapshot(broken)
    with pytest.raises(ValueError, match=r"(the .*|tuning .*) for samples \[0, 1, .*\] of the batch"):
        broken.predict(images(6))
    assert broken.report() == {}
    assert all(torch.equal(value.nan_to_num(7), before[key].nan_to_num(7)) for key, value in snapshot(broken).items())


@each
def test_states_that_do_not_fit_are_refused_and_nothing_is_loaded(case: Case) -> None:
    adapter, other = case.make(), case.make(**({"seed": 5} if "seed" in case.kind.options else {}))
    adapter.predict(images(7))
    other.predict(images(9, seed=2))
    before, state = snapshot(adapter), other.state_dict()
    wrong: list[dict[str, Tensor]] = [{**state, "stranger": torch.zeros(())}]
    for name, value in state.items():
        if value.is_floating_point():
            wrong.append({**state, name: torch.full_like(value, math.nan)})
        if name.startswith("memory."):
            continue  # its size varies
        wrong.append({**state, name: torch.zeros(*value.shape, 3, dtype=value.dtype)})
        wrong.append({**state, name: value.to(torch.float32 if value.dtype != torch.float32 else torch.float64)})
        if name.endswith((".variance", "running_var", ".second", "step", "batches", "position", "seen")) and not (
            name.startswith("mean.")
        ):
            wrong.append({**state, name: torch.full_like(value, -1)})
    wrong += [{key: value for key, value in state.items() if key != name} for name in state]
    for one in wrong:
        with pytest.raises(ValueError, match="state"):
            adapter.load_state_dict(one)
    assert same(snapshot(adapter), before)


class Counted(nn.Module):
    """A layer whose parameters have names of counts and variances, and are negative."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("position", "step", "seen", "second", "batches", "variance"):
            self.register_parameter(name, nn.Parameter(torch.tensor(-0.1, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(self.parameters())


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("ttt", "shot", "fedicon", "cotta")], ids=str)
def test_a_parameter_may_be_negative_whatever_its_name(case: Case) -> None:
    model: Any = network()
    model.encoder.insert(0, Counted())
    adapter, twin = case.make(model=model), case.make(model=model)
    adapter.predict(images(7))
    twin.load_state_dict(adapter.state_dict())
    assert same(snapshot(twin), snapshot(adapter))


@pytest.mark.parametrize("case", VIEWING, ids=str)
def test_views_that_fail_change_nothing(case: Case) -> None:
    calls: list[int] = []
    mode = "fine"

    def breaks(x: Tensor, generator: Generator) -> Tensor:
        calls.append(1)
        if mode == "raise" and len(calls) > 1:
            raise RuntimeError("no view")
        return noise(x, generator)[1:] if mode == "short" else noise(x, generator)

    adapter = case.make(augment=breaks)
    adapter.predict(images(6))
    before, report = snapshot(adapter), adapter.report()
    mode = "short"
    with pytest.raises(ValueError, match="augment made"):
        adapter.predict(images(8, seed=2))
    if case.name not in ("roid", "bbn") and str(case) != "tsa-scope=stream":
        calls, mode = [], "raise"
        with pytest.raises(RuntimeError, match="no view"):
            adapter.predict(images(12, seed=2))
    assert same(snapshot(adapter), before)
    assert same(adapter.report(), report)


@pytest.mark.parametrize("case", VIEWING, ids=str)
def test_views_depend_on_the_seed_alone(case: Case) -> None:
    default = "student" if case.name == "bbn" else None
    x = images(4)
    torch.random.default_generator.manual_seed(1)
    adapter = case.make(augment=default)
    first = [adapter.predict(x), adapter.predict(x)]
    learned = snapshot(adapter)
    torch.random.default_generator.manual_seed(2)
    adapter.reset()
    assert all(torch.equal(adapter.predict(x), rows) for rows in first)
    other = case.make(augment=default, seed=8)
    rows = [other.predict(x), other.predict(x)]
    assert not same(snapshot(other), learned) or not all(map(torch.equal, rows, first))


# Adapters that share


@pytest.mark.parametrize("case", SHARING, ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_a_mixture_is_taken_over_and_the_rest_kept(case: Case, share: Any) -> None:
    adapter, other = case.make(), case.make()
    adapter.predict(images(6))
    other.predict(1 - images(8, seed=5))
    mine, theirs = adapter.shared(share), other.shared(share)
    assert all(not value.requires_grad for value in mine.values())
    mixture = {name: (value + theirs[name]) / 2 for name, value in mine.items()}
    rest = {name: value for name, value in adapter.shared("all").items() if name not in mixture}
    adapter.load_shared(mixture)
    after = adapter.shared("all")
    assert all(torch.equal(after[name], value) for name, value in {**mixture, **rest}.items())
    torch.testing.assert_close(adapter.predict(images(6)).sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("case", SHARING, ids=str)
def test_the_domain_starts_at_the_source_and_then_moves(case: Case) -> None:
    model: Any = network()
    adapter = case.make(model=model)
    for layer, (mean, variance) in adapter.domain().items():
        source = model.get_submodule(layer)
        torch.testing.assert_close((mean, variance), (source.running_mean, source.running_var))
    if case.name != "none":
        assert list(adapter.domain()) == ["encoder.1", "encoder.4"]
        adapter.predict(images(8))
        assert not torch.equal(adapter.domain()["encoder.1"][0], model.encoder[1].running_mean)


@pytest.mark.parametrize(
    "case", [case for case in SHARING if case.name in ("tent", "eata", "cotta", "roid", "bbn")], ids=str
)
def test_a_proximal_term_has_no_effect_on_one_step_after_a_reception(case: Case) -> None:
    one = {"steps": 1} if "steps" in case.kind.options else {}
    free, pulled = (case.make(proximal=strength, **one) for strength in (0.0, 50.0))
    for part in images(16).split(8):
        assert torch.equal(free.predict(part), pulled.predict(part))
        for adapter in (free, pulled):
            adapter.load_shared({name: 1.01 * value for name, value in adapter.shared("affine").items()})
    assert same(free.shared("all"), pulled.shared("all"))
    for adapter in (free, pulled):  # two steps without a reception between them
        adapter.predict(images(8))
        adapter.predict(images(8, seed=2))
    assert not same(free.shared("all"), pulled.shared("all"))


@pytest.mark.parametrize("case", SHARING, ids=str)
def test_frozen_and_missing_batchnorms(case: Case) -> None:
    if case.name == "none":
        return
    model: Any = network()
    model.encoder[1].requires_grad_(False)
    adapter = case.make(model=model)
    adapter.predict(images(8))
    assert not any("encoder.1." in name for name in adapter.trained())
    if case.kind.shares:
        assert any("encoder.4." in name for name in adapter.trained())
    plain = TwoHead(nn.Sequential(nn.Flatten(), nn.Linear(108, D), nn.ReLU()), D, CLASSES).double()
    with pytest.raises(ValueError, match="no BatchNorm layer"):
        case.make(model=plain)


@pytest.mark.parametrize("case", [case for case in SHARING if case.kind.shares], ids=str)
def test_a_step_that_leaves_the_finite_numbers_changes_nothing(case: Case) -> None:
    adapter, x = case.make(torch.float32, lr=1e308), images(N, dtype=torch.float32)
    before = snapshot(adapter)
    with pytest.raises(ValueError, match="finite"):
        adapter.predict(x)
    assert same(snapshot(adapter), before)
    assert adapter.report() == {}


@pytest.mark.parametrize(
    "name", ["personal", "fixed_mix", "fedrod", "fedthe", "fedthe_plus", "btfl", "tsa", "fedicon", "shot", "t3a", "ttt"]
)
def test_a_network_without_the_parts_is_refused(name: str) -> None:
    kind, plain = ADAPTERS[name], nn.Linear(D, CLASSES)
    given: dict[str, Any] = {"statistics": known()} if "statistics" in inspect.signature(kind).parameters else {}
    with pytest.raises(ValueError, match=r"needs a .*; Linear has no .*features"):
        kind(plain, **given)
