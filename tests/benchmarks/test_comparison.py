"""Cells over seeds against numbers computed by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.cells import row_content
from benchmarks.papers import Printed
from benchmarks.protocol import Cell, Reference
from benchmarks.summary import Summary, beyond, beyond_words, recovered, shares, spread, summarise, to_markdown
from settings import Settings
from tests.benchmarks.fabricated import results


@pytest.fixture
def summary() -> Summary:
    kept = {
        seed: {"rows": {label: row_content(results(seed), label, "t") for label in ("fedavg", "personal", "btfl")}}
        for seed in (2, 1)
    }
    return summarise(Cell("made-up", "Made up", Settings()), kept)


def test_summary_by_hand(summary: Summary) -> None:
    # Seed 1, fedavg on original: clients 1/4 and 3/4, mean 50 %; out of client 3/4 and 2/4, 62.5 %; average 56.25 %.
    assert summary.seeds == [1, 2]
    assert summary.columns == ["original", "out_of_client", "average"]
    assert summary.cells == {
        "fedavg": {"original": [50, 50], "out_of_client": [62.5, 75], "average": [56.25, 62.5]},
        "personal": {"original": [87.5, 100], "out_of_client": [12.5, 25], "average": [50, 62.5]},
        "btfl": {"original": [75, 87.5], "out_of_client": [37.5, 37.5], "average": [56.25, 62.5]},
    }


def test_share_of_the_gap_by_hand(summary: Summary) -> None:
    # Seed 1: (37.5 - 12.5) / (62.5 - 12.5) = 1/2; seed 2: (37.5 - 25) / (75 - 25) = 1/4.
    assert recovered(summary, "btfl") == [50, 25]
    assert shares(summary) == {"btfl": [50, 25]}
    fewer = {**summary.cells, "late": {"out_of_client": [50.0]}}  # a row that one seed has
    assert shares(dataclasses.replace(summary, cells=fewer)) == {"btfl": [50, 25]}


def test_without_a_gap_there_is_no_share(summary: Summary) -> None:
    assert all(math.isnan(share) for share in recovered(summary, "btfl", "original"))
    assert spread(recovered(summary, "btfl", "original")) == "–"
    others = {name: row for name, row in summary.cells.items() if name != "personal"}
    assert shares(dataclasses.replace(summary, cells=others)) == {}


def test_markdown_by_hand(summary: Summary) -> None:
    # Standard deviations are divided by n: of 62.5 and 75 it is 6.25. 59.375 is displayed as 59.38, twice the best.
    assert to_markdown(summary).splitlines() == [
        "| row | original | out_of_client | average |",
        "| --- | --: | --: | --: |",
        "| `fedavg` | 50.00 ± 0.00 | **68.75 ± 6.25** | **59.38 ± 3.12** |",
        "| `personal` | **93.75 ± 6.25** | 18.75 ± 6.25 | 56.25 ± 6.25 |",
        "| `btfl` | 81.25 ± 6.25 | 37.50 ± 0.00 | **59.38 ± 3.12** |",
    ]


def test_a_row_that_some_seeds_lack_and_the_papers_numbers() -> None:
    one, two = results(1), results(2)
    kept = {
        1: {"rows": {"fedavg": row_content(one, "fedavg", "t"), "btfl": row_content(one, "btfl", "t")}},
        2: {"rows": {"fedavg": row_content(two, "fedavg", "t")}},
    }
    found = summarise(Cell("c", "C", Settings(), Reference("fedthe", "1", {"alpha": 1.0})), kept)
    own, strange = (found.paper["fedavg"][column].mean for column in ("original", "out_of_client"))
    text = to_markdown(found)
    assert f"| `fedavg` | 50.00 ± 0.00 \\| {own:.2f} | **68.75 ± 6.25** \\| {strange:.2f} | **59.38" in text
    assert "| `btfl` | **75.00** (1 of 2 seeds) |" in text


def test_one_seed_has_no_standard_deviation() -> None:
    assert spread([12.5]) == "12.50"
    one = Summary("one", "One", {"a": {"original": [1.0], "average": [1.0]}}, {}, [1])
    assert "±" not in to_markdown(one)
    assert one.columns == ["original"]  # the average of one says nothing


def test_samples_or_clients_count_the_same() -> None:
    # three of four right at one client, one of one at another
    row = {"training": "t", "shifts": {"original": {"accuracy_percent": 87.5, "by_samples_percent": 80.0}}}
    kept = {1: {"rows": {"fedavg": row}}}
    by_samples = summarise(Cell("c", "C", Settings(), weighting="samples"), kept)
    assert by_samples.cells["fedavg"]["original"] == [80.0]
    assert summarise(Cell("c", "C", Settings()), kept).cells["fedavg"]["original"] == [87.5]


def test_further_from_the_paper_than_both_spreads() -> None:
    def of(mean: float, sd: float | None) -> Printed:
        return Printed("1", {}, "A", "a", "x", "%", mean, sd)

    rows = {"a": {"x": [50.0, 52.0], "y": [50.0, 52.0]}, "b": {"x": [50.0], "z": [1.0]}}  # means 51, sd 1
    paper = {"a": {"x": of(53.0, 1.1), "y": of(53.0, 0.9)}, "b": {"x": of(50.1, None)}, "c": {"x": of(1.0, 1.0)}}
    summary = Summary("s", "S", rows, paper, [1, 2])
    assert beyond(summary) == (2, 3)  # a on y by 2 > 1.9, b on x by 0.1 > 0; a on x by 2 < 2.1
    assert beyond_words(summary, "few rounds") == (
        "2 of 3 means differ from the paper's by more than both spreads: few rounds."
    )
    assert beyond_words(Summary("s", "S", rows, {}, [1, 2]), "") == ""
