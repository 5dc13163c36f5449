"""Choices on validation data: what a benchmark uses, and the best of what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chosen import Choice, choices, markdown
from benchmarks.fedicon import DATA, MORE
from settings import SettingsError


def test_what_is_used_is_what_was_chosen() -> None:
    found = choices()
    assert {one.key for one in found} == {"learning-rate", "finetune-epochs", "classifier-epochs", "epochs"}
    for one in found:
        name = one.where.removeprefix("fedicon --data ")
        if one.key == "epochs":  # an adapter's option
            assert all(f"epochs={one.value}" in row for row in (*MORE[name, "covariate"], MORE[name, "domain"][-1]))
        else:
            assert f"{one.key}={one.value}" in DATA[name]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('percent = { "1" = 50, "2" = 60 }', "k = 1: allowed is the value with the highest"),
        ('percent = { "2" = 50 }', "k = 1: allowed is the value with the highest"),
        ('percent = { "1" = 50 }\nwhy = "so"', "allowed are key, of, percent, value, where"),
    ],
)
def test_a_choice_that_is_none(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "chosen.toml"
    path.write_text(f'[[choice]]\nwhere = "w"\nkey = "k"\nvalue = 1\nof = "o"\n{line}\n')
    with pytest.raises(SettingsError, match=words):
        choices(path)


def test_every_value_is_told() -> None:
    text = markdown([Choice("w", "k", "2", "validation", {"1": 50.0, "2": 61.25})])
    assert "| `w` | `k = 2` | 1: 50.0 %, 2: 61.2 % | validation |" in text
