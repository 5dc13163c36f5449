"""The table of constants: complete, every default read from where it is, and faults named."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from docs import generated
from fedtta.benchmarks.constants import FILE, Constant, constants, default_at
from fedtta.server.trainings import TRAININGS
from fedtta.settings import Settings
from fedtta.strategies.registry import AGGREGATIONS, COLLABORATIONS, NO_COLLABORATION
from fedtta.tta.registry import ADAPTERS

HEAD = "method,constant,paper,code,place,ours,why"


def test_every_method_with_a_paper_has_rows_and_others_have_none() -> None:
    with_paper = {name for name, adapter in ADAPTERS.items() if adapter.paper}
    trainings = {name for name, one in TRAININGS.items() if re.search(r"\b(19|20)\d\d\b", one.summary)}
    rules = {*AGGREGATIONS, *COLLABORATIONS} - {NO_COLLABORATION}
    assert len(with_paper) > 15
    assert len(trainings) > 10
    found = {one.method for one in constants()}
    assert found >= with_paper | trainings | rules
    assert found <= {*ADAPTERS, *TRAININGS, *rules}


def test_every_option_that_is_a_number_is_in_the_table() -> None:
    """Those that decide what a method with a paper computes; seeds, memory and the run's own are left out."""
    places = {one.place for one in constants()}
    own = {"seed", "record", "chunk", "proximal", "num_classes", "leave_one_out"}  # the last is a setting, too
    numeric = {
        f"option:{name}.{option}"
        for name, adapter in ADAPTERS.items()
        if adapter.paper
        for option, (_, default) in adapter.options.items()
        if isinstance(default, (int, float)) and not isinstance(default, bool) and option not in own
    }
    assert len(numeric) > 60
    assert numeric <= places, sorted(numeric - places)


def test_defaults_are_the_codes() -> None:
    by_name = {(one.method, one.constant): one for one in constants()}
    assert by_name["fedthe", "β, weight of the feature in its smoothed version"].default == "0.3"
    assert by_name["roid", "τ of the weights"].default == "0.3333"
    assert by_name["pfedgraph", "cosine that counts as 1"].at == "PFedGraph.round_above"
    assert by_name["tent", "layers trained"].at == "tent[layers]"
    assert by_name["fedbn", "what stays on the client"].default == "kind:batchnorm"
    assert by_name["bbn", "γ, interpolation with the batch"].default == "0"
    assert default_at("setting:learning-rate") == Settings().learning_rate
    assert default_at("option:knn_per.neighbours") == 10
    assert default_at("default:fedtta.client.algorithms.apfl:APFL.alpha") == 0.5
    assert default_at("constant:fedtta.benchmarks.constants:Constant.default.fget.__name__") == "default"


def test_no_line_types_what_is_read() -> None:
    for one in constants():
        assert one.default, one
        assert bool(one.ours) != bool(one.place and default_at(one.place) is not None), one
    assert sum(bool(one.place) for one in constants()) > 100


def test_the_page_shows_every_line() -> None:
    lines = generated.section("constants").splitlines()
    assert len(lines) == 2 + len(constants())
    assert "| `tent` | steps a batch | 1 | 1 | 1 | `tent[steps]` | as the paper |" in lines
    row = "| `pfedgraph` | cosine that counts as 1 | none | above 0.9 | 1 | `PFedGraph.round_above` |"
    assert any(line.startswith(row) for line in lines)


def test_the_file_is_as_a_writer_of_csv_leaves_it() -> None:
    with FILE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert all(cell == cell.strip() for row in rows for cell in row)
    assert b"\r" not in FILE.read_bytes()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("tent,steps,1,1,option:tent.steps,2,why", r"line 2: ours = '2'; words are for what cannot be read"),
        ("tent,steps,1,1,,,why", "line 2: ours = ''"),
        ("tent,steps,1,1,option:tent.step,,why", "line 2: place 'option:tent.step': 'step'"),
        ("tent,steps,1,1,option:tant.steps,,why", "line 2: place .*unknown adapter 'tant'"),
        ("fedamp,sigma,1,1,default:fedtta.strategies.fedamp:FedAMP.sigma,,why", "line 2: ours = ''"),
        ("krum,f,1,1,default:fedtta.strategies.robust:FedKrum.aggregator,,why", "line 2: place .*no default"),
        ("tent,steps,1,1,setting:steps,,why", "line 2: place 'setting:steps'"),
        ("tent,steps,1,1,constant:fedtta.tta.tent:STEPS,,why", "line 2: place .*STEPS"),
        ("tent,steps,1,1,constant:fedtta.tta.nothing:STEPS,,why", "line 2: place .*nothing"),
        ("tent,steps,1,1,value:2,,why", "line 2: place .*unknown kind 'value'; there are: option, setting"),
        ("tent,steps,,1,option:tent.steps,,why", "line 2: no paper"),
        ("tent,steps,1,1,option:tent.steps,", "line 2: columns are missing"),
        ("tent,s,1,1,option:tent.steps,,why\ntent,s,1,1,option:tent.lr,,why", "line 3: tent, s occurs twice"),
    ],
)
def test_faults_are_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "constants.csv"
    path.write_text(f"{HEAD}\n{line}\n")
    with pytest.raises(ValueError, match=told):
        constants(path)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "constants.csv"
    path.write_text("method,constant\n")
    with pytest.raises(ValueError, match=r"columns .*; allowed are method, constant, paper"):
        constants(path)
    path.write_text(f"{HEAD}\ntent,steps,1,1,option:tent.steps,,why\n")
    assert constants(path) == (Constant("tent", "steps", "1", "1", "option:tent.steps", "", "why"),)
