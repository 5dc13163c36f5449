"""Test-time rounds with real clients in one process: what travels, faults, scores, bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtta import tta
from fedtta.client.adaptation import batch_of, streams_of
from fedtta.client.node import federation_of
from fedtta.messages.arrays import Arrays, array_bytes
from fedtta.messages.flower import allow_messages
from fedtta.messages.replies import Adapted, Reply
from fedtta.messages.requests import Adapt, Request
from fedtta.models import load_model
from fedtta.server.adaptation import Cell, check_collaborations, parse_collaborations, rounds_of
from fedtta.server.app import serve
from fedtta.server.checkpoints import STRATEGY, Checkpoints, memory_key
from fedtta.server.events import Events, RunError
from fedtta.server.methods import plan
from fedtta.server.nodes import Nodes
from fedtta.server.rounds import Federation
from fedtta.server.validation import AdaptCheck
from fedtta.settings import Settings, SettingsError
from fedtta.strategies import COLLABORATIONS
from fedtta.strategies.arrays import weighted_mean
from tests.server.test_run import Watch, events
from tests.transports import Client, FakeTransport, devices

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


class Watched:
    """A run with all requests and replies of its test-time rounds, by cell, partition and round."""

    def __init__(
        self, folder: Path, settings: Settings = SMALL, watch: Watch = lambda partition, request: None,
        spoil: Callable[[int, int, Adapted], Adapted] = lambda partition, round, reply: reply,
        order: Callable[[list], list] = list,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.settings = settings.replace(state_dir=str(folder / "state"))
        self.replies: dict[tuple[str, int, int], Adapted] = {}
        self.transport = devices(self.settings, watch=watch, order=order)
        for node, client in self.transport.clients.items():
            self.transport.clients[node] = self._watch(900 - node, client, spoil)
        serve(self.transport, self.settings, folder / "r")

    def _watch(self, partition: int, client: Client, spoil: Callable[[int, int, Adapted], Adapted]) -> Client:
        def watched(request: Request) -> Reply | None:
            reply = client(request)
            if isinstance(request, Adapt) and isinstance(reply, Adapted):
                reply = self.replies[request.cell, partition, request.round] = spoil(partition, request.round, reply)
            return reply

        return watched

    def of(self, kind: str) -> list[dict]:
        return [event for event in events(self.folder / "r") if event["event"] == kind]

    def asked(self) -> list[tuple[int, Adapt]]:
        """Partition and request, in order."""
        sent = [(900 - one.node, one.request) for one, _ in self.transport.sent]
        return [(partition, request) for partition, request in sent if isinstance(request, Adapt)]

    def request(self, partition: int, round: int) -> Adapt:
        """Of a run with one cell."""
        (one,) = (request for who, request in self.asked() if (who, request.round) == (partition, round))
        return one

    def shared(self, partition: int, round: int) -> Arrays:
        """What a client of a run with one cell replied."""
        (one,) = (reply for (_, who, when), reply in self.replies.items() if (who, when) == (partition, round))
        return one.shared


def records_of(message: Request | Reply) -> set[str]:
    return set(message.to_record().arrays)


def same(one: Arrays, other: Arrays) -> bool:
    return set(one) == set(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def away(partition: int, round: int) -> Watch:
    """Let a client fail in one round."""

    def watch(who: int, request: Request) -> None:
        if isinstance(request, Adapt) and (who, request.round) == (partition, round):
            raise RuntimeError("battery empty")

    return watch


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    allow_messages()
    settings = SMALL.replace(methods="fedavg,tent[lr=0.01]", collaborations=ALL, stream_rounds=2)
    return Watched(tmp_path_factory.mktemp("matrix"), settings)


# -- the matrix


def test_every_rule_runs_and_gives_each_client_a_mixture(matrix: Watched) -> None:
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
    carried = [(partition, one.cell, one.round) for partition, one in matrix.asked() if one.arrays is not None]
    assert carried == [(partition, "fedavg_none", 1) for partition in range(3)]
    (kept,) = (matrix.folder / "state" / "networks").iterdir()
    assert {kept.stem} == {request.network for _, request in matrix.asked()}


def test_bytes_are_those_of_the_arrays_in_requests_and_replies(matrix: Watched) -> None:
    by_cell: dict[tuple[str, int], list[Adapt]] = {}
    for _, request in matrix.asked():
        by_cell.setdefault((request.cell, request.round), []).append(request)
    for event, ((cell, round), requests) in zip(matrix.of("adapt_round"), by_cell.items(), strict=True):
        down = sum(array_bytes(arrays) for one in requests for arrays in one.to_record().arrays.values())
        replies = [matrix.replies[cell, partition, round] for partition in range(3)]
        up = sum(array_bytes(arrays) for reply in replies for arrays in reply.to_record().arrays.values())
        assert (event["bytes_down"], event["bytes_up"]) == (down, up)
    tent = {(e["collaboration"], e["round"]): e for e in matrix.of("adapt_round") if e["method"] != "fedavg"}
    numbers = array_bytes(matrix.replies["tent_lr_0.01__fedavg", 0, 1].shared)
    assert tent["fedavg", 1]["bytes_down"] == 0
    assert tent["fedavg", 2]["bytes_down"] == tent["fedavg", 2]["bytes_up"] == 3 * numbers
    assert tent["fedavgm", 1]["bytes_up"] == 6 * numbers  # with what they started from, the first time
    assert tent["fedavgm", 2]["bytes_up"] == 3 * numbers


def test_only_what_a_rule_needs_is_sent(matrix: Watched) -> None:
    for how in ALL.split(","):
        rule, cell = COLLABORATIONS[how.partition("[")[0]], memory_key("tent[lr=0.01]", how)
        always = {"shared"} | ({"normalization"} if rule.needs_statistics else set())
        first = always | ({"start"} if rule.needs_start else set())
        for partition in range(3):
            assert records_of(matrix.replies[cell, partition, 1]) == first, how
            assert records_of(matrix.replies[cell, partition, 2]) == always, how


def test_scores_and_arrays_are_those_of_one_long_lived_adapter(matrix: Watched) -> None:
    """A device made for each request, with its state on disk, equals one adapter that lives throughout."""
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
                    assert same(matrix.replies["tent_lr_0.01__none", partition, round].shared, shared)
    assert sum(sum(event["correct"]) for event in told.values()) > 0


def test_none_sends_each_client_its_own(matrix: Watched) -> None:
    for partition, request in matrix.asked():
        if (request.cell, request.round) == ("tent_lr_0.01__none", 2):
            assert same(request.shared or {}, matrix.replies["tent_lr_0.01__none", partition, 1].shared)


def test_the_proximal_term_of_fedprox_is_in_its_requests_only(matrix: Watched) -> None:
    assert {one.cell for _, one in matrix.asked() if one.proximal_mu} == {"tent_lr_0.01__fedprox"}
    # one step a batch: the gradient of the term is zero, so it equals the plain average (ALGORITHMS, section 6)
    for partition in range(3):
        one, other = (matrix.replies[f"tent_lr_0.01__{how}", partition, 2] for how in ("fedprox", "fedavg"))
        assert same(one.shared, other.shared)


# -- nodes that come and go


def test_a_node_that_fails_in_a_round_keeps_its_arrays_and_rejoins(tmp_path: Path) -> None:
    run = Watched(tmp_path, watch=away(1, 2))
    (failed,) = run.of("failed")
    assert (failed["partition"], failed["round"], failed["reason"]) == (1, 2, "RuntimeError: battery empty")
    rounds = run.of("adapt_round")
    assert [event["replied"] for event in rounds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert [np.array(event["weights"]).shape for event in rounds] == [(3, 3), (2, 2), (3, 3)]
    first = weighted_mean([run.shared(partition, 1) for partition in range(3)])
    second = weighted_mean([run.shared(partition, 2) for partition in (0, 2)])
    assert same(run.request(1, 3).shared or {}, first)
    assert same(run.request(0, 3).shared or {}, second)
    assert not same(first, second)
    # it may have been restarted, so the network comes with it
    carried = [(partition, request.round) for partition, request in run.asked() if request.arrays is not None]
    assert carried == [(0, 1), (1, 1), (2, 1), (1, 3)]


def test_a_node_that_joins_late_starts_from_the_network(tmp_path: Path) -> None:
    run = Watched(tmp_path, watch=away(2, 1))
    assert records_of(run.request(2, 2)) == {"arrays"}
    assert records_of(run.request(0, 2)) == {"shared"}
    model, _ = load_model(run.folder / "r" / "model.safetensors")
    adapter = tta.create("tent", model, lr=0.01)
    x, _, _ = batch_of(streams_of(run.settings, federation_of(run.settings)), 2, 2, torch.device("cpu"))
    adapter.predict(x)  # the second batch is its first
    assert same(run.shared(2, 2), {name: value.numpy() for name, value in adapter.shared("all").items()})
    assert [event["replied"] for event in run.of("adapt_round")] == [[0, 1], [0, 1, 2], [0, 1, 2]]


def spoil_with(change: Callable[[Arrays], Arrays]) -> Callable[[int, int, Adapted], Adapted]:
    """Spoil what partition 0 shares in round 1."""

    def spoil(partition: int, round: int, reply: Adapted) -> Adapted:
        return replace(reply, shared=change(reply.shared)) if (partition, round) == (0, 1) else reply

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
        got = run.request(partition, 2).shared or {}
        for name, value in got.items():
            np.testing.assert_allclose(value, row[0] * good[0][name] + row[1] * good[1][name], rtol=1e-6)
    assert run.request(0, 2).shared is None  # it has no mixture yet, and continues from its own memory
    # its batch of round 1 is not counted, that of round 2 is
    assert [(e["partition"], e["round"]) for e in run.of("adapted")] == [(1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]


def test_options_that_do_not_fit_the_clients_end_the_run_with_their_names(tmp_path: Path) -> None:
    """Whether α is too large depends on the clients' distances: users saw a traceback."""
    rule = "fedamp[sigma=100;alpha=1000]"
    with pytest.raises(RunError, match=rf"@{re.escape(rule)}, round 1: alpha = 1000: a client would give "):
        Watched(tmp_path, SMALL.replace(collaborations=rule))


def test_equal_bits_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    settings = SMALL.replace(collaborations="pfedbbn,fedavgm", stream_rounds=2)
    one, other = Watched(tmp_path / "a", settings), Watched(tmp_path / "b", settings, order=lambda names: names[::-1])
    assert {key: _bits(reply) for key, reply in one.replies.items()} == {
        key: _bits(reply) for key, reply in other.replies.items()
    }
    assert [e["weights"] for e in one.of("adapt_round")] == [e["weights"] for e in other.of("adapt_round")]


def _bits(reply: Adapted) -> dict[str, dict[str, bytes]]:
    arrays = reply.to_record().arrays
    return {name: {key: value.tobytes() for key, value in named.items()} for name, named in arrays.items()}


# -- settings


def test_collaborations_are_parsed_with_their_options() -> None:
    found = parse_collaborations(
        "none, fedprox[proximal=0.5],pfedbbn[share=statistics; temperature=1],pfedgraph[round_above=0.9]", "affine"
    )
    assert [(one.label, one.rule, one.options, one.share) for one in found] == [
        ("none", "none", {}, "affine"),
        ("fedprox[proximal=0.5]", "fedprox", {"proximal": 0.5}, "affine"),
        ("pfedbbn[share=statistics;temperature=1]", "pfedbbn", {"temperature": 1}, "statistics"),
        ("pfedgraph[round_above=0.9]", "pfedgraph", {"round_above": 0.9}, "affine"),
    ]
    strategies = [one.strategy() for one in found]
    assert [type(strategy) for strategy in strategies] == [COLLABORATIONS[one.rule] for one in found]
    assert strategies[1].proximal == 0.5
    assert strategies[3].round_above == 0.9
    assert found[1].strategy() is not strategies[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedvag", "unknown rule 'fedvag'; there are: none, fedavg, .*pfedbbn"),
        ("fedavg,", "unknown rule ''"),
        ("fedavg[share=some]", "share = 'some'; allowed: affine, statistics, all"),
        ("fedavg,fedavg", "fedavg is named twice"),
        ("pfedbbn[temprature=1]", "temprature"),
        ("fedavg[network=1]", "network"),
        ("pfedbbn[temperature=0]", "temperature"),
        ("fedprox[proximal=-1]", "proximal"),
        ("pfedgraph[round_above=1.1]", "round_above"),
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
    for row in ("fedavg_ft", "tent[base=personalised]", "fedprox"):  # no client trains in test-time rounds
        with pytest.raises(SettingsError, match=f"methods: {re.escape(row)} cannot take part"):
            check_collaborations(settings, plan(settings.replace(methods=row)))


def test_rounds_go_to_the_end_of_the_streams_at_most() -> None:
    assert [rounds_of(SMALL.replace(stream_rounds=rounds), 30) for rounds in (0, 7, 30, 99)] == [30, 7, 30, 30]


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It names the normalization statistics as they were named then."""
    (training,), (rule,) = plan(SMALL), parse_collaborations("pfedbbn", "all")
    cell = Cell(training.name, training.rows[0], rule, rule.strategy(), AdaptCheck(10, 15), ["fog"])
    checkpoints = Checkpoints(tmp_path, SMALL)
    shapes = {"bn.mean": [[4], "float32"]}
    checkpoints.records, checkpoints.notes = {STRATEGY: {}}, {"signature": {"normalisation": shapes, "shared": {}}}
    cell.load(checkpoints, Federation(Nodes(FakeTransport({}), {}), SMALL, "run", Events()))
    assert cell.check.signature == {"normalization": {"bn.mean": ((4,), "float32")}, "shared": {}}


# -- how little travels


def affine_and_statistics_bytes(layers: list[int], classes: int) -> tuple[int, int]:
    """Bytes that BBN mixes in a round, float32: γ and β of each layer, and its two networks' class statistics."""
    return sum(2 * maps * 4 for maps in layers), sum(2 * 2 * classes * maps * 4 for maps in layers)


def test_bbn_moves_a_small_part_of_the_network() -> None:
    """γ, β and the balanced statistics of pFedBBN: under 2 % of ResNet-20; class statistics too: under 15 %."""
    from fedtta.models import build

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
    # class names promise data of their own, which these clients do not have
    with pytest.raises(SettingsError, match="no data of their own have 0, 1"):
        Watched(tmp_path / "own", SMALL.replace(rounds=1, classes=",".join("0123456789")))
