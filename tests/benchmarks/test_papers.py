"""The papers' numbers: every place is named once, our rows are rows, averages agree with what they average."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedtta.benchmarks import papers as module
from fedtta.benchmarks.papers import Printed, papers, printed, values
from fedtta.server.methods import parse_rows

HEAD = "table,setting,row,method,column,unit,mean,sd\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    printed.cache_clear()
    yield tmp_path
    printed.cache_clear()


@pytest.mark.parametrize("paper", ["atp", "btfl", "fedicon", "fedthe", "pfedbbn"])
def test_every_number_has_its_place_and_every_method_is_a_row_here(paper: str) -> None:
    numbers = printed(paper)
    for method in {one.method for one in numbers if one.method}:
        assert [row.label for row in parse_rows(method)] == [method]
    percent = [one for one in numbers if one.unit == "%" and one.column not in ("difference", "gain")]
    assert len(percent) > 100
    assert all(0 <= one.mean <= 100 for one in percent)
    assert paper in papers()


def test_averages_agree_with_what_they_average() -> None:
    """FedTHE's Table 3 and BTFL's Table 2, but for cells that the papers themselves add up differently."""
    for paper, table in (("fedthe", "3"), ("btfl", "2")):
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for one in printed(paper):
            if one.table == table:
                rows.setdefault((str(dict(one.setting)), one.row), {})[one.column] = one.mean
        off = []
        for place, row in rows.items():
            average = row.pop("average")
            off.append(abs(np.mean(list(row.values())) - average))
            assert len(row) >= 4, place
        assert len(off) >= 9
        assert np.mean(np.array(off) < 0.011) > 0.9


def test_a_table_is_found_by_its_column_and_setting() -> None:
    assert values("fedicon", "9", dataset="office10")["fedavg_ft"] == 60.45
    assert values("fedicon", "1", "usps")["tent"] == 67.51
    with pytest.raises(ValueError, match="two numbers of local"):
        values("fedicon", "9")
    with pytest.raises(ValueError, match="no number fits"):
        values("fedicon", "9", dataset="cifar10")
    with pytest.raises(ValueError, match="no numbers of 'unknown'; there are: atp"):
        printed("unknown")


def test_a_number_is_read_as_it_is_printed(folder: Path) -> None:
    (folder / "one.csv").write_text(HEAD + '1,model=cnn;alpha=0.1,"A, B",fedavg,mnist,%,64.30,\n1,,C,,mnist,s,2,0.5\n')
    first, second = printed("one")
    assert first == Printed("1", {"model": "cnn", "alpha": 0.1}, "A, B", "fedavg", "mnist", "%", 64.3, None)
    assert (second.method, second.sd, dict(second.setting)) == ("", 0.5, {})
    assert values("one", "1", model="cnn") == {"fedavg": 64.3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("table,row\n1,A\n", "columns .* allowed are table, setting"),
        (HEAD + "1,,A,fedavg,mnist,%,much,\n", r"one\.csv, line 2: could not convert"),
        (HEAD + "1,,A,fedavg,mnist,%,nan,\n", r"line 2: mean nan"),
        (HEAD + "1,,A,fedavg,mnist,%,1,-1\n", r"line 2: mean 1.0, sd -1.0"),
        (HEAD + "1,alpha,A,fedavg,mnist,%,1,\n", r"line 2: .*'alpha' is not of the form name=value"),
        (HEAD + "1,,A,fedavg,,%,1,\n", r"line 2: no column"),
        (HEAD + "1,,A,fedavg,mnist,%,1\n", r"line 2: columns are missing"),
        (HEAD + "1,,A,fedavg,mnist,%,1,\n1,,A,tent,mnist,%,1,\n", r"line 3: 1, , A, mnist occurs twice"),
    ],
)
def test_a_damaged_file_is_refused_by_line(folder: Path, text: str, words: str) -> None:
    (folder / "one.csv").write_text(text)
    with pytest.raises(ValueError, match=words):
        printed("one")
