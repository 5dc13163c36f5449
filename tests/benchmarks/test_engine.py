"""`run` from the command line to its files, over made-up runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import run as module
from benchmarks.__main__ import main, parser
from benchmarks.curves import curve
from benchmarks.papers import Printed
from benchmarks.protocol_page import share_lines
from benchmarks.run import rendered, seeds_of
from benchmarks.summary import Summary
from server.report import Results
from settings import Settings, SettingsError
from tests.benchmarks.fabricated import results

ROWS = ["--methods", "fedavg,personal,btfl"]
CELL = ["run", "brfl", "--cells", "cnn-dir-0.1"]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """Seed, rows and folder of every test that was asked for; runs are made up."""
    found: list[tuple[int, str, str]] = []

    def evaluated(settings: Settings, trainings: Path, folder: Path, of: Settings | None = None) -> Results:
        found.append((settings.seed, settings.methods, folder.name))
        return results(settings.seed, settings, folder.name.partition("-")[0])

    monkeypatch.setattr("benchmarks.cells.evaluated", evaluated)
    monkeypatch.setattr("benchmarks.curves.evaluated", evaluated)
    return found


def words(tmp_path: Path, *more: str) -> list[str]:
    return [*CELL, "--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *more]


def test_from_words_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, *ROWS, "--seeds", "2", "--set", "rounds=1", "alpha=0.5", "--set", "rounds=2")) == 0
    printed = capsys.readouterr().out
    assert "btfl: 37.50 ± 12.50 % of the gap personal → FedAvg recovered on out_of_client" in printed
    assert "1 of 2: cnn-dir-0.1, seed 1, cross_entropy; about 0 min left" in printed
    content = json.loads((tmp_path / "out/brfl/cnn-dir-0.1-2.json").read_text())
    assert (content["settings"]["rounds"], content["settings"]["alpha"], content["seed"]) == (2, 0.5, 2)
    (ran,) = content["runs"]
    assert (ran["commit"], ran["wall_seconds"], ran["test_samples_checked"]) == ("abc", 20, 16)
    assert (ran["test_samples_trained_on"], ran["methods"]) == (0, ["fedavg", "personal", "btfl"])
    assert content["rows"]["btfl"]["shifts"]["original"]["accuracy_percent"] == 87.5
    page = (tmp_path / "out/brfl/README.md").read_text()
    assert "| `btfl` | 81.25 ± 6.25 | 37.50 ± 0.00 | **59.38 ± 3.12** |" in page
    assert "python -m benchmarks run brfl --cells cnn-dir-0.1" in page
    assert "--seeds 1,2 --set rounds=1 alpha=0.5 rounds=2" in page
    assert "- Seed 2: 16 test samples, by index none of them trained on; 20 s on abacus; torch 9.9" in page
    assert "`alpha = 0.5`" in page
    assert "- made up" in page
    assert "Not run: cnn-dir-1, full" in page
    assert str(tmp_path) not in page


def test_rows_and_seeds_that_are_kept_are_not_run_again(asked: list, tmp_path: Path) -> None:
    assert main(words(tmp_path, "--methods", "fedavg,personal", "--seeds", "1")) == 0
    assert main(words(tmp_path, *ROWS, "--seeds", "2")) == 0
    assert main(words(tmp_path, *ROWS, "--seeds", "2")) == 0
    trained = [one[:2] for one in asked]
    assert trained == [(1, "fedavg,personal"), (1, "btfl"), (2, "fedavg,personal,btfl")]
    content = json.loads((tmp_path / "out/brfl/cnn-dir-0.1-1.json").read_text())
    assert (list(content["rows"]), len(content["runs"])) == (["fedavg", "personal", "btfl"], 2)


def test_tests_on_the_way_are_kept_with_the_rows(
    asked: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = words(tmp_path, *ROWS, "--seeds", "1", "--every", "8")  # of 20 rounds
    assert main(every) == 0
    assert main(every) == 0
    assert [one[2] for one in asked] == ["cross_entropy", "cross_entropy-8", "cross_entropy-16"]
    content = json.loads((tmp_path / "out/brfl/cnn-dir-0.1-1.json").read_text())
    assert content["curves"]["btfl"]["16"] == {"original": 75.0, "out_of_client": 37.5}
    assert list(content["curves"]["btfl"]) == ["8", "16"]
    assert curve(content, "btfl", "original") == {8: 75.0, 16: 75.0, 20: 75.0}
    assert "<strong>Accuracy over the rounds</strong>" in (tmp_path / "out/report.html").read_text()
    assert main([*words(tmp_path, "--methods", "fedicon"), "--every", "8"]) == 2
    assert "--every 8: allowed with trainings of one phase; fedicon has several" in capsys.readouterr().err
    assert main([*every, "--every", "-1"]) == 2


def test_what_was_made_with_other_settings_is_refused_before_anything_runs(
    asked: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, *ROWS, "--seeds", "2-2")) == 0
    asked.clear()
    assert main(words(tmp_path, *ROWS, "--seeds", "2", "--set", "rounds=3")) == 2
    assert "cnn-dir-0.1-2.json was made with other settings (rounds)" in capsys.readouterr().err
    assert main(words(tmp_path, "--methods", "fedavg,nobody")) == 2
    assert "brfl, cell cnn-dir-0.1: methods: unknown method" in capsys.readouterr().err
    assert asked == []
    (tmp_path / "out/brfl/cnn-dir-0.1-2.json").write_text("{")
    assert main(words(tmp_path, *ROWS)) == 2
    assert "cnn-dir-0.1-2.json cannot be read" in capsys.readouterr().err


def test_quick_is_small_and_has_a_place_of_its_own(
    asked: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    monkeypatch.setattr("benchmarks.seconds.run", lambda arguments, console: measured.append(arguments.samples))
    monkeypatch.setattr(module, "QUICK", tmp_path / "quick")
    assert main(["run", "btgfl", "--quick", *ROWS]) == 0
    assert measured == [2]
    assert [one[0] for one in asked] == [1, 1]
    content = json.loads((tmp_path / "quick/btgfl/one-by-one-1.json").read_text())
    assert (content["settings"]["dataset"], content["settings"]["rounds"]) == ("digits", 1)


def test_commands_that_belong_to_a_protocol_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("benchmarks.fedicon.run", lambda arguments, console: called.append(arguments.data))
    words = ["run", "feature-shift", "--out", str(tmp_path)]
    assert main([*words, "--seeds", "2-2"]) == 0
    assert called == ["digit5", "office10-equal", "office10-equal", "office10", "digit5"]
    assert "python -m benchmarks fedicon --data digit5 --seeds 2-2" in capsys.readouterr().out.replace("\n", " ")

    def fail(arguments: object, console: object) -> None:
        raise SettingsError("no such data")

    monkeypatch.setattr("benchmarks.fedicon.run", fail)
    assert main(words) == 1
    assert "fedicon --data digit5 --seeds 1,2,3 ended with 2" in capsys.readouterr().err


def test_terminal_table_and_labels_with_brackets() -> None:
    cells = {"fedavg": [60.0], "personal": [20.0], "fedthe[beta=1]": [40.0]}
    rows = {name: {"original": v, "out_of_client": v, "average": v} for name, v in cells.items()}
    summary = Summary(
        "p",
        "Some cell",
        rows,
        {"fedavg": {"average": Printed("1", {}, "FedAvg", "fedavg", "average", "%", 71.25, None)}},
        [7],
    )
    console = Console(width=100)
    with console.capture() as printed:
        console.print(rendered(summary))
    text = re.sub(r"\s+", " ", printed.get())
    assert "fedthe[beta=1] │ 40.00 │ 40.00 │ 40.00" in text
    assert "fedavg │ 60.00 │ 60.00 │ 60.00 71.2" in text
    assert "over seeds 7" in text
    assert share_lines(summary) == ["fedthe[beta=1]: 50.00 % of the gap personal → FedAvg recovered on out_of_client"]


def test_errors_are_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown protocol 'nothing'; there are: atp, brfl")
    assert main(["run", "brfl", "--cells", "nowhere"]) == 2
    assert "cell 'nowhere'; there are: cnn-dir-0.1" in capsys.readouterr().err


def test_seeds() -> None:
    assert (seeds_of("3"), seeds_of("3,1"), seeds_of("2-4"), seeds_of("5-5")) == ([1, 2, 3], [3, 1], [2, 3, 4], [5])
    assert parser().parse_args(["run", "brfl"]).seeds is None


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["walk"],
        ["run"],
        ["run", "brfl", "--seeds", "1,1"],
        ["run", "brfl", "--seeds", "1,x"],
        ["run", "brfl", "--seeds", "0"],
        ["run", "brfl", "--seeds", "3-2"],
        ["heads", "--samples", "999"],
        ["heads", "--samples", "many"],
        ["rounds", "--clients", "few"],
        ["central", "--protocol", "brfl-central", "--seed", "1"],
        ["central", "--seed", "1", "--out", "x"],
    ],
)
def test_words_that_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(words)
    assert end.value.code == 2
