"""CSV files, terminal tables and the command."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image
from rich.console import Console

from fedtta.server.report import (
    METRICS,
    Metric,
    Results,
    matrix,
    render_tables,
    tables,
    write_collaboration,
    write_table,
)
from fedtta.server.report.__main__ import main
from fedtta.server.report.tables import collaboration_csv, table_csv
from tests.report.runs import (
    METHODS,
    SHIFTS,
    adapt_round,
    adapted,
    evaluation,
    rates_round,
    results_of,
    whole_run,
    write_events,
)
from tests.report.test_scores import BY_HAND, FEWER, FULL, SHORT


def test_table_csv(tmp_path: Path) -> None:
    path = write_table(results_of(tmp_path, BY_HAND), tmp_path / "table.csv")
    assert path.read_text() == (
        "method,training,x,y,average,average_sd\na,cross_entropy,62.50,50.00,56.25,6.25\nb,cross_entropy,100.00,,,\n"
    )
    assert table_csv(Results()) == "method,training,average,average_sd\n"


def test_a_registered_metric_adds_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "METRICS", (*METRICS, Metric("calibration_error", "Calibration error", "samples")))
    events = [evaluation("a", "x", 0, 1, 2, calibration_error=0.125), evaluation("b", "x", 0, 1, 2)]
    rows = list(csv.DictReader(io.StringIO(table_csv(results_of(tmp_path, events)))))
    assert [row["calibration_error:x"] for row in rows] == ["0.1250", ""]
    assert "calibration_error" not in table_csv(results_of(tmp_path, BY_HAND))  # no client computes it


def test_a_failed_write_keeps_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(results_of(tmp_path, BY_HAND), tmp_path / "table.csv")
    before = path.read_text()

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_table(Results(), path)
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.glob("*table.csv*")] == ["table.csv"]


def test_collaboration_csv(tmp_path: Path) -> None:
    path = write_collaboration(results_of(tmp_path, [*FULL, *SHORT]), tmp_path / "collaboration.csv")
    assert path is not None
    assert path.read_text() == (
        "method,collaboration,rounds,samples,global,mean_over_classes,corruption:fog,corruption:snow,"
        "class:0,class:1,class:2,client:0,client:1\n"
        "bbn,pfedbbn,2,12,50.00,50.00,66.67,33.33,50.00,50.00,,55.56,33.33\n"
        "tent,pfedbbn,1,6,66.67,50.00,66.67,,100.00,0.00,,100.00,0.00\n"
    )
    assert write_collaboration(Results(), tmp_path / "none.csv") is None
    assert not (tmp_path / "none.csv").exists()


def printed(results: Results, styles: bool = False) -> str:
    console = Console(width=120, record=True, force_terminal=True)
    for rendered in render_tables(results):
        console.print(rendered)
    return console.export_text(styles=styles)


def test_terminal_table_of_methods(tmp_path: Path) -> None:
    results = results_of(tmp_path, [*BY_HAND, evaluation("[red]c", "x", 0, 1, 1)])
    assert "56.2 ± 6.2" in printed(results)
    assert "[red]c" in printed(results)  # a name is not markup
    assert re.search(r"\x1b\[1m100\.0", printed(results, styles=True))  # the best of the column is bold


def test_terminal_tables_of_collaborations(tmp_path: Path) -> None:
    strange = adapted(1, 0, [1, 0, 0], [1, 0, 0], method="[red]odd", collaboration="pfedbbn[share=all]")
    results = results_of(tmp_path, [*FULL, *SHORT, *FEWER, strange])
    plain, styled = printed(results), printed(results, styles=True)
    assert "66.7*" in plain
    assert "tent · pfedbbn: after 1 of 2 rounds" in plain
    assert "[red]odd" in plain
    assert re.search(r"\x1b\[1m *50\.0", styled)  # the best of the complete cells, though 66.7 is higher
    assert not re.search(r"\x1b\[1m *66\.7", styled)


def test_an_incomplete_cell_is_not_bold_even_in_a_tie(tmp_path: Path) -> None:
    tie = adapted(1, 0, [2, 0, 0], [4, 0, 0], method="tent")
    styled = printed(results_of(tmp_path, [*FULL, tie]), styles=True)
    assert len(re.findall(r"\x1b\[1m *50\.0", styled)) == 2  # one cell in each of the two matrices


@pytest.mark.parametrize(
    ("events", "number"),
    [([], 1), ([BY_HAND[0]], 1), (FULL, 3), ([BY_HAND[0], *FULL], 4), ([adapted(1, 0, [0], [0])], 1)],
)
def test_terminal_tables_of_every_kind_of_run(tmp_path: Path, events: list[Any], number: int) -> None:
    results = results_of(tmp_path, events)
    assert len(render_tables(results)) == number
    printed(results)


def test_the_file_has_all_clients_and_the_terminal_the_first(tmp_path: Path) -> None:
    results = results_of(tmp_path, [adapted(1, client, [1], [1]) for client in range(30)])
    assert "the first 20 of 30" in printed(results)
    found = matrix(results)
    assert found is not None
    assert "client:29" in next(csv.reader(io.StringIO(collaboration_csv(found))))


def test_command_writes_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_events(tmp_path / "run", whole_run(clients=2, rounds=1))
    assert main([str(folder)]) == 0
    assert "fedthe_plus" in capsys.readouterr().out
    assert (folder / "report.html").exists()
    rows = list(csv.DictReader(io.StringIO((folder / "table.csv").read_text())))
    assert [row["method"] for row in rows] == list(METHODS)
    assert list(rows[0]) == ["method", "training", *SHIFTS, "average", "average_sd"]
    assert not (folder / "collaboration.csv").exists()
    assert not (folder / "plots").exists()


def test_command_writes_the_matrix_and_the_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_events(tmp_path / "run", [rates_round(1), adapted(1, 0, [1, 0], [1, 1])])
    assert main([str(folder), "--plots"]) == 0
    assert str(folder / "collaboration.csv") in capsys.readouterr().out
    assert (folder / "collaboration.csv").read_text().startswith("method,collaboration")
    files = {path.name for path in (folder / "plots").iterdir()}
    assert files == {f"{name}.{kind}" for name in ("clients", "collaboration", "curves") for kind in ("svg", "png")}
    for path in (folder / "plots").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert Image.open(folder / "plots" / "curves.png").width == 800


def test_command_names_the_files_that_it_writes_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds of clients without labels have no matrix."""
    folder = write_events(tmp_path / "run", [adapt_round(1, [[1.0]]), adapted(1, 0, [0, 0], [0, 0])])
    assert main([str(folder)]) == 0
    assert "collaboration.csv" not in capsys.readouterr().out
    assert not (folder / "collaboration.csv").exists()


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert main([str(write_events(tmp_path, ["nonsense"]))]) == 2
    assert "line 1" in capsys.readouterr().err


def test_command_names_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_events(tmp_path / "run", [rates_round(1)])
    (folder / "plots").touch()
    assert main([str(folder), "--plots"]) == 2
    assert capsys.readouterr().err.startswith(f"error: [Errno 17] File exists: '{folder / 'plots'}'")
