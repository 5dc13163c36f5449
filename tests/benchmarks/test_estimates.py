"""`estimates`: errors and comparisons by hand, and a small run from the training to the page."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from fedtta.benchmarks.__main__ import main
from fedtta.benchmarks.tables import estimates
from fedtta.benchmarks.tables.estimates import PROTOCOL, estimates_page, read_estimates, summary
from fedtta.tta.estimates import ESTIMATES


def row(client: int, adapter: str, shift: str, accuracy: float, guess: float = 0.5) -> dict[str, Any]:
    told = {name: [guess, guess - 0.1, guess + 0.1] for name in ESTIMATES}
    found = {} if adapter == "auto" else {"own": told, "others": {name: [0.0, 0.0, 1.0] for name in ESTIMATES}}
    about = {"seed": 1, "client": client, "adapter": adapter, "shift": shift, "severity": 5 * (shift == "corrupted")}
    return {**about, "accuracy": accuracy, **({"own": {}, "others": {}} | found)}


ROWS = [
    row(0, "none", "original", 0.5), row(1, "none", "original", 0.7, 0.55), row(0, "none", "corrupted", 0.2),
    row(1, "none", "corrupted", 0.4), row(0, "fedthe", "original", 0.8), row(1, "fedthe", "original", 0.9),
    row(0, "fedthe", "corrupted", 0.1), row(1, "fedthe", "corrupted", 0.4), row(0, "auto", "original", 0.8),
    row(1, "auto", "original", 0.66), row(0, "auto", "corrupted", 0.2), row(1, "auto", "corrupted", 0.4),
]  # fmt: skip


def test_errors_are_mean_distances_and_shares_of_intervals() -> None:
    found = {(one["by"], one["adapter"], one["stream"]): one for one in summary(ROWS)["errors"]}
    assert len(found) == 8
    assert found["own", "none", "original"]["error"]["doc"] == pytest.approx((0 + 15) / 2)
    assert found["own", "none", "original"]["inside"]["doc"] == 0.5
    assert found["own", "fedthe", "corrupted 5"]["error"]["label_shift"] == pytest.approx((40 + 10) / 2)
    assert found["others", "none", "corrupted 5"]["error"]["heads"] == pytest.approx((20 + 40) / 2)
    assert found["others", "none", "corrupted 5"]["inside"]["heads"] == 1


def test_auto_is_compared_with_none_and_the_best_fixed_adapter() -> None:
    found = summary(ROWS)
    assert found["adapters"]["fedthe"] == {
        "average": 55.0, "worst client": 45.0, "worst stream": 25.0, "original": 85.0, "corrupted 5": 25.0,
    }  # fmt: skip
    assert found["auto"]["original"] == {
        "over none": 13.0, "worst client over none": -4.0, "clients more than 1 below none": 1, "clients": 2,
        "best fixed": "fedthe", "below the best": 12.0,
    }  # fmt: skip
    assert (found["auto"]["corrupted 5"]["best fixed"], found["auto"]["corrupted 5"]["below the best"]) == ("none", 0.0)


def test_a_small_run_from_the_training_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(estimates.read_protocol, PROTOCOL, ["fraction=0.3"], True)
    monkeypatch.setattr(estimates, "read_protocol", lambda *_: few())
    monkeypatch.setattr(estimates, "ADAPTERS", ("none", "personal"))
    monkeypatch.setattr(estimates, "STREAMS", (("original", 0), ("corrupted", 3), ("switching", 5)))
    monkeypatch.setattr(estimates, "RESULTS", tmp_path / "kept")
    monkeypatch.setattr(estimates, "QUICK", tmp_path)
    monkeypatch.setattr(estimates, "FOLDER", tmp_path / "full")
    assert main(["estimates", "--quick", "--clients", "3"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [estimates.FILE, "runs"]  # no network or result in full
    content = read_estimates(tmp_path / estimates.FILE)
    assert json.loads((tmp_path / estimates.FILE).read_text()) == content
    assert list(content["adapters"]) == ["none", "personal", "auto"]
    assert {one["stream"] for one in content["errors"]} == {"original", "corrupted 3", "switching 5"}
    assert all(0 <= value <= 100 for one in content["errors"] for value in one["error"].values())
    page = estimates_page(content)
    assert f"| auto | {content['adapters']['auto']['average']} |" in page
    assert read_estimates(tmp_path / "none.json") == {}
    assert main(["estimates", "--clients", "2"]) == 2
    assert content["seeds"] == [1]
