"""Cached trainings: run once, tested often with the bits of a separate run; interrupted ones are resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedtta.benchmarks.tables import runs
from fedtta.benchmarks.tables.runs import RUN, STATE, evaluated, key, trained
from fedtta.client.device import Device
from fedtta.messages.replies import Evaluated
from fedtta.messages.requests import Evaluate
from fedtta.server.app import serve
from fedtta.server.events import RunError
from fedtta.server.methods import plan
from fedtta.server.report import Results
from fedtta.server.resume import locked
from fedtta.settings import Settings, SettingsError
from tests.server.test_resume import SMALL, Killed, Killer, devices, events, quicken
from tests.test_structure import ALLOWED

SETTINGS = SMALL.replace(methods="fedavg,btfl", shifts="original,corrupted")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were run, or gone on with, in this process."""
    quicken(monkeypatch)
    folders: list[Path] = []

    def simulate(settings: Settings, folder: Path) -> None:
        folders.append(folder)
        serve(devices(settings), settings, folder)

    monkeypatch.setattr("fedtta.simulation.simulate", simulate)
    return folders


def accuracies(results: Results) -> dict[tuple[str, str, int], int]:
    return {(one.method, one.shift, one.partition): one.correct for one in results.evaluations}


def test_a_training_is_run_once_and_tested_as_often_as_asked(started: list[Path], tmp_path: Path) -> None:
    one = evaluated(SETTINGS, tmp_path / "kept", tmp_path / "one")
    two = evaluated(SETTINGS.replace(methods="em,personal,btfl", severity=2), tmp_path / "kept", tmp_path / "two")
    (place,) = (tmp_path / "kept").iterdir()
    assert started == [place / RUN, tmp_path / "one", tmp_path / "two"]
    alone = SETTINGS.replace(methods="em,personal,btfl", severity=2, state_dir=str(tmp_path / "state"))
    serve(devices(alone), alone, tmp_path / "alone")
    assert accuracies(two) == {
        (one["method"], one["shift"], one["partition"]): one["correct"]
        for one in events(tmp_path / "alone", "evaluation")
    }
    assert {method for method, _, _ in accuracies(one)} == {"fedavg", "btfl"}
    assert not (tmp_path / "one" / STATE).exists()  # the copy of the clients' state is removed
    assert [each.round for each in two.rounds] == [1, 2]


def test_what_is_complete_is_read(started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluated(SETTINGS, tmp_path / "kept", tmp_path / "one")
    again = evaluated(SETTINGS.replace(workers=1, round_timeout=9.0), tmp_path / "kept", tmp_path / "one")
    assert accuracies(first) == accuracies(again)
    assert len(started) == 2
    monkeypatch.setattr(runs, "code", lambda: "changed since")
    evaluated(SETTINGS, tmp_path / "kept", tmp_path / "one")
    assert len(started) == 4  # trained and tested again


def test_other_rates_in_the_same_file_are_tested_again(started: list[Path], tmp_path: Path) -> None:
    """Every folder of kept results has a cell's rates in the same file; the training does not depend on them."""
    rates = tmp_path / "rates"
    settings = SETTINGS.replace(rates_init=str(rates))
    for content in (b"one", b"one", b"other"):
        rates.write_bytes(content)
        evaluated(settings, tmp_path / "kept", tmp_path / "test")
    (place,) = (tmp_path / "kept").iterdir()
    assert started == [place / RUN, tmp_path / "test", tmp_path / "test"]


def test_another_training_has_a_place_of_its_own(started: list[Path], tmp_path: Path) -> None:
    evaluated(SETTINGS, tmp_path / "kept", tmp_path / "one")
    evaluated(SETTINGS.replace(seed=2), tmp_path / "kept", tmp_path / "two")
    evaluated(SETTINGS.replace(methods="fedrep"), tmp_path / "kept", tmp_path / "three")
    names = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "kept").iterdir())
    assert names == ["digits-cross_entropy-1", "digits-cross_entropy-2", "digits-fedrep-1"]
    with pytest.raises(SettingsError, match="rows of one training, not of cross_entropy, fedrep"):
        evaluated(SETTINGS.replace(methods="fedavg,fedrep"), tmp_path / "kept", tmp_path / "four")


def test_the_key_changes_with_all_a_training_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (training,) = plan(SETTINGS)
    base = key(SETTINGS, training)
    for same in ({"methods": "em"}, {"shifts": "brfl"}, {"workers": 1}, {"severity": 1}, {"state_dir": "x"}):
        assert key(SETTINGS.replace(**same), training) == base, same
    for other in ({"alpha": 0.2}, {"local_epochs": 2}, {"clients": 3}, {"momentum": 0.1}, {"autocast": True}):
        assert key(SETTINGS.replace(**other), training) != base, other
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"1")
    start = [key(SETTINGS.replace(init=str(tmp_path / name)), training) for name in "ab"]
    assert start[0] == start[1] != base  # what is in the file counts, not where it is
    monkeypatch.setattr(runs, "code", lambda: "other")
    assert key(SETTINGS, training) != base


def test_all_code_of_clients_and_server_counts() -> None:
    assert set(runs.PACKAGES) == {"client", "server"} | ALLOWED["client"] | ALLOWED["server"]


def test_a_training_that_was_cut_short_goes_on(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = accuracies(evaluated(SETTINGS, tmp_path / "whole", tmp_path / "one"))
    killer = Killer("asked", only=lambda point: point[0] == "train" and point[2:] == ("2", 1))
    resumed: list[str] = []

    def simulate(settings: Settings, folder: Path) -> None:
        resumed.append(settings.resume)
        serve(devices(settings, killer=killer), settings, folder)

    monkeypatch.setattr("fedtta.simulation.simulate", simulate)
    (training,) = plan(SETTINGS)
    with pytest.raises(Killed):
        evaluated(SETTINGS, tmp_path / "kept", tmp_path / "two")
    place = tmp_path / "kept" / key(SETTINGS, training)
    assert accuracies(evaluated(SETTINGS, tmp_path / "kept", tmp_path / "two")) == whole
    assert resumed == ["", str(place / RUN), str(tmp_path / "two")]
    # a test that was cut short is done again, from the training's end
    metrics = tmp_path / "two" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-2]))
    assert accuracies(evaluated(SETTINGS, tmp_path / "kept", tmp_path / "two")) == whole
    shutil.rmtree(place)


def test_a_test_from_a_model_file_is_read_again(started: list[Path], tmp_path: Path) -> None:
    """Its run has the normalization of the file, which is no other setting than the `auto` that was asked for."""
    evaluated(SETTINGS, tmp_path / "kept", tmp_path / "first")
    from_file = SETTINGS.replace(init=str(tmp_path / "first" / "model.safetensors"), rounds=0)
    evaluated(from_file, tmp_path / "kept", tmp_path / "second")
    begun = list(started)
    evaluated(from_file, tmp_path / "kept", tmp_path / "second")
    assert started == begun


def test_a_test_on_the_way_comes_from_the_same_training(started: list[Path], tmp_path: Path) -> None:
    longer = SETTINGS.replace(rounds=3)
    last = evaluated(longer, tmp_path / "kept", tmp_path / "last")
    first = evaluated(SETTINGS.replace(rounds=1), tmp_path / "kept", tmp_path / "first", of=longer)
    (place,) = (tmp_path / "kept").iterdir()
    assert started.count(place / RUN) == 2  # the first time it did not keep what a test on the way needs
    again = evaluated(SETTINGS.replace(rounds=2), tmp_path / "kept", tmp_path / "second", of=longer)
    assert started.count(place / RUN) == 2
    assert [len(results.rounds) for results in (first, again, last)] == [1, 2, 3]
    assert accuracies(first) == accuracies(evaluated(SETTINGS.replace(rounds=1), tmp_path / "own", tmp_path / "alone"))


def test_without_training_rounds_nothing_is_kept(started: list[Path], tmp_path: Path) -> None:
    evaluated(SETTINGS.replace(rounds=0), tmp_path / "kept", tmp_path / "one")
    assert started == [tmp_path / "one"]
    assert not (tmp_path / "kept").exists()


def test_a_run_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtta.simulation.simulate", lambda settings, folder: None)
    (training,) = plan(SETTINGS)
    with pytest.raises(RunError, match="the training did not complete"):
        trained(SETTINGS, training, tmp_path / "kept")
    with pytest.raises(RunError, match="the run did not complete"):
        evaluated(SETTINGS.replace(rounds=0), tmp_path / "kept", tmp_path / "one")
    with pytest.raises(SettingsError, match="unknown method"):
        evaluated(SETTINGS.replace(methods="nothing"), tmp_path / "kept", tmp_path / "one")


def test_what_another_process_is_at_is_not_removed(started: list[Path], tmp_path: Path) -> None:
    """Neither its test nor a training that has no checkpoint yet."""
    (training,) = plan(SETTINGS)
    for run in (tmp_path / "test", tmp_path / "kept" / key(SETTINGS, training) / RUN):
        run.mkdir(parents=True)
        (run / "settings.toml").write_text("")
        with locked(run), pytest.raises(RunError, match="another process is writing this run"):
            evaluated(SETTINGS, tmp_path / "kept", tmp_path / "test")
        assert (run / "settings.toml").exists()
    assert started == []
    evaluated(SETTINGS, tmp_path / "kept", tmp_path / "test")
    assert len(started) == 2


def test_a_client_that_cannot_be_tested_ends_it(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Device.evaluate

    def failing(self: Device, request: Evaluate) -> Evaluated:
        if self.partition == 1:
            raise RuntimeError("out of memory")
        return evaluate(self, request)

    monkeypatch.setattr(Device, "evaluate", failing)
    with pytest.raises(RunError, match=r"clients \[1\] have no accuracy"):
        evaluated(SETTINGS, tmp_path / "kept", tmp_path / "one")
    monkeypatch.setattr(Device, "evaluate", evaluate)
    results = evaluated(SETTINGS, tmp_path / "kept", tmp_path / "one")
    assert {one.partition for one in results.evaluations} == set(range(SETTINGS.clients))
