"""Test-time rounds with real devices on a grid in one process: who gets what, faults, scores, bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

import tta
from client.runtime import federation_of
from client.streams import batch_of, streams_of
from models import load_model
from server.app import serve
from server.collaboration import check_collaborations, parse_collaborations, rounds_of
from server.methods import plan
from settings import Settings, SettingsError
from strategies import COLLABORATIONS
from strategies.arrays import weighted_mean
from strategies.broadcast import array_bytes
from tests.flower import LocalGrid, record
from tests.server.test_run import events, nodes

ALL = "none,fedavg,fedprox,fedavgm,pfedgraph,fedamp,pfedbbn,pfedbbn[share=statistics;temperature=1]"
SMALL = Settings(
    clients=3,
    fraction=0.2,
    rounds=0,
    image_size=16,
    model="resnet20-bn",
    model_options="depth=8;width=4",
    methods="tent[lr=0.01]",
    collaborations="fedavg",
    stream_size=40,
    stream_batch=20,
    stream_rounds=3,
    stream_concentration=0.5,
    device="cpu",
    node_timeout=5,
    round_timeout=60,
)
Arrays = dict[str, np.ndarray]


class Watched:
    """A run whose messages and replies are looked at: by partition and round, of each cell in turn."""

    def __init__(
        self, folder: Path, settings: Settings = SMALL, change: Callable[[int, Message], None] | None = None,
        spoil: Callable[[int, int, RecordDict], None] | None = None, order: Callable[[list], list] = list,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.settings = settings.replace(state_dir=str(folder / "state"))
        self.replies: dict[tuple[str, int, int], RecordDict] = {}
        grid = nodes(self.settings, change)
        watched = {name: self._watch(900 - name, answer, spoil) for name, answer in grid.nodes.items()}
        self.grid = LocalGrid(watched, order)
        serve(self.grid, self.settings, folder / "r")

    def _watch(self, partition: int, answer: Callable, spoil: Callable | None) -> Callable:
        def watched(message: Message) -> RecordDict:
            content = answer(message)
            if message.metadata.message_type == "train.adapt":
                round = round_of(message)
                if spoil is not None:
                    spoil(partition, round, content)
                self.replies[str(config_of(message)["cell"]), partition, round] = content
            return content

        return watched

    def of(self, kind: str) -> list[dict]:
        return [event for event in events(self.folder / "r") if event["event"] == kind]

    def asked(self) -> list[Message]:
        return [message for message in self.grid.sent if message.metadata.message_type == "train.adapt"]

    def message(self, partition: int, round: int) -> Message:
        """Of a run with one cell."""
        (one,) = (m for m in self.asked() if m.metadata.dst_node_id == 900 - partition and round_of(m) == round)
        return one

    def shared(self, partition: int, round: int) -> Arrays:
        """What a client of a run with one cell replied."""
        (one,) = (content for (_, who, when), content in self.replies.items() if (who, when) == (partition, round))
        return numpy_of(one, "shared")


def config_of(message: Message) -> Any:
    return message.content.config_records["config"]


def round_of(message: Message) -> int:
    return int(config_of(message)["server-round"])


def numpy_of(content: RecordDict, name: str) -> Arrays:
    return {key: array.numpy() for key, array in content.array_records[name].items()}


def same(one: Arrays, other: Arrays) -> bool:
    return set(one) == set(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def at(partition: int, round: int) -> Callable[[int, Message], None]:
    """Let a client be away in one round."""

    def change(who: int, message: Message) -> None:
        if message.metadata.message_type == "train.adapt" and (who, round_of(message)) == (partition, round):
            raise RuntimeError("battery empty")

    return change


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    settings = SMALL.replace(methods="fedavg,tent[lr=0.01]", collaborations=ALL, stream_rounds=2)
    return Watched(tmp_path_factory.mktemp("matrix"), settings)


# -- the matrix


def test_every_rule_runs_and_gives_everybody_a_mixture(matrix: Watched) -> None:
    rounds = matrix.of("adapt_round")
    cells = [("fedavg", "none"), *(("tent[lr=0.01]", how) for how in ALL.split(","))]  # nothing to share: one cell
    assert [(e["method"], e["collaboration"], e["round"]) for e in rounds] == [(*c, r) for c in cells for r in (1, 2)]
    assert {how.partition("[")[0] for _, how in cells} == set(COLLABORATIONS)
    for event in rounds:
        weights = np.array(event["weights"])
        assert event["replied"] == [0, 1, 2]
        assert weights.shape == (3, 3)
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
        assert (weights >= 0).all()
        assert event["context_bytes"] == 0
    assert not matrix.of("failed")
    assert not matrix.of("refused")
    assert matrix.of("end")[0]["status"] == "completed"
    assert matrix.of("plan")[0]["steps"] == len(rounds)
    assert (matrix.folder / "r" / "report.html").exists()


def test_the_network_travels_once_for_the_whole_matrix(matrix: Watched) -> None:
    carried = [
        (m.metadata.dst_node_id, config_of(m)["cell"], round_of(m)) for m in matrix.asked() if "arrays" in m.content
    ]
    assert carried == [(900 - partition, "fedavg_none", 1) for partition in range(3)]
    (kept,) = (matrix.folder / "state" / "networks").iterdir()
    assert kept.stem == config_of(matrix.asked()[0])["network"]


def test_bytes_are_those_of_the_arrays_in_messages_and_replies(matrix: Watched) -> None:
    by_cell: dict[tuple[str, int], list[Message]] = {}
    for message in matrix.asked():
        by_cell.setdefault((config_of(message)["cell"], round_of(message)), []).append(message)
    assert len(by_cell) == len(matrix.of("adapt_round"))
    for event, ((cell, round), messages) in zip(matrix.of("adapt_round"), by_cell.items(), strict=True):
        down = sum(array_bytes(arrays) for m in messages for arrays in m.content.array_records.values())
        replies = [matrix.replies[cell, partition, round] for partition in range(3)]
        up = sum(array_bytes(arrays) for content in replies for arrays in content.array_records.values())
        assert (event["bytes_down"], event["bytes_up"]) == (down, up)
    tent = {(e["collaboration"], e["round"]): e for e in matrix.of("adapt_round") if e["method"] != "fedavg"}
    numbers = sum(value.nbytes for value in numpy_of(matrix.replies["tent_lr_0.01__fedavg", 0, 1], "shared").values())
    assert tent["fedavg", 1]["bytes_down"] == 0
    assert tent["fedavg", 2]["bytes_down"] == tent["fedavg", 2]["bytes_up"] == 3 * numbers
    assert tent["fedavgm", 1]["bytes_up"] == 6 * numbers  # with what they started from, the first time
    assert tent["fedavgm", 2]["bytes_up"] == 3 * numbers


def test_only_what_is_asked_for_is_sent(matrix: Watched) -> None:
    records = {cell: set(content.array_records) for (cell, _, round), content in matrix.replies.items() if round == 2}
    for cell, names in records.items():
        assert names == ({"shared", "normalisation"} if "pfedbbn" in cell else {"shared"}), cell
    assert all(set(content.metric_records["metrics"]) == {
        "correct", "total", "num-examples", "corruption", "seconds", "context-bytes",
    } for content in matrix.replies.values())  # fmt: skip


def test_scores_and_arrays_are_those_of_one_long_lived_adapter(matrix: Watched) -> None:
    """Replay without Flower: a device made anew for every message, state on disk, is one adapter that never sleeps."""
    settings = matrix.settings
    model, _ = load_model(matrix.folder / "r" / "model.safetensors")
    stream = streams_of(settings, federation_of(settings))
    told = {(e["method"], e["collaboration"], e["partition"], e["round"]): e for e in matrix.of("adapted")}
    assert len(told) == 3 * 2 * (1 + len(ALL.split(",")))
    makers: dict[str, Callable] = {
        "fedavg": lambda: tta.create("none", model), "tent[lr=0.01]": lambda: tta.create("tent", model, lr=0.01),
    }  # fmt: skip
    for method, make in makers.items():
        for partition in range(3):
            adapter = make()
            for round in (1, 2):
                x, labels, corruption = batch_of(stream, partition, round, torch.device("cpu"))
                right = adapter.predict(x).argmax(1).numpy() == labels
                event = told[method, "none", partition, round]
                assert event["total"] == [int((labels == k).sum()) for k in range(10)]
                assert event["correct"] == [int((right & (labels == k)).sum()) for k in range(10)]
                assert event["corruption"] == corruption
                if method != "fedavg":
                    shared = {name: value.numpy() for name, value in adapter.shared("all").items()}
                    assert same(numpy_of(matrix.replies["tent_lr_0.01__none", partition, round], "shared"), shared)
    assert sum(sum(event["correct"]) for event in told.values()) > 0


def test_none_sends_everybody_its_own(matrix: Watched) -> None:
    for message in matrix.asked():
        if config_of(message)["cell"] == "tent_lr_0.01__none" and round_of(message) == 2:
            own = matrix.replies["tent_lr_0.01__none", 900 - message.metadata.dst_node_id, 1]
            assert same(numpy_of(message.content, "shared"), numpy_of(own, "shared"))


def test_the_pull_of_fedprox_is_in_its_messages_only(matrix: Watched) -> None:
    pulls = {config_of(message)["cell"]: config_of(message)["proximal-mu"] for message in matrix.asked()}
    assert {cell for cell, mu in pulls.items() if mu} == {"tent_lr_0.01__fedprox"}
    # one step a batch: the pull's gradient is zero, so it equals the plain average (ALGORITHMS, section 6)
    for partition in range(3):
        one, other = (matrix.replies[f"tent_lr_0.01__{how}", partition, 2] for how in ("fedprox", "fedavg"))
        assert same(numpy_of(one, "shared"), numpy_of(other, "shared"))


# -- nodes that come and go


def test_a_node_that_fails_in_a_round_keeps_its_arrays_and_rejoins(tmp_path: Path) -> None:
    run = Watched(tmp_path, change=at(1, 2))
    (failed,) = run.of("failed")
    assert (failed["partition"], failed["round"], failed["reason"]) == (1, 2, "error 2: battery empty")
    rounds = run.of("adapt_round")
    assert [event["replied"] for event in rounds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert [np.array(event["weights"]).shape for event in rounds] == [(3, 3), (2, 2), (3, 3)]
    first = weighted_mean([run.shared(partition, 1) for partition in range(3)])
    second = weighted_mean([run.shared(partition, 2) for partition in (0, 2)])
    assert same(numpy_of(run.message(1, 3).content, "shared"), first)
    assert same(numpy_of(run.message(0, 3).content, "shared"), second)
    assert not same(first, second)
    # it may have been started anew, so the network comes with it
    carried = [(m.metadata.dst_node_id, round_of(m)) for m in run.asked() if "arrays" in m.content]
    assert carried == [(900, 1), (899, 1), (898, 1), (899, 3)]


def test_a_node_that_joins_late_starts_from_the_network(tmp_path: Path) -> None:
    run = Watched(tmp_path, change=at(2, 1))
    late = run.message(2, 2)
    assert set(late.content.array_records) == {"arrays"}
    assert set(run.message(0, 2).content.array_records) == {"shared"}
    model, _ = load_model(run.folder / "r" / "model.safetensors")
    adapter = tta.create("tent", model, lr=0.01)
    x, _, _ = batch_of(streams_of(run.settings, federation_of(run.settings)), 2, 2, torch.device("cpu"))
    adapter.predict(x)  # the second batch is its first
    assert same(run.shared(2, 2), {name: value.numpy() for name, value in adapter.shared("all").items()})
    assert [event["replied"] for event in run.of("adapt_round")] == [[0, 1], [0, 1, 2], [0, 1, 2]]


def spoil_with(change: Callable[[Arrays], Arrays]) -> Callable[[int, int, RecordDict], None]:
    """Spoil what partition 0, the first to be looked at, shares in round 1."""

    def spoil(partition: int, round: int, content: RecordDict) -> None:
        if (partition, round) == (0, 1):
            content["shared"] = record(**change(numpy_of(content, "shared")))

    return spoil


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda a: {n: np.full_like(v, math.nan) for n, v in a.items()}, "values that are not finite"),
        (lambda a: {n: np.append(v, v[:1]) for n, v in a.items()}, "shapes or dtypes than most clients sent"),
        (lambda a: {n: v.astype(np.float64) for n, v in a.items()}, "shapes or dtypes than most clients sent"),
        (lambda a: dict(list(a.items())[1:]), "other names"),
    ],
)
def test_a_bad_reply_never_reaches_the_mixture(change: Callable[[Arrays], Arrays], told: str, tmp_path: Path) -> None:
    run = Watched(tmp_path, SMALL.replace(collaborations="pfedbbn", stream_rounds=2), spoil=spoil_with(change))
    (refused,) = run.of("refused")
    assert (refused["partition"], refused["round"]) == (0, 1)
    assert told in refused["reason"]
    first, second = run.of("adapt_round")
    assert (first["replied"], second["replied"]) == ([1, 2], [0, 1, 2])
    weights = np.array(first["weights"])
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    good = [run.shared(partition, 1) for partition in (1, 2)]
    for row, partition in zip(weights, (1, 2), strict=True):
        got = numpy_of(run.message(partition, 2).content, "shared")
        for name, value in got.items():
            np.testing.assert_allclose(value, row[0] * good[0][name] + row[1] * good[1][name], rtol=1e-6)
    assert "shared" not in run.message(0, 2).content  # it has nothing yet, and goes on from its own memory
    # its batch of round 1 is not counted, that of round 2 is
    assert [(e["partition"], e["round"]) for e in run.of("adapted")] == [(1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]


def test_equal_bits_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    settings = SMALL.replace(collaborations="pfedbbn,fedavgm", stream_rounds=2)
    one, other = Watched(tmp_path / "a", settings), Watched(tmp_path / "b", settings, order=lambda names: names[::-1])
    assert {key: _bits(content) for key, content in one.replies.items()} == {
        key: _bits(content) for key, content in other.replies.items()
    }
    assert [e["weights"] for e in one.of("adapt_round")] == [e["weights"] for e in other.of("adapt_round")]


def _bits(content: RecordDict) -> dict[str, dict[str, bytes]]:
    return {record: {n: v.tobytes() for n, v in numpy_of(content, record).items()} for record in content.array_records}


# -- settings


def test_collaborations_are_parsed_with_their_options() -> None:
    found = parse_collaborations("none, fedprox[proximal=0.5],pfedbbn[share=statistics; temperature=1]", "affine")
    assert [(one.label, one.rule, one.options, one.share) for one in found] == [
        ("none", "none", {}, "affine"),
        ("fedprox[proximal=0.5]", "fedprox", {"proximal": 0.5}, "affine"),
        ("pfedbbn[share=statistics;temperature=1]", "pfedbbn", {"temperature": 1}, "statistics"),
    ]
    strategies = [one.strategy() for one in found]
    assert [type(strategy) for strategy in strategies] == [COLLABORATIONS[one.rule] for one in found]
    assert strategies[1].proximal == 0.5
    assert found[1].strategy() is not strategies[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedvag", "unknown rule 'fedvag'; there are: none, fedavg, .*pfedbbn"),
        ("fedavg,", "unknown rule ''"),
        ("fedavg[share=some]", "share = 'some'; allowed: affine, statistics, all"),
        ("fedavg,fedavg", "fedavg is named twice"),
        ("pfedbbn[temprature=1]", "temprature"),
        ("pfedbbn[temperature=0]", "temperature"),
        ("fedprox[proximal=-1]", "proximal"),
    ],
)
def test_collaborations_that_do_not_exist_are_refused(text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=rf"collaborations: .*{told}|collaborations: {told}"):
        parse_collaborations(text, "all")


def test_methods_that_cannot_take_part_are_refused_before_training(tmp_path: Path) -> None:
    settings = SMALL.replace(methods="tent,memo,atp")
    told = "methods: memo, atp cannot take part in collaborations; fitting: none, bn_adapt, tent, cotta"
    with pytest.raises(SettingsError, match=told):
        check_collaborations(settings, plan(settings))
    with pytest.raises(SettingsError, match=told):
        Watched(tmp_path, settings)
    assert check_collaborations(settings.replace(collaborations=""), plan(settings)) == []
    for row in ("fedavg_ft", "tent[base=personalised]", "fedprox"):  # nobody trains in test-time rounds
        with pytest.raises(SettingsError, match=f"methods: {re.escape(row)} cannot take part"):
            check_collaborations(settings, plan(settings.replace(methods=row)))


def test_rounds_go_to_the_end_of_the_streams_at_most() -> None:
    assert [rounds_of(SMALL.replace(stream_rounds=rounds), 30) for rounds in (0, 7, 30, 99)] == [30, 7, 30, 30]


# -- how little travels


def affine_and_statistics_bytes(layers: list[int], classes: int) -> tuple[int, int]:
    """Bytes that BBN mixes in a round, float32: γ and β of each layer, and its two networks' class statistics."""
    return sum(2 * maps * 4 for maps in layers), sum(2 * 2 * classes * maps * 4 for maps in layers)


def test_bbn_moves_a_small_part_of_the_network() -> None:
    """γ, β and the balanced statistics of pFedBBN: under 2 % of ResNet-20; class statistics too: under 15 %."""
    from models import build

    model = build("resnet20-bn", 10, image_size=32)
    network = sum(value.numel() * 4 for value in model.global_state().values())
    adapter = tta.create("bbn", model)
    assert isinstance(adapter, tta.Collaborator)
    sizes = {share: sum(v.numel() * v.element_size() for v in adapter.shared(share).values())
             for share in ("affine", "statistics", "all")}  # fmt: skip
    layers = [m.num_features for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    affine, statistics = affine_and_statistics_bytes(layers, 10)
    assert sizes == {"affine": affine, "statistics": statistics, "all": affine + statistics}
    domain = sum(
        (mean.numel() + variance.numel()) * mean.element_size() for mean, variance in adapter.domain().values()
    )
    assert domain == affine  # two numbers a map as well
    assert (sizes["affine"] + domain) / network < 0.02
    assert sizes["all"] / network < 0.15


def test_bbn_on_a_wide_resnet_by_its_shapes() -> None:
    """WideResNet-28-10 (Zagoruyko & Komodakis 2016), from its layers' widths alone: 36.5 million weights."""
    weights, layers, fan_in = 3 * 16 * 9, [], 16
    for maps in (160, 320, 640):
        for block in range(4):
            layers += [fan_in, maps]  # BatchNorm comes before each convolution
            weights += 9 * fan_in * maps + 9 * maps * maps + (fan_in * maps if block == 0 else 0)
            fan_in = maps
    layers.append(fan_in)
    weights += fan_in * 10 + 10
    affine, statistics = affine_and_statistics_bytes(layers, 10)
    network = 4 * weights + 2 * affine  # γ, β and the running statistics
    assert 36e6 < weights < 37e6
    assert 2 * affine / network < 0.02
    assert (affine + statistics) / network < 0.02


def test_a_run_that_would_train_on_its_streams_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="rounds = 1: allowed with collaborations is 0"):
        Watched(tmp_path, SMALL.replace(rounds=1))
