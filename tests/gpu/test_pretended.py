"""The pretended GPU itself: what it refuses, what it counts as waiting, and that it is gone afterwards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.gpu.pretended import CUDA, PretendedGPU

HOST = torch.arange(3.0)


def normalized(images: Tensor) -> Tensor:
    return nn.functional.batch_norm(images, None, None, training=True)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + HOST,
        lambda x: x.clone().copy_(x).mul_(HOST),
        lambda x: HOST.clone().add_(x),
        lambda x: torch.cat([x, HOST]),
        lambda x: torch.stack([x[0], torch.tensor(1.0)]),
        lambda x: torch.tensor(0.0).add_(x[0]),
        lambda x: HOST[x.long()],
        lambda x: x.scatter(0, torch.tensor([1]), 2.0),
        lambda x: torch.where(HOST > 0, x, x),
        lambda x: nn.Linear(3, 2)(x),
        lambda x: vmap(lambda row: row + HOST[0:1])(x[:, None]),
        lambda x: vmap(lambda row: row * torch.ones(1))(x[:, None]),
        lambda x: grad(lambda y: (y * HOST).sum())(x),
        lambda x: torch.rand(3, generator=torch.Generator(), device=CUDA),
        lambda x: x.uniform_(generator=torch.Generator()),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: torch.from_numpy(np.ones(3)).to(x) + np.ones(3),
        lambda x: x.pin_memory(),
        lambda x: vmap(normalized)(x.expand(2, 4, 5, 5, 3).contiguous().movedim(-1, 2)),
        lambda x: vmap(grad(lambda y: normalized(y).sum()))(x.expand(2, 4, 5, 5, 3).contiguous().movedim(-1, 2)),
    ],
)
def test_what_cuda_refuses_is_refused(work: Callable[[Tensor], object]) -> None:
    with PretendedGPU() as gpu:
        x = torch.arange(3.0).to(gpu.device)
        with pytest.raises((RuntimeError, TypeError), match="cuda"):
            work(x)


@pytest.mark.parametrize(
    ("waits", "work"),
    [
        (0, lambda x: x + 1 + torch.tensor(2.0)),
        (0, lambda x: x.masked_fill(x > 1, 0.0)),
        (0, lambda x: torch.zeros(3, device=x.device) + x.new_ones(3) + torch.zeros_like(x)),
        (0, lambda x: x[torch.arange(2, device=x.device)]),
        (0, lambda x: x.index_put((x > 1,), torch.tensor(0.0))),
        (0, lambda x: nn.functional.one_hot(x.long(), 3).argmax(1)),
        (0, lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True)),
        (1, lambda x: torch.ones(3).pin_memory().to(x.device)),
        (1, lambda x: torch.ones(3).to(x.device, non_blocking=True)),
        (1, lambda x: torch.tensor([1.0], device=x.device)),
        (1, lambda x: x.new_tensor([1.0])),
        (1, lambda x: x.copy_(torch.ones(3))),
        (1, lambda x: x.__setitem__(0, torch.tensor(1.0))),
        (1, lambda x: x[torch.arange(2)]),
        (1, lambda x: x.cpu()),
        (1, lambda x: x.numpy(force=True)),
        (1, lambda x: x.tolist()),
        (1, lambda x: x[0].item()),
        (1, lambda x: bool((x > 0).all())),
        (1, lambda x: x[: int(x[1])]),
        (1, lambda x: torch.nonzero(x)),
        (1, lambda x: x[x > 1]),
        (1, lambda x: x.masked_select(x > 1)),
        (1, lambda x: torch.equal(x, x)),
        (1, lambda x: x.unique()),
        (2, lambda x: torch.bincount(x.long())),
        (1, lambda x: torch.cuda.synchronize()),
        (1, lambda x: torch.cuda.current_stream().synchronize()),
    ],
)
def test_waits_are_counted(waits: int, work: Callable[[Tensor], object]) -> None:
    with PretendedGPU() as gpu:
        x = torch.arange(3.0).to(gpu.device)
        gpu.waits.clear()
        work(x)
        assert gpu.waits.total() == waits
        assert all(place.startswith("tests/gpu/test_pretended.py:") for place in gpu.waits)


def test_a_copy_that_does_not_block_has_no_values_before_something_waits() -> None:
    with PretendedGPU() as gpu:
        x = torch.arange(3.0).to(gpu.device)
        late, number = x.to("cpu", non_blocking=True), x.long().to("cpu", non_blocking=True)
        assert late.isnan().all()
        assert number.tolist() == [1, 1, 1]
        event = torch.cuda.Event()
        event.synchronize()
        assert late.tolist() == number.tolist() == [0, 1, 2]


def test_values_gradients_and_copies_are_those_of_the_cpu() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    twin, x = copy.deepcopy(network), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
        network(x).square().sum().backward()
        weights = {name: value.detach() for name, value in network.named_parameters()}
        network.eval()
        each = vmap(grad(lambda w, row: functional_call(network, w, (row[None],)).sum()), (None, 0))(weights, x)
        return [*(value.grad for value in network.parameters()), *each.values(), *network.buffers()]  # type: ignore[misc]

    expected = gradients(twin, x)
    with PretendedGPU() as gpu:
        network = copy.deepcopy(network.to(gpu.device))
        assert all(isinstance(value, nn.Parameter) and value.is_cuda for value in network.parameters())
        found = gradients(network, x.to(gpu.device))
        assert {value.device for value in found} == {CUDA}
        inside = []
        vmap(lambda row: inside.append((row.device, row.is_cuda, row.is_cpu)) or row)(x.to(gpu.device))
        assert inside == [(CUDA, True, False)]
        found = [value.cpu() for value in found]
    assert all(map(torch.equal, found, expected))


def test_threads_see_it_and_it_goes() -> None:
    seen: list[object] = []
    with PretendedGPU() as gpu:
        x = torch.ones(2, device="cuda")
        thread = threading.Thread(target=lambda: seen.append((torch.ones(2).to("cuda") + x).device))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="there is a pretended GPU already"):
            PretendedGPU().__enter__()
        assert torch.cuda.is_available()
        assert gpu.waits.total() == 1
    assert seen == [CUDA]
    assert "Pretended" in repr(x)
    with pytest.raises(RuntimeError, match="has gone"):
        x + 1
    assert torch.ones(2).device.type == "cpu"
