"""Tables with a page of their own as sections of the page with pictures, from made-up files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.other_tables import learned_rates, mixing_weights, other_tables, pages, to_html
from benchmarks.record import write_json
from models import save_arrays


def test_markdown_as_html() -> None:
    html = to_html("# One\n\n`a` <b>\n\n| x | y |\n| --- | --: |\n| 1 | 2 \\| 3 |\n")
    assert html.startswith("<h2>One</h2>")
    assert "<code>a</code> &lt;b&gt;" in html  # markup of a page is shown, not obeyed
    assert '<td style="text-align:right">2 | 3</td>' in html
    assert html.count('<div class="scroll"><table>') == html.count("</table></div>") == 1


def test_only_pages_of_their_own_and_only_known_ones(tmp_path: Path) -> None:
    (tmp_path / "brfl").mkdir()
    for name in ("README.md", "brfl/README.md", "fedicon.md", "methods.md"):
        (tmp_path / name).write_text(f"# {name}\n")
    assert [path.name for path in pages(tmp_path)] == ["fedicon.md", "methods.md"]
    sections = other_tables(tmp_path)
    assert list(sections) == ["fedicon"]
    assert sections["fedicon"].startswith('<section class="prose" id="fedicon">\n<h2>fedicon.md</h2>')


def test_rates_of_every_shift_that_was_run(tmp_path: Path) -> None:
    assert learned_rates(tmp_path)[0] is None
    for shift, rate in (("label", 0.25), ("hybrid", -0.5)):
        rates = {"encoder.norm.running_mean": rate, "encoder.conv.weight": 0.1, "encoder.conv.bias": 0.3}
        write_json(tmp_path / f"{shift}-all.json", {"rates": rates})
        arrays = {name: np.zeros(4 if name.endswith("conv.weight") else 2, np.float32) for name in rates}
        save_arrays(tmp_path / f"{shift}.safetensors", arrays)
    plot, _ = learned_rates(tmp_path)
    assert plot is not None
    for shift, rate in (("label", "+0.25"), ("hybrid", "-0.5")):
        assert f"{shift}: BN running mean {rate}, conv weight +0.1, bias +0.3" in plot.alt


@pytest.mark.parametrize("together", ["pfedbbn", "pfedbbn[share=statistics]"])
def test_weights_of_the_papers_method(tmp_path: Path, together: str) -> None:
    cell = {"weights": {"1": "0.5 0.5; 0.5 0.5", "3": "0.900 0.100; 0.300 0.700"}}
    write_json(
        tmp_path / "collaborate.json", {"cells": {"tent": {together: {"iid": cell}}, "bbn": {"none": {"iid": {}}}}}
    )
    assert mixing_weights(tmp_path)[0] is None
    write_json(tmp_path / "collaborate.json", {"cells": {"bbn": {together: {"iid": cell, "0.01": {}}}}})
    plot, _ = mixing_weights(tmp_path)
    assert plot is not None
    assert plot.alt.endswith(f"bbn, iid with {together}: a client's mean weight for itself is 0.80 in the last round")
