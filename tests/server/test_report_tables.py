"""The table against hand-computed numbers, as data, CSV and terminal table."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from server.report import (
    Evaluation,
    Results,
    render_table,
    table,
    write_table,
)
from tests.server.test_report_run import (
    evaluation,
    results_of,
)

# Method a on x: clients 3/4 = .75, 1/2 = .5 and one without samples; mean .625, sd .125, by samples 4/6.
#          on y: 1/4 = .25 and 9/12 = .75; mean .5, sd .25, by samples 10/16.
# Average (.625 + .5) / 2 = .5625; sd over distributions .0625; by samples (.6667 + .625) / 2 = .64583.
BY_HAND = [
    evaluation("a", "x", 0, 3, 4),
    evaluation("a", "x", 1, 1, 2),
    evaluation("a", "x", 2, 0, 0),
    evaluation("a", "y", 0, 1, 4),
    evaluation("a", "y", 1, 9, 12),
    evaluation("b", "x", 0, 1, 1),
    evaluation("b", "nobody", 0, 0, 0),
]


def test_table_against_hand_computed_numbers(tmp_path: Path) -> None:
    first, second = table(results_of(tmp_path, BY_HAND))
    x, y = first.cells["x"], first.cells["y"]
    assert list(first.cells) == ["x", "y"]  # nobody has a sample of "nobody"
    assert x is not None
    assert y is not None
    assert (x.mean, x.sd, x.clients, x.samples, x.seconds) == (0.625, 0.125, 2, 6, 1.0)
    assert (y.mean, y.sd) == (0.5, 0.25)
    assert x.weighted == pytest.approx(4 / 6)
    assert y.weighted == pytest.approx(10 / 16)
    assert (first.average, first.average_sd) == (0.5625, 0.0625)
    assert first.weighted_average == pytest.approx((4 / 6 + 10 / 16) / 2)
    # b has nothing on y: an average over fewer distributions would compare with nothing.
    assert second.cells["y"] is None
    assert second.average is None
    assert second.average_sd is None


def test_csv_contents(tmp_path: Path) -> None:
    path = write_table(results_of(tmp_path, BY_HAND), tmp_path / "table.csv")
    assert path.read_text() == (
        "method,training,x,y,average,average_sd\na,cross_entropy,62.50,50.00,56.25,6.25\nb,cross_entropy,100.00,,,\n"
    )
    assert [entry.name for entry in tmp_path.glob("*table.csv*")] == ["table.csv"]  # no temporary file is left


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


def test_a_method_after_two_trainings_has_a_row_for_each(tmp_path: Path) -> None:
    other = evaluation("a", "x", 0, 1, 4, training="balanced_softmax")
    rows = table(results_of(tmp_path, [evaluation("a", "x", 0, 2, 4), other, evaluation("b", "x", 0, 2, 4)]))
    assert [row.label for row in rows] == ["a (cross_entropy)", "a (balanced_softmax)", "b"]
    assert [row.average for row in rows] == [0.5, 0.25, 0.5]


@given(st.lists(st.integers(0, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=8))
def test_cell_invariants(pairs: list[tuple[int, int]]) -> None:
    entries = [Evaluation("t", "m", "s", i, correct, total) for i, (correct, total) in enumerate(pairs)]
    rows = table(Results(evaluations=entries))
    kept = [correct / total for correct, total in pairs if total]
    if not kept:
        assert all(not row.cells and row.average is None for row in rows)
        return
    cell = rows[0].cells["s"]
    assert cell is not None
    assert cell.mean == pytest.approx(sum(kept) / len(kept))
    assert cell.sd == pytest.approx(float(np.std(kept)), abs=1e-12)
    assert min(kept) - 1e-12 <= cell.weighted <= max(kept) + 1e-12
    assert rows[0].average == pytest.approx(statistics.fmean(kept))


def test_terminal_table(tmp_path: Path) -> None:
    console = Console(width=120, record=True, force_terminal=True)
    console.print(render_table(results_of(tmp_path, [*BY_HAND, evaluation("[red]c", "x", 0, 1, 1)])))
    styled = console.export_text(styles=True, clear=False)
    plain = console.export_text()
    assert "56.2 ± 6.2" in plain
    assert "[red]c" in plain  # a name is not markup
    assert "–" in plain
    assert re.search(r"\x1b\[1m100\.0", styled)  # the best of the column is bold


def test_terminal_table_of_nothing() -> None:
    Console(width=80, record=True).print(render_table(Results()))
