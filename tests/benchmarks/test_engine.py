"""`run`: a tiny protocol end to end with real runs, and the command over made-up runs."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedtta.benchmarks.__main__ import COMMANDS, main, parser
from fedtta.benchmarks.papers import Printed
from fedtta.benchmarks.tables import engine, protocol_file
from fedtta.benchmarks.tables.comparison import Comparison
from fedtta.benchmarks.tables.engine import rendered, seeds_of
from fedtta.benchmarks.tables.pages import write_pages
from fedtta.benchmarks.tables.plots import curve
from fedtta.benchmarks.tables.pretrained import read_label
from fedtta.models import load_model
from fedtta.server.report import Results
from fedtta.settings import Settings
from tests.benchmarks.fabricated import results

TINY = """
# Tiny.
dataset = "digits"
image-size = 20
fraction = 0.4
clients = 4
target-fraction = 0.25
partition = "step"
model = "shallow-cnn"
rounds = 1
local-epochs = 1
personal-epochs = 0
rates-rounds = 1
batch-size = 20
adapt-batch-size = 20
shifts = "original"
engine = "vectorised"
device = "cpu"
checkpoint-every = 1
methods = "fedavg,atp"

[networks.federated]

[networks.central]
train = "central"
epochs = 1
target-fraction = 0.0

[tables.t]
title = "Rates"
baseline = "fedavg"

[cells.own]
from = "federated"
table = "t"
column = "own"

[cells.crossed]
from = { network = "federated", rates = "own" }
methods = "atp"
table = "t"
column = "own"
suffix = "again"

[cells.central]
from = "central"
target-fraction = 0.0
methods = "fedavg"

[cells.leaky]
from = "central"
methods = "fedavg"
"""


@pytest.mark.timeout(300)
def test_a_protocol_with_networks_and_rates_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(protocol_file, "PROTOCOLS", tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    out = tmp_path / "out"
    words = ["run", "tiny", "--seeds", "2-2", "--folder", str(tmp_path / "runs"), "--out", str(out)]
    assert main([*words, "--cells", "crossed"]) == 2
    assert "own-2.json has no learned rates: run cell own first" in capsys.readouterr().err
    assert main([*words, "--cells", "own,crossed,central"]) == 0, capsys.readouterr().err
    kept = {name: json.loads((out / f"tiny/{name}-2.json").read_text()) for name in ("own", "crossed", "central")}
    rows = kept["own"]["rows"]
    assert list(rows) == ["fedavg", "atp"]
    # rates learned in one run, used in another: the same predictions of the same network
    assert kept["crossed"]["rows"]["atp"]["shifts"] == {
        shift: {**one, "samples_per_second": kept["crossed"]["rows"]["atp"]["shifts"][shift]["samples_per_second"]}
        for shift, one in rows["atp"]["shifts"].items()
    }
    assert kept["own"]["trainings"]["cross_entropy"]["rates"]["all"]
    assert kept["crossed"]["start"] == {**kept["own"]["start"], "rates": "own"}
    assert kept["own"]["runs"][0]["test_samples_trained_on"] == 0
    label = read_label(out / "tiny/federated-2.safetensors")
    assert (label["kind"], label["settings"]["seed"], label["settings"]["rounds"]) == ("federated", 2, 1)
    assert load_model(out / "tiny/federated-2.safetensors")[1]["name"] == "shallow-cnn"
    assert kept["central"]["start"]["recipe"]["epochs"] == 1
    printed = capsys.readouterr().out
    assert "network central, seed 2" in printed
    assert "network federated" not in printed  # it was trained by the first call
    assert "atp (again)" in printed
    # kept results are not run again, and a network that was trained on test samples is refused
    monkeypatch.setattr("fedtta.simulation.simulate", None)
    assert main([*words, "--cells", "own,crossed,central"]) == 0
    assert main([*words, "--cells", "leaky"]) == 2
    assert "tiny, cell leaky: init = " in (error := capsys.readouterr().err)
    assert "was trained with target-fraction = 0.0, the run has 0.25" in error
    assert main([*words, "--cells", "own", "--set", "learning-rate=0.5"]) == 2
    assert "other settings (learning-rate)" in capsys.readouterr().err
    write_pages(out, tmp_path / "pages")
    page = (tmp_path / "pages/tiny.md").read_text()
    assert "| `atp (again)` |" in page
    assert "seed 2: starts from a federated network" in page


ROWS = ["--methods", "fedavg,personal,btfl"]
CELL = ["run", "brfl", "--cells", "cnn-dir-0.1"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """Seed, rows and folder of every test that was asked for; runs are made up."""
    found: list[tuple[int, str, str]] = []

    def evaluated(settings: Settings, trainings: Path, folder: Path, of: Settings | None = None) -> Results:
        found.append((settings.seed, settings.methods, folder.name))
        return results(settings.seed, settings, folder.name.partition("-")[0])

    monkeypatch.setattr(engine, "evaluated", evaluated)
    return found


def words(tmp_path: Path, *more: str) -> list[str]:
    return [*CELL, "--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *more]


def test_from_words_to_files(asked: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, *ROWS, "--seeds", "2", "--set", "rounds=1", "alpha=0.5", "--set", "rounds=2")) == 0
    assert "1 of 2: cnn-dir-0.1, seed 1, cross_entropy; about 0 min left" in capsys.readouterr().out
    content = json.loads((tmp_path / "out/brfl/cnn-dir-0.1-2.json").read_text())
    assert (content["settings"]["rounds"], content["settings"]["alpha"], content["seed"]) == (2, 0.5, 2)
    assert content["rows"]["btfl"]["shifts"]["original"]["accuracy_percent"] == 87.5


def test_rows_and_seeds_that_are_kept_are_not_run_again(asked: list, tmp_path: Path) -> None:
    assert main(words(tmp_path, "--methods", "fedavg,personal", "--seeds", "1")) == 0
    assert main(words(tmp_path, *ROWS, "--seeds", "2")) == 0
    assert main(words(tmp_path, *ROWS, "--seeds", "2")) == 0
    assert [one[:2] for one in asked] == [(1, "fedavg,personal"), (1, "btfl"), (2, "fedavg,personal,btfl")]
    content = json.loads((tmp_path / "out/brfl/cnn-dir-0.1-1.json").read_text())
    assert (list(content["rows"]), len(content["runs"])) == (["fedavg", "personal", "btfl"], 2)


def test_rows_that_another_process_adds_meanwhile_stay(
    asked: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up, others = engine.evaluated, ["personal", "btfl"]

    def evaluated(*arguments: Any, **more: Any) -> Results:
        if others:
            assert main(words(tmp_path, "--methods", others.pop(), "--seeds", "1")) == 0
        return made_up(*arguments, **more)

    monkeypatch.setattr(engine, "evaluated", evaluated)
    assert main(words(tmp_path, "--methods", "fedavg", "--seeds", "1")) == 0
    content = json.loads((tmp_path / "out/brfl/cnn-dir-0.1-1.json").read_text())
    assert [one["methods"] for one in content["runs"]] == [["personal"], ["btfl"], ["fedavg"]]
    assert set(content["rows"]) == {"fedavg", "personal", "btfl"}


def test_tests_at_intermediate_rounds_are_kept_with_the_rows(
    asked: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = words(tmp_path, *ROWS, "--seeds", "1", "--every", "8")  # of 20 rounds
    assert main(every) == 0
    assert main(every) == 0
    assert [one[2] for one in asked] == ["cross_entropy", "cross_entropy-8", "cross_entropy-16"]
    content = json.loads((tmp_path / "out/brfl/cnn-dir-0.1-1.json").read_text())
    assert content["curves"]["btfl"]["16"] == {"original": 75.0, "out_of_client": 37.5}
    assert curve(content, "btfl", "original") == {8: 75.0, 16: 75.0, 20: 75.0}
    assert main([*words(tmp_path, "--methods", "fedicon"), "--every", "8"]) == 2
    assert "--every 8: allowed for trainings of one stage; fedicon has several" in capsys.readouterr().err
    assert main([*every, "--every", "-1"]) == 2


def test_everything_is_checked_before_anything_runs(
    asked: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, *ROWS, "--seeds", "2-2")) == 0
    asked.clear()
    assert main(words(tmp_path, *ROWS, "--seeds", "2", "--set", "rounds=3")) == 2
    assert "cnn-dir-0.1-2.json was made with other settings (rounds)" in capsys.readouterr().err
    assert main(words(tmp_path, "--methods", "fedavg,unknown")) == 2
    assert "brfl, cell cnn-dir-0.1: methods: unknown method" in capsys.readouterr().err
    assert main(words(tmp_path, *ROWS, "--set", "rounds=0", "--out", str(tmp_path / "new"))) == 2
    assert "rounds = 0: no network would be trained" in capsys.readouterr().err
    assert main(["run", "nothing"]) == 2
    assert "error: unknown protocol 'nothing'; there are: atp, brfl" in capsys.readouterr().err
    assert asked == []


def test_quick_is_small_and_has_a_folder_of_its_own(
    asked: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "QUICK", tmp_path / "quick")
    assert main(["run", "btgfl", "--quick", *ROWS]) == 0
    assert [one[0] for one in asked] == [1, 1, 1]
    content = json.loads((tmp_path / "quick/btgfl/one-by-one-1.json").read_text())
    assert (content["settings"]["dataset"], content["settings"]["rounds"]) == ("digits", 1)


def test_terminal_table_and_labels_with_brackets() -> None:
    values = {
        name: {"original": {7: v}, "out_of_client": {7: v}, "average": {7: v}}
        for name, v in {"fedavg": 60.0, "fedthe[beta=1]": 40.0}.items()
    }
    paper = {"fedavg": {"average": Printed("1", {}, "FedAvg", "fedavg", "average", "%", 71.25, None)}}
    console = Console(width=100)
    with console.capture() as printed:
        console.print(rendered(Comparison("Some cell", values, [7], paper)))
    text = re.sub(r"\s+", " ", printed.get())
    assert "fedthe[beta=1] │ 40.00 │ 40.00 │ 40.00" in text
    assert "fedavg │ 60.00 │ 60.00 │ 60.00 | 71.25" in text


def test_list_names_protocols_and_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in protocol_file.protocol_names())
    assert main(["list", "atp"]) == 0
    assert "label-on-feature" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("poisoning --seeds 0", "--seeds 0: allowed is 1 or more"),
        ("privacy --seeds a", "--seeds 'a': allowed are numbers, separated by commas"),
        ("privacy --seeds ,", "--seeds: allowed are one or more"),
        ("privacy --noise 1,b", "--noise '1,b': allowed are numbers, separated by commas"),
        ("drift --orders 0", "--orders 0: allowed is 1 or more"),
        ("drift --false-alarms 7", "--false-alarms 7: allowed is above 0, up to 0.5"),
    ],
)
def test_arguments_out_of_range_are_named(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "out").mkdir()
    assert main(["page", "--out", str(tmp_path / "out"), "--to", str(tmp_path / "file")]) == 1
    assert re.fullmatch(r"page failed: .*/file.*\n", capsys.readouterr().err)


def test_a_signal_unwinds_what_a_command_has_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM alone would leave private state in temporary folders, and processes of deployments in their sessions."""
    folders = []

    def terminated(*_: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            folders.append(folder)
            signal.raise_signal(signal.SIGTERM)

    stub = SimpleNamespace(add_arguments=lambda parser: None, run=terminated)
    monkeypatch.setitem(COMMANDS, "list", (stub, ""))
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("as before the command"))
    with pytest.raises(SystemExit) as end:
        main(["list"])
    assert end.value.code == 128 + signal.SIGTERM
    assert not Path(folders[0]).exists()
    assert "interrupted" in capsys.readouterr().err


def test_seeds() -> None:
    assert (seeds_of("3"), seeds_of("3,1"), seeds_of("2-4"), seeds_of("5-5")) == ([1, 2, 3], [3, 1], [2, 3, 4], [5])
    names = "list run page speed gpu fleet poisoning privacy drift estimates methods"
    assert list(COMMANDS) == names.split()


@pytest.mark.parametrize(
    "words", [[], ["walk"], ["run"], *(["run", "brfl", "--seeds", n] for n in ("1,1", "x", "0", "3-2"))]
)
def test_words_that_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(words)
    assert end.value.code == 2
