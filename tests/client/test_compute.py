"""Which processor a device computes on."""

import pytest
import torch

from fedtta.client.algorithms.training import autocast
from fedtta.client.resources import resolve_device
from fedtta.settings import SettingsError


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pretend that so many GPUs are there."""
    count = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return count


@pytest.mark.parametrize(
    ("gpus", "name", "expected"),
    [
        (0, "auto", torch.device("cpu")),
        (0, "cpu", torch.device("cpu")),
        (2, "auto", torch.device("cuda")),
        (2, "cpu", torch.device("cpu")),
        (2, "cuda", torch.device("cuda")),
        (2, "cuda:1", torch.device("cuda", 1)),
    ],
    indirect=["gpus"],
)
def test_names_become_devices(gpus: int, name: str, expected: torch.device) -> None:
    assert resolve_device(name) == expected


@pytest.mark.parametrize(
    ("gpus", "name", "told"),
    [
        (0, "cuda", "device = 'cuda': this process sees 0 GPUs; allowed are auto, cpu"),
        (0, "cuda:0", "device = 'cuda:0': this process sees 0 GPUs; allowed are auto, cpu"),
        (2, "cuda:2", "device = 'cuda:2': this process sees 2 GPUs; allowed are auto, cpu, cuda:0, cuda:1"),
    ],
    indirect=["gpus"],
)
def test_a_gpu_that_is_not_there_is_an_error_that_lists_what_is(gpus: int, name: str, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve_device(name)
    assert str(caught.value) == told


def test_autocast_computes_in_bfloat16_only_when_asked() -> None:
    x = torch.ones(2, 2)
    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with autocast(torch.device("cpu"), enabled):
            assert (x @ x).dtype == dtype
