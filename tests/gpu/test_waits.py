"""How often the host waits for the device: upper bounds by name.

A wait costs a GPU more than most of what these methods compute, and stops it while the host goes on. The counts are
those of the product's code; a failure says where they are. `pytest tests/gpu/test_waits.py -s` prints them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from fedtta.client.agent.live import Live
from fedtta.client.algorithms import ALGORITHMS
from fedtta.client.config import Limits
from fedtta.models import accelerator
from fedtta.tta import ADAPTERS
from fedtta.tta.btfl import READINGS
from tests.client import tiny
from tests.gpu.cases import adapter, contract, local_context, served
from tests.gpu.devices import gpu, product_waits

#: What is done → waits at most: the second batch of an adapter with its default options, a step of training, a request
#: to the agent.
BOUNDS: dict[str, float] = {
    "none": 1, "personal": 2, "fixed_mix": 2, "fedrod": 2, "knn_per": 2, "em": 2, "bbse": 2,
    "fedthe": 2, "btfl": 2, "memo": 2, "fedthe_plus": 3, "ttt": 2, "t3a": 2, "tsa": 7,
    "atp": 2, "surgical": 2, "shot": 2, "fedicon": 3, "bn_adapt": 2, "tent": 2, "eata": 3,
    "cotta": 20, "rotta": 2, "roid": 3, "bbn": 8, "auto": 12,
    "step of fedavg": 0, "step of supervised_contrastive": 4, "step of self_contrastive": 4,
    "request of one image": 6,
}  # fmt: skip
Work = Callable[[torch.device], Callable[[], object]]


def batch(name: str, device: torch.device, **options: object) -> Callable[[], object]:
    """An adapter that has seen one batch, and its next one."""
    made, x = adapter(contract.Case(name), device, **options), contract.images(8, seed=2).to(device)
    made.predict(contract.images(8).to(device))
    return lambda: made.predict(x)


def epoch(name: str, device: torch.device, count: int) -> Callable[[], object]:
    """An epoch of local training on some images."""
    context = local_context(device, tiny.network(norm=True).to(device).eval(), {}, count=count, local_epochs=1)
    return lambda: ALGORITHMS[name].train(context)


def request(device: torch.device) -> Callable[[], object]:
    """A guarded model that has answered one request of one image, and the next."""
    accelerator._first_stream.cache_clear()
    live, pixels = Live(served(device, "btfl"), Limits(), print), tiny.images(2).pixels.astype(np.float32) / 255
    live.predict(pixels[:1])
    return lambda: live.predict(pixels[1:])


def waits(work: Work) -> Counter[str]:
    """Return the waits of some work by place."""
    with gpu() as there:
        call = work(there.device)
        there.waits.clear()
        call()
        return product_waits(there.waits)


def counted(name: str) -> Counter[str]:
    """Return the waits of what a bound is for; those of a step are the difference that two more steps make, halved."""
    if name.startswith("step of "):
        one = partial(epoch, name.removeprefix("step of "))
        more, fewer = (waits(partial(one, count=4 * steps)) for steps in (4, 2))
        return Counter({place: (more[place] - fewer[place]) / 2 for place in more})  # type: ignore[misc]
    return waits(request if name == "request of one image" else partial(batch, name))


@pytest.mark.parametrize("name", list(BOUNDS))
def test_the_host_waits_at_most_so_often(name: str) -> None:
    found = counted(name)
    places = ", ".join(f"{place} {count:g}" for place, count in found.most_common())
    print(f"{name}: {found.total():g} waits, at most {BOUNDS[name]}: {places}")
    assert found.total() <= BOUNDS[name], places


@pytest.mark.parametrize(
    "reading",
    [
        {"reading": "published", "leave_one_out": 3},
        *({name: value} for name, value in vars(READINGS["published"]).items() if value is not None),
    ],
    ids=str,
)
def test_no_reading_of_btfl_waits_more_often(reading: dict[str, object]) -> None:
    found = waits(partial(batch, "btfl", **reading))
    assert found.total() <= BOUNDS["btfl"], found


def test_every_adapter_has_a_bound() -> None:
    assert set(ADAPTERS) <= set(BOUNDS)
