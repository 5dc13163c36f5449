"""The mean of adaptation rates: cohorts, messages, bytes."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedtta.messages.arrays import digest
from fedtta.strategies import ATPRates
from tests.flower import LocalGrid, record

NETWORK = {"w": np.zeros((10, 10), np.float32)}


class Device:
    """A node that adds its number to the rates."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.received: list[set[str]] = []

    def __call__(self, message: Message) -> RecordDict:
        assert message.metadata.message_type == "train.rates"
        self.received.append(set(message.content))
        rates = message.content["rates"]["rates"].numpy() + self.number
        return RecordDict({"rates": record(rates=rates), "metrics": MetricRecord({"num-examples": self.number + 1})})


def one_round(strategy: ATPRates, grid: LocalGrid, server_round: int, rates: np.ndarray) -> np.ndarray:
    messages = list(strategy.configure_train(server_round, record(rates=rates), ConfigRecord({"seed": 1}), grid))
    arrays, metrics = strategy.aggregate_train(server_round, list(grid.send_and_receive(messages)))
    assert metrics is None
    return arrays["rates"].numpy()


def test_plain_mean_whatever_the_examples() -> None:
    devices = {9 - i: Device(i) for i in range(3)}
    strategy = ATPRates(record(**NETWORK))
    rates = np.array([0.5, -1.0])
    new = one_round(strategy, LocalGrid(devices), 1, rates)
    np.testing.assert_allclose(new, rates + 1)  # mean of 0, 1, 2
    assert new.dtype == np.float64
    assert strategy.sent_bytes == 3 * (400 + 16)
    one_round(strategy, LocalGrid(devices), 2, new)
    assert strategy.sent_bytes == 3 * 16
    assert devices[9].received == [{"rates", "config", "arrays"}, {"rates", "config"}]


def test_config_of_a_message() -> None:
    config = ConfigRecord({"seed": 1})
    strategy = ATPRates(record(**NETWORK))
    (message,) = strategy.configure_train(4, record(rates=np.zeros(1)), config, LocalGrid({3: Device(0)}))
    assert dict(message.content["config"]) == {"seed": 1, "server-round": 4, "network": digest(NETWORK)}
    assert dict(config) == {"seed": 1}


def test_cohorts_are_drawn_by_position_from_seed_and_round() -> None:
    def cohorts(ids: list[int], seed: int) -> list[list[int]]:
        strategy = ATPRates(cohort=4, seed=seed)
        return [[ids.index(node) for node in strategy.sample(ids, r)] for r in range(1, 30)]

    first = cohorts(list(range(10)), 5)
    assert first == cohorts([int(i) for i in np.random.default_rng(0).permutation(10**6)[:10]], 5)
    assert first != cohorts(list(range(10)), 6)
    assert all(len(set(cohort)) == 4 and cohort == sorted(cohort) for cohort in first)
    assert {position for cohort in first for position in cohort} == set(range(10))
    sizes = {cohort: len(ATPRates(cohort=cohort).sample(range(10), 1)) for cohort in (0, 1, 9, 10, 11)}
    assert sizes == {0: 10, 1: 1, 9: 9, 10: 10, 11: 10}  # 0: all of them
    everyone = [7, 3, 5]
    for size in (0, 3, 8):
        assert ATPRates(cohort=size).sample(everyone, 1) == everyone


def test_no_reply_and_impossible_settings() -> None:
    strategy = ATPRates(record(**NETWORK))
    assert strategy.aggregate_train(1, []) == (None, None)
    strategy.summary()
    with pytest.raises(ValueError, match="cohort = -1"):
        ATPRates(cohort=-1)
    with pytest.raises(ValueError, match="seed = -1"):
        ATPRates(seed=-1)


def test_flowers_own_loop() -> None:
    strategy = ATPRates(record(**NETWORK))
    result = strategy.start(LocalGrid({i: Device(i) for i in range(3)}), record(rates=np.zeros(2)), num_rounds=4)
    np.testing.assert_allclose(result.arrays["rates"].numpy(), [4.0, 4.0])
