"""Choices on validation data: what a benchmark uses, and the best of what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.benchmarks.tables.tuning import choices
from fedtta.settings import SettingsError


def test_what_is_used_is_what_was_chosen() -> None:
    found = choices()
    assert {one.key for one in found} == {"learning-rate", "finetune-epochs", "classifier-epochs", "epochs"}
    for one in found:
        protocol, _, prefix = one.where.partition(" ")
        cells = [cell for cell in read_protocol(protocol).cells if cell.name.startswith(prefix)]
        assert cells
        for cell in cells:
            if one.key == "epochs":  # an adapter's option
                assert f"epochs={one.value}" in cell.settings.methods
            else:
                assert str(cell.settings.flat()[one.key]) == one.value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('percent = { "1" = 50, "2" = 60 }', "k = 1: allowed is the value with the highest"),
        ('percent = { "2" = 50 }', "k = 1: allowed is the value with the highest"),
        ('percent = { "1" = 50 }\nwhy = "so"', "allowed are key, of, percent, value, where"),
    ],
)
def test_a_choice_that_is_none(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "tuning.toml"
    path.write_text(f'[[choice]]\nwhere = "w"\nkey = "k"\nvalue = 1\nof = "o"\n{line}\n')
    with pytest.raises(SettingsError, match=words):
        choices(path)
