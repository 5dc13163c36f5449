"""Work in parts that fit a GPU's memory: a pretended allocator on the CPU counts bytes, and refuses beyond a limit."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedtta.client import cohort
from fedtta.client.device import Device
from fedtta.models import build, memory
from fedtta.models.memory import budget, in_parts, take_share
from fedtta.tta import memo
from fedtta.tta.memo import Readout, Tuning, tune_and_predict
from tests.client.test_cohort import TASK, alone, clients, compare, together, world
from tests.client.tiny import global_arrays, network

GPU = torch.device("cuda", 0)
GIB = 2**30


class Allocator(TorchDispatchMode):
    """Count the bytes of the storages that are alive; more than `limit` raise what CUDA raises."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit, self.now, self.peak = limit, 0, 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.now)
        if self.now > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {self.now} bytes")
        return out

    def _free(self, which: int) -> None:
        self.now -= self._alive.pop(which)


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 8 GiB, of which others have taken half."""
    monkeypatch.setattr(memory, "PLAN", memory.Plan())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (4 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_a_process_plans_with_its_share_of_the_gpu_whatever_is_free() -> None:
    assert budget(GPU) == 8 * GIB
    take_share(0.25)
    assert budget(GPU) == 2 * GIB
    take_share(2)  # two whole GPUs, of which a process uses one
    assert budget(GPU) == 8 * GIB
    take_share(0.25)
    assert budget(torch.device("cpu")) == memory.ON_CPU  # the same on every machine


#: What CUDA raises, in torch and in the libraries that take memory themselves.
ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
)


@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize(
    ("most", "fit", "sizes", "tried"),
    [(4, 9, [4, 4, 2], [4, 4, 2]), (99, 10, [10], [10]), (99, 3, [2, 2, 2, 2, 2], [10, 5, 2, 2, 2, 2, 2])],
)
def test_parts_are_halved_until_they_fit(
    most: int, fit: int, sizes: list[int], tried: list[int], error: Exception, caplog: Any
) -> None:
    begun: list[int] = []

    def work(part: slice) -> list[int]:
        begun.append(len(range(10)[part]))
        if begun[-1] > fit:
            raise error
        return list(range(10))[part]

    with caplog.at_level(logging.WARNING, memory.LOG.name):
        results = in_parts(10, most, work)
    assert [one for part in results for one in part] == list(range(10))
    assert ([len(part) for part in results], begun) == (sizes, tried)
    failed = len(tried) - len(sizes)
    assert budget(GPU) == 8 * GIB // 2**failed  # this process tries no more again
    assert [f"{most} at once" in record.getMessage() for record, most in zip(caplog.records, (5, 2), strict=False)] == [
        True
    ] * failed


def test_what_does_not_fit_alone_and_other_errors_are_raised() -> None:
    def full(part: slice) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory at {part.start}")

    with pytest.raises(torch.OutOfMemoryError, match="at 0"):
        in_parts(5, 4, full)
    assert budget(GPU) == 2 * GIB
    with pytest.raises(ZeroDivisionError):
        in_parts(5, 4, lambda part: 1 / part.start)
    begun: list[int] = []

    def broken(part: slice) -> None:
        begun.append(part.stop)
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")

    with pytest.raises(RuntimeError, match="EXECUTION"):
        in_parts(5, 4, broken)
    assert begun == [4]
    assert in_parts(0, 4, full) == []


# Views of MEMO and FedTHE+


def memo_case(name: str, size: int, count: int) -> tuple[Readout, Tensor, Tensor, Tuning]:
    model = build(name, 10, in_channels=3, image_size=size, seed=0).eval()
    x = torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    return Readout(model, "global"), x, torch.ones(count), Tuning(8, 2, 5e-4, mode="vmap", chunk=count)


@pytest.mark.parametrize(("name", "size"), [("cnn", 32), ("shallow-cnn", 40), ("resnet20-bn", 16)])
def test_the_estimate_of_a_samples_views_bounds_what_they_take(name: str, size: int) -> None:
    readout, x, weight, tuning = memo_case(name, size, 3)
    estimate = 3 * memo.sample_bytes(readout, x, weight, tuning)
    with Allocator() as taken:
        tune_and_predict(readout, x, weight, 0, tuning)
    assert estimate / 2 < taken.peak < estimate


def test_views_for_which_the_memory_does_not_suffice_are_made_in_parts(caplog: Any) -> None:
    readout, x, weight, tuning = memo_case("cnn", 32, 7)
    expected = tune_and_predict(readout, x, weight, 5, tuning)
    with Allocator(3.5 * memo.sample_bytes(readout, x, weight, tuning)):
        found = tune_and_predict(readout, x, weight, 5, tuning)
    assert ["3 at once" in record.getMessage() for record in caplog.records] == [True]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_chunk_of_views_is_a_quarter_of_the_share() -> None:
    class OnGPU(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        is_cuda = property(lambda self: True)
        device = property(lambda self: GPU)

    readout, x, weight, tuning = memo_case("cnn", 32, 2)
    each = memo.sample_bytes(readout, x, weight, tuning)
    for share, expected in ((1.0, 256), (0.25, 8 * GIB // 16 // each), (1e-9, 1)):
        take_share(share)
        assert memo._vmap_chunk(readout, x.as_subclass(OnGPU), weight, tuning) == expected
    assert 1 < 8 * GIB // 16 // each < 256


# Stacked clients

SIZES = ((40, 3, 2),) * 4


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adam", "learning_rate": 1e-3}, {"batch_size": 4}], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_the_estimate_of_a_stacked_client_bounds_what_it_takes(norm: bool, changes: dict[str, Any]) -> None:
    model = network(norm)
    members = [
        one.inner for one in clients(model, world(SIZES), local_epochs=1, personal_epochs=1, augment=True, **changes)
    ]
    requests = [one.request(1, TASK, global_arrays(model), 0.1) for one in clients(model, world(SIZES))]
    estimate = 4 * cohort.client_bytes(members[0], requests[0], 40)
    with Allocator() as taken:
        assert not any(isinstance(one, Exception) for one in cohort.train(members, requests))
    assert estimate / 4 < taken.peak < estimate


@pytest.mark.parametrize(("limited", "expected"), [("budget", [3, 1]), ("allocator", [4, 2, 2]), ("", [4])])
def test_clients_for_which_the_memory_does_not_suffice_come_later(
    limited: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def members() -> list[Any]:
        return clients(network(True), world(SIZES), augment=True, local_epochs=1, personal_epochs=1)

    one_by_one, at_once, arrays = members(), members(), [global_arrays(network(True))] * 4
    theirs, stacks, real, limit = alone(one_by_one, TASK, arrays, 1)[0], list[int](), cohort._train, float("inf")
    if limited == "budget":
        each = cohort.client_bytes(at_once[0].inner, at_once[0].request(1, TASK, arrays[0]), 40)
        monkeypatch.setattr(memory, "ON_CPU", int(3.5 * each / cohort.MEMORY_SHARE))
    if limited == "allocator":
        two = members()[:2]
        with Allocator() as taken:
            together(two, 1, TASK, arrays[:2])
        limit = 1.2 * taken.peak

    def noted(devices: Any, requests: Any) -> Any:
        stacks.append(len(devices))
        return real(devices, requests)

    monkeypatch.setattr(cohort, "_train", noted)
    with Allocator(limit):
        ours = together(at_once, 1, TASK, arrays)
    assert stacks == expected
    for one, other in zip(ours, theirs, strict=True):
        assert not isinstance(one, Exception), one
        compare(one, other, 1e-4)
    for one, other in zip(at_once, one_by_one, strict=True):
        kept, alike = (client.state.load("t", 1) for client in (one, other))
        assert kept.keys() == alike.keys() != set()
        for key in kept:
            np.testing.assert_allclose(kept[key], alike[key], 1e-4, 1e-5)


def test_a_client_that_no_stack_holds_fails_them_all() -> None:
    """The transport says so for each, as for any error of a stack."""
    model = network()
    with Allocator(10_000), pytest.raises(torch.OutOfMemoryError):
        together(clients(model, world(SIZES)), 1, TASK, [global_arrays(model)] * 4)


@pytest.mark.parametrize("error", ERRORS[:2], ids=str)
def test_memory_that_runs_out_while_clients_begin_fails_none_of_them(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = Device.begin, list[int]()

    def begin(self: Device, request: Any) -> Any:
        begun.append(self.partition)
        if len(begun) == 4:
            raise error
        return real(self, request)

    monkeypatch.setattr(Device, "begin", begin)
    model = network()
    found = together(clients(model, world(SIZES), local_epochs=1), 1, TASK, [global_arrays(model)] * 4)
    assert not any(isinstance(one, Exception) for one in found)
    assert begun == [0, 1, 2, 3, 0, 1, 2, 3]
