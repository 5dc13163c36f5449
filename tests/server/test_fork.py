"""A training that is done is tested again: what a run of its own would have written, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtta.models import build
from fedtta.server.app import serve
from fedtta.server.fork import fork
from fedtta.server.privacy import Ledger
from fedtta.settings import Settings
from tests.models import nets
from tests.server.test_resume import BATCHNORM, SMALL, assert_same, devices, events, quicken, run

#: What is trained, and what of it is tested later.
LATER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both heads": ({}, {"methods": "fedavg,personal,btfl,em", "shifts": "original,corrupted", "severity": 3}),
    "heads that stay": ({"methods": "fedavg[training=fedrep]"}, {"methods": "fedrep,memo[training=fedrep]"}),
    "own models": ({"methods": "fedavg[training=apfl]"}, {"methods": "apfl,t3a[training=apfl;base=personalised]"}),
    "two stages": (
        {"methods": "fedavg[training=fedicon]", "classifier_rounds": 2},
        {"methods": "fedicon,fedavg[training=fedicon;base=personalised]", "adapt_batch_size": 7},
    ),
    "rates": (
        {"rounds": 1, **BATCHNORM},
        {"methods": "fedavg,atp,tent", "rates_rounds": 2, "rates_epochs": 2, "finetune_epochs": 2},
    ),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def trained(folder: Path, **changes: Any) -> tuple[Path, Settings]:
    """Train, test FedAvg's head, and keep what a fork needs."""
    settings = SMALL.replace(**{"methods": "fedavg", "checkpoints_kept": 3, **changes})
    return run(folder / "first", settings), settings.replace(state_dir=str(folder / "first" / "state"))


def evaluate_again(source: Path, target: Path, settings: Settings) -> Path:
    """Test in a folder of its own, with a copy of the clients' private state."""
    shutil.copytree(settings.state_dir, target / "state")
    settings = settings.replace(state_dir=str(target / "state"))
    serve(devices(settings), fork(source, target / "r", settings), target / "r")
    return target / "r"


@pytest.mark.parametrize("name", LATER)
def test_later_tests_are_those_of_a_run_of_their_own(name: str, tmp_path: Path) -> None:
    training, tests = LATER[name]
    source, settings = trained(tmp_path, **training)
    alone = run(tmp_path / "alone", settings.replace(**tests))
    for again in ("one", "two"):  # a training can be tested any number of times
        assert_same(evaluate_again(source, tmp_path / again, settings.replace(**tests)), alone)


def test_of_a_run_of_several_trainings_only_one_is_told(tmp_path: Path) -> None:
    source, settings = trained(tmp_path, methods="fedavg,fedthe", rounds=1)  # fedthe's training comes second
    tests = settings.replace(methods="fedthe")
    assert_same(evaluate_again(source, tmp_path / "later", tests), run(tmp_path / "alone", tests))


def test_a_fork_can_be_forked(tmp_path: Path) -> None:
    source, settings = trained(tmp_path, shifts="brfl")
    first = evaluate_again(source, tmp_path / "one", settings)
    tests = settings.replace(methods="fedavg,btfl", state_dir=str(tmp_path / "one" / "state"))
    assert_same(evaluate_again(first, tmp_path / "two", tests), run(tmp_path / "alone", tests))
    notes = [{event["text"] for event in events(tmp_path / name / "r", "note")} for name in ("one", "two")]
    assert any("left out" in note for note in notes[0])
    assert {note for note in notes[0] if "left out" in note} <= notes[1]


def test_what_clients_note_of_test_distributions_is_that_of_the_fork(tmp_path: Path) -> None:
    for before, after in (("original", "brfl"), ("brfl", "original")):
        source, settings = trained(tmp_path / before, shifts=before)
        folder = evaluate_again(source, tmp_path / before / "later", settings.replace(shifts=after))
        noted = ["natural column is left out" in event["text"] for event in events(folder, "note")]
        assert sum(noted) == (after == "brfl")


def test_of_a_folder_that_is_overwritten_nothing_goes_on(tmp_path: Path) -> None:
    """Neither its checkpoints nor its runs in trackers, which would leave out the numbers that they have."""
    source, settings = trained(tmp_path)
    target = evaluate_again(source, tmp_path / "later", settings)
    assert len(list((target / "checkpoints").glob("*.safetensors"))) == 2
    for name in ("trackers", "tensorboard"):
        (target / name).mkdir()
        (target / name / "old").touch()
    again = fork(source, target, settings.replace(methods="fedavg,btfl"))
    assert not (target / "trackers").exists()
    assert not (target / "tensorboard").exists()
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["000001.safetensors"]
    serve(devices(again), again, target)
    assert not [event for event in events(target, "note") if "was not used" in event["text"]]


def test_what_was_loaded_of_pretrained_weights_is_noted_in_the_run_and_its_forks(tmp_path: Path) -> None:
    name, path = "tests.models.nets:tied", tmp_path / "w.pth"
    weights = nets.tied(3).state_dict()
    weights["extra"] = weights.pop("stem.bias")
    torch.save(weights, path)
    source, settings = trained(tmp_path, model=name, model_options=f"pretrained={path}", rounds=1)
    expected = list(build(name, 10, image_size=16, pretrained=str(path)).notes)
    assert "not loaded, not in the file: ['stem.bias']" in expected[0]
    again = evaluate_again(source, tmp_path / "again", settings)
    for folder in (source, again):
        noted = [event["text"] for event in events(folder, "note")]
        assert [noted.count(note) for note in expected] == [1] * len(expected)


def test_a_shorter_training_is_the_beginning_of_a_longer_one(tmp_path: Path) -> None:
    source, settings = trained(tmp_path, rounds=3, checkpoints_kept=9)
    short = settings.replace(rounds=1, methods="fedavg,personal,btfl")
    assert_same(evaluate_again(source, tmp_path / "later", short), run(tmp_path / "alone", short))
    with pytest.raises(ValueError, match="no checkpoint after round 4"):
        fork(source, tmp_path / "longer", settings.replace(rounds=4))


def test_stages_are_no_beginning_of_longer_ones(tmp_path: Path) -> None:
    phases = {"methods": "fedavg[training=fedicon]", "rounds": 2, "classifier_rounds": 1, "checkpoints_kept": 9}
    source, settings = trained(tmp_path, **phases)
    with pytest.raises(ValueError, match="rounds = 1, there it is 2"):
        fork(source, tmp_path / "later", settings.replace(rounds=1))


def test_the_new_folder_tells_what_was_trained_and_what_was_tested(tmp_path: Path) -> None:
    source, settings = trained(tmp_path)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    tests = settings.replace(methods="fedavg,memo", tune_samples=3)
    folder = evaluate_again(source, tmp_path / "later", tests)
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    (opening,) = events(folder, "run")
    assert (opening["settings"]["methods"], opening["settings"]["tune-samples"]) == ("fedavg,memo", 3)
    assert opening["time"] == events(source, "run")[0]["time"]
    texts = [event["text"] for event in events(folder, "note")]
    assert any(text.startswith("memo: measured on the first 3 samples") for text in texts)
    assert any(text.startswith("resumed after round 2 of training") or "round 2" in text for text in texts)
    assert {event["method"] for event in events(folder, "evaluation")} == {"fedavg", "memo"}


def released(folder: Path, settings: Settings) -> dict[str, int]:
    """Return what the client that has released most released, by all files of a run folder."""
    spent = Ledger(settings, folder).spent()
    assert spent is not None
    return dict(spent["releases"])


def test_epsilon_of_a_fork_counts_what_the_source_released_after_it(tmp_path: Path) -> None:
    noise = {"differential_privacy": "model=1/1;statistics=1/1", "methods": "btfl", "rounds": 3, "checkpoints_kept": 9}
    source, settings = trained(tmp_path, **noise)
    assert released(source, settings) == {"model": 3, "statistics": 1}
    folder = evaluate_again(source, tmp_path / "later", settings.replace(rounds=1))
    (spent,) = events(folder, "privacy")
    assert spent["releases"] == {"model": 3, "statistics": 2}  # its own statistics are released once more


def test_epsilon_of_a_fork_counts_what_the_run_released_that_it_overwrites(tmp_path: Path) -> None:
    """The clients are the same, and so is what they tell of themselves."""
    noise = {"differential_privacy": "model=1/1;statistics=1/1", "methods": "btfl"}
    source, settings = trained(tmp_path, **noise)
    folder = evaluate_again(source, tmp_path / "later", settings)
    assert released(folder, settings) == {"model": 2, "statistics": 2}
    for _ in range(2):  # once
        fork(source, folder, settings)
        assert released(folder, settings) == {"model": 2, "statistics": 2}


def test_epsilon_of_a_fork_counts_what_was_cut_off_or_damaged(tmp_path: Path) -> None:
    noise = {"differential_privacy": "model=1/1", "rounds": 3, "checkpoints_kept": 9}
    source, settings = trained(tmp_path, **noise)
    journal, short = source / "metrics.jsonl", settings.replace(rounds=1)
    whole = journal.read_bytes()
    (third,) = (line for line in whole.splitlines(keepends=True) if b'"attempt"' in line and b'"round": 3' in line)
    (source / "metrics-1.damaged.jsonl").write_bytes(b"\xff\n" + whole)  # all of it is known
    earlier = {**json.loads(third), "at": 1.0}  # a server that was killed in the third round
    del earlier["digest"]
    (source / "metrics-1.cut.jsonl").write_text(json.dumps(earlier) + "\n")
    assert released(source, settings) == {"model": 4}
    for _ in range(2):  # a fork that is overwritten counts nothing twice
        fork(source, tmp_path / "later", short)
        assert released(tmp_path / "later", settings) == {"model": 4}
    (source / "metrics-1.damaged.jsonl").unlink()
    journal.write_bytes(whole.replace(third, b"?" + third[1:]))  # the copy beside the checkpoints has it
    fork(source, tmp_path / "other", short)
    assert released(tmp_path / "other", settings) == {"model": 4}


def test_epsilon_of_a_fork_counts_the_other_trainings(tmp_path: Path) -> None:
    noise = {"differential_privacy": "model=2/0.5;statistics=2/0.5"}
    source, settings = trained(tmp_path, methods="fedavg,fedthe", **noise)
    fork(source, tmp_path / "later", settings.replace(methods="fedthe"))
    assert released(source, settings) == {"model": 4, "statistics": 1}  # two rounds of each training
    assert released(tmp_path / "later", settings) == released(source, settings)


def test_without_noise_a_fork_has_no_releases(tmp_path: Path) -> None:
    source, settings = trained(tmp_path)
    fork(source, tmp_path / "later", settings)
    assert not list((tmp_path / "later").glob("*.cut.jsonl"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": "fedavg,fedthe"}, "allowed are rows of one training"),
        ({"methods": "fedthe"}, "no checkpoint after round 2 of balanced_softmax"),
        ({"rounds": 3}, "no checkpoint after round 3 of cross_entropy"),
        ({"learning_rate": 0.2, "alpha": 0.3}, "learning-rate = 0.2, there it is 0.1; .*|alpha = 0.3, there it is 0.1"),
        ({"methods": "nothing"}, "unknown method 'nothing'"),
    ],
)
def test_another_training_is_refused_and_nothing_is_written(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    source, settings = trained(tmp_path)
    with pytest.raises(ValueError, match=words):
        fork(source, tmp_path / "later", settings.replace(**change))
    assert not (tmp_path / "later").exists()


def test_a_checkpoint_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    source, settings = trained(tmp_path, checkpoints_kept=1)
    with pytest.raises(ValueError, match="no checkpoint after round 2 of cross_entropy"):
        fork(source, tmp_path / "later", settings)
    (path,) = (source / "checkpoints").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=path.name):
        fork(source, tmp_path / "later", settings)


def test_a_damaged_checkpoint_that_is_not_needed_does_no_harm(tmp_path: Path) -> None:
    source, settings = trained(tmp_path)
    first, *_ = sorted((source / "checkpoints").glob("*.safetensors"))
    first.write_bytes(b"")
    assert evaluate_again(source, tmp_path / "later", settings).is_dir()
