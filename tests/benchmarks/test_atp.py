"""ATP's tables from kept cells, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.atp import ARMS, VARIANTS, known, read_cell, require_same, settings_of
from benchmarks.atp_tables import TABLE_5, markdown
from benchmarks.protocol import load_protocol
from settings import Settings, SettingsError

ABOUT: dict[str, Any] = {"hardware": "a box", "versions": {"torch": "2", "flwr": "1"}}


def cell(
    rounds: tuple[int, int] = (200, 400), rates: dict[str, float] | None = None, **accuracy: float
) -> dict[str, Any]:
    return {"rounds": list(rounds), "accuracy_percent": accuracy, "rates": rates or {}, **ABOUT}


def test_the_page_has_gains_beside_the_papers_and_dashes_for_what_was_not_run() -> None:
    rates = {"norm.running_mean": -0.5, "norm2.running_mean": 0.1, "norm.running_var": 0.25, "conv.weight": 9.0}
    cells = {
        "hybrid-all": cell(rates=rates, fedavg=60.0, atp=66.5, **{"atp[mode=online]": 69.0}),
        "hybrid-stats": cell(**{"atp[adapt=stats]": 61.0}),
        "label-all": cell((60, 120), rates, fedavg=50.0, atp=55.0, **{"atp[mode=online]": 54.0}),
        "hybrid-on-label": cell(atp=49.0),
    }
    page = markdown(cells, ["label", "hybrid"], 1, "python -m benchmarks atp")
    assert "| no adaptation | 50.0 / 69.3 | 60.0 / 62.0 |" in page
    assert "| ATP-batch | 55.0 (+5.0) / 76.2 (+6.9) | 66.5 (+6.5) / 68.9 (+6.9) |" in page
    assert "label 60 + 120, hybrid 200 + 400" in page
    assert "| ATP-params | – / +5.3 | – / +4.4 |" in page
    assert "| ATP-stats | – / +1.0 | +1.0 / +1.1 |" in page
    assert "| label | +5.0 / +6.9 | – / +5.8 |" in page  # rates of label shift: on itself, not yet on hybrid
    assert "| hybrid | -1.0 / +5.9 | +6.5 / +9.4 |" in page
    assert "| hybrid | -0.2000 | +0.2500 |" in page  # mean of -0.5 and 0.1


def test_the_papers_gains_are_those_of_its_table() -> None:
    gains = {s: round(TABLE_5["atp[mode=online]"][s] - TABLE_5["fedavg"][s], 2) for s in ARMS}
    assert gains == {"feature": 2.74, "label": 9.23, "hybrid": 9.53}


def test_shifts_differ_from_the_protocol_in_one_thing_each() -> None:
    base = load_protocol("atp")
    chosen = settings_of(list(ARMS), base, ["feature=60+120"])
    assert (chosen["feature"].step_ratio, chosen["feature"].domains) == (1.0, "corruptions")
    assert (chosen["label"].step_ratio, chosen["label"].domains) == (16.0, "none")
    assert chosen["hybrid"] == base
    assert (chosen["feature"].rounds, chosen["feature"].rates_rounds, chosen["label"].rounds) == (60, 120, 200)
    assert base.clients * base.target_fraction == 60


@pytest.mark.parametrize("text", ["feature=60", "60+120", "other=1+2", "label=a+b"])
def test_odd_rounds_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="SHIFT=TRAINING"):
        settings_of(list(ARMS), Settings(), [text])


def test_names_are_checked() -> None:
    assert known("--variants", "all, stats", VARIANTS) == ["all", "stats"]
    with pytest.raises(SettingsError, match=r"--shifts wind: allowed are feature, label, hybrid"):
        known("--shifts", "label,wind", ARMS)


def test_what_is_kept_must_have_been_made_alike(tmp_path: Path) -> None:
    made = Settings(init="here/model.safetensors", workers=1)
    require_same(tmp_path, made.flat(), made.replace(init="there/model.safetensors", workers=2))
    with pytest.raises(SettingsError, match=r"other settings \(learning-rate\)"):
        require_same(tmp_path, made.flat(), made.replace(learning_rate=1.0))
    with pytest.raises(SettingsError, match="run that cell first"):
        read_cell(tmp_path, "label-all")
    (tmp_path / "label-all.json").write_text(json.dumps(cell(atp=1.0)))
    assert read_cell(tmp_path, "label-all")["accuracy_percent"] == {"atp": 1.0}
