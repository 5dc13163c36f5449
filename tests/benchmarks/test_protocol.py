"""Protocols: every file parses, every reference is found, cells expand, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedtta.benchmarks.tables.protocol_file as module
from fedtta.benchmarks.papers import Reference
from fedtta.benchmarks.tables.protocol import Realtime, Start, select_cells
from fedtta.benchmarks.tables.protocol_file import protocol_names, read_protocol
from fedtta.benchmarks.tables.results import wanted_rows
from fedtta.server.methods import plan
from fedtta.settings import SettingsError

NAMES = protocol_names()
COLUMNS = (
    "original", "corrupted", "original_ind", "corrupted_out_of_client", "average", "feature", "label", "hybrid",
    "mnist", "usps", "mnistm", "amazon", "caltech10", "dslr", "webcam", "clipart", "global",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_of_every_protocol_is_valid(name: str, quick: bool) -> None:
    protocol = read_protocol(name, quick=quick)
    assert protocol.cells
    assert protocol.about
    for network in protocol.networks.values():
        assert plan(network.settings)
    for cell in protocol.cells:
        rows = wanted_rows(cell.settings)
        assert rows
        for reference in cell.references if not quick else ():
            columns = (cell.column, *COLUMNS) if cell.column else COLUMNS
            found = [reference.number(row, column) for row in rows for column in columns]
            assert any(found), f"{cell.name}: {reference} has none of these rows and columns"
    listed = [cell.name for table in protocol.tables if not table.measure for cell in table.cells]
    assert sorted(listed) == sorted(cell.name for cell in protocol.cells)


def test_a_protocol_without_a_small_version_is_not_run_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text('# Mine.\ndataset = "digits"\nrounds = 100\n')
    monkeypatch.setattr("fedtta.benchmarks.tables.protocol_file.PROTOCOLS", tmp_path)
    assert read_protocol("mine").cells
    with pytest.raises(SettingsError, match=r"mine: --quick: allowed with a section \[quick\]"):
        read_protocol("mine", quick=True)


def test_changes_win_over_the_file_and_the_last_one_counts() -> None:
    cells = {cell.name: cell.settings for cell in read_protocol("brfl", ["rounds=4", "autocast=false"]).cells}
    assert {(settings.rounds, settings.autocast) for settings in cells.values()} == {(4, False)}
    assert (cells["cnn-dir-1"].alpha, cells["cnn-dir-0.1"].alpha) == (1.0, 0.1)
    assert read_protocol("brfl", ["rounds=3", "rounds=5", "dataset-options=path=a=b"]).cells[0].settings.rounds == 5
    quick = read_protocol("brfl", ["alpha=0.7"], quick=True)
    assert {(one.settings.dataset, one.settings.alpha) for one in quick.cells} == {("digits", 0.7)}


def test_cells_by_name_and_the_papers_numbers_beside_them() -> None:
    protocol = read_protocol("brfl")
    (cell,) = select_cells(protocol, ["cnn-dir-1"])
    (reference,) = cell.references
    assert (cell.title, reference.setting, reference.table) == ("CNN, Dirichlet(1.0)", {"alpha": 1.0}, "1")
    assert "splits that do not leak" in reference.why
    ft = reference.number("fedavg_ft", "original")
    assert ft is not None
    assert (ft.row, ft.mean > 50) == ("FedAvg + FT", True)
    assert reference.number("fedavg_ft", "nothing") is None
    with pytest.raises(ValueError, match="two numbers of"):  # an ambiguous place is not a missing number
        Reference("fedthe", "1").number("fedavg_ft", "natural")
    with pytest.raises(SettingsError, match=r"cell 'nowhere'; there are: cnn-dir-0\.1"):
        select_cells(protocol, ["nowhere"])


def test_atp_shifts_differ_in_one_setting_each_and_start_from_networks_of_their_own() -> None:
    protocol = read_protocol("atp")
    cells = {cell.name: cell for cell in protocol.cells}
    feature, label, hybrid = (cells[name].settings for name in ("feature", "label", "hybrid"))
    assert (feature.step_ratio, feature.domains) == (1.0, "corruptions")
    assert (label.step_ratio, label.domains) == (16.0, "none")
    assert (hybrid.step_ratio, hybrid.domains) == (16.0, "corruptions")
    assert hybrid.clients * hybrid.target_fraction == 60
    assert [protocol.networks[name].settings.rounds for name in ("feature", "label", "hybrid")] == [60, 60, 200]
    assert [one.rates_rounds for one in (feature, label, hybrid)] == [120, 120, 400]
    crossed = cells["label-on-hybrid"]
    assert crossed.start == Start("hybrid", "label")
    assert (crossed.settings.rounds, crossed.settings.rates_rounds, crossed.column) == (0, 0, "hybrid")
    for name, network in protocol.networks.items():  # a network is trained on the split of the cells that start from it
        starting = [cell for cell in protocol.cells if cell.start.network == name]
        assert starting
        assert {tuple(cell.settings.select("data").items()) for cell in starting} == {
            tuple(network.settings.select("data").items())
        }


def test_papers_numbers_of_collaborations_and_of_gains() -> None:
    cells = {cell.name: cell for cell in read_protocol("pfedbbn").cells}
    (reference,) = cells["dirichlet-0.01"].references
    texts = [reference.number(row, "0.01") for row in ("bbn", "bbn @ pfedbbn[share=all]", "tent[lr=0.1] @ fedavg")]
    assert [one.mean if one else None for one in texts] == [52.33, 71.96, 22.47]
    crossed = read_protocol("atp").cell("label-on-hybrid").references[0]
    own, base = crossed.number("atp", "hybrid"), crossed.baseline("fedavg", "hybrid")
    assert own is not None
    assert base is not None
    assert round(own.mean - base.mean, 1) == 5.8  # Table 3 over Table 4


def test_fedicon_columns_are_the_domains_of_the_clients() -> None:
    cells = {cell.name: cell for cell in read_protocol("fedicon").cells}
    for cell in cells.values():
        if cell.columns:
            assert len(cell.columns) == cell.settings.clients, cell.name
        domains = cell.settings.dataset_options.partition("domains=")[2].split(",")
        assert set(cell.columns) <= set(domains), cell.name
        if cell.settings.unseen_domain:
            assert cell.settings.unseen_domain in domains
    assert cells["office10-equal-domain-dslr"].columns == ("dslr",) * 3
    assert "digit5-one-mnist-mnist" not in cells
    assert cells["digit5-one-usps-mnist"].column == "usps to mnist"
    amounts = {
        name: sum(int(cells[name].settings.dataset_options.partition("=")[2].partition(";")[0]) for _ in range(sources))
        for name, sources in (("digit5-one-usps-mnist", 1), ("digit5-each-mnist", 2), ("digit5-mixed-mnist", 2))
    }
    assert set(amounts.values()) == {4000}  # Figure 1b: as many images to train on in each case


def test_networks_and_realtime() -> None:
    protocol = read_protocol("realtime")
    assert protocol.cells[0].realtime == Realtime((1.0, 2.0, 5.0), "fedthe", 32, 15)
    assert (protocol.networks["central"].train, protocol.networks["central"].epochs) == ("central", 8)
    quick = read_protocol("realtime", ["seed=4", "clients=3"], quick=True)
    assert (quick.networks["central"].epochs, quick.networks["central"].settings.clients) == (1, 3)
    assert quick.networks["central"].settings.dataset == quick.cells[0].settings.dataset == "digits"
    source = read_protocol("pfedbbn", ["clients=3"], quick=True).networks["source"]  # fixed
    assert (source.epochs, source.settings.clients, source.settings.dataset_options) == (15, 10, "part=train")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("brfl2", [], f"unknown protocol 'brfl2'; there are: {', '.join(NAMES)}"),
        ("brfl", ["rounds"], "--set 'rounds': allowed is key=value"),
        ("brfl", ["round=3"], "did you mean rounds?"),
        ("brfl", ["rounds=many"], "allowed is a value of type int"),
        ("brfl", ["rounds=-1"], "allowed is 0 or more"),
        ("fedicon", ["clients=4"], "cell digit5-covariate: clients = 4; allowed is 3, one for each of columns"),
    ],
)
def test_wrong_names_and_changes_are_named(name: str, changes: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_protocol(name, changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cels.a]\n", "section [cels]; allowed are cells, networks, tables, paper, quick"),
        ("seed = \n", "made.toml"),
        ("[cells.a]\nrounds = -1\n", "made, cell a: rounds = -1: allowed is 0 or more"),
        ('[cells."a/b"]\n', "name 'a/b'"),
        ('[cells."{x}"]\neach = { x = ["A"] }\n', "name 'A'"),
        ('[cells.a]\nweighting = "none"\n', "weighting = 'none'; allowed are clients, samples"),
        ('[paper]\nname = "them"\n[cells.a]\npaper = { table = "1" }\n', "made, cell a: paper 'them'; there are"),
        ('[cells.a]\npaper = { table = "1" }\n', "made, cell a: paper ''; there are"),
        ('[cells.a]\nfrom = "b"\n', "made, cell a: from = 'b'; networks: "),
        ('[networks.n]\n[cells.a]\nfrom = { network = "n", rates = "b" }\n', "from = 'b' is no cell"),
        (
            '[cells.a]\nfrom = { rates = "b" }\n[cells.b]\n',
            "cell a: from = { rates = 'b' }: a network is missing, or init",
        ),
        ('[networks.n]\ntrain = "alone"\n', "made, network n: train = 'alone'; allowed are federated, central, source"),
        ("[networks.n]\nepochs = 0\n", "made, network n: epochs = 0"),
        ("[tables.t]\n", "[tables.t]: no cell belongs to it"),
        ("[tables.main]\nbase = 1\n", "[tables.main]: key 'base'"),
        ("paper = 3\n", "made: paper = 3; allowed is a table"),
        ("[cells]\na = 3\n", "made, cell a = 3; allowed is a table"),
        ("[cells.a]\neach = { x = 3 }\n", "made, cell a: each: x = 3; allowed is a list"),
        ('[cells.a]\ncolumns = "abc"\n', "made, cell a: columns = 'abc'; allowed is a list"),
        ("[cells.a]\nfrom = 3\n", "made, cell a: from = 3; allowed is a text or a table"),
        ('[cells.a]\nfrom = { net = "n" }\n', "made, cell a: from: key 'net'; allowed are network, rates"),
        ("[cells.a]\npaper = [3]\n", "made, cell a: paper = 3; allowed is a table"),
        ("[cells.a]\nrealtime = { speed = [1] }\n", "realtime: key 'speed'; allowed are speeds, reference"),
        ("[cells.a]\nrealtime = { repeats = 0 }\n", "made, cell a: realtime: repeats = 0; allowed is 1 or more"),
        ("[cells.a]\nrealtime = { speeds = [0] }\n", "realtime: speeds = [0]; allowed are numbers above 0"),
        ('[networks.n]\ntrain = "source"\nhalf = "no"\n', "made, network n: half = 'no'; allowed is true or false"),
        ("[networks.n]\nepochs = 1.5\n", "made, network n: epochs = 1.5; allowed is an integer"),
        (
            '[networks.n]\ntrain = "source"\nfrom = "m"\n',
            "network n: from = 'm'; allowed are source models before it: ",
        ),
        (
            '[networks.m]\n[networks.n]\ntrain = "source"\nfrom = "m"\n',
            "network n: from = 'm'; allowed are source models",
        ),
        ("[networks.n]\nthreads = 0\n", "made, network n: threads = 0; allowed is 1 or more"),
        ('[tables.main]\nagainst = "fedavg"\n', "[tables.main]: against = 'fedavg'; allowed is a list"),
        ('[quick]\ncells = "main"\n', "made: [quick]: cells = 'main'; allowed is a list"),
    ],
)
def test_a_bad_file_is_refused_by_place(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROTOCOLS", tmp_path)
    (tmp_path / "made.toml").write_text(text)
    with pytest.raises(SettingsError) as error:
        read_protocol("made")
    assert words in str(error.value)


def test_description_is_the_comment_on_top() -> None:
    about = read_protocol("brfl").about
    assert about.startswith("BRFL (FedTHE, section 5)")
    assert "#" not in about
    assert "dataset =" not in about
