"""Comparison over seeds against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from fedtta.benchmarks.papers import Printed, Reference
from fedtta.benchmarks.tables.comparison import Comparison, beyond, compare, entry_text, recovered, spread
from fedtta.benchmarks.tables.pages import markdown_table, recovered_lines
from fedtta.benchmarks.tables.protocol import Cell, Table
from fedtta.benchmarks.tables.results import CONSTANT, row_content
from fedtta.settings import Settings
from tests.benchmarks.fabricated import results

METHODS = ("fedavg", "personal", "btfl")


def kept(seed: int, rows: tuple[str, ...] = METHODS) -> dict:
    return {"rows": {label: row_content(results(seed).evaluations, label, "t") for label in rows}}


def table_of(*cells: Cell, **more: str) -> Table:
    return Table("t", "Made up", cells, **more)


def one_cell(**more: object) -> Table:
    return table_of(Cell("c", "C", Settings(), **more))  # type: ignore[arg-type]


@pytest.fixture
def found() -> Comparison:
    return compare(one_cell(), {"c": {2: kept(2), 1: kept(1)}})


def test_values_by_hand(found: Comparison) -> None:
    # Seed 1, fedavg on original: clients 1/4 and 3/4, mean 50 %; out of client 3/4 and 2/4, 62.5 %; average 56.25 %.
    assert found.seeds == [1, 2]
    assert found.columns == ["original", "out_of_client", "average"]
    assert found.values["fedavg"] == {
        "original": {1: 50, 2: 50}, "out_of_client": {1: 62.5, 2: 75}, "average": {1: 56.25, 2: 62.5}
    }  # fmt: skip
    assert found.values["btfl"]["out_of_client"] == {1: 37.5, 2: 37.5}


def test_share_of_the_gap_by_hand(found: Comparison) -> None:
    # Seed 1: (37.5 - 12.5) / (62.5 - 12.5) = 1/2; seed 2: (37.5 - 25) / (75 - 25) = 1/4.
    assert recovered(found) == {"btfl": [50, 25]}
    assert recovered_lines(found) == ["btfl: 37.50 ± 12.50 % of the gap personal → FedAvg recovered on out_of_client"]
    assert all(math.isnan(share) for share in recovered(found, "original")["btfl"])  # FedAvg is not better there
    late = compare(one_cell(), {"c": {1: kept(1), 2: kept(2, ("fedavg", "personal"))}})
    assert recovered(late) == {}  # one seed lacks the row
    assert recovered(compare(one_cell(), {"c": {1: kept(1, ("fedavg", "btfl"))}})) == {}


def test_a_row_on_fewer_samples_is_neither_the_best_nor_gains() -> None:
    rows = kept(1)["rows"] | {"memo": row_content(results(1).evaluations, "btfl", "t")}
    for shift in rows["memo"]["shifts"].values():
        shift |= {"accuracy_percent": 99.0, "samples": 1}
    made = compare(table_of(Cell("c", "C", Settings()), baseline="fedavg"), {"c": {1: {"rows": rows}}})
    assert entry_text(made, "memo", "original") == ("99.00", False)
    assert entry_text(made, "personal", "original") == ("87.50 (+37.50)", True)
    assert recovered(made) == {"btfl": [50]}


def test_a_row_on_fewer_seeds_is_not_the_best() -> None:
    found = compare(one_cell(), {"c": {1: kept(1), 2: kept(2, ("fedavg", "btfl"))}})
    assert entry_text(found, "personal", "original") == ("87.50 (1 of 2 seeds)", False)
    assert entry_text(found, "btfl", "original") == ("81.25 ± 6.25", True)
    alone = compare(one_cell(), {"c": {1: kept(1, ("personal",)), 2: kept(2, ("fedavg",))}})
    assert found.best("absent") == set()
    assert alone.best("original") == {"personal"}


def test_markdown_by_hand(found: Comparison) -> None:
    # Standard deviations are divided by n: of 62.5 and 75 it is 6.25. 59.375 is displayed as 59.38, twice the best.
    assert markdown_table(found).splitlines() == [
        "| row | original | out_of_client | average |",
        "| --- | --: | --: | --: |",
        "| `fedavg` | 50.00 ± 0.00 | **68.75 ± 6.25** | **59.38 ± 3.12** |",
        "| `personal` | **93.75 ± 6.25** | 18.75 ± 6.25 | 56.25 ± 6.25 |",
        "| `btfl` | 81.25 ± 6.25 | 37.50 ± 0.00 | **59.38 ± 3.12** |",
    ]


def test_a_row_that_some_seeds_lack_and_the_papers_numbers() -> None:
    reference = Reference("fedthe", "1", {"alpha": 1.0})
    found = compare(one_cell(references=(reference,)), {"c": {1: kept(1), 2: kept(2, ("fedavg",))}})
    theirs = found.paper["fedavg"]["out_of_client"].mean
    assert entry_text(found, "fedavg", "out_of_client") == (f"68.75 ± 6.25 | {theirs:.2f}", True)
    assert entry_text(found, "btfl", "original") == ("75.00 (1 of 2 seeds)", False)


def test_cells_joined_into_a_table_with_gains_and_suffixes() -> None:
    def row(value: float) -> dict:
        return {"training": "t", "shifts": {"original": {"accuracy_percent": value}}}

    cells = (
        Cell("a", "A", Settings(), table="t", column="left"),
        Cell("b", "B", Settings(), table="t", column="right"),
        Cell("a-on-b", "C", Settings(), table="t", column="right", suffix="from a"),
    )
    contents = {
        "a": {1: {"rows": {"fedavg": row(50.0), "atp": row(55.0), CONSTANT: row(99.0)}}},
        "b": {1: {"rows": {"fedavg": row(60.0), "atp": row(59.0)}}},
        "a-on-b": {1: {"rows": {"atp": row(40.0)}}},
    }
    found = compare(table_of(*cells, baseline="fedavg"), contents)
    assert found.columns == ["left", "right", "average"]
    assert found.values["atp"]["average"] == {1: 57.0}
    assert entry_text(found, "atp", "left") == ("55.00 (+5.00)", True)  # constant predictions are not a method
    assert entry_text(found, "atp (from a)", "right") == ("40.00 (-20.00)", False)
    assert "average" not in found.values["atp (from a)"]  # it has one of the two columns


def test_samples_or_clients_or_another_measure_count() -> None:
    shift = {"accuracy_percent": 87.5, "by_samples_percent": 80.0, "answered_percent": 12.0}
    contents = {"c": {1: {"rows": {"fedavg": {"training": "t", "shifts": {"original": shift}}}}}}
    assert compare(one_cell(weighting="samples"), contents).values["fedavg"]["original"] == {1: 80.0}
    assert compare(one_cell(), contents).values["fedavg"]["original"] == {1: 87.5}
    measured = table_of(*one_cell().cells, measure="answered_percent")
    assert compare(measured, contents).values["fedavg"]["original"] == {1: 12.0}


def test_one_seed_has_no_standard_deviation() -> None:
    assert (spread([12.5]), spread([float("nan")]), spread([])) == ("12.50", "–", "–")
    one = Comparison("one", {"a": {"original": {1: 1.0}, "average": {1: 1.0}}}, [1])
    assert one.columns == ["original"]  # the average of one says nothing


def test_further_from_the_paper_than_both_spreads() -> None:
    def of(mean: float, sd: float | None) -> Printed:
        return Printed("1", {}, "A", "a", "x", "%", mean, sd)

    two = {1: 50.0, 2: 52.0}  # mean 51, sd 1
    values = {"a": {"x": two, "y": two}, "b": {"x": {1: 50.0}, "z": {1: 1.0}}}
    paper = {"a": {"x": of(53.0, 1.1), "y": of(53.0, 0.9)}, "b": {"x": of(50.1, None)}, "c": {"x": of(1.0, 1.0)}}
    # a on y by 2 > 1.9, b on x by 0.1 > 0; a on x by 2 < 2.1
    assert beyond(Comparison("s", values, [1, 2], paper)) == (2, 3)
    assert beyond(Comparison("s", values, [1, 2])) == (0, 0)
