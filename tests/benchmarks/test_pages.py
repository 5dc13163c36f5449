"""The index and the page with pictures, from made-up cells."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.overview import as_results, cost_plot, html_table, milliseconds, table_rows
from benchmarks.protocol import Cell, read_protocol
from benchmarks.record import write_json
from benchmarks.summary import summarise
from settings import Settings

RUN = {
    "training": "cross_entropy", "methods": ["fedavg"], "time": "2030-01-01T00:00:00+00:00", "commit": "abc",
    "hardware": "abacus", "versions": {"torch": "9", "flwr": "1"}, "wall_seconds": 60, "test_samples_checked": 8,
    "test_samples_trained_on": 0,
}  # fmt: skip


def content(seed: int, cell: str = "cnn-dir-1", weights: bool = True) -> dict:
    """One seed of a cell: FedAvg 50 + seed % on both distributions, FedTHE ten more, with weights."""
    histogram = " ".join(["0"] * 10 + [str(seed)] + ["0"] * 9)
    more = {"weight_mean": 0.5, "weight_histogram": histogram} if weights else {}
    rows = {
        label: {
            "training": "cross_entropy",
            "shifts": {
                shift: {
                    "accuracy_percent": start + seed,
                    "samples_per_second": 100.0 * seed if label == "fedthe" else None,
                    **(more if label == "fedthe" else {}),
                }
                for shift in ("original", "out_of_client")
            },
        }
        for label, start in (("fedavg", 50.0), ("fedthe", 60.0))
    }
    curves = {"train_loss": "2.1 nan 1.5", "validation_percent": "- 20 30", "rates": {}}
    about = {"protocol": "brfl", "cell": cell, "seed": seed, "settings": {"rounds": 3, "seed": seed}}
    return {**about, "rows": rows, "trainings": {"cross_entropy": curves}, "runs": [RUN], "notes": ["made <up>"]}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for seed in (1, 3):
        write_json(tmp_path / "brfl" / f"cnn-dir-1-{seed}.json", content(seed))
    write_json(tmp_path / "brfl" / "cnn-dir-0.1-1.json", content(1, "cnn-dir-0.1", weights=False))
    write_json(tmp_path / "heads.json", {"none": "of these"})
    (tmp_path / "atp").mkdir()
    (tmp_path / "atp" / "atp.md").write_text("# ATP\n")
    return tmp_path


class Checker(HTMLParser):
    """Collects ids, references to them, and tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "xlink:href") and str(value).startswith("#"):
                self.references.append(str(value)[1:])
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "br"):
            self.open.pop()


def test_both_pages_from_what_is_kept(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("Written:") == 2
    index = (out / "README.md").read_text()
    assert "| CNN, Dirichlet(1.0) | `fedavg`, `fedthe` | 1, 3 |" in index
    assert index.index("CNN, Dirichlet(0.1)") < index.index("CNN, Dirichlet(1.0)")  # as in the protocol's file
    assert "- [atp/atp.md](atp/atp.md)" in index
    assert "- [heads.json](heads.json)" in index
    page = (out / "report.html").read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert set(checker.references) <= set(checker.ids)
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", page)
    assert "made &lt;up&gt;" in page
    assert page.count("Weight e of the global head") == 1  # of the cell that has weights
    assert "Seed 3: 8 test samples, by index none of them trained on; 60 s on abacus" in page


def test_ours_the_papers_and_the_difference(out: Path) -> None:
    (cell,) = read_protocol("brfl", only=["cnn-dir-1"]).cells
    assert cell.reference is not None
    theirs = cell.reference.column("original")["fedavg"].mean
    summary = summarise(cell, {1: content(1), 3: content(3)})
    table = html_table(summary, cell)
    assert f'52.0 <span class="sd">± 1.0</span><div class="sd">{theirs:.1f} ({52 - theirs:+.1f})</div>' in table
    assert "mean ± standard deviation (divided by n) over the seeds 1, 3" in table
    row = table_rows(summary)[1]
    assert (row.label, row.average) == ("fedthe", pytest.approx(0.62))
    assert row.cells["original"] is not None
    assert (row.cells["original"].mean, row.cells["original"].sd) == (pytest.approx(0.62), pytest.approx(0.01))


def test_time_of_a_sample() -> None:
    contents = {1: content(1), 3: content(3)}
    assert milliseconds(contents, "fedthe") == pytest.approx((10 + 10 / 3) / 2)
    assert milliseconds(contents, "fedavg") is None
    plot = cost_plot(contents, summarise(Cell("c", "C", Settings()), contents))
    assert plot is not None
    assert plot.alt == "Average accuracy against time a sample. fedthe: 6.67 ms, 62.0 %"


def test_weights_of_all_seeds_and_curves_of_the_first() -> None:
    results = as_results({3: content(3), 1: content(1)})
    assert {(one.method, one.shift, one.partition) for one in results.evaluations} == {
        ("fedthe", shift, seed) for shift in ("original", "out_of_client") for seed in (1, 3)
    }
    losses = [one.train_loss for one in results.rounds]
    assert np.array_equal(losses, [2.1, np.nan, 1.5], equal_nan=True)
    assert [one.validation_accuracy for one in results.rounds] == [None, 0.2, 0.3]
