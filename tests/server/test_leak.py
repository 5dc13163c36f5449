"""A leak ends a run, unless it was asked for: then a note and the page say how large it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.client import device
from fedtta.client.node import federation_of
from fedtta.data import stream
from fedtta.messages.flower import allow_messages
from fedtta.server.events import Leak
from tests.server.test_run import SMALL, assert_same_results, events, run

LEAKY = SMALL.replace(
    split="published", rounds=5, fraction=0.08, methods="fedavg,personal,fedthe", shifts="original,corrupted"
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    allow_messages()
    return run(tmp_path_factory.mktemp("leak") / "r", LEAKY)


@pytest.mark.drawn
def test_a_published_run_says_how_many_test_samples_had_been_trained_on(published: Path) -> None:
    """By an independent count: five rounds and the statistics round, all of the client's own."""
    made = federation_of(LEAKY)
    checked = leaked = 0
    for client in range(made.num_clients):
        draws = [made.in_round(round).splits[client].train for round in range(1, 7)]
        for shift in ("original", "corrupted"):
            index = stream(made, client, shift, seed=LEAKY.seed).index
            checked, leaked = checked + len(index), leaked + int(np.isin(index, np.concatenate(draws)).sum())
    assert leaked / checked > 0.95
    happened = events(published)
    for training in ("cross_entropy", "balanced_softmax"):
        check = {"training": training, "checked": checked, "leaked": leaked}
        (told,) = [one for one in happened if one["event"] == "leak_check" and one["training"] == training]
        assert {name: told[name] for name in check} == check
        (note,) = [one["text"] for one in happened if one["event"] == "note" and one["text"].startswith(training)]
        assert "redrawn in every round, as in the published code" in note
        assert f"{leaked:,} of {checked:,} test samples ({100 * leaked / checked:.1f} %) had been trained on" in note
        assert "accuracies on clients' own data are optimistic" in note
        page = (published / "report.html").read_text()
        assert f"Leak on purpose, split = published ({training}): {leaked:,} of {checked:,} test samples" in page
        assert f"({100 * leaked / checked:.1f} %) had been trained on" in page
    assert happened[-1]["status"] == "completed"


def test_the_same_seed_gives_the_same_bits_also_from_a_folder(published: Path, tmp_path: Path) -> None:
    again = run(tmp_path / "again", LEAKY.replace(state_dir=str(tmp_path / "state")))
    assert_same_results(published, again)


def test_what_is_tested_is_the_same_as_with_splits_drawn_once(published: Path, tmp_path: Path) -> None:
    once = run(tmp_path / "once", LEAKY.replace(split="once", rounds=1, methods="fedavg"))
    sizes: list[Any] = []
    for folder in (published, once):
        found = [one for one in events(folder) if one["event"] == "evaluation" and one["method"] == "fedavg"]
        sizes.append([(one["partition"], one["shift"], one["total"]) for one in found])
    assert sizes[0] == sizes[1]
    assert [one["leaked"] for one in events(once) if one["event"] == "leak_check"] == [0]


def leaky(monkeypatch: pytest.MonkeyPatch, clients: range) -> int:
    """Let clients have trained on these clients' test samples, by whatever mistake; return how many these are."""
    tested = np.concatenate([federation_of(SMALL).splits[client].test for client in clients])
    monkeypatch.setattr(device, "trained_indices", lambda private: tested)
    return len(tested)


def test_a_leak_at_most_clients_that_was_not_asked_for_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaked = leaky(monkeypatch, range(2))
    settings = SMALL.replace(rounds=1, methods="fedavg", shifts="original")
    with pytest.raises(Leak, match=rf"{leaked} of \d+ test samples had been trained on"):
        run(tmp_path / "r", settings)
    happened = events(tmp_path / "r")
    assert happened[-1]["status"].startswith("failed: Leak")
    assert not [one for one in happened if one["event"] == "note" and "trained on" in one["text"]]


def test_a_leak_at_one_client_refuses_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked = leaky(monkeypatch, range(1))
    happened = events(run(tmp_path / "r", SMALL.replace(rounds=1, methods="fedavg", shifts="original")))
    (refused,) = [one for one in happened if one["event"] == "refused"]
    assert refused["partition"] == 0
    assert (
        f"leaked = {leaked} of {leaked} test samples had been trained on; most clients report none" in refused["reason"]
    )
    assert {one["partition"] for one in happened if one["event"] == "evaluation"} == {1, 2}
    assert happened[-1]["status"] == "completed"
