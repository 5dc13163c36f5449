import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from strategies import StatisticsFedAvg
from tests.flower import LocalGrid, record, reply, request


def statistics_reply(descriptor: list[float], examples: int, with_model: bool = False) -> Message:
    content = RecordDict(
        {
            "statistics": record(descriptor=np.array(descriptor, np.float64)),
            "metrics": MetricRecord({"num-examples": examples}),
        }
    )
    if with_model:
        content["arrays"] = record(w=np.full(2, examples, np.float32))
    return Message(content, reply_to=request())


@pytest.mark.parametrize(("weighting", "expected"), [("uniform", [2.0, 5.0]), ("examples", [1.5, 3.5])])
def test_means_of_statistics(weighting: str, expected: list[float]) -> None:
    # by examples: (3·1 + 1·3)/4 = 1.5 and (3·2 + 1·8)/4 = 3.5
    strategy = StatisticsFedAvg(weighting=weighting)
    means = strategy.aggregate_statistics(1, [statistics_reply([1, 2], 3), statistics_reply([3, 8], 1)])
    np.testing.assert_allclose(means["descriptor"].numpy(), expected)
    assert means["descriptor"].numpy().dtype == np.float64
    assert strategy.statistics is means


def test_training_is_fedavg_with_and_without_statistics() -> None:
    draw = np.random.default_rng(0)
    models = [draw.normal(size=(4, 3)).astype(np.float32) for _ in range(3)]
    plain, _ = FedAvg().aggregate_train(1, [reply(record(w=m), n) for m, n in zip(models, (5, 1, 2), strict=True)])
    replies = [reply(record(w=m), n) for m, n in zip(models, (5, 1, 2), strict=True)]
    for index, message in enumerate(replies):
        message.content["statistics"] = record(descriptor=np.array([float(index)]))
    strategy = StatisticsFedAvg()
    ours, metrics = strategy.aggregate_train(1, replies)
    np.testing.assert_array_equal(ours["w"].numpy(), plain["w"].numpy())
    assert metrics is not None
    np.testing.assert_allclose(strategy.statistics["descriptor"].numpy(), [1.0])
    assert all("statistics" in message.content for message in replies), "the replies are left whole"


def test_no_statistics_leave_the_last_ones() -> None:
    strategy = StatisticsFedAvg()
    first = strategy.aggregate_statistics(1, [statistics_reply([1.0], 1)])
    assert strategy.aggregate_statistics(2, [reply(record(w=np.zeros(1)))]) is None
    assert strategy.statistics is first


def test_statistics_round_goes_to_everyone_whatever_the_fraction() -> None:
    strategy = StatisticsFedAvg(fraction_train=0.1)
    grid = LocalGrid(dict.fromkeys(range(10), lambda message: None))
    messages = list(strategy.configure_statistics(4, ArrayRecord(), ConfigRecord({}), grid))
    assert [m.metadata.dst_node_id for m in messages] == list(range(10))
    assert {m.metadata.message_type for m in messages} == {"train.statistics"}
    assert messages[0].content["config"]["server-round"] == 4


def test_unknown_weighting() -> None:
    with pytest.raises(ValueError, match="uniform, examples"):
        StatisticsFedAvg(weighting="median")
