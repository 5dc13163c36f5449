"""Results on a GPU are the CPU's: adapters, local training, clients, the agent, data and files.

FEDTTA_TEST_DEVICE=cuda runs the same on the machine's GPU, within `devices.TOLERANCES`.
"""

from __future__ import annotations

import pytest
import torch

from fedtta.client.algorithms import ALGORITHMS
from fedtta.data.corruptions import corrupt
from fedtta.tta import ADAPTERS
from tests.gpu.cases import CASES, adapter, contract
from tests.gpu.devices import differences, gpu, on_host


def differences_from_cpu(name: str) -> list[str]:
    """Return how the results of a case differ between GPU and CPU."""
    with gpu() as there:
        found = on_host(CASES[name](there.device))
    return differences(found, on_host(CASES[name](torch.device("cpu"))))


@pytest.mark.parametrize("name", list(CASES))
def test_results_are_those_of_the_cpu(name: str) -> None:
    assert differences_from_cpu(name) == []


def test_every_adapter_and_every_local_algorithm_is_among_them() -> None:
    assert {name.split()[1].partition("-")[0] for name in CASES if name.startswith("adapter ")} == set(ADAPTERS)
    assert {name.split()[1] for name in CASES if name.startswith("training ")} >= set(ALGORITHMS)


@pytest.mark.parametrize("name", ["fedthe", "tent", "cotta"])
def test_samples_on_another_device_than_the_network_are_an_error(name: str) -> None:
    """The check can fail: what is mixed is refused."""
    with gpu() as there:
        made = adapter(contract.Case(name), there.device)
        with pytest.raises(RuntimeError, match=r"same device|same type|should be the same|on cuda:0|on cpu"):
            made.predict(contract.images(4))


def test_differences_are_seen() -> None:
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    one = on_host({"x": corrupt(x, "fog", 3, 1), "n": 3})
    assert differences(one, on_host({"x": x, "n": 3})) == [f"x differs by {abs(one['x'] - x.numpy()).max():.3g}"]
    assert differences(one, on_host({"x": torch.as_tensor(one["x"]), "n": 5})) == ["n differs by 2"]
    flat = {"x": one["x"][0], "n": one["n"]}
    assert differences(one, flat) == ["x: float32(1, 3, 8, 8) instead of float32(3, 8, 8)"]
    assert differences(one, {}) == ["names differ: ['n', 'x']"]
