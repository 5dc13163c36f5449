"""(a) What each adapter costs as a multiple of the bare forward pass, in batches of 1, 32 and 512."""

from __future__ import annotations

from benchmarks.cost import measure, setting_up
from benchmarks.speed.figure import Figure
from tta.registry import ADAPTERS

#: Those that go through the network dozens of times for each sample; not measured in batches of 512.
SLOW = frozenset({"memo", "ttt", "fedthe_plus"})
#: (adapter, batch) → most that it may cost, as a multiple.
TARGETS = {("btfl", 512): 1.15, ("fedthe", 512): 1.5, ("btfl", 1): 2.0, ("fedthe", 1): 4.0}
#: Batch → samples of the stream.
SAMPLES = {1: 64, 32: 256, 512: 2048}


def adapters(quick: bool) -> list[Figure]:
    """Measure all adapters that fit the papers' CNN, those without BatchNorm on it as it is.

    The ratio is of processor time; `ours` and `other` are its milliseconds for a sample.
    """
    found = []
    for batch, samples in SAMPLES.items():
        for slow in (False, True):
            names = [name for name in ADAPTERS if (name in SLOW) == slow]
            if slow and batch > 32:
                continue
            length = (batch if quick else samples) if not slow else min(samples, 2 if quick else 32)
            costs = measure(setting_up("cnn", "", length, batch), 1 if quick else 5, names)
            bare = costs.pop("none")
            found += [
                Figure(
                    f"{name}, batch {batch}",
                    cost.ratio,
                    "ms a sample",
                    cost.processor_milliseconds,
                    bare.processor_milliseconds,
                    "the bare forward pass",
                    TARGETS.get((name, batch)),
                )
                for name, cost in costs.items()
            ]
    return found
