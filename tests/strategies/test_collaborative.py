"""Collaborations: messages, late, lost and returning nodes, θ_0, and the network that travels once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedtta.messages.arrays import digest
from fedtta.strategies import COLLABORATIONS, ATPRates, Broadcast, PFedBBN
from fedtta.strategies.fedamp import fedamp_weights
from fedtta.strategies.pfedbbn import bn_distance, similarity_weights
from fedtta.strategies.pfedgraph import pfedgraph_weights
from tests.flower import LocalGrid, record
from tests.strategies.nodes import NETWORK, START, Device, begun, rounds, shared_reply

Node = Callable[[Message], RecordDict | None]
STATISTICS = [{"bn": (np.array([i, 0.0]), np.array([1.0, i]))} for i in range(4)]


@pytest.mark.parametrize("name", COLLABORATIONS)
def test_each_rule_weighs_what_it_says(name: str) -> None:
    devices = {i: Device(i, i + 1) for i in range(4)}
    strategy = begun(name)
    rounds(strategy, LocalGrid(devices), range(1, 2))
    shared = [device.state for device in devices.values()]
    expected = {
        "none": lambda: np.eye(4),
        "fedamp": lambda: fedamp_weights(shared),
        "pfedgraph": lambda: pfedgraph_weights(shared, START, [1, 2, 3, 4]),
        "pfedbbn": lambda: similarity_weights(bn_distance(STATISTICS)),
    }
    np.testing.assert_allclose(strategy.weights, expected.get(name, lambda: np.full((4, 4), 0.25))(), atol=1e-12)


def test_messages_of_a_round() -> None:
    strategy = COLLABORATIONS["fedprox"](proximal=0.25)
    strategy.begin(record(**NETWORK))
    config = ConfigRecord({"seed": 3})
    messages = list(strategy.configure_train(7, record(), config, LocalGrid({4: Device(0), 2: Device(1)})))
    assert [message.metadata.dst_node_id for message in messages] == [4, 2]
    assert dict(messages[0].content["config"]) == {
        "seed": 3,
        "server-round": 7,
        "network": digest(NETWORK),
        "proximal-mu": 0.25,
        "send-normalisation": False,
        "send-start": False,
    }
    assert dict(config) == {"seed": 3}, "the caller's config is left as it is"
    assert strategy.sent_bytes == 2 * (6 * 4 + 4 * 4)


def test_a_lost_node_keeps_its_mixture_and_gets_the_network_again() -> None:
    devices = {i: Device(i) for i in range(3)}
    strategy, grid = begun(), LocalGrid(devices)
    rounds(strategy, grid, range(1, 2))
    last = strategy.personal[1]
    devices[1].on = False
    rounds(strategy, grid, range(2, 4))
    assert strategy.node_ids == [0, 2]
    assert strategy.personal[1] is last
    devices[1].on = True
    rounds(strategy, grid, range(4, 5))
    assert devices[1].received[-1] == {"config", "arrays", "shared"}
    assert devices[0].received[-1] == {"config", "shared"}
    assert strategy.node_ids == [0, 1, 2]
    rounds(strategy, grid, range(5, 6))
    assert devices[1].received[-1] == {"config", "shared"}


def test_a_failed_node_counts_as_lost_and_a_gone_one_is_not_asked() -> None:
    def broken(message: Message) -> RecordDict:
        raise RuntimeError("no memory")

    nodes: dict[int, Node] = {0: Device(0), 1: broken, 2: Device(2)}
    strategy, grid = begun(), LocalGrid(nodes)
    rounds(strategy, grid, range(1, 2))
    assert strategy.node_ids == [0, 2]
    del nodes[2]
    messages = list(strategy.configure_train(2, record(), ConfigRecord({}), grid))
    assert [(m.metadata.dst_node_id, "arrays" in m.content) for m in messages] == [(0, False), (1, True)]


def test_a_late_node_starts_from_the_network() -> None:
    devices = {0: Device(0)}
    strategy = begun()
    rounds(strategy, LocalGrid(devices), range(1, 3))
    devices[1] = Device(1)
    rounds(strategy, LocalGrid(devices), range(3, 4))
    assert devices[1].received == [{"config", "arrays"}]
    assert strategy.node_ids == [0, 1]


def test_a_round_that_was_never_aggregated_sends_the_network_again() -> None:
    devices = {i: Device(i) for i in range(2)}
    strategy, grid = begun(), LocalGrid(devices)
    rounds(strategy, grid, range(1, 2))
    list(strategy.configure_train(2, record(), ConfigRecord({}), grid))
    messages = list(strategy.configure_train(2, record(), ConfigRecord({}), grid))
    assert all("arrays" in message.content for message in messages)


def test_no_reply_changes_nothing() -> None:
    strategy = begun()
    rounds(strategy, LocalGrid({0: Device(1)}), range(1, 2))
    weights, personal = strategy.weights, dict(strategy.personal)
    assert strategy.aggregate_train(2, []) == (None, None)
    assert strategy.weights is weights
    assert strategy.personal == personal


def test_flowers_own_loop_runs_it_from_the_first_arrays() -> None:
    devices = {i: Device(i) for i in range(3)}
    strategy = PFedBBN(temperature=0.5)
    strategy.start(LocalGrid(devices), record(**NETWORK), num_rounds=2)
    assert [device.received[0] for device in devices.values()] == [{"config", "arrays"}] * 3
    np.testing.assert_allclose(strategy.weights, similarity_weights(bn_distance(STATISTICS[:3]), 0.5))


def test_start_is_asked_for_once_unless_it_was_given() -> None:
    devices = {i: Device(i) for i in range(2)}
    asked, told = begun("pfedgraph"), begun("pfedgraph")
    told.set_start(record(**START))
    flags = []
    for strategy in (asked, told):
        for server_round in (1, 2):
            messages = list(strategy.configure_train(server_round, record(), ConfigRecord({}), LocalGrid(devices)))
            flags.append(messages[0].content["config"]["send-start"])
            strategy.aggregate_train(server_round, list(LocalGrid(devices).send_and_receive(messages)))
    assert flags == [True, False, False, False]
    np.testing.assert_array_equal(asked.start_arrays["gamma"], START["gamma"])


@pytest.mark.parametrize("name", ["fedavgm", "pfedgraph"])
def test_what_does_not_fit_the_start_is_refused(name: str) -> None:
    strategy = begun(name)
    strategy.set_start(record(**START))
    other = {**START, "gamma": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"gamma of client 1: float32\(3,\) does not fit float32\(2,\)"):
        strategy.aggregate_train(1, [shared_reply(node, shared=record(**other)) for node in (0, 1)])
    assert strategy.weights is None


def test_fedavgm_by_hand() -> None:
    strategy = begun("fedavgm")
    strategy.set_start({"w": np.array([1.0]), "bn.running_var": np.array([1.0])})
    # round 1: mean 3, v = 2, sent 3; variance: mean 0.5, v = -0.5, sent 0.5
    # round 2: mean 4, v = 0.9·2 + 1 = 2.8, sent 5.8; variance: mean 0.4, v = -0.45 - 0.1 = -0.55, sent 0 for -0.05
    # round 3: mean 5.8, v = 2.52, sent 8.32; variance: mean 0, v = -0.495, sent 0
    table = [((2, 4), (0.5, 0.5), 3, 0.5), ((4, 4), (0.3, 0.5), 5.8, 0), ((5.8, 5.8), (0, 0), 8.32, 0)]
    for server_round, (values, variances, mean, variance) in enumerate(table, start=1):
        replies = [
            shared_reply(node, shared=record(**{"w": np.array([float(w)]), "bn.running_var": np.array([float(v)])}))
            for node, (w, v) in enumerate(zip(values, variances, strict=True))
        ]
        strategy.aggregate_train(server_round, replies)
        for node in (0, 1):
            assert strategy.personal[node]["w"].numpy()[0] == pytest.approx(mean)
            assert strategy.personal[node]["bn.running_var"].numpy()[0] == pytest.approx(variance, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "records", "part"),
    [
        ("pfedbbn", {}, "node 9 sent no record 'normalisation'"),
        ("pfedbbn", {"normalisation": record(**{"a.mean": np.zeros(1)})}, "<layer>.mean"),
        ("pfedbbn", {"normalisation": record()}, "<layer>.mean"),
        ("pfedgraph", {"shared": record(w=np.zeros(1))}, "none of the nodes .* sent the record 'start'"),
        ("pfedgraph", {"shared": record(w=np.zeros(1)), "start": record(w=np.zeros(2))}, "w of client 1"),
    ],
)
def test_records_that_a_rule_needs(name: str, records: dict, part: str) -> None:
    strategy = begun(name)
    with pytest.raises(ValueError, match=part):
        strategy.aggregate_train(1, [shared_reply(9, **records)])
    assert (strategy.weights, strategy.personal) == (None, {})


def test_weights_that_are_not_stochastic_are_refused() -> None:
    class Greedy(COLLABORATIONS["fedavg"]):
        def weigh(self, replies):
            return np.full((len(replies.node_ids),) * 2, 1.0)

    strategy = Greedy(record(**NETWORK))
    with pytest.raises(ValueError, match="sum to 2, not to one"):
        strategy.aggregate_train(1, [shared_reply(0), shared_reply(1)])


def test_unknown_state_is_refused() -> None:
    strategy = begun("fedavg")
    with pytest.raises(ValueError, match="velocity"):
        strategy.load_state_arrays({"velocity/w": np.zeros(1)}, {0: 1})
    with pytest.raises(ValueError, match="personal/4"):
        strategy.load_state_arrays({"personal/4/w": np.zeros(1)}, {0: 1})
    assert not strategy.personal


def test_no_network() -> None:
    for strategy in (PFedBBN(), ATPRates()):
        with pytest.raises(ValueError, match=r"has no network yet"):
            list(strategy.configure_train(1, record(), ConfigRecord({}), LocalGrid({0: Device(0)})))
        with pytest.raises(ValueError, match="no arrays"):
            strategy.begin(record())


def test_there_is_no_evaluation_round() -> None:
    strategy = begun()
    assert list(strategy.configure_evaluate(1, record(), ConfigRecord({}), LocalGrid({0: Device(0)}))) == []
    assert strategy.aggregate_evaluate(1, []) is None
    strategy.summary()


def test_digest() -> None:
    same = dict(reversed(NETWORK.items()))
    assert digest(same) == digest(NETWORK)
    turned = {"a": np.arange(6.0).reshape(2, 3)}
    assert digest({"a": np.asfortranarray(turned["a"])}) == digest(turned)
    assert digest({"a": turned["a"].astype(">f8")}) == digest(turned)
    others = [
        {"b": turned["a"]},
        {"a": turned["a"].reshape(3, 2)},
        {"a": turned["a"].astype(np.float32)},
        {"a": turned["a"].view(np.int64)},
        {"a": turned["a"] + 1},
        {},
    ]
    assert len({digest(other) for other in [turned, *others]}) == 7
    assert len(digest(turned)) == 64


def test_broadcast() -> None:
    network = record(**NETWORK)
    broadcast = Broadcast(network)
    assert broadcast.digest == digest(NETWORK)
    assert broadcast.records(1) == {"arrays": network}
    broadcast.held([1, 2])
    assert broadcast.records(1) == {}
    broadcast.lost([1, 5])
    assert (broadcast.records(1), broadcast.records(2)) == ({"arrays": network}, {})


def test_a_network_that_comes_as_a_broadcast_comes_with_its_holders() -> None:
    everyone = Broadcast(record(**NETWORK))
    devices = {i: Device(i) for i in range(2)}
    for name in ("fedavg", "fedamp"):
        strategy = COLLABORATIONS[name]()
        strategy.begin(everyone)
        for device in devices.values():
            device.received.clear()
        rounds(strategy, LocalGrid(devices), range(1, 2))
    assert [device.received for device in devices.values()] == [[{"config"}]] * 2


def test_the_start_of_most_nodes_counts_and_not_that_of_the_first() -> None:
    """One attacker that comes first would choose for all what the rule measures from."""
    strategy = begun("pfedgraph")
    good, bad = record(w=np.ones(2)), record(w=np.full(2, -50.0))
    moved = [record(w=np.array([1.0, 2.0])), record(w=np.array([2.0, 1.0])), record(w=np.array([0.0, 0.0]))]
    replies = [shared_reply(n, shared=moved[n], start=bad if n == 0 else good) for n in range(3)]
    strategy.aggregate_train(1, replies)
    np.testing.assert_array_equal(strategy.start_arrays["w"], np.ones(2))
