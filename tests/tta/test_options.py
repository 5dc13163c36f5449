"""Options of all adapters: typed from text, refused out of range; the registry that finds them by name."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedtta import tta
from fedtta.tta import ADAPTERS
from fedtta.tta.modules import zero_rates
from fedtta.tta.registry import PATHS, create, info, parse_options
from fedtta.tta.trial import check_options
from tests.tta.networks import CLASSES, images, two_head_network
from tests.tta.test_adapter_contract import known, network, store

ROOT = Path(__file__).parents[2]
# fmt: off
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "fixed_mix": {"e": [1.1, math.nan], "mix": ["heads"]},
    "fedthe": {
        "alpha": [1.5], "beta": [-0.1], "steps": [0], "lr": [0.0, math.nan], "objective": ["x"], "history": ["x"],
    },
    "btfl": {
        "strength": [0, 1e15, math.inf], "smoothing": [0.6], "rectify": ["x"], "leave_one_out": [1],
        "reading": ["x"],
        "mixing": ["x"], "denominators": ["x"], "classes": [1], "squash": [-1.0, math.nan], "prune": ["x"],
        "integral": ["x"], "prior": ["x"],
    },
    "memo": {
        "views": [0], "steps": [-1], "seed": [-1], "lr": [-1.0, math.nan], "chunk": [0], "mode": ["fast"],
        "head": ["mix"],
    },
    "fedthe_plus": {"views": [0]},
    "atp": {"mode": ["each"], "adapt": ["none"]},
    "bn_adapt": {"prior": [-1], "proximal": [-1.0]},
    "tent": {"steps": [0], "lr": [-1.0, math.nan], "momentum": [1.5], "optimizer": ["lbfgs"], "proximal": [-1.0],
        "layers": ["linear"]},
    "cotta": {
        "views": [0], "seed": [-1], "lr": [-1.0], "restore": [1.1], "momentum_teacher": [-0.1],
        "threshold": [math.nan], "average": ["votes"], "proximal": [math.inf],
    },
    "rotta": {
        "capacity": [0], "update_every": [0], "seed": [-1], "alpha": [1.5], "nu": [-0.1], "lr": [-1.0],
        "lambda_t": [-1.0], "lambda_u": [math.nan], "proximal": [-1.0],
    },
    "roid": {
        "momentum_src": [1.1], "momentum_probs": [-0.1], "temperature": [0.0], "seed": [-1], "lr": [-1.0],
        "proximal": [-1.0], "divide": ["largest"],
    },
    "bbn": {
        "h0": [-0.1], "consistency": [math.inf], "lr": [-1.0], "seed": [-1], "momentum": [0.0], "gamma": [2.0],
        "augment": ["both"], "proximal": [-1.0], "between": ["half"],
    },
    "eata": {
        "margin": [0.0], "redundancy": [1.5], "momentum_probs": [-1.0], "fisher_strength": [math.inf],
        "fisher_batches": [-1], "steps": [0], "lr": [-1.0], "layers": ["linear"],
    },
    "ttt": {"views": [0], "steps": [-1], "lr": [math.nan], "seed": [-1], "head": ["mix"]},
    "t3a": {"support": [-1], "prototype": ["sum"], "head": ["local"]},
    "shot": {"strength": [-1.0], "lr": [math.inf], "momentum": [1.5], "steps": [0], "head": ["mix"]},
    "surgical": {"lr": [-1.0], "steps": [0], "adapt": ["stats"], "block": [3, -2]},
    "em": {"iterations": [0], "tolerance": [math.nan]},
    "bbse": {"rtol": [1.0], "predictions": ["top"]},
    "tsa": {
        "scope": ["batch"], "similarity": ["l2"], "lr": [-1.0], "steps": [-1], "seed": [-1], "momentum": [2.0],
        "least": [0.5],
    },
    "knn_per": {"neighbours": [0], "scale": [0.0], "weight": [1.1], "head": ["both"]},
    "fedicon": {
        "mode": ["batch"], "head": ["mix"], "epochs": [0], "batch_size": [1], "lr": [math.nan], "momentum": [1.5],
        "seed": [-1], "temperature": [0.0],
    },
}
# fmt: on


def test_names_are_readable_without_torch():
    code = "import sys; from fedtta.tta import ADAPTERS; assert 'tent' in ADAPTERS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_public_names_exist():
    assert all(hasattr(tta, name) for name in tta.__all__)
    assert set(tta.__all__) <= set(dir(tta))
    assert tta.btfl.BTFL is tta.BTFL
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = tta.nothing_here


def test_create_passes_typed_options(stream):
    adapter = create("fedthe", stream.model, stream.known, beta=1, objective="em")
    assert isinstance(adapter, tta.FedTHE)
    assert adapter.beta == 1


def test_text_becomes_typed_options():
    assert parse_options("fedthe", {"beta": "1", "objective": "em", "steps": "5", "record": "false"}) == {
        "beta": 1.0,
        "objective": "em",
        "steps": 5,
        "record": False,
    }
    assert isinstance(parse_options("btfl", {"strength": "8"})["strength"], float)
    assert parse_options("memo", {"chunk": "none"}) == {"chunk": None}
    assert parse_options("memo", {"chunk": "4"}) == {"chunk": 4}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tnet", {}, "unknown adapter 'tnet'; there are: atp, auto, .*personal"),
        ("btfl", {"beta": "1"}, "btfl has no option 'beta'; there are: .*smoothing, squash, strength"),
        ("fedthe", {"beta": "much"}, "beta='much' is not a number"),
        ("fedthe", {"steps": "1.5"}, "steps='1.5' is not an integer"),
        ("fedthe", {"objective": "x"}, "one of slw, em, fa, half"),
        ("fedthe", {"record": "maybe"}, "true or false"),
        ("memo", {"augment": "flip"}, "function"),
    ],
)
def test_bad_text_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        parse_options(name, options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tnet", {}, "unknown adapter"),
        ("btfl", {"lambda": 3}, "has no option 'lambda'"),
        ("fedthe", {"steps": 2.5}, "steps=2.5 is not an integer"),
        ("fedthe", {"steps": True}, "steps=True is not an integer"),
        ("fedthe", {"beta": "0.3"}, "beta='0.3' is not a number"),
        ("fedthe", {"objective": "x"}, "one of slw"),
    ],
)
def test_bad_options_are_refused(stream, name, options, message):
    with pytest.raises(ValueError, match=message):
        create(name, stream.model, stream.known, **options)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (name, option, value)
        for name, options in OUT_OF_RANGE.items()
        for option, values in options.items()
        for value in values
    ],
)
def test_options_out_of_range_are_named(name: str, option: str, value: Any) -> None:
    model = network()
    given: dict[str, Any] = {"statistics": known(), "rates": dict(zero_rates(model)), "datastore": store()}
    accepted = inspect.signature(ADAPTERS[name]).parameters
    with pytest.raises(ValueError, match=option):
        ADAPTERS[name](model, **{key: one for key, one in given.items() if key in accepted}, **{option: value})


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_a_trial_makes_every_adapter_and_names_what_is_out_of_range(name: str) -> None:
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_options(name, model, 3)
    for option, values in OUT_OF_RANGE.get(name, {}).items():
        for value in values:
            with pytest.raises(ValueError, match=option):
                check_options(name, model, 3, **{option: value})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training == network().training


def test_a_trial_leaves_the_network_in_its_mode_and_without_a_rotation_head() -> None:
    model: Any = two_head_network().train()
    for name in ("ttt", "none"):
        check_options(name, model, 3)
        assert model.rotation_head is None
        assert model.training


def test_a_trial_knows_how_many_clients_take_part() -> None:
    options = {"reading": "published"}
    check_options("btfl", network(), 2, **options)
    with pytest.raises(ValueError, match="leave_one_out=1: give the number of clients, at least 2"):
        check_options("btfl", network(), 1, **options)


def test_a_trial_names_what_does_not_fit_candidates_or_the_network() -> None:
    model = network()
    check_options("auto", model, 3, among="none+btfl+knn_per+atp")
    for options, told in (
        ({"every": 10}, "every=10: allowed is 0, or at least probe=200"),
        ({"among": "none+auto"}, "auto cannot be a candidate"),
        ({"among": "tnet"}, "unknown adapter 'tnet'"),
    ):
        with pytest.raises(ValueError, match=told):
            check_options("auto", model, 3, **options)
    with pytest.raises(ValueError, match="block=3"):
        check_options("surgical", model, 3, block=3)


@pytest.mark.parametrize("name", ["rotta", "roid", "bbn", "eata"])
def test_the_number_of_classes_must_be_known_and_right(name: str) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, CLASSES)).double()
    with pytest.raises(ValueError, match="num_classes is needed: Sequential does not state"):
        ADAPTERS[name](plain)
    with pytest.raises(ValueError, match="num_classes=0 must be at least"):
        ADAPTERS[name](plain, num_classes=0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"num_classes=9|is not \[8, 9\]"):
        ADAPTERS[name](plain, num_classes=9).predict(images(8))  # type: ignore[call-arg]


def test_an_argument_that_is_no_option_is_named():
    class Untyped(tta.FixedMix):
        def __init__(self, model: torch.nn.Module, strength=1.0, *, rate: float, **more: float) -> None:
            super().__init__(model)

    with pytest.raises(
        TypeError, match=r"Untyped.__init__: strength, rate, more: an option is a named argument with a"
    ):
        _ = Untyped.options


def test_an_adapter_that_calls_itself_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATHS, "mine", "fedtta.tta.t3a:T3A")
    with pytest.raises(ValueError, match=r"adapter 'mine': fedtta\.tta\.t3a:T3A says name = 't3a'"):
        info("mine")
