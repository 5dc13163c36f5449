"""Protocols: files, changes, and the summary of two made-up runs against numbers computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.protocol import (
    PROTOCOLS,
    Summary,
    load_protocol,
    recovered,
    run_protocol,
    shares,
    spread,
    summarise,
    to_markdown,
    write_summary,
)
from server.errors import RunError
from server.methods import plan
from server.report import METRICS_FILE, Evaluation, Results, read_results
from settings import Settings, SettingsError
from tests.benchmarks.fabricated import write_run

SETTINGS = Settings(rounds=1)


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    folders = [write_run(tmp_path / str(seed), seed, SETTINGS) for seed in (1, 2)]
    return summarise("made-up", [1, 2], [read_results(folder / METRICS_FILE) for folder in folders])


@pytest.mark.parametrize("name", sorted(path.stem for path in PROTOCOLS.glob("*.toml")))
def test_every_protocol_is_valid(name: str) -> None:
    assert plan(load_protocol(name))


def test_changes_win_over_the_file_and_the_last_one_counts() -> None:
    settings = load_protocol("brfl", ["rounds=3", "autocast=false", "rounds=4", "dataset-options=path=a=b"])
    assert (settings.rounds, settings.autocast, settings.dataset_options) == (4, False, "path=a=b")
    assert settings.clients == load_protocol("brfl").clients == 20


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "brfl2",
            [],
            "unknown protocol 'brfl2'; there are: atp, brfl, brfl-central, "
            "brfl-personal, fedicon, fedicon-attribute, pfedbbn",
        ),
        ("brfl", ["rounds"], "--set 'rounds': allowed is key=value"),
        ("brfl", ["round=3"], "did you mean rounds?"),
        ("brfl", ["rounds=many"], "allowed is a value of type int"),
        ("brfl", ["rounds=-1"], "allowed is 0 or more"),
    ],
)
def test_what_is_wrong_is_named(name: str, changes: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_protocol(name, changes)
    assert words in str(error.value)


def test_summary_by_hand(summary: Summary) -> None:
    # Seed 1, fedavg on original: clients 1/4 and 3/4, mean 50 %; out of client 3/4 and 2/4, 62.5 %; average 56.25 %.
    assert summary.cells == {
        "fedavg": {"original": [50, 50], "out_of_client": [62.5, 75], "average": [56.25, 62.5]},
        "personal": {"original": [87.5, 100], "out_of_client": [12.5, 25], "average": [50, 62.5]},
        "btfl": {"original": [75, 87.5], "out_of_client": [37.5, 37.5], "average": [56.25, 62.5]},
    }


def test_share_of_the_gap_by_hand(summary: Summary) -> None:
    # Seed 1: (37.5 - 12.5) / (62.5 - 12.5) = 1/2; seed 2: (37.5 - 25) / (75 - 25) = 1/4.
    assert recovered(summary, "btfl") == [50, 25]
    assert shares(summary) == {"btfl": [50, 25]}


def test_without_a_gap_there_is_no_share(summary: Summary) -> None:
    assert all(math.isnan(share) for share in recovered(summary, "btfl", "original"))
    assert spread(recovered(summary, "btfl", "original")) == "–"
    del summary.cells["personal"]
    assert shares(summary) == {}


def test_markdown_by_hand(summary: Summary) -> None:
    # Standard deviations are divided by n: of 62.5 and 75 it is 6.25. 59.375 is displayed as 59.38, twice the best.
    assert to_markdown(summary).splitlines() == [
        "| method | original | out_of_client | average |",
        "| --- | --: | --: | --: |",
        "| fedavg | 50.00 ± 0.00 | **68.75 ± 6.25** | **59.38 ± 3.12** |",
        "| personal | **93.75 ± 6.25** | 18.75 ± 6.25 | 56.25 ± 6.25 |",
        "| btfl | 81.25 ± 6.25 | 37.50 ± 0.00 | **59.38 ± 3.12** |",
    ]


def test_one_seed_has_no_standard_deviation() -> None:
    assert spread([12.5]) == "12.50"
    assert "±" not in to_markdown(Summary("one", [1], {"a": {"average": [1.0]}}))


def test_summary_file(summary: Summary, tmp_path: Path) -> None:
    path = write_summary(summary, SETTINGS, {"runs": []}, tmp_path / "out")
    content = json.loads(path.read_text())
    assert content["seeds"] == [1, 2]
    assert content["settings"] == SETTINGS.flat()
    assert content["accuracy_percent"] == summary.cells
    assert content["share_of_gap_recovered_out_of_client_percent"] == {"btfl": [50, 25]}
    summary.cells["personal"]["out_of_client"] = [70.0, 25.0]  # seed 1 has no gap now
    content = json.loads(write_summary(summary, SETTINGS, {}, tmp_path).read_text())
    assert content["share_of_gap_recovered_out_of_client_percent"] == {"btfl": [None, 25]}


def test_a_missing_accuracy_is_refused() -> None:
    one = [Evaluation("t", "a", "x", 0, 1, 2)]
    two = [*one, Evaluation("t", "a", "y", 0, 1, 2)]
    with pytest.raises(RunError, match="a has no accuracy on y"):
        summarise("p", [1, 2], [Results(evaluations=two), Results(evaluations=one)])
    with pytest.raises(RunError, match="a run has no accuracy of b on y"):
        summarise("p", [1], [Results(evaluations=[*two, Evaluation("t", "b", "x", 0, 1, 2)])])
    with pytest.raises(RunError, match="no evaluation"):
        summarise("p", [1], [Results()])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds that were simulated; runs are made up."""
    seeds: list[int] = []

    def simulate(settings: Settings, folder: Path) -> None:
        seeds.append(settings.seed)
        write_run(folder, settings.seed, settings.replace(device="cpu"))

    monkeypatch.setattr("simulation.simulate", simulate)
    return seeds


def test_seeds_that_are_there_are_not_run_again(started: list[int], tmp_path: Path) -> None:
    first = run_protocol("p", SETTINGS, [1], tmp_path)
    both = run_protocol("p", SETTINGS, [1, 2], tmp_path)
    elsewhere = run_protocol("p", SETTINGS.replace(workers=1, device="cpu"), [1, 2], tmp_path)
    assert started == [1, 2]
    assert first.cells["btfl"]["average"] == [56.25]
    assert both == elsewhere
    assert both.cells["btfl"]["average"] == [56.25, 62.5]


def test_runs_that_do_not_fit_are_refused_before_any_starts(started: list[int], tmp_path: Path) -> None:
    write_run(tmp_path / "cut-2", 2, SETTINGS.replace(seed=2), status="failed: NodesMissing")
    with pytest.raises(SettingsError, match=r"cut-2 holds a run that did not complete"):
        run_protocol("cut", SETTINGS, [1, 2], tmp_path)
    write_run(tmp_path / "other-2", 2, SETTINGS.replace(seed=2, alpha=0.7))
    with pytest.raises(SettingsError, match=r"other-2 holds a run with other settings \(alpha\)"):
        run_protocol("other", SETTINGS, [1, 2], tmp_path)
    with pytest.raises(SettingsError, match="no network would be trained"):
        run_protocol("none", SETTINGS.replace(rounds=0), [1], tmp_path)
    assert started == []
