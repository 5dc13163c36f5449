from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tta
from tta.registry import ADAPTERS, AdapterInfo, create, parse_options

ROOT = Path(__file__).parents[2]


def test_the_table_is_readable_without_torch():
    code = "import sys, tta, tta.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_row_holds_together():
    assert list(ADAPTERS) == [
        "none", "personal", "fixed_mix", "fedthe", "btfl", "memo", "fedthe_plus", "atp",
        "bn_adapt", "tent", "cotta", "rotta", "roid", "bbn",
        "eata", "ttt", "t3a", "shot", "surgical", "em", "bbse", "tsa", "knn_per", "fedrod", "fedicon",
    ]  # fmt: skip
    for row in ADAPTERS.values():
        adapter = row.load()
        assert getattr(tta, row.class_name) is adapter
        assert issubclass(adapter, tta.Adapter)
        assert adapter.per == row.per
        assert row.options["record"] == (bool, True)
        # what collaborates is known from the table alone, and so is whether it has anything to share
        assert row.collaborates is issubclass(adapter, tta.Collaborator)


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
        ("tnet", {}, "unknown adapter 'tnet'; there are: atp, bbn, .*personal"),
        ("btfl", {"beta": "1"}, "btfl has no option 'beta'; there are: .*smoothing, strength"),
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


def test_unknown_needs_are_refused():
    with pytest.raises(ValueError, match="unknown needs"):
        AdapterInfo("x", "tta.none:NoAdaptation", "", "", "sample", frozenset({"labels"}))
