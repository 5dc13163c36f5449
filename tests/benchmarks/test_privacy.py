"""The benchmark of what messages tell: the attack works without protection, and not with it."""

from __future__ import annotations

import pytest

from fedtta.benchmarks.privacy import SETTINGS, measure, modes
from fedtta.server.methods import plan

SMALL = SETTINGS.replace(rounds=1, clients=6, local_epochs=1, methods="fedavg,fedthe,btfl", shifts="original")


@pytest.mark.parametrize(("mode", "low", "high"), [("none", 0.8, 1.0), ("secure", -0.55, 0.55)])
def test_the_class_mix_is_read_from_plain_messages_and_not_from_masked_ones(mode: str, low: float, high: float) -> None:
    found = measure(SMALL.replace(**modes([])[mode]))
    assert found["statistics r"] is not None
    assert low <= found["statistics r"] <= high
    assert found["epsilon"] is None


def test_every_mode_is_a_run_that_can_be_planned() -> None:
    for changes in modes([0.5, 2]).values():
        plan(SETTINGS.replace(**changes))
