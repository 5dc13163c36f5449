"""`poisoning`: which runs there are, what is kept, and the page of what attacks cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from fedtta.benchmarks import poisoning
from fedtta.benchmarks.poisoning import NONE, Case, Measured, accuracies, cases, poisoning_page, read_poisoning
from fedtta.settings import SettingsError

WHERE = {"hardware": "2 cores", "commit": "abc", "time": "today"}


def kept(*rows: Measured) -> dict[str, object]:
    return {**WHERE, "measured": [asdict(one) for one in rows]}


def test_every_attack_has_a_run_without_it_to_compare_with() -> None:
    found = cases(3)
    assert len(set(found)) == len(found)
    assert {one.seed for one in found} == {1, 2, 3}
    honest = {(one.split, one.seed, one.poisoners, one.limits) for one in found if one.attack == NONE}
    assert {(one.split, one.seed, one.poisoners, one.limits) for one in found} == honest
    assert poisoning.poisoners(Case("equal parts", 1, NONE, 2)) == [8, 9]


def test_accuracies_are_those_of_the_others() -> None:
    events = [
        {"event": "evaluation", "method": "fedthe[training=cross_entropy]", "partition": i, "correct": i, "total": 4}
        for i in range(3)
    ]
    cell = {"event": "adapted", "method": "tent", "collaboration": "pfedbbn", "partition": 0}
    events += [{**cell, "correct": [right, 0], "total": [2, 2]} for right in (1, 2)]
    assert accuracies([*events, {"event": "round"}], [2]) == {"fedthe": 12.5, "tent@pfedbbn": 37.5}


def test_the_page_has_accuracies_and_what_attacks_add(tmp_path: Path) -> None:
    rows = [
        Measured(Case("equal parts", seed, attack, limits=limits), {"fedavg": value}, 0, 0)
        for seed, attack, limits, value in (
            (1, NONE, True, 90.0), (2, NONE, True, 92.0), (1, "sign flip × 1", True, 89.0),
            (2, "sign flip × 1", True, 92.5), (1, NONE, False, 91.0), (1, "sign flip × 1", False, 11.0),
        )
    ]  # fmt: skip
    (tmp_path / poisoning.FILE).write_text(json.dumps(kept(*rows)))
    page = poisoning_page(read_poisoning(tmp_path / poisoning.FILE))
    assert "| equal parts | no attack | 91.0 ± 1.0 | 2 |" in page
    assert "| equal parts | sign flip × 1 | -0.2 (-1.0) | 2 |" in page
    assert "| equal parts | no attack | 91.0 | 1 |" in page  # one seed has no standard deviation
    assert "| equal parts | sign flip × 1 | -80.0 | 1 |" in page
    assert "Two poisoners" not in page


def test_an_attack_is_not_compared_with_itself() -> None:
    rows = [
        Measured(Case("equal parts", seed, attack), {"fedavg": 90.0}, 0, 0)
        for seed, attack in ((1, NONE), (1, "sign flip × 1"), (2, "sign flip × 1"))
    ]
    with pytest.raises(
        SettingsError, match=r"poisoning\.json lacks Case\(.* seed=2, attack='no attack'.*`fedtta bench"
    ):
        poisoning_page(kept(*rows))


def test_cases_kept_before_keep_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Measured(Case("equal parts", seed, NONE), {"fedavg": 90.0}, 0, 0) for seed in (1, 2))
    (tmp_path / poisoning.FILE).write_text(json.dumps(kept(first)))
    monkeypatch.setattr(poisoning, "measure", lambda seeds, kept, folder: iter([second]))
    monkeypatch.setattr(poisoning, "provenance", lambda: {**WHERE, "commit": "def"})
    poisoning.run(argparse.Namespace(out=tmp_path, seeds=2), Console(quiet=True))
    content = read_poisoning(tmp_path / poisoning.FILE)
    assert (content["commit"], len(content["measured"])) == ("abc, def", 2)


def test_kept_results_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / poisoning.FILE
    assert read_poisoning(path) == {}
    path.write_text('{"measured": [{"case": {"split": 1}}]}')
    with pytest.raises(SettingsError, match=r"poisoning\.json cannot be read"):
        read_poisoning(path)
