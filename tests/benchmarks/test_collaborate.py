"""The table of test-time methods and collaborations: growing it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.collaborate import collect, constant_accuracy, earlier, folder_name, identity, label, markdown, with_mix
from benchmarks.protocol import load_protocol
from client.runtime import federation_of
from client.streams import streams_of
from settings import Settings, SettingsError
from tests.report.runs import adapt_round, adapted, results_of


def test_the_protocol_is_the_papers() -> None:
    settings = load_protocol("pfedbbn")
    assert (settings.clients, settings.stream_size, settings.stream_batch, settings.severity) == (10, 1000, 200, 5)
    assert "part=test" in settings.dataset_options


def test_mixes() -> None:
    assert with_mix(Settings(), "iid").stream_mix == "iid"
    assert with_mix(Settings(), "0.005").stream_concentration == 0.005
    with pytest.raises(SettingsError, match="--mixes 'even'"):
        with_mix(Settings(), "even")
    assert folder_name("0.01", "bbn", "none,pfedbbn[share=all]") == "0.01-bbn-none_pfedbbn_share_all_"


def test_a_table_grows_with_cells_of_one_kind_only(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    source.write_bytes(b"weights")
    same = identity(Settings(methods="tent", workers=1), source)
    assert same == identity(Settings(methods="bbn", workers=2), source)
    path = tmp_path / "collaborate.json"
    assert earlier(path, same) == {}
    path.write_text(json.dumps({**same, "cells": {"tent": {"none": {"iid": {}}}}}))
    assert earlier(path, same)["cells"] == {"tent": {"none": {"iid": {}}}}
    older = {key: value for key, value in same["settings"].items() if key != "temperature"}  # not yet a setting then
    path.write_text(json.dumps({**same, "settings": older, "cells": {"tent": {}}}))
    assert earlier(path, same)["cells"] == {"tent": {}}
    with pytest.raises(SettingsError, match="another settings"):
        earlier(path, identity(Settings(temperature=0.5), source))
    source.write_bytes(b"other weights")
    with pytest.raises(SettingsError, match="another source_sha256"):
        earlier(path, identity(Settings(), source))


def test_weights_are_kept_where_they_say_something(tmp_path: Path) -> None:
    alone, together = ([[1.0, 0.0], [0.0, 1.0]], [[0.75, 0.25], [0.12345, 0.87655]])
    lines = [
        *(
            adapted(1, client, [1, 0, 0], [2, 1, 0], collaboration=name)
            for client in (0, 1)
            for name in ("none", "mixed")
        ),
        adapt_round(1, alone, collaboration="none"),
        adapt_round(1, together, collaboration="mixed"),
    ]
    cells: dict = {}
    collect(results_of(tmp_path, lines), "iid", cells)
    assert cells["bbn"]["none"]["iid"]["global"] == 33.33
    assert "weights" not in cells["bbn"]["none"]["iid"]
    assert cells["bbn"]["mixed"]["iid"]["weights"] == {"1": "0.750 0.250; 0.123 0.877"}


def test_a_source_must_not_have_been_trained_on_the_streams(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    with pytest.raises(SettingsError, match="cannot be read"):
        label(source)
    note = tmp_path / "source.safetensors.json"
    note.write_text(json.dumps({"measured_on": "10% of each class, held out", "accuracy": 0.9}))
    with pytest.raises(SettingsError, match="part=test was left out"):
        label(source)
    note.write_text(json.dumps({"measured_on": "part=test", "accuracy": 0.9}))
    assert label(source) == {"measured_on": "part=test", "accuracy": 0.9}


def test_the_page_sets_the_papers_number_beside_ours() -> None:
    one = {"global": 46.78, "mean_over_classes": 45.0, "commit": "abc"}
    content = {
        "cells": {
            "bbn": {"pfedbbn[share=statistics]": {"0.01": one}, "none": {"iid": one}},
            "tent[lr=0.1]": {"fedavg": {"0.01": one}},
        },
        "settings": {"model": "resnet20-bn", "model-options": "depth=8", "seed": 1},
        "source_label": {"accuracy": 0.83},
        "constant_percent": {"0.01": 81.25, "iid": 12.0},
        "hardware": "a box",
        "versions": {},
        "commit": None,
    }
    page = markdown(content, "command")
    # rows and columns in the order of the paper's table, whatever the order of the runs
    assert (
        "| bbn | none | 46.8 (45.0) \\| 72.3 | – \\| 52.3 |\n| bbn | pfedbbn[share=statistics] | – \\| 70.1 |" in page
    )
    assert "| tent[lr=0.1] | fedavg | – \\| 81.2 | 46.8 (45.0) \\| 22.5 |\n| bbn |" in page
    assert "cells of commit abc." in page
    assert "| always the client's most frequent class | | 12.0 | 81.2 |" in page


def test_what_naming_one_class_would_give() -> None:
    settings = load_protocol("pfedbbn").replace(
        dataset="digits", dataset_options="", clients=3, stream_size=20, stream_batch=10, stream_mix="dirichlet"
    )
    counts = streams_of(settings, federation_of(settings)).counts
    expected = sum(max(row) / sum(row) for row in counts.tolist()) / 3
    assert constant_accuracy(settings) == pytest.approx(expected)
    assert 0.1 < expected <= 1
