import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedtta.strategies import Median, StatisticsFedAvg
from tests.flower import LocalGrid, record, reply, request


def statistics_reply(examples: int = 1, **arrays: list[float]) -> Message:
    statistics = record(**{name: np.array(value, np.float64) for name, value in arrays.items()})
    content = {"statistics": statistics, "metrics": MetricRecord({"num-examples": examples})}
    return Message(RecordDict(content), reply_to=request())


@pytest.mark.parametrize(("weighting", "expected"), [("uniform", [2.0, 5.0]), ("examples", [1.5, 3.5])])
def test_means_of_statistics(weighting: str, expected: list[float]) -> None:
    # by examples: (3·1 + 1·3)/4 = 1.5 and (3·2 + 1·8)/4 = 3.5
    strategy = StatisticsFedAvg(weighting=weighting)
    means = strategy.aggregate_statistics(
        1, [statistics_reply(3, descriptor=[1, 2]), statistics_reply(1, descriptor=[3, 8])]
    )
    np.testing.assert_allclose(means["descriptor"].numpy(), expected)
    assert means["descriptor"].numpy().dtype == np.float64


def test_replies_without_statistics_count_for_nothing() -> None:
    strategy, without = StatisticsFedAvg(), reply(record(w=np.zeros(1)))
    assert strategy.aggregate_statistics(1, [without]) is None
    means = strategy.aggregate_statistics(1, [without, statistics_reply(1, descriptor=[1.0])])
    assert means is not None
    assert means["descriptor"].numpy() == 1.0


def test_statistics_round_goes_to_everyone_whatever_the_fraction() -> None:
    strategy = StatisticsFedAvg(fraction_train=0.1)
    grid = LocalGrid(dict.fromkeys(range(10), lambda message: None))
    messages = list(strategy.configure_statistics(4, ArrayRecord(), ConfigRecord({}), grid))
    assert [m.metadata.dst_node_id for m in messages] == list(range(10))
    assert {m.metadata.message_type for m in messages} == {"train.statistics"}
    assert messages[0].content["config"]["server-round"] == 4


def test_weightings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"allowed with .* is uniform only"):
        StatisticsFedAvg("examples", aggregator=Median())
    with pytest.raises(ValueError, match="uniform, examples"):
        StatisticsFedAvg(weighting="median")


def test_robust_statistics_keep_distributions() -> None:
    priors = [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.0, 0.0, 1.0]]
    replies = [statistics_reply(dle=[d], label_prior=p) for d, p in zip((0.1, 0.2, 1.0), priors, strict=True)]
    scaled = StatisticsFedAvg(aggregator=Median(), distributions=("label_prior",))
    means = scaled.aggregate_statistics(1, replies)
    assert means["dle"].numpy() == 0.2
    np.testing.assert_allclose(means["label_prior"].numpy(), np.array([0.4, 0.3, 0.2]) / 0.9)
    plain = StatisticsFedAvg(aggregator=Median()).aggregate_statistics(1, replies)
    np.testing.assert_array_equal(plain["label_prior"].numpy(), [0.4, 0.3, 0.2])
    apart = [statistics_reply(label_prior=list(row)) for row in np.eye(3)]
    with pytest.raises(ValueError, match="label_prior: robust aggregation leaves 0 everywhere"):
        scaled.aggregate_statistics(1, apart)
