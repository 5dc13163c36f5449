"""Real-time evaluation with given costs: what adapters see, what is counted, and the content of a cell's file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from fedtta.benchmarks.tables import realtime
from fedtta.benchmarks.tables.clock import Batch, Cost
from fedtta.benchmarks.tables.networks import load_federation, train_network
from fedtta.benchmarks.tables.pages import realtime_costs
from fedtta.benchmarks.tables.protocol import Network, Realtime
from fedtta.benchmarks.tables.realtime import Client, Score, Scores
from fedtta.data import Stream
from fedtta.messages.requests import AdapterRow, Evaluate, TrainingTask
from fedtta.models import load_model
from fedtta.server.events import Leak
from fedtta.settings import Settings, SettingsError, to_json
from fedtta.tta import Adapter

QUIET = Console(quiet=True, width=200)
METHODS = "fedavg,personal,fedthe[training=cross_entropy],btfl,tent"
SETTINGS = Settings(
    dataset="digits", fraction=0.4, image_size=18, clients=2, personal_epochs=1, adapt_batch_size=4, batch_size=32,
    model="cnn", model_options="norm=batch", rounds=0, device="cpu", methods=METHODS, shifts="corrupted,mixture",
)  # fmt: skip
REALTIME = Realtime((1.0, 2.0, 5.0), "fedthe", 32, 1)


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_an_adapter_gets_the_scheduled_samples_and_no_others(per: str) -> None:
    batches = [Batch(0, 1, 0, 1), Batch(3, 5, 4, 6), Batch(6, 9, 8, 9)]
    places = [one.tolist() for one in realtime.batches_of(batches, per, 4)]
    assert places == ([[0, 3, 4, 6], [7, 8]] if per == "sample" else [[0], [3, 4], [6, 7, 8]])
    assert realtime.batches_of([], per, 4) == []


def test_score_by_hand() -> None:
    # Samples 1, 2 and 5 are missed; the fallback predicts 1 and 5; 3 and 4 are answered 2.5 s after 3 arrived.
    fallback = np.array([True, True, False, True, True, True])
    found = realtime.score([Batch(0, 1, 0, 1), Batch(3, 5, 2, 4)], 0.5, 2, fallback)
    assert found == Score(total=6, answered=3, correct=2, fallback_correct=2, delay=2.5)
    percent = found.percent()
    assert (percent["accuracy_percent"], percent["missed_wrong_percent"]) == (400 / 6, 200 / 6)


def test_means_by_hand() -> None:
    # Over clients first, however many samples they have, then over distributions.
    a = [Score(4, 4, 3, 0, 0.1), Score(2, 1, 0, 1, 0.3)]
    b = [Score(4, 2, 2, 2, 0.2)]
    scores: Scores = {("tent", 2.0): {"corrupted": a, "mixture": b}}
    shift = realtime.score_rows(scores)["tent"]["shifts"]["2×"]
    assert shift.pop("by_shift") == {
        "corrupted": {"answered_percent": 75, "accuracy_percent": 62.5, "missed_wrong_percent": 37.5},
        "mixture": {"answered_percent": 50, "accuracy_percent": 100, "missed_wrong_percent": 50},
    }
    means = {"answered_percent": 62.5, "accuracy_percent": 81.25, "missed_wrong_percent": 43.75}
    assert shift == {**means, "longest_delay_milliseconds": 300}


class Recorder(Adapter):
    """Predicts class 0 for the first two samples, then class 1; records all samples."""

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
    scores = realtime.play([client], {"row": cost}, 1.0, Realtime((1.0, 2.0, 4.0), queue=1), 256, QUIET)
    assert adapter.runs == [[[0, 1, 2, 3, 4, 5]], [[0, 1, 3, 5]]]
    everything = Score(6, 6, 4, 0, 0.5)  # 0, 2, 3 and 5 are right
    assert scores["row", 1.0] == scores["row", 2.0] == {"made-up": [everything]}
    assert scores["row", 4.0] == {"made-up": [Score(6, 4, 3, 1, 0.75)]}  # 0, 3, 5; the fallback predicts 2 of 2 and 4
    by_batch: Any = Recorder("batch")
    client = Client([stream], [fallback], {"row": by_batch})
    realtime.play([client], {"row": Cost((2,), (3.0,), 2, 2)}, 1.0, Realtime((1.0,), queue=2), 256, QUIET)
    assert by_batch.runs == [[[0, 1], [2, 3], [5]]]  # at 1, at 4 and, 4 overwritten at 6, at 7


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A network that was trained centrally for one epoch."""
    folder = tmp_path_factory.mktemp("realtime")
    path = folder / "central.safetensors"
    train_network(Network("central", "central", 1, "central", SETTINGS), 1, path, folder, QUIET)
    return str(path)


def test_on_a_slow_stream_it_is_the_evaluation_of_a_run(monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    settings, model = SETTINGS.replace(init=init), load_model(init)[0]
    rows, devices, means = realtime.shared_rows(settings), [], []
    made, joined = realtime.client_of, realtime._mean_statistics
    monkeypatch.setattr(realtime, "client_of", lambda *words: devices.append(made(*words)) or devices[-1])
    monkeypatch.setattr(realtime, "_mean_statistics", lambda *words: means.append(joined(*words)) or means[-1])
    clients, _ = realtime.prepare(settings, load_federation(settings), model, rows, QUIET)
    slow = {row.label: Cost.of_samples((1,), (1e-9,)) for row in rows}
    slow["tent"] = Cost.of_batches((4,), (1e-9,))
    scores = realtime.play(clients, slow, 1.0, Realtime((1.0,)), settings.eval_batch_size, QUIET)
    arrays = {name: value.numpy() for name, value in model.global_state().items()}
    for number, device in enumerate(devices):
        asked = [AdapterRow(row.label, row.method.adapter, row.options, row.base) for row in rows]
        request = Evaluate(
            settings=to_json(settings), run="test", round=realtime.ROUND, task=TrainingTask(realtime.TRAINING),
            arrays=arrays, rows=asked, shifts=["corrupted", "mixture"], statistics=means[0],
        )  # fmt: skip
        evaluated = device.evaluate(request)
        assert evaluated.leaked == 0
        for one in evaluated.results:
            mine = scores[one.label, 1.0][one.shift][number]
            assert (mine.correct, mine.answered, mine.total) == (one.correct, one.total, one.total)
            assert one.total > 8


def test_a_cell_with_given_costs(monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    # One interval is 2 ms: all methods keep up but Tent, whose four samples take five intervals.
    fast = Cost.of_samples((1, 4), (0.002, 0.003))
    costs = dict.fromkeys(METHODS.split(",")[:-1], fast) | {"tent": Cost.of_batches((1, 4), (0.005, 0.010))}
    monkeypatch.setattr(realtime, "measure_costs", lambda *ignored: costs)
    threads, settings = torch.get_num_threads(), SETTINGS.replace(init=init)
    content, again = (realtime.measure_cell(settings, REALTIME, QUIET) for _ in range(2))
    assert torch.get_num_threads() == threads
    assert content["rows"] == again["rows"]  # nothing but the costs depends on the machine
    own = content["realtime"]
    assert (own["interval_milliseconds"], own["reference"]) == (2, "fedthe[training=cross_entropy]")
    assert own["costs"]["tent"] == {
        "milliseconds": {"1": 5, "4": 10}, "least": 4, "most": 4, "keeps_up_to": pytest.approx(0.8),
    }  # fmt: skip
    found = {label: row["shifts"] for label, row in content["rows"].items()}
    assert {len(shifts) for shifts in found.values()} == {3}
    assert len({shift["accuracy_percent"] for shift in found["fedavg"].values()}) == 1  # missed or not
    assert found["btfl"]["2×"]["answered_percent"] == 100  # 1.33 samples per interval, four at a time
    assert found["btfl"]["5×"]["answered_percent"] < 100
    answered = [found["tent"][speed]["answered_percent"] for speed in ("1×", "2×", "5×")]
    assert answered[0] > answered[1] > answered[2] > 0
    for one in (shift for shifts in found.values() for shift in shifts.values()):
        assert one["missed_wrong_percent"] <= one["accuracy_percent"]
        assert (one["missed_wrong_percent"] == one["accuracy_percent"]) == (one["answered_percent"] == 100)
    assert "| `tent` | 5 | 2.5 | 4 | 0.8× |" in realtime_costs(own)


def test_a_sample_that_was_trained_on_ends_it(monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    monkeypatch.setattr(realtime, "check_no_leak", lambda samples, federation: 1)
    with pytest.raises(Leak, match="4 test samples"):
        realtime.measure_cell(SETTINGS.replace(init=init), REALTIME, QUIET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapt_batch_size": 33}, "queue = 32; allowed is adapt-batch-size, 33, or more"),
        ({"shifts": "sideways"}, "unknown shift 'sideways'"),
        ({"device": "auto"}, "device = 'auto': allowed is cpu"),
        ({"target_fraction": 0.5}, "target-fraction"),
        ({"split": "published"}, "split = 'published': allowed is once"),
        ({"partition": "domain"}, "dataset = 'digits'"),
        ({"methods": "fedavg,fedthe"}, "fedthe is defined on the training balanced_softmax; .* training=cross_entropy"),
        ({"methods": "fedavg,atp"}, "atp needs adaptation rates"),
        ({"methods": "fedavg,tent"}, "reference = 'fedthe'; allowed is one of the rows, fedavg, tent"),
    ],
)
def test_settings_that_cannot_be_played_are_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        realtime.measure_cell(SETTINGS.replace(**changes), REALTIME, QUIET)


def test_the_reference_is_the_named_row_with_the_fewest_options() -> None:
    rows = realtime.shared_rows(SETTINGS.replace(methods="fedavg,btfl[smoothing=0.1],btfl"))
    assert realtime.reference_row(rows, "btfl") == "btfl"
    assert realtime.reference_row(rows, "btfl[smoothing=0.1]") == "btfl[smoothing=0.1]"
