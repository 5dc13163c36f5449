"""Protocols: files, cells, changes, and what is wrong with them in words."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.protocol as module
from benchmarks.__main__ import parser
from benchmarks.protocol import PROTOCOLS, Reference, description, load_protocol, read_protocol
from benchmarks.run import WITHOUT_SETTINGS, calls
from server.methods import plan
from settings import SettingsError

NAMES = sorted(path.stem for path in PROTOCOLS.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_of_every_protocol_is_valid(name: str, quick: bool) -> None:
    protocol = read_protocol(name, quick=quick)
    assert protocol.cells or protocol.calls
    for words in calls(protocol, [1], Path("out"), Path("runs"), ["rounds=1"]):
        known = vars(parser().parse_args(words))
        assert known["command"] in WITHOUT_SETTINGS or known["set"][-1] == "rounds=1"
    for cell in protocol.cells:
        assert plan(cell.settings)
        if cell.reference is not None:
            shifts = ("original", "corrupted", "original_ind", "corrupted_out_of_client")
            columns = [cell.reference.column(name) for name in shifts]
            assert any(columns), f"{cell.name}: the paper has no such number"


def test_changes_win_over_the_file_and_the_last_one_counts() -> None:
    settings = load_protocol("brfl", ["rounds=3", "autocast=false", "rounds=4", "dataset-options=path=a=b"])
    assert (settings.rounds, settings.autocast, settings.dataset_options) == (4, False, "path=a=b")
    assert settings.clients == load_protocol("brfl").clients == 20
    cells = {cell.name: cell.settings for cell in read_protocol("brfl", ["rounds=4"]).cells}
    assert {settings.rounds for settings in cells.values()} == {4}
    assert (cells["cnn-dir-1"].alpha, cells["cnn-dir-0.1"].alpha) == (1.0, 0.1)
    quick = read_protocol("brfl", ["alpha=0.7"], quick=True)
    assert {(one.settings.dataset, one.settings.alpha) for one in quick.cells} == {("digits", 0.7)}


def test_cells_by_name_and_the_papers_numbers_beside_them() -> None:
    (cell,) = read_protocol("brfl", only=["cnn-dir-1"]).cells
    assert cell.title == "CNN, Dirichlet(1.0)"
    assert cell.reference == Reference("fedthe", "1", {"alpha": 1.0}, why=cell.reference.why)
    assert "splits that do not leak" in cell.reference.why
    ft = cell.reference.column("original")["fedavg_ft"]
    assert (ft.row, ft.mean > 50) == ("FedAvg + FT", True)
    assert cell.reference.column("nothing") == {}
    with pytest.raises(ValueError, match="two numbers of"):  # a place that is not told apart is no absent number
        Reference("fedthe", "1").column("natural")
    (alone,) = read_protocol("brfl-personal").cells
    assert (alone.name, alone.title) == ("main", "brfl-personal")
    (without,) = read_protocol("brfl-central").cells
    assert without.reference is None


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("brfl2", [], f"unknown protocol 'brfl2'; there are: {', '.join(NAMES)}"),
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
    with pytest.raises(SettingsError) as error:
        read_protocol(name, changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "only", "words"),
    [
        ("[cels.a]\n", [], "table [cels]; allowed are cells, paper, quick"),
        ("seed = \n", [], "made.toml"),
        ("[cells.a]\nrounds = -1\n", [], "made, cell a: rounds = -1: allowed is 0 or more"),
        ("[cells.a]\n[cells.b]\n", ["c"], "cell 'c'; there are: a, b"),
        ('[cells."a/b"]\n', [], "cell 'a/b'"),
        ('[paper]\nname = "them"\n[cells.a]\npaper = { table = "1" }\n', [], "made, cell a: paper 'them'; there are"),
    ],
)
def test_a_bad_file_is_refused_by_place(
    text: str, only: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROTOCOLS", tmp_path)
    (tmp_path / "made.toml").write_text(text)
    with pytest.raises(SettingsError) as error:
        read_protocol("made", only=only)
    assert words in str(error.value)


def test_description_is_the_comment_on_top() -> None:
    assert description("brfl").startswith("BRFL (FedTHE, section 5)")
    assert "#" not in description("brfl")
    assert "dataset =" not in description("brfl")
