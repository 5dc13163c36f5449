"""Statistics: what clients send, and what becomes of it at a client."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from fedtta.server.evaluation import statistics_shapes
from fedtta.tta import ADAPTERS, Statistics
from fedtta.tta.statistics import (
    DISTRIBUTIONS,
    ON_REQUEST,
    OWN_NEEDS,
    STATISTICS,
    STATISTICS_NEEDS,
    out_of_range,
)
from fedtta.tta.surgical import blocks
from tests.tta.networks import two_head_network


def test_every_field_comes_from_one_statistic_and_every_need_is_asked_for() -> None:
    filled = [name for known in STATISTICS.values() for name in (known.own, known.mean) if name]
    assert sorted([*filled, "clients"]) == sorted(field.name for field in fields(Statistics))
    asked = frozenset().union(*(kind.needs for kind in ADAPTERS.values()))
    assert asked >= STATISTICS_NEEDS
    assert {"descriptor", "dle", "entropy"} == OWN_NEEDS
    assert ON_REQUEST == ("label_prior", "confusion", "block_scores")
    assert DISTRIBUTIONS == ("label_prior", "confusion")


def test_shapes_follow_the_network_and_the_needs() -> None:
    model = two_head_network()
    shapes = statistics_shapes({"personal_head", "confusion"}, model)
    assert {name: shape for name, (shape, _) in shapes.items()} == {
        "descriptor": (6,), "dle": (6,), "entropy_local": (1,), "entropy_global": (1,), "confusion": (4, 4),
    }  # fmt: skip
    assert {dtype for _, dtype in shapes.values()} == {"float64"}
    # two convolutions with their BatchNorms, and the head
    assert statistics_shapes(ON_REQUEST, model)["block_scores"] == ((3,), "float64")


def test_there_is_a_score_for_each_block_that_may_be_adapted() -> None:
    """None for a layer that is frozen, and one for a layer that is in two places."""
    model = two_head_network()
    model.encoder.append(model.encoder[0])
    for count in (3, 2):
        assert len(blocks(model)) == count
        assert statistics_shapes(ON_REQUEST, model)["block_scores"] == ((count,), "float64")
        model.encoder[3].requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("dle", [0.0, 1.0], True),
        ("dle", [0.0, 1.1], False),
        ("dle", [-0.1, 1.0], False),
        ("descriptor", [0.0, 1e300], True),
        ("descriptor", [0.0, np.inf], False),
        ("descriptor", [-np.inf, 0.0], False),
        ("descriptor", [-2.5, 1.0], True),  # a network without a ReLU before the heads
        ("entropy_local", [np.nan], False),
        ("entropy_local", [0.0, 4.6], True),  # up to ln K
        ("entropy_global", [0.0, 4.6], True),
        ("entropy_local", [-0.1], False),
        ("entropy_global", [-0.1], False),
        ("confusion", [[0.5, 0.6]], True),
        ("confusion", [[-0.1, 1.0]], False),
        ("label_prior", [-0.1, 1.1], False),
        ("block_scores", [0.0, 1.0], True),
        ("block_scores", [2.0], False),
        ("block_scores", [-0.1], False),
    ],
)
def test_values_out_of_range_are_named(name: str, value: list[float], fine: bool) -> None:
    assert (out_of_range(name, np.array(value)) == "") is fine
    assert fine or out_of_range(name, np.array(value)).startswith("values from ")


def arrays(seed: int) -> dict[str, np.ndarray]:
    draw, sizes = np.random.default_rng(seed), {"features": 3, "classes": 2, "blocks": 4}
    return {name: draw.random(known.sized(sizes)) for name, known in STATISTICS.items()}


def test_own_values_and_means_fill_their_fields() -> None:
    own, means = arrays(0), arrays(1)
    known = Statistics.combine({name: own[name] for name in own if name not in ON_REQUEST}, means)
    assert known.entropy_local == own["entropy_local"][0]
    assert known.entropy_global == own["entropy_global"][0]
    expected = {"descriptor_local": own["descriptor"], "descriptor_global": means["descriptor"]}
    expected |= {"dle_local": own["dle"], "dle_global": means["dle"], "confusion": means["confusion"]}
    expected |= {"label_prior": means["label_prior"], "block_scores": means["block_scores"]}
    for name, value in expected.items():
        assert np.array_equal(getattr(known, name).numpy(), value), name
    target = Statistics.combine({}, {name: means[name] for name in ON_REQUEST})
    assert set(target.to_arrays()) == set(ON_REQUEST)


def test_arrays_there_and_back() -> None:
    known = replace(Statistics.combine(arrays(0), arrays(1)), clients=4.0)
    again = Statistics.from_arrays(known.to_arrays())
    assert known.to_arrays().keys() == {field.name for field in fields(Statistics)}
    for field in fields(Statistics):
        one, other = getattr(known, field.name), getattr(again, field.name)
        assert type(one) is type(other)
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert Statistics.from_arrays({}) == Statistics()


def test_what_is_missing_is_named() -> None:
    told = (
        "m needs statistics of training data that are not here: dle_global (mean over clients), entropy_local (of this "
        "client); a run's statistics round makes them at clients that train"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        Statistics(dle_local=torch.zeros(2)).require("m", "dle_local", "dle_global", "entropy_local")
