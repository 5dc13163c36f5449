"""Kept results: numbers computed by hand, the committed files, and what does not belong beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.benchmarks.provenance import RESULTS
from fedtta.benchmarks.tables.comparison import compare
from fedtta.benchmarks.tables.engine import missing_points
from fedtta.benchmarks.tables.networks import network_path, of_seed
from fedtta.benchmarks.tables.pretrained import check_pretrained
from fedtta.benchmarks.tables.protocol import Cell
from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.benchmarks.tables.results import (
    CONSTANT,
    Content,
    add_run,
    cell_path,
    check_kept,
    collaboration_rows,
    constant_row,
    empty,
    lasting,
    missing,
    mixing_weights,
    read_cell,
    read_results_of,
    row_content,
    wanted_rows,
)
from fedtta.client.device import SLOW_BFLOAT16
from fedtta.models import load_model
from fedtta.server.events import RunError
from fedtta.server.report import WEIGHT_BINS, Evaluation
from fedtta.server.report.events import Adapted, AdaptRound, Incident, Rates, RatesRound
from fedtta.settings import Settings, SettingsError
from tests.benchmarks.fabricated import results

KEPT = read_results_of(RESULTS)
FILES = [(name, cell, seed) for name, cells in KEPT.items() for cell, seeds in cells.items() for seed in seeds]
#: protocol, cell, seed, row, column → accuracy in percent, from files of 2026-11-22 (BTGFL, pFedBBN, ATP: later).
KNOWN = {
    ("brfl", "cnn-dir-0.1", 1, "fedavg", "original"): 42.1333,
    ("brfl", "cnn-dir-0.1", 1, "fedavg", "out_of_client"): 42.45,
    ("fedicon", "office10-equal-domain-dslr", 1, "fedavg", "dslr"): 44.586,
    ("fedicon", "office10-equal-domain-dslr", 1, "fedicon[mode=offline;epochs=10;base=global]", "dslr"): 77.4947,
    ("atp", "label", 1, "atp[mode=online]", "original"): 69.825,
    ("atp", "label", 1, "fedavg", "original"): 61.1833,
    ("ttpfl", "digits-cnn-mnistm", 1, "fedavg", "original"): 34.8,
    ("ttpfl", "digits-cnn-mnistm", 1, "atp", "original"): 13.5,
    ("btgfl", "full", 1, "fedthe", "synthetical"): 59.8417,
    ("pfedbbn", "dirichlet-0.01", 1, "bbn @ pfedbbn[share=statistics]", "global"): 85.32,
    ("pfedbbn", "iid", 1, "bbn", "global"): 53.58,
    ("pfedbbn", "dirichlet-0.005", 1, CONSTANT, "global"): 97.37,
}


@pytest.mark.parametrize(("protocol", "cell", "seed"), FILES)
def test_a_committed_file_belongs_to_its_cell(protocol: str, cell: str, seed: int) -> None:
    known = read_protocol(protocol).cell(cell)
    settings, path = of_seed(known.settings, seed), cell_path(RESULTS, protocol, cell, seed)
    check_kept(path, settings)
    content = KEPT[protocol][cell][seed]
    assert settings.seed == content["settings"]["seed"] == seed
    assert set(wanted_rows(settings)) & set(content["rows"])
    assert all(run["commit"] for run in content["runs"])
    if known.start.network:
        assert content["start"]["network"] == known.start.network
    if known.columns:
        assert {column for row in content["rows"].values() for column in row["shifts"]} == set(known.columns)


def test_committed_numbers_have_not_changed() -> None:
    assert len(FILES) == 152
    for (protocol, cell, seed, row, column), value in KNOWN.items():
        shift = KEPT[protocol][cell][seed]["rows"][row]["shifts"][column]
        assert shift["accuracy_percent"] == value
    own = KEPT["fedicon"]["office10-equal-domain-dslr"][1]["rows"]["fedavg_ft"]["shifts"]["dslr"]
    assert own["per_client_percent"] == "25.4777 41.4013 52.2293"
    bbn = KEPT["pfedbbn"]["iid"][2]["rows"]["bbn @ pfedbbn[share=statistics]"]["shifts"]["global"]
    assert bbn["weights"]["75"].startswith("0.218 0.067 0.097")
    assert (bbn["mean_over_classes_percent"], bbn["rounds"]) == (47.63, 75)
    rates = KEPT["atp"]["label"][1]["trainings"]["cross_entropy"]["rates"]["all"]
    assert (rates["head.bias"], len(rates)) == (0.05321099326232042, 23)


def test_the_kept_tables_of_two_papers() -> None:
    (table,) = read_protocol("atp").tables
    found = compare(table, KEPT["atp"])
    assert found.columns == ["feature", "label", "hybrid", "average"]
    gains = [found.gains("atp", column)[0] for column in found.columns[:3]]
    assert gains == pytest.approx([1.6, 7.275, 8.4667], abs=1e-4)
    for row, own, base in (
        ("atp", 66.90, 64.39),
        ("atp[adapt=stats]", 71.27, 69.42),
        ("atp (rates of hybrid)", 72.69, 69.42),
    ):
        printed = found.paper[row]["feature"], found.paper_baseline[row]["feature"]
        assert [one.mean for one in printed] == [own, base]
        assert printed[0].comparable(printed[1])  # of one network
    gains = [found.gains("atp[adapt=params]", column)[0] for column in found.columns[:3]]
    assert gains == pytest.approx([-0.0583, 7.225, 6.65], abs=1e-4)
    streams, classes = read_protocol("pfedbbn").tables[:2]
    halves = {table.name: table for table in read_protocol("pfedbbn").tables}
    early = compare(halves["orders-first"], KEPT["pfedbbn"]).values
    assert (early["bbn"]["orders = 1"][1], early["bbn @ fedavg"]["orders = 1"][1]) == (29.11, 52.46)
    assert compare(streams, KEPT["pfedbbn"]).values["bbn"]["0.01"] == {1: 46.03, 2: 50.14, 3: 48.15}
    assert compare(classes, KEPT["pfedbbn"]).values["bbn"]["0.01"] == {1: 45.15, 2: 44.24, 3: 49.1}


@pytest.mark.parametrize("name", ["atp", "pfedbbn"])
def test_committed_networks_are_those_of_the_protocol(name: str, tmp_path: Path) -> None:
    protocol = read_protocol(name)
    starts = {cell.start.network for cell in protocol.cells if cell.name in KEPT[name]}
    for network in (one for one in protocol.networks.values() if one.name in starts):
        path = network_path(network, 1, tmp_path)
        assert path.is_relative_to(RESULTS)
        assert load_model(path)[1]["name"] == network.settings.model
        for cell in protocol.cells:
            if cell.start.network == network.name:
                check_pretrained(path, of_seed(cell.settings, 1))


def test_only_data_and_networks_are_committed() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert max(path.stat().st_size for path in files) < 1_000_000


def evaluation(partition: int, correct: int, total: int, **more: Any) -> Evaluation:
    return Evaluation("t", "fedavg", "original", partition, correct, total, **more)


def test_a_row_by_hand() -> None:
    # 3 of 4 and 1 of 1: mean over clients 87.5, over samples 80.
    entries = [evaluation(0, 3, 4), evaluation(1, 1, 1), evaluation(2, 0, 0)]
    shift = row_content(entries, "fedavg", "t")["shifts"]["original"]
    assert (shift["accuracy_percent"], shift["by_samples_percent"], shift["samples"]) == (87.5, 80.0, 5)
    assert shift["per_client_percent"] == "75 100"
    with pytest.raises(RunError, match="btfl: the run has no accuracy"):
        row_content(entries, "btfl", "t")


def test_clients_that_count_for_a_column() -> None:
    entries = [evaluation(2, 1, 4), evaluation(0, 3, 4), evaluation(1, 1, 1)]
    shifts = row_content(entries, "fedavg", "t", ["a", "a", "b"])["shifts"]
    assert {name: one["accuracy_percent"] for name, one in shifts.items()} == {"a": 87.5, "b": 25.0}
    with pytest.raises(RunError, match=r"clients \[2\] have no accuracy"):
        row_content(entries[1:], "fedavg", "t", ["a", "a", "b"])


def test_mixing_weights_e_are_summed_over_clients() -> None:
    rest = [0] * (WEIGHT_BINS - 2)
    more = [
        {"weight_mean": mean, "weight_histogram": [*counts, *rest]} for mean, counts in ((0.5, [1, 2]), (0.2, [0, 1]))
    ]
    entries = [evaluation(0, 1, 3, **more[0]), evaluation(1, 1, 1, **more[1])]
    shift = row_content(entries, "fedavg", "t")["shifts"]["original"]
    assert (shift["weight_mean"], shift["weight_histogram"]) == (0.425, "1 3" + " 0" * len(rest))


def adapted(
    partition: int, correct: list[int], total: list[int], collaboration: str = "none", round: int = 1
) -> Adapted:
    return Adapted("bbn", collaboration, round, partition, "snow", correct, total, 0.0)


def test_collaborations_by_hand() -> None:
    entries = [
        adapted(0, [1, 0, 0], [2, 1, 0]),
        adapted(1, [3, 0, 0], [3, 0, 0]),
        adapted(0, [2, 1, 0], [2, 1, 0], "fedavg"),
    ]
    rounds = [AdaptRound("bbn", "fedavg", 1, [0, 1], [[0.75, 0.25], [0.12345, 0.87655]], 1.0, 1, 1, 0)]
    found = collaboration_rows(entries, rounds, "t")
    assert list(found) == ["bbn", "bbn @ fedavg"]
    shift = found["bbn"]["shifts"]["global"]
    assert (shift["accuracy_percent"], shift["per_client_percent"]) == (66.67, "33.33 100")  # 4 of 6; 1 of 3, 3 of 3
    assert shift["mean_over_classes_percent"] == 40.0  # 4 of 5 and 0 of 1; class 2 does not occur
    assert "weights" not in shift
    assert found["bbn @ fedavg"]["shifts"]["global"]["weights"] == {"1": "0.750 0.250; 0.123 0.877"}
    alone = [AdaptRound("bbn", "none", 1, [0, 1], [[1.0, 0.0], [0.0, 1.0]], 1.0, 1, 1, 0)]
    assert mixing_weights(alone) == {}


def test_clients_without_test_samples_have_no_accuracy_in_collaborations() -> None:
    # Client 1 takes no part, and client 3 has no samples: 1 of 2 and 3 of 3 are 4 of 5.
    entries = [adapted(0, [1, 0], [2, 0]), adapted(2, [3, 0], [3, 0]), adapted(3, [0, 0], [0, 0], round=2)]
    shift = collaboration_rows(entries, [], "t")["bbn"]["shifts"]["global"]
    assert (shift["per_client_percent"], shift["by_samples_percent"]) == ("50 100", 80.0)
    assert (shift["second_half_percent"], shift["samples"]) == (80.0, 5)
    with pytest.raises(RunError, match="bbn: the run has no accuracy of it"):
        collaboration_rows(entries[2:], [], "t")


def test_halves_of_the_rounds_by_hand() -> None:
    one = [
        adapted(0, [1, 0], [2, 2], round=1),
        adapted(0, [2, 1], [2, 2], round=2),
        adapted(0, [2, 2], [2, 2], round=3),
    ]
    shift = collaboration_rows(one, [], "t")["bbn"]["shifts"]["global"]
    assert (shift["first_half_percent"], shift["second_half_percent"]) == (
        25.0,
        87.5,
    )  # of 3 rounds the first is one half
    assert "first_half_percent" not in collaboration_rows(one[:1], [], "t")["bbn"]["shifts"]["global"]


def test_constant_predictions_by_hand() -> None:
    row = constant_row(np.array([[3, 1], [2, 2]]))  # 75 % and 50 %
    assert row["shifts"]["global"]["accuracy_percent"] == 62.5


def test_rows_that_are_missing_are_grouped_by_training_and_by_collaboration(tmp_path: Path) -> None:
    settings = Settings(methods="fedavg,btfl,fedrep,fedthe", rounds=1)
    path = tmp_path / "a.json"
    found = missing(path, settings)
    assert [(training.name, own.methods) for training, own in found] == [
        ("cross_entropy", "fedavg,btfl"), ("fedrep", "fedrep"), ("balanced_softmax", "fedthe")
    ]  # fmt: skip
    row = {"training": "t", "shifts": {}}
    kept = empty("p", Cell("c", "C", settings), settings)
    path.write_text(json.dumps({**kept, "rows": {"fedavg": row, "fedrep": row}}))
    assert [own.methods for _, own in missing(path, settings)] == ["btfl", "fedthe"]
    together = Settings(
        model_options="norm=batch", methods="fedavg,tent", collaborations="none,fedavg,pfedbbn[share=all]", rounds=0
    )
    path.write_text(json.dumps({**kept, "rows": {"tent @ fedavg": row}}))
    assert [(own.methods, own.collaborations) for _, own in missing(path, together)] == [
        ("fedavg,tent", "none"), ("tent", "pfedbbn[share=all]")
    ]  # fmt: skip


def test_what_was_made_otherwise_is_refused(tmp_path: Path) -> None:
    settings = Settings(init="here", workers=1, methods="fedavg")
    content: Content = empty("p", Cell("c", "C", settings), settings)
    content["start"] = {"kind": "federated", "sha256": "a"}
    path = tmp_path / "c-1.json"
    path.write_text(json.dumps(content))
    check_kept(path, settings.replace(init="there", workers=2, methods="btfl", data_dir="x"), {"sha256": "a"})
    with pytest.raises(SettingsError, match=r"other settings \(learning-rate\)"):
        check_kept(path, settings.replace(learning_rate=1.0))
    with pytest.raises(SettingsError, match="from another network"):
        check_kept(path, settings, {"sha256": "b"})
    path.write_text("{")
    with pytest.raises(SettingsError, match=r"c-1\.json cannot be read"):
        check_kept(path, settings)


def test_results_of_before_the_limits_on_means_have_plain_means(tmp_path: Path) -> None:
    path, settings = tmp_path / "c-1.json", Settings()
    content = empty("p", Cell("c", "C", settings), settings)
    for key in ("clip-factor", "max-share"):
        del content["settings"][key]
    path.write_text(json.dumps(content))
    assert read_cell(path)["settings"]["clip-factor"] == 0
    check_kept(path, settings.replace(clip_factor=0.0, max_share=0.0))
    with pytest.raises(SettingsError, match=r"other settings \(clip-factor, max-share\)"):
        check_kept(path, settings)


def test_seeds_may_differ_in_precision_and_rows_of_a_seed_may_not(tmp_path: Path) -> None:
    settings = Settings(methods="fedavg,btfl", autocast=False)
    path, row = tmp_path / "c-1.json", {"training": "t", "shifts": {}}
    path.write_text(json.dumps({**empty("p", Cell("c", "C", settings), settings), "rows": {"fedavg": row}}))
    other = settings.replace(autocast=True)
    check_kept(path, other)
    assert missing(path, other.replace(methods="fedavg")) == []
    assert len(missing(path, settings)) == 1
    for run in (lambda: missing(path, other), lambda: missing_points(path, other.replace(methods="fedavg"), 1)):
        with pytest.raises(SettingsError, match=r"c-1\.json was made with another autocast; set it, or"):
            run()


REALTIME = {"reference": "fedavg", "interval_milliseconds": 1, "queue": 8, "repeats": 3}


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (3, " = 3; allowed is a table"),
        ([["rows", 1]], r" = \[\['rows', 1\]\]; allowed is a table"),
        ({}, ": protocol is missing"),
        ({"rows": []}, r": rows = \[\]; allowed is a table"),
        ({"seed": "1", "rows": {}}, ": seed = '1'; allowed is an integer"),
        ({"runs": {}}, ": runs = {}; allowed is a list"),
        ({"rows": {"fedavg": 1}}, ": rows: fedavg = 1; allowed is a table"),
        ({"rows": {"fedavg": {"shifts": 1}}}, ": rows: fedavg: shifts = 1; allowed is a table"),
        ({"rows": {"fedavg": {"training": "t", "shifts": {"a": 9.5}}}}, ": rows: fedavg: a = 9.5; allowed is a table"),
        (
            {"rows": {"fedavg": {"training": "t", "shifts": {"a": {"accuracy_percent": "9"}}}}},
            ": rows: fedavg: a: accuracy_percent = '9'; allowed is an integer or a decimal number",
        ),
        *(({key: None}, f": {key} is missing") for key in ("cell", "seed", "rows", "settings", "trainings", "notes")),
        ({"rows": {"fedavg": {"shifts": {}}}}, ": rows: fedavg: training is missing"),
        ({"rows": {"fedavg": {"training": "t"}}}, ": rows: fedavg: shifts is missing"),
        (
            {"rows": {"fedavg": {"training": "t", "shifts": {"a": {}}}}},
            ": rows: fedavg: a: accuracy_percent is missing",
        ),
        ({"runs": [1]}, ": runs: 1 = 1; allowed is a table"),
        ({"runs": [{"training": "t", "commit": "a", "versions": {}}]}, ": runs: 1: hardware is missing"),
        ({"start": {"network": "n"}}, ": start: kind is missing"),
        ({"realtime": {"reference": "fedavg"}}, ": realtime: interval_milliseconds is missing"),
        (
            {"realtime": {**REALTIME, "costs": {"fedavg": {"milliseconds": {}}}}},
            ": realtime: costs: fedavg: least is missing",
        ),
    ],
)
def test_a_kept_file_with_other_fields_is_named(kept: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "p" / "c-1.json"
    path.parent.mkdir()
    if kept and isinstance(kept, dict):  # None: without this field
        whole = {**empty("p", Cell("c", "C", Settings()), Settings()), **kept}
        kept = {key: value for key, value in whole.items() if value is not None}
    path.write_text(json.dumps(kept))
    for read in (lambda: read_cell(path), lambda: read_results_of(tmp_path)):
        with pytest.raises(SettingsError, match=r"c-1\.json" + told):
            read()


def test_a_kept_file_without_a_run_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "c-1.json").write_text(json.dumps(empty("p", Cell("c", "C", Settings()), Settings())))
    with pytest.raises(SettingsError, match=r"c-1\.json: runs = \[\]; allowed is a list of one or more"):
        read_results_of(tmp_path)


def test_a_run_is_added_with_its_provenance() -> None:
    settings = Settings(methods="fedavg,btfl", rounds=1)
    cell = Cell("c", "C", settings)
    content = empty("p", cell, settings)
    add_run(content, results(1, settings), cell, settings, "t", {"kind": "federated"})
    add_run(content, results(1, settings), cell, settings.replace(methods="personal"), "t", {})
    assert list(content["rows"]) == ["fedavg", "btfl", "personal"]
    assert content["rows"]["btfl"]["shifts"]["original"]["accuracy_percent"] == 75.0
    first, second = content["runs"]
    assert (first["methods"], second["methods"], first["commit"]) == (["fedavg", "btfl"], ["personal"], "abc")
    assert (first["test_samples_checked"], first["test_samples_trained_on"]) == (16, 0)
    assert (content["notes"], content["start"]) == (["made up"], {"kind": "federated"})


def test_rates_of_rows_that_are_added_later_stand_beside_those_of_others() -> None:
    settings = Settings(methods="fedavg", rounds=1)
    cell, content = Cell("c", "C", settings), empty("p", Cell("c", "C", settings), settings)
    for variants in (("all",), ("params", "stats")):
        rounds = [RatesRound("t", one, 1, [0, 1], [0, 1], 1.0, 0.5, 0.1, 40, 16, 0) for one in variants]
        rates = [Rates("t", one, {"a": len(one) / 8, "b": 0.0}, {"a": 3, "b": 1}) for one in variants]
        found = replace(results(1, settings), rates=rates, rates_rounds=rounds)
        add_run(content, found, cell, settings, "t", {})
        assert content["trainings"]["t"]["traffic"]["bytes_down_all_rounds"] == 40  # of one variant
    assert {name: one["a"] for name, one in content["trainings"]["t"]["rates"].items()} == {
        "all": 0.375, "params": 0.75, "stats": 0.625
    }  # fmt: skip


def test_replies_that_had_less_effect_are_counted() -> None:
    settings = Settings(methods="fedavg", rounds=1)
    cell, found = Cell("c", "C", settings), results(1, settings)
    limited = [Incident(event, "t", 1, "far away") for event in ("limited", "late", "limited")]
    content = empty("p", cell, settings)
    add_run(content, replace(found, incidents=limited), cell, settings, "t", {})
    assert content["runs"][0]["replies_limited"] == 2


def test_replies_of_a_training_that_several_runs_share_are_counted_once() -> None:
    settings = Settings(methods="fedavg", rounds=1)
    cell, content = Cell("c", "C", settings), empty("p", Cell("c", "C", settings), settings)
    phases = {"fedavg": ("train t", "train t", "evaluate t"), "btfl": ("train t", "train t", "rates t", "statistics t")}
    for name, own in phases.items():
        limited = [Incident("limited", "t", 1, "far away", phase=phase) for phase in own]
        found = replace(results(1, settings), incidents=limited)
        add_run(content, found, cell, settings.replace(methods=name), "t", {})
    assert [run["replies_limited"] for run in content["runs"]] == [3, 2]
    other = replace(results(1, settings, "u"), incidents=[Incident("limited", "u", 1, "far", phase="train u")])
    add_run(content, other, cell, settings, "u", {})
    assert content["runs"][-1]["replies_limited"] == 1


def test_notes_on_how_a_run_went_are_not_kept() -> None:
    natural = "no natural data set is at hand; it is left out"
    notes = ["resumed after round 2; later events are in x", f"{natural}; {SLOW_BFLOAT16}", SLOW_BFLOAT16, "made up"]
    assert lasting(notes) == [natural, "made up"]
