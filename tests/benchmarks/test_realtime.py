"""`wall-clock` with costs that are given: what adapters are shown, what is counted, and from words to files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks import central, paced, wall_clock
from benchmarks.arrivals import Taken
from benchmarks.batch_cost import Cost
from benchmarks.paced import Client, Score, Scores
from benchmarks.wall_clock_tables import share
from client.evaluation import Row
from data import Stream
from server.errors import Leak
from settings import SettingsError
from tta import Adapter

QUIET = Console(quiet=True, width=200)
SMALL = ("dataset=digits", "fraction=0.4", "image-size=18", "clients=2", "personal-epochs=1", "adapt-batch-size=4")
METHODS = "fedavg,personal,fedthe[training=cross_entropy],btfl,tent"
WORDS = ("--epochs", "1", "--set", *SMALL, f"methods={METHODS}", "shifts=corrupted,mixture")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    wall_clock.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_an_adapter_is_shown_what_was_taken_and_nothing_else(per: str) -> None:
    taken = [Taken(0, 1, 0, 1), Taken(3, 5, 4, 6), Taken(6, 9, 8, 9)]
    batches = [batch.tolist() for batch in paced.batches_of(taken, per, 4)]
    assert batches == ([[0, 3, 4, 6], [7, 8]] if per == "sample" else [[0], [3, 4], [6, 7, 8]])
    assert paced.batches_of([], per, 4) == []


def test_score_by_hand() -> None:
    # Samples 1, 2 and 5 are missed, of which the fallback gets 1 and 5 right; 3 and 4 are answered 2.5 s after 3 came.
    fallback = np.array([True, True, False, True, True, True])
    found = paced.score([Taken(0, 1, 0, 1), Taken(3, 5, 2, 4)], 0.5, 2, fallback)
    assert found == Score(total=6, answered=3, right=2, fallback_right=2, delay=2.5)
    assert (found.accuracy, found.accuracy_missed_wrong) == (4 / 6, 2 / 6)


def test_means_by_hand() -> None:
    # Over clients first, however many samples they have, then over distributions.
    a = [Score(4, 4, 3, 0, 0.1), Score(2, 1, 0, 1, 0.3)]
    b = [Score(4, 2, 2, 2, 0.2)]
    scores: Scores = {("tent", 2.0): {"corrupted": a, "mixture": b}}
    (entry,) = wall_clock.results(scores)
    assert entry.pop("by_shift") == {
        "corrupted": {"answered": 75, "accuracy": 62.5, "accuracy_missed_wrong": 37.5},
        "mixture": {"answered": 50, "accuracy": 100, "accuracy_missed_wrong": 50},
    }
    means = {"answered": 62.5, "accuracy": 81.25, "accuracy_missed_wrong": 43.75}
    assert entry == {"method": "tent", "speed": 2.0, **means, "longest_delay_milliseconds": 300}


class Recorder(Adapter):
    """Says class 0, or class 1 from the third sample on that it is shown; keeps all that it is shown."""

    def __init__(self, per: Any) -> None:
        super().__init__(nn.Identity())
        self.shown: list[list[int]] = []
        self.runs: list[list[list[int]]] = []
        self.per = per  # type: ignore[misc]

    def build(self) -> Adapter:
        return self

    def _predict(self, x: Tensor) -> Tensor:
        before = sum(map(len, self.shown))
        self.shown.append(x[:, 0].int().tolist())
        late = (torch.arange(len(x)) + before >= 2).float()
        return torch.stack([1 - late, late], 1)

    def _reset(self) -> None:
        self.shown = []
        self.runs.append(self.shown)


def test_a_stream_played_by_hand() -> None:
    # Six samples, 1 s apart at speed 1. One by one in 0.5 s nothing is missed at speeds 1 and 2, and the adapter, to
    # which that is the same, runs once. At speed 4 one comes every 0.25 s and one can wait: taken are 0 at 0, 1 at 0.5
    # (2, which is there as well, has not overwritten it yet), 3 at 1, 5 at 1.5.
    x, y = torch.arange(6.0)[:, None], torch.tensor([0, 1, 1, 1, 0, 1])
    stream = Stream("made-up", x, y, np.full(6, -1), np.full(6, "original"))
    adapter: Any = Recorder("sample")
    fallback = np.array([False, False, True, False, False, True])
    client = Client([stream], [fallback], {"row": adapter})
    cost = Cost((1,), (0.5,), 1, 1)
    scores = paced.play([client], {"row": cost}, 1.0, (1.0, 2.0, 4.0), 1, 256, QUIET)
    assert adapter.runs == [[[0, 1, 2, 3, 4, 5]], [[0, 1, 3, 5]]]
    everything = Score(6, 6, 4, 0, 0.5)  # 0, 2, 3 and 5 are right
    assert scores["row", 1.0] == scores["row", 2.0] == {"made-up": [everything]}
    assert scores["row", 4.0] == {"made-up": [Score(6, 4, 3, 1, 0.75)]}  # 0, 3, 5; of 2 and 4 the fallback knows 2
    by_batch: Any = Recorder("batch")
    client = Client([stream], [fallback], {"row": by_batch})
    paced.play([client], {"row": Cost((2,), (3.0,), 2, 2)}, 1.0, (1.0,), 2, 256, QUIET)
    assert by_batch.runs == [[[0, 1], [2, 3], [5]]]  # at 1, at 4 and, 4 overwritten at 6, at 7


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    """One interval is 2 ms: all methods keep pace with it but Tent, whose four samples take five intervals."""
    fast = Cost.of_samples((1, 4), (0.002, 0.003))
    return dict.fromkeys(METHODS.split(",")[:-1], fast) | {"tent": Cost.of_batches((1, 4), (0.005, 0.010))}


def given_costs(monkeypatch: pytest.MonkeyPatch, costs: dict[str, Cost]) -> None:
    monkeypatch.setattr(wall_clock, "measure", lambda *ignored: costs)


def test_without_haste_it_is_the_evaluation_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parsed(*WORDS)
    settings, federation, _ = wall_clock.settings_of(arguments)
    rows = wall_clock.rows_of(settings)
    model, _ = wall_clock.network_of(settings, federation, arguments, QUIET)
    devices: list[Any] = []
    made = paced.make_device
    monkeypatch.setattr(paced, "make_device", lambda *words: devices.append(made(*words)) or devices[-1])
    means: list[Any] = []
    joined = paced._mean_statistics
    monkeypatch.setattr(paced, "_mean_statistics", lambda *words: means.append(joined(*words)) or means[-1])
    clients, _ = paced.prepare(settings, federation, model, rows, QUIET)
    slow = {row.label: Cost.of_samples((1,), (1e-9,)) for row in rows}
    slow["tent"] = Cost.of_batches((4,), (1e-9,))
    scores = paced.play(clients, slow, 1.0, (1.0,), 32, settings.eval_batch_size, QUIET)
    arrays = {name: value.numpy() for name, value in model.global_state().items()}
    for number, device in enumerate(devices):
        asked = [Row(row.label, row.method.adapter, row.options, row.base) for row in rows]
        leak, found = device.evaluate(1, paced.TASK, arrays, means[0], asked, ("corrupted", "mixture"))
        assert leak["leaked"] == 0
        for one in found:
            mine = scores[one["method"], 1.0][one["shift"]][number]
            assert (mine.right, mine.answered, mine.total) == (one["correct"], one["total"], one["total"])
            assert one["total"] > 8


def test_from_words_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, costs: dict[str, Cost]) -> None:
    given_costs(monkeypatch, costs)
    threads = torch.get_num_threads()
    wall_clock.run(parsed(*WORDS, "--out", str(tmp_path / "a")), QUIET)
    wall_clock.run(parsed(*WORDS, "--out", str(tmp_path / "b")), QUIET)
    assert torch.get_num_threads() == threads
    content, again = (json.loads((tmp_path / name / "wall-clock.json").read_text()) for name in "ab")
    assert content["results"] == again["results"]  # nothing but the costs depends on the machine
    assert content["interval_milliseconds"] == 2
    assert content["reference"] == "fedthe[training=cross_entropy]"
    assert content["costs"]["tent"] == {
        "milliseconds": {"1": 5, "4": 10}, "least": 4, "most": 4, "keeps_up_to": pytest.approx(0.8),
    }  # fmt: skip
    assert {"hardware", "versions", "commit", "time", "load_average"} <= set(content)
    assert content["settings"]["clients"] == 2
    found = {(one["method"], one["speed"]): one for one in content["results"]}
    assert len(found) == 5 * 3
    plain = {found["fedavg", speed]["accuracy"] for speed in (1, 2, 5)}
    assert len(plain) == 1  # missed or not, it is the same network
    assert found["btfl", 2]["answered"] == 100  # 1.33 samples an interval, four at a time
    assert found["btfl", 5]["answered"] < 100
    assert found["tent", 1]["answered"] > found["tent", 2]["answered"] > found["tent", 5]["answered"] > 0
    for one in found.values():
        assert one["accuracy_missed_wrong"] <= one["accuracy"]
        assert (one["accuracy_missed_wrong"] == one["accuracy"]) == (one["answered"] == 100)
    page = (tmp_path / "a" / "wall-clock.md").read_text()
    text = f"{found['tent', 5]['accuracy']:.1f}"
    (line,) = [line for line in page.splitlines() if line.startswith("| tent | 0.8× |")]
    assert line.split("|")[5].replace("*", "") == f" {text} ({share(found['tent', 5]['answered'])}) "
    assert "| tent | 5 | 2.5 | 4 |" in page
    assert page.count("| fedavg |") == 3
    assert "--epochs 1 --set dataset=digits" in page


def test_it_starts_from_a_network_of_central(tmp_path: Path) -> None:
    path = tmp_path / "start.safetensors"
    parser = argparse.ArgumentParser()
    central.add_arguments(parser)
    words = ["--protocol", "wall-clock", "--seed", "2", "--epochs", "1", "--out", str(path), "--set", *SMALL]
    central.run(parser.parse_args(words), QUIET)
    arguments = parsed("--init", str(path), "--seed", "2", "--set", *SMALL)
    settings, federation, _ = wall_clock.settings_of(arguments)
    model, told = wall_clock.network_of(settings, federation, arguments, QUIET)
    again, _ = wall_clock.network_of(settings.replace(init=""), federation, parsed("--epochs", "1"), QUIET)
    state = again.global_state()
    assert all(torch.allclose(value, state[name], atol=1e-4) for name, value in model.global_state().items())
    assert told["recipe"]["epochs"] == 1
    assert not model.training
    other = parsed("--init", str(path), "--seed", "3", "--set", *SMALL)
    settings, federation, _ = wall_clock.settings_of(other)
    with pytest.raises(SettingsError, match="seed = 2, the run has 3"):
        wall_clock.network_of(settings, federation, other, QUIET)


def test_a_sample_that_was_trained_on_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parsed(*WORDS)
    settings, federation, _ = wall_clock.settings_of(arguments)
    model, _ = wall_clock.network_of(settings, federation, arguments, QUIET)
    monkeypatch.setattr(paced, "check_no_leak", lambda samples, federation: 1)
    with pytest.raises(Leak, match="4 test samples"):
        paced.prepare(settings, federation, model, wall_clock.rows_of(settings), QUIET)


def test_without_cifar10_it_is_digits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTTA_DATA", str(tmp_path))
    settings, federation, notes = wall_clock.settings_of(parsed("--set", "clients=3"))
    assert (settings.dataset, settings.clients, federation.num_clients) == ("digits", 3, 3)
    assert notes == ["cifar10 was not at hand: these are the embedded digits"]
    with pytest.raises(SettingsError, match="dataset = 'cifar10'"):
        wall_clock.settings_of(parsed("--set", "dataset=cifar10", "clients=3"))


def test_quick_is_digits_and_set_wins() -> None:
    settings, _, notes = wall_clock.settings_of(parsed("--quick", "--seed", "4", "--set", "clients=3"))
    assert (settings.dataset, settings.clients, settings.seed, notes) == ("digits", 3, 4, [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--queue", "3"), "--queue 3: allowed is adapt-batch-size, 4, or more"),
        (("--set", "shifts=sideways"), "unknown shift 'sideways'"),
        (("--set", "device=auto"), "device = 'auto': allowed is cpu"),
        (("--set", "target-fraction=0.5"), "target-fraction"),
        (("--set", "split=published"), "split = 'published': allowed is once"),
        (("--set", "partition=domain"), "dataset = 'digits'"),
    ],
)
def test_what_could_not_be_played_is_refused_before_training(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        wall_clock.settings_of(parsed("--set", *SMALL, *words))


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ("fedavg,fedthe", "fedthe is defined on the training balanced_softmax; .* training=cross_entropy"),
        ("fedavg,atp", "atp needs adaptation rates"),
        ("fedavg,ttt", "ttt is defined on the training rotation"),
    ],
)
def test_rows_that_do_not_fit(methods: str, told: str) -> None:
    settings, _, _ = wall_clock.settings_of(parsed("--set", *SMALL, f"methods={methods}"))
    with pytest.raises(SettingsError, match=told):
        wall_clock.rows_of(settings)


def test_the_reference_is_one_of_the_rows() -> None:
    settings, _, _ = wall_clock.settings_of(parsed("--set", *SMALL, "methods=fedavg,btfl[smoothing=0.1],btfl"))
    rows = wall_clock.rows_of(settings)
    assert wall_clock.reference_of(rows, "btfl") == "btfl"  # the one of that name goes before one with options
    assert wall_clock.reference_of(rows, "btfl[smoothing=0.1]") == "btfl[smoothing=0.1]"
    with pytest.raises(SettingsError, match="--reference 'tent': allowed is one of the methods, fedavg, btfl"):
        wall_clock.reference_of(rows, "tent")


def test_words_that_are_no_speeds() -> None:
    assert parsed("--speeds", "0.5,10").speeds == (0.5, 10)
    for text in ("", "fast", "1,1", "0", "-1", "inf", "nan"):
        with pytest.raises(SystemExit):
            parsed("--speeds", text)
    with pytest.raises(SystemExit):
        parsed("--queue", "0")


@pytest.mark.parametrize(
    ("percent", "text"),
    [(0, "0 %"), (0.02, "0.1 %"), (4.44, "4.4 %"), (43.7, "44 %"), (99.97, "99.9 %"), (100, "100 %")],
)
def test_only_all_is_all(percent: float, text: str) -> None:
    assert share(percent) == text
