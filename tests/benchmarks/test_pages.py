"""Pages and plots from made-up kept results, and from the committed ones."""

from __future__ import annotations

import io
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from fedtta.benchmarks.__main__ import main
from fedtta.benchmarks.provenance import RESULTS, write_json
from fedtta.benchmarks.tables import plots
from fedtta.benchmarks.tables.comparison import compare
from fedtta.benchmarks.tables.pages import table_section, write_pages
from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.settings import SettingsError

RUN = {
    "training": "cross_entropy", "methods": ["fedavg"], "time": "2030-01-01T00:00:00+00:00", "commit": "abc",
    "hardware": "abacus", "versions": {"torch": "9", "flwr": "1"}, "wall_seconds": 60, "test_samples_checked": 8,
    "test_samples_trained_on": 0, "replies_limited": 5,
}  # fmt: skip


def content(seed: int, cell: str = "cnn-dir-1", weights: bool = True) -> dict:
    """One seed of a cell: FedAvg 50 + seed % on both distributions, FedTHE ten more, with weights."""
    histogram = " ".join(["0"] * 10 + [str(seed)] + ["0"] * 9)
    more = {"weight_mean": 0.5, "weight_histogram": histogram} if weights else {}
    rows = {
        label: {
            "training": "cross_entropy",
            "shifts": {
                shift: {"accuracy_percent": start + seed, **(more if label == "fedthe" else {})}
                for shift in ("original", "out_of_client")
            },
        }
        for label, start in (("fedavg", 50.0), ("fedthe", 60.0))
    }
    curves = {"train_loss": "2.1 nan 1.5", "validation_percent": "- 20 30"}
    settings = {"rounds": 3, "seed": seed, "alpha": 0.5, "clip-factor": 3.0, "max-share": 3.0}
    about = {"protocol": "brfl", "cell": cell, "seed": seed, "settings": settings}
    return {**about, "rows": rows, "trainings": {"cross_entropy": curves}, "runs": [RUN], "notes": ["made <up>"]}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for seed in (1, 3):
        write_json(tmp_path / "brfl" / f"cnn-dir-1-{seed}.json", content(seed))
    write_json(tmp_path / "brfl" / "cnn-dir-0.1-1.json", content(1, "cnn-dir-0.1", weights=False))
    write_json(tmp_path / "atp" / "label-1.safetensors.json", {"none": "of these"})
    return tmp_path


class Checker(HTMLParser):
    """Collects ids and images, and fails on tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.images: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [str(value) for name, value in attributes if name == "id"]
        self.images += [str(value) for name, value in attributes if name == "src"]
        if tag not in ("meta", "hr", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_pages_of_made_up_results(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = out / "pages"
    assert main(["page", "--out", str(out), "--to", str(to)]) == 0
    assert "index.html" in capsys.readouterr().out.replace("\n", "")
    index, page = (to / "index.md").read_text(), (to / "brfl.md").read_text()
    assert "| CNN, Dirichlet(1.0) | `fedavg`, `fedthe` | 1, 3 |" in index
    assert index.index("CNN, Dirichlet(0.1)") < index.index("CNN, Dirichlet(1.0)")  # as in the protocol's file
    assert "| fedicon office10 | `learning-rate = 0.05` | 0.01: 54.9 %, 0.05: 62.7 % |" in index
    theirs = read_protocol("brfl").cell("cnn-dir-1").references[0].number("fedavg", "original")
    assert theirs is not None
    assert f"| `fedavg` | 52.00 ± 1.00 \\| {theirs.mean:.2f} |" in page
    assert "| `fedthe` | **62.00 ± 1.00** \\| " in page
    limited = "5 replies with less effect than in a plain mean (`clip-factor`, `max-share`)"
    assert f"cnn-dir-1, seed 3: 8 test samples, none of them trained on; {limited}; 60 s; abacus; torch 9" in page
    assert "Settings of `cnn-dir-1` that differ from the defaults: `rounds = 3`, `alpha = 0.5`" in page
    assert "Not yet run: full, published" in page
    html = (to / "index.html").read_text()
    checker = Checker()
    checker.feed(html)
    assert (checker.open, len(checker.ids)) == ([], len(set(checker.ids)))
    assert all((to / image).exists() for image in checker.images)
    assert "brfl-cnn-dir-1.weights.svg" in checker.images
    assert "brfl-cnn-dir-0.1.weights.svg" not in checker.images  # that cell has no weights
    assert not re.search(r"<script|https?://", html)
    assert "made &lt;up&gt;" in html
    first = {path.name: path.read_bytes() for path in to.iterdir()}
    write_pages(out, to)
    assert first == {path.name: path.read_bytes() for path in to.iterdir()}  # equal data, equal files


def test_a_page_says_which_seeds_have_other_settings(tmp_path: Path) -> None:
    changes: dict[int, dict] = {
        1: {"autocast": True}, 2: {"autocast": False, "estimate-accuracy": False}, 3: {"rounds": 4},
        4: {"autocast": True, "device": "auto"}, 10: {"autocast": False},
    }  # fmt: skip
    for seed, more in changes.items():
        one = content(seed)
        write_json(tmp_path / "brfl" / f"cnn-dir-1-{seed}.json", {**one, "settings": {**one["settings"], **more}})
    write_pages(tmp_path, tmp_path)
    own = "Settings of `cnn-dir-1` that differ from the defaults: `rounds = 3`, `alpha = 0.5`, `autocast = True`"
    others = "with seeds 2, 10: `autocast = False`; with seed 3: `rounds = 4`, `autocast = False`"
    assert f"{own}; {others}\n" in (tmp_path / "brfl.md").read_text()


def test_pages_of_a_folder_that_does_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--out .*typo: no such folder"):
        write_pages(tmp_path / "typo", tmp_path / "pages")
    assert not (tmp_path / "pages").exists()


def test_the_seeds_of_every_cell_of_a_table_are_compared() -> None:
    protocol = read_protocol("atp")
    (table,) = (one for one in protocol.tables if one.name == "shifts")
    names = [cell.name for cell in table.cells][:2]
    kept = {name: {seed: content(seed, name) for seed in (1, 2)} for name in names}
    kept[names[1]][2]["settings"]["autocast"] = True
    section = table_section(protocol, table, kept)
    assert section.endswith(f"`alpha = 0.5`; of `{names[1]}` with seed 2: `autocast = True`")


def test_all_committed_results_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure is made, one in 24 is drawn: to draw them takes most of the time."""
    figures, drawn = itertools.count(), plots.to_svg
    monkeypatch.setattr(plots, "to_svg", lambda figure: drawn(figure) if next(figures) % 24 == 0 else "<svg/>")
    written = {path.name for path in write_pages(RESULTS, tmp_path)}
    assert {"atp.md", "atp-shifts.rates.svg", "pfedbbn-streams.mixing.svg", "methods.md", "speed.md"} <= written
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)


def test_plots_show_the_data() -> None:
    contents = {1: content(1), 3: content(3)}
    (table,) = (one for one in read_protocol("brfl").tables if one.name == "cnn-dir-1")
    svg = plots.accuracy_bars(compare(table, {"cnn-dir-1": contents}))
    assert all(text in svg for text in ("fedavg", "fedthe", "out_of_client", "average"))
    assert plots.mean_curve([{1: 1.0, 2: 3.0}, {1: 3.0, 2: 5.0}, {1: 9.0}]) == ([1, 2], [2.0, 4.0])
    assert plots.curves([{**content(1), "trainings": {}}]) == ""
    assert plots.weight_histograms([content(1, weights=False)]) == ""
    assert plots.learned_rates([content(1)]) == plots.mixing([content(1)]) == ""
    assert "cross_entropy" in plots.curves(list(contents.values()))


def test_learned_rates_are_drawn_of_all_seeds_and_mixing_weights_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [content(1), content(3)]
    for one, rate in zip(contents, (0.25, 0.75), strict=True):
        one["settings"]["rates-rounds"] = 2
        one["trainings"] = {"atp": {"rates": {"all": {"layer.weight": rate, f"of seed {one['seed']}": 2 * rate}}}}
        one["rows"]["fedavg"]["shifts"]["original"]["weights"] = {"1": f"{rate} 0;0 {rate}"}
    made: list[Figure] = []
    monkeypatch.setattr(plots, "to_svg", lambda figure: made.append(figure) or "<svg/>")
    assert plots.learned_rates(contents) == plots.mixing(contents) == "<svg/>"
    (rates,), (weights,) = (figure.axes for figure in made)
    assert [label.get_text() for label in rates.get_yticklabels()] == ["layer.weight", "of seed 1", "of seed 3"]
    points = [line.get_xydata().tolist() for line in rates.lines[:2]]
    assert points == [[[0.25, 0], [0.5, 1]], [[0.75, 0], [1.5, 2]]]
    assert weights.get_title(loc="left") == f"fedavg\n{contents[0]['cell']}, seed 1, round 1"
    assert weights.images[0].get_array().tolist() == [[25, 0], [0, 25]]


def test_a_plot_is_drawn_once_and_cropped_to_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    def figure() -> Figure:
        made = Figure((4, 2))
        axes = made.subplots()
        axes.imshow([[0, 1], [1, 0]])  # its box is known only after its aspect has been applied
        axes.plot([0, 1], [0, 1], label="a legend beside the axes")
        axes.set_title("title", loc="left")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        return made

    drawings, draw = [], Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (drawings.append(self), draw(self, renderer)))
    svg = plots.to_svg(figure())
    assert len(drawings) == 1
    text = io.StringIO()
    figure().savefig(text, format="svg", bbox_inches="tight")
    sizes = [re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', one) for one in (svg, text.getvalue())]
    ours, tight = ([float(number) for number in one.groups()] for one in sizes if one)
    assert ours == pytest.approx(tight, abs=3)  # points
