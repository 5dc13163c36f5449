"""The round loop with clients that are functions: means, order, dtypes, faults, quorum, nodes that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Adapted, Identity, RefinedRates, Reply, Trained
from fedtta.messages.requests import Adapt, AdapterRow, Identify, RefineRates, Request, Train
from fedtta.server.adaptation import strategy_message
from fedtta.server.aggregation import make_strategy
from fedtta.server.events import Event, Events, NoReplies, QuorumMissed
from fedtta.server.methods import Training
from fedtta.server.nodes import Nodes
from fedtta.server.rounds import Federation, Round
from fedtta.server.training import train, train_round
from fedtta.server.trainings import TrainingStage
from fedtta.server.validation import AdaptCheck, RatesCheck
from fedtta.settings import Settings, from_json
from fedtta.strategies import ATPRates, Broadcast, FedAvgAtTestTime
from fedtta.strategies.collaborative import Collaborative
from tests.flower import record
from tests.server.test_nodes import IDENTITY, raises, says, silent
from tests.transports import Client, Clock, FakeTransport

CE = Training("cross_entropy", ())
START: Arrays = {"w": np.zeros(3, np.float32), "n.running_var": np.ones(2, np.float32)}
COUNTS: dict[str, Any] = {
    "train_loss": 1.0, "seconds": 0.1, "validation_total": 4, "validation_correct": 1, "personal_validation_correct": 2,
}  # fmt: skip


def client(
    value: float, num_examples: int = 1, change: Callable[[Arrays], Arrays] | None = None, **fields: Any
) -> Client:
    """A client that trains every array to `value`."""

    def answer(request: Request) -> Reply:
        assert isinstance(request, Train)
        names = request.arrays if request.aggregated is None else request.aggregated
        arrays = {name: np.full_like(request.arrays[name], value) for name in names}
        return Trained(arrays=change(arrays) if change else arrays, num_examples=num_examples, **{**COUNTS, **fields})

    return answer


def known(partition: int, answer: Client, **changes: Any) -> Client:
    """A client that can be identified."""
    return lambda request: (says(partition, **changes) if isinstance(request, Identify) else answer)(request)


def once(first: Client, then: Client) -> Client:
    """A client that does one thing with the first request and another with later ones."""
    seen: list[Request] = []

    def answer(request: Request) -> Reply | None:
        seen.append(request)
        return (first if len(seen) == 1 else then)(request)

    return answer


class Place:
    """A federation with a clock of its own; partition i is node 100 + i, with five training samples."""

    def __init__(self, clients: dict[int, Client], order: Callable[[list], list] = list, **settings: Any) -> None:
        self.clock, self.events = Clock(), list[Event]()
        self.transport = FakeTransport({100 + i: one for i, one in clients.items()}, order, self.clock)
        self.clients = self.transport.clients
        identities: dict[int, Identity] = {i: replace(IDENTITY, name=str(i)) for i in clients}
        by_partition = {i: 100 + i for i in clients}
        self.nodes = Nodes(self.transport, by_partition, identities, self.clock, self.clock.sleep)
        chosen = {"round_timeout": 60.0, "node_timeout": 300.0, "clients": len(clients), **settings}
        self.federation = Federation(self.nodes, Settings(**chosen), "run", Events(self.events.append))

    def round(self, strategy: Any = None, stage: TrainingStage | None = None, round: int = 1) -> Arrays:
        stage = stage or TrainingStage()
        chosen = strategy or make_strategy(stage, self.federation.settings)
        return train_round(self.federation, chosen, stage, START, "cross_entropy", round)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds]

    def incidents(self) -> list[tuple[str, int | None, str]]:
        return [(e["event"], e["partition"], e["reason"]) for e in self.of("late", "failed", "refused")]


# -- means


def test_mean_weighted_by_examples_by_hand() -> None:
    place = Place({0: client(1, 1), 1: client(5, 3)})
    new = place.round()
    np.testing.assert_allclose(new["w"], 4.0)  # (1·1 + 3·5)/4
    assert {name: value.dtype for name, value in new.items()} == {name: value.dtype for name, value in START.items()}
    (done,) = place.of("round")
    assert done["replied"] == done["sampled"] == [0, 1]
    assert (done["validation_accuracy"], done["personal_validation_accuracy"]) == (0.25, 0.5)
    assert done["bytes_up"] == done["bytes_down"] == 2 * 5 * 4


@examples(max_examples=25)
@given(st.permutations(range(4)), st.integers(0, 999))
def test_order_of_arrival_does_not_change_a_bit(order: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=4).astype(np.float32) ** 2
    clients = {i: client(float(value), i + 1) for i, value in enumerate(values)}
    first = Place(clients).round()
    other = Place(clients, order=lambda found: [found[i] for i in order]).round()
    assert first["w"].tobytes() == other["w"].tobytes()


def test_qffl_without_fairness_is_the_plain_mean_of_the_clients() -> None:
    """q = 0: Δ_k = L (w - w_k), h_k = L: (1 + 5) / 2 whatever their examples and losses."""
    place = Place(
        {0: client(1, 1, global_loss=9.0), 1: client(5, 3, global_loss=0.5)}, aggregation="qffl", fairness=0.0
    )
    np.testing.assert_allclose(place.round()["w"], 3.0, rtol=1e-6)
    assert {tuple(request.client_metrics) for request in place.transport.requests(Train)} == {("global-loss",)}


def test_qffl_by_hand() -> None:
    """q = 1, L = 1/0.5, w = (0, 0, 0), w_k = 1 and 5: Δ = F L (w - w_k), h = L² ‖w - w_k‖² + L F; no norm of n.var."""
    clients = {0: client(1, 1, global_loss=2.0), 1: client(5, 3, global_loss=0.5)}
    place = Place(clients, aggregation="qffl", fairness=1.0, learning_rate=0.5)
    delta = 2.0 * 2 * (0 - 1) + 0.5 * 2 * (0 - 5)
    h = (4 * 3 * 1 + 2 * 2.0) + (4 * 3 * 25 + 2 * 0.5)
    np.testing.assert_allclose(place.round()["w"], -delta / h, rtol=1e-6)


@pytest.mark.parametrize(("aggregation", "mu"), [("fedprox", 0.25), ("fedavg", 0.0), ("gma", 0.0)])
def test_only_fedprox_tells_its_clients_how_strong_the_proximal_term_is(aggregation: str, mu: float) -> None:
    place = Place({0: client(1), 1: client(5, 3)}, aggregation=aggregation, proximal_mu=0.25)
    place.round()
    assert {request.proximal_mu for request in place.transport.requests(Train)} == {mu}
    assert {tuple(request.client_metrics) for request in place.transport.requests(Train)} == {()}


@pytest.mark.parametrize("strategy", [FedAvg, FedProx, FedAvgM, FedMedian, FedAdam])
def test_flowers_own_strategies_run_unchanged(strategy: type[FedAvg]) -> None:
    options = {"proximal_mu": 0.1} if strategy is FedProx else {}
    made = strategy(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **options)
    place = Place({0: client(1), 1: client(2), 2: client(3)}, rounds=3)
    if strategy is FedAdam:
        made.current_arrays = {name: array.copy() for name, array in START.items()}
    final = train(place.federation, [made], CE, START)
    assert [event["round"] for event in place.of("round")] == [1, 2, 3]
    assert all(np.isfinite(array).all() and array.dtype == np.float32 for array in final.values())


def test_a_fraction_is_sampled_by_partition_and_all_requests_carry_the_settings() -> None:
    place = Place({i: client(i) for i in range(10)}, fraction_train=0.3, rounds=4, seed=5)
    train(place.federation, [make_strategy(TrainingStage(), place.federation.settings)], CE, START)
    cohorts = [event["sampled"] for event in place.of("round")]
    assert all(len(cohort) == 3 for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    for request in place.transport.requests(Train):
        assert from_json(request.settings) == place.federation.settings
        assert (request.run, request.task.training, request.task.algorithm) == ("run", "cross_entropy", "fedavg")


def test_requests_go_out_by_partition_and_the_model_stays_in_channels_last_memory() -> None:
    """An engine that stacks clients gives equal bits only if they come in one order; Flower samples them at random."""
    place, model = Place({i: client(i) for i in range(9)}), {"c.weight": np.zeros((2, 3, 4, 5), np.float32)}
    strategy = make_strategy(TrainingStage(), place.federation.settings)
    for round in (1, 2):
        model = train_round(place.federation, strategy, TrainingStage(), model, "cross_entropy", round)
        assert model["c.weight"].shape == (2, 3, 4, 5)
        assert model["c.weight"].transpose(0, 2, 3, 1).flags.c_contiguous
    assert [one.node for one, _ in place.transport.sent] == [*range(100, 109)] * 2


# -- faults and quorum

BAD: dict[str, tuple[Client, str, str]] = {
    "fails": (raises, "failed", "disk full"),
    "silent": (silent, "late", "no reply within 60 s"),
    "not finite": (client(np.nan), "refused", "w: values that are not finite"),
    "examples": (client(1e6, -5), "refused", "num-examples"),
    "more examples than it has": (client(1e6, 6), "refused", "num-examples = 6, allowed is at most 5"),
    "another shape": (client(1e6, change=lambda a: {**a, "w": a["w"][:1]}), "refused", "float32[1]"),
    "counts": (client(1e6, validation_correct=9), "refused", "validation-correct = 9"),
    "no personal head": (client(1e6, personal_validation_correct=None), "refused", "is missing"),
    "another reply": (says(0), "refused", "a reply of kind 'identity': allowed is 'trained'"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("strategy", [None, FedAvg, FedMedian])
def test_one_bad_reply_is_named_and_leaves_no_trace(name: str, strategy: type[FedAvg] | None) -> None:
    bad, kind, part = BAD[name]
    settings = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    place = Place({0: client(2), 1: bad, 2: client(4)})
    np.testing.assert_allclose(place.round(strategy(**settings) if strategy else None)["w"], 3.0)
    (incident,) = place.of("late", "refused", "failed")
    assert (incident["event"], incident["partition"], incident["node_id"]) == (kind, 1, 101)
    assert (incident["training"], incident["round"], incident["phase"]) == ("cross_entropy", 1, "train cross_entropy")
    assert part in incident["reason"]
    assert place.of("round")[0]["replied"] == [0, 2]


@pytest.mark.parametrize("loss", [None, -1.0, float("nan")])
def test_qffl_refuses_a_reply_without_a_possible_loss_and_goes_on(loss: float | None) -> None:
    clients = {0: client(1, 1, global_loss=2.0), 1: client(5, 3, global_loss=loss)}
    place = Place(clients, aggregation="qffl", fairness=0.0)
    np.testing.assert_allclose(place.round()["w"], 1.0, rtol=1e-6)
    ((kind, partition, reason),) = place.incidents()
    assert (kind, partition) == ("refused", 1)
    assert "global-loss" in reason


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "fedavgm", "qffl", "gma", "fedmedian"])
def test_a_huge_update_and_a_lying_count_are_refused_under_every_rule(aggregation: str) -> None:
    clients = {i: client(1, 5, global_loss=1.0) for i in range(3)}
    clients |= {3: client(1e4, 5, global_loss=1.0), 4: client(1, 6, global_loss=1.0)}
    place = Place(clients, aggregation=aggregation, update_norm_bound=10.0, fairness=0.0)
    np.testing.assert_allclose(place.round()["w"], 1.0, rtol=1e-6)
    assert place.incidents() == [
        ("refused", 3, "22359.8 from what was sent (l2 norm), allowed is at most 10"),
        ("refused", 4, "num-examples = 6, allowed is at most 5"),
    ]


def test_a_round_below_the_quorum_is_repeated_with_the_same_requests() -> None:
    place = Place({0: client(2), 1: once(raises, client(4, 3)), 2: client(6)}, min_replies=3)
    undisturbed = Place({0: client(2), 1: client(4, 3), 2: client(6)}, min_replies=3).round()
    assert place.round()["w"].tobytes() == undisturbed["w"].tobytes()
    assert place.incidents() == [("failed", 1, "RuntimeError: disk full")]
    (note,) = place.of("note")
    reason = "failed client 1: RuntimeError: disk full"
    assert note["text"] == f"train cross_entropy, round 1: 2 usable replies, 3 needed; {reason}; the round is repeated"
    assert len(place.of("round")) == 1
    assert place.clock.now == 0, "enough nodes are connected: no waiting"
    for node in (100, 101, 102):
        first, second = place.transport.requests(Train, node)
        assert replace(first, arrays={}) == replace(second, arrays={})
        assert first.round == 1
        assert all((one.arrays[name] == START[name]).all() for one in (first, second) for name in START)


def test_a_quorum_that_is_missed_twice_names_all_clients_and_reasons() -> None:
    clients = {0: client(2), 1: silent, 2: raises, 3: client(np.nan), 4: raises}
    place = Place(clients, min_replies=2)
    with pytest.raises(QuorumMissed) as caught:
        place.round()
    assert not isinstance(caught.value, NoReplies)
    assert str(caught.value) == (
        "train cross_entropy, round 1: 1 usable reply, 2 needed; late client 1: no reply within 60 s; "
        "failed clients 2, 4: RuntimeError: disk full; refused client 3: w: values that are not finite"
    )
    assert len(place.incidents()) == 2 * 4, "both attempts are reported"
    assert place.clock.now == pytest.approx(120.0)
    assert not place.of("round")
    with pytest.raises(NoReplies, match="no usable reply, 1 needed; failed client 0: RuntimeError: disk full"):
        Place({0: raises}).round()


@examples(max_examples=20)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=6),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_whatever_fails_the_model_is_the_mean_of_the_attempt_that_counted(
    works: list[tuple[bool, bool]], needed: int, draw: Any
) -> None:
    bad = [raises, client(np.nan), silent, client(1e9, -3)]
    clients = {
        i: once(client(i + 1) if first else draw.choice(bad), client(i + 1) if then else draw.choice(bad))
        for i, (first, then) in enumerate(works)
    }
    place = Place(clients, min_replies=needed, round_timeout=0.2, clip_factor=0.0)  # a plain mean
    attempts = [[i + 1 for i, pair in enumerate(works) if pair[attempt]] for attempt in (0, 1)]
    usable = next((attempt for attempt in attempts if len(attempt) >= needed), None)
    if usable is None:
        with pytest.raises(QuorumMissed):
            place.round()
        assert not place.of("round")
    else:
        np.testing.assert_allclose(place.round()["w"], np.mean(usable), rtol=1e-6)


def test_fewer_clients_asked_than_a_robust_rule_needs() -> None:
    """As with roles, which are known late: three of five clients train."""
    place = Place({i: client(1) for i in range(5)}, aggregation="krum")
    for partition in (0, 1):
        place.nodes.identities[partition] = replace(place.nodes.identities[partition], role="target")
    with pytest.raises(QuorumMissed, match="3 clients are asked, 5 replies are needed"):
        place.round()
    assert not place.transport.sent


# -- nodes that go and come back


def test_a_missing_node_is_not_waited_for() -> None:
    place = Place({0: client(2), 1: client(4)})
    del place.clients[101]
    np.testing.assert_allclose(place.round()["w"], 2.0)
    assert place.incidents() == [("failed", 1, "the node is not there")]
    assert place.clock.now == 0


def test_when_all_are_gone_the_wait_is_bounded_and_the_error_typed() -> None:
    place = Place({0: client(2), 1: client(4)}, node_timeout=5.0)
    place.clients.clear()
    with pytest.raises(NoReplies, match=r"the node is not there; after 5 s 0 of the 2 clients are connected"):
        place.round()
    assert place.clock.now == pytest.approx(5.0, abs=0.3)


def test_nodes_that_come_back_in_time_take_part_in_the_round() -> None:
    place = Place({0: client(2), 1: client(4), 2: client(6)}, min_replies=2)
    home = dict(place.clients)
    del place.clients[101], place.clients[102]
    place.clock.later = {7.0: lambda: place.clients.update({102: home[102]})}
    np.testing.assert_allclose(place.round()["w"], 4.0)  # 2 and 6
    assert 7 <= place.clock.now < 8
    assert place.of("round")[0]["replied"] == [0, 2]


def test_a_client_that_comes_back_as_another_node_while_a_quorum_is_waited_for() -> None:
    place = Place({0: client(2), 1: client(4)}, min_replies=2)
    del place.clients[101]
    place.clock.later = {3.0: lambda: place.clients.update({7: known(1, client(8))})}
    np.testing.assert_allclose(place.round()["w"], 5.0)
    assert place.nodes.by_partition == {0: 100, 1: 7}


def test_a_client_that_came_back_as_another_node_is_sent_everything() -> None:
    place = Place({0: client(1), 1: client(1), 2: client(1)})
    stage = TrainingStage("personalized", local=("w",))
    strategy = make_strategy(stage, place.federation.settings)
    place.round(strategy, stage)
    del place.clients[101]
    place.clients[7] = known(1, client(1))
    place.round(strategy, stage, 2)
    sent = {node: [list(one.arrays) for one in place.transport.requests(Train, node)] for node in (7, 100)}
    assert sent == {7: [list(START)], 100: [list(START), ["n.running_var"]]}
    assert {tuple(one.aggregated) for one in place.transport.requests(Train)} == {("n.running_var",)}
    assert place.of("round")[1]["replied"] == [0, 1, 2]
    assert not place.incidents()
    assert {(type(one.request), timeout) for one, timeout in place.transport.sent} == {(Identify, 300.0), (Train, 60.0)}


# -- strategies that keep arrays by node


def sharing(value: float, asked: list[set[str]]) -> Client:
    def answer(request: Request) -> Reply:
        assert isinstance(request, Adapt)
        asked.append(set(request.to_record().arrays))
        mean = np.zeros(2) if request.shared is None else request.shared["a"]
        return Adapted(shared={"a": mean + value}, corruption=0, correct=[1], total=[1], seconds=0.0)

    return answer


def collaborate(place: Place, strategy: Collaborative, round: int) -> None:
    row = AdapterRow("tent", "tent")
    template = Adapt(**place.federation.common("c"), round=round, cell="c", row=row, share="all", network="")
    asking = Round(place.federation, AdaptCheck(1, 1), "t", round, "cell", strategy)
    outcome = asking.ask(lambda: place.federation.configured(strategy, round, {}, template, place.federation.testers))
    strategy.aggregate_train(round, [strategy_message(one, ["shared"]) for one in outcome.replies])


def test_a_node_that_came_back_gets_its_mixture_and_the_network_and_the_others_get_neither_again() -> None:
    asked: dict[int, list[set[str]]] = {100: [], 101: [], 7: []}
    place = Place({0: sharing(1.0, asked[100]), 1: sharing(3.0, asked[101])})
    strategy = FedAvgAtTestTime(record(w=np.zeros(4)))
    collaborate(place, strategy, 1)
    del place.clients[101]
    place.clients[7] = known(1, sharing(5.0, asked[7]))
    collaborate(place, strategy, 2)
    assert asked == {100: [{"arrays"}, {"shared"}], 101: [{"arrays"}], 7: [{"arrays", "shared"}]}
    np.testing.assert_array_equal(strategy.personal[7]["a"].numpy(), [5.0, 5.0])  # 2 from before, mean of 1 and 5


def test_a_repeated_round_brings_the_network_to_a_node_that_lost_it() -> None:
    received: list[bool] = []

    def refined(request: Request) -> Reply:
        assert isinstance(request, RefineRates)
        received.append(request.arrays is not None)
        rates = {name: value + 1 for name, value in request.rates.items()}
        return RefinedRates(rates=rates, loss=1.0, correct=1, seconds=0.0)

    place = Place({0: refined, 1: once(raises, refined)}, min_replies=2)
    network = Broadcast(record(w=np.zeros(4)))
    network.held([100, 101])
    strategy, rates = ATPRates(network), {"a": np.asarray(0.5)}
    federation, check = place.federation, RatesCheck(rates)
    template = RefineRates(**federation.common("t"), round=1, variant="all", network="")
    asking = Round(federation, check, "t", 1, "rates t", strategy)
    outcome = asking.ask(lambda: federation.configured(strategy, 1, rates, template, [0, 1]))
    assert (outcome.asked, outcome.replied) == ([0, 1], [0, 1])
    assert [float(one.reply.rates["a"]) for one in outcome.replies] == [1.5, 1.5]
    assert place.incidents() == [("failed", 1, "RuntimeError: disk full")]
    assert received == [False, True, True], "the first attempt was not aggregated: either may have lost it"
    assert (outcome.bytes_down, outcome.bytes_up) == (2 * (8 + 4 * 8), 2 * 8)
