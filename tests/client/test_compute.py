"""Which processor a device computes on, and how."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedtta.client import device, node, resources
from fedtta.client.agent import local
from fedtta.client.algorithms.training import autocast
from fedtta.client.config import AgentConfig
from fedtta.client.device import SLOW_BFLOAT16
from fedtta.client.resources import DETERMINISTIC, Switches, has_bfloat16, resolve_device, set_up_torch
from fedtta.messages.requests import AdapterRow
from fedtta.models import memory
from fedtta.settings import Settings, SettingsError
from tests.client.tiny import device as tiny_device
from tests.client.tiny import made


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


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no list of the processor's instructions")
def test_bfloat16_is_found_by_the_processors_own_list_of_instructions() -> None:
    lines = [line.split(":")[1].split() for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    words = {word for line in lines for word in line}
    assert has_bfloat16(torch.device("cpu")) == bool(words & {"avx512bw", "avx_ne_convert", "bf16"})


@pytest.mark.parametrize("native", [False, True])
def test_a_gpu_that_computes_bfloat16_in_software_does_not_count(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert has_bfloat16(torch.device("cuda")) == native


@pytest.mark.parametrize(
    ("on", "native", "rounds", "told"),
    [(True, False, 1, True), (True, True, 1, False), (False, False, 1, False), (True, False, 0, False)],
)
def test_a_client_that_trains_says_that_autocast_is_slow_on_its_processor(
    monkeypatch: pytest.MonkeyPatch, on: bool, native: bool, rounds: int, told: bool
) -> None:
    monkeypatch.setattr(device, "has_bfloat16", lambda _: native)
    notes = tiny_device(autocast=on, rounds=rounds).describe()["note"].split("; ")
    assert (SLOW_BFLOAT16 in notes) == told


def test_autocast_computes_in_bfloat16_only_when_asked() -> None:
    x = torch.ones(2, 2)
    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with autocast(torch.device("cpu"), enabled):
            assert (x @ x).dtype == dtype


# Equal bits ---------------------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


@pytest.fixture
def _switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what `set_up_torch` sets."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is as before afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(memory, "PLAN", memory.Plan())
    before = Switches.now()
    yield
    resources._before.clear()
    before.set()


@pytest.mark.usefixtures("_switches")
def test_on_a_cpu_one_thread_is_all_that_is_set() -> None:
    torch.set_num_threads(2)
    before = Switches.now()
    set_up_torch(torch.device("cpu"), deterministic=True, share=0.25)
    assert torch.get_num_threads() == 1
    assert Switches.now() == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert memory.PLAN.share == 1.0


@pytest.mark.usefixtures("_switches")
def test_on_a_gpu_equal_bits_are_switched_on_and_off_by_request() -> None:
    torch.backends.cudnn.benchmark = True  # as a program around this one might do
    torch.backends.cuda.matmul.allow_tf32 = True
    before = Switches.now()
    torch.set_num_threads(2)
    for deterministic in (False, True, True, False, False, True):
        set_up_torch(GPU, deterministic)
        assert torch.get_num_threads() == 1
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # also for a later run in this process
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic is deterministic
        assert (torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32) == (not deterministic,) * 2
        assert torch.backends.cudnn.allow_tf32 is not deterministic  # torch's default
        assert Switches.now() == (DETERMINISTIC if deterministic else before)


@pytest.mark.usefixtures("_switches")
def test_what_torch_does_without_it() -> None:
    """As docs/design/determinism.md says: convolutions in TF32, matrix products not."""
    assert Switches.now()._asdict() == {
        "debug_mode": 0, "cudnn_deterministic": False, "cudnn_benchmark": False,
        "cudnn_tf32": True, "matmul_tf32": False,
    }  # fmt: skip


@pytest.mark.usefixtures("_switches")
def test_a_workspace_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_up_torch(GPU, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_whatever_runs_a_client_sets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All transports make a device for a request; an agent predicts before it has one."""
    seen: list[tuple] = []
    for module in (node, local):
        monkeypatch.setattr(module, "resolve_device", lambda _: GPU)
        monkeypatch.setattr(module, "set_up_torch", lambda *given: seen.append(given))
    small = Settings(fraction=0.1, image_size=16, clients=3, device="cpu")
    made(small.replace(deterministic=True, num_gpus=0.25), 0)
    made(small, 0)
    local.Local(AgentConfig(name="0", state_dir=str(tmp_path)), AdapterRow("none", "none"), print)
    assert seen == [(GPU, True, 0.25), (GPU, False, 1.0), (GPU,)]


def test_it_is_set_in_one_place() -> None:
    root, names = Path(resources.__file__).parent.parent, set()
    words = ("set_num_threads", "set_deterministic_debug_mode", "use_deterministic", "allow_tf32", "CUBLAS_WORKSPACE")
    for package in ("client", "data", "messages", "models", "server", "settings", "simulation", "strategies", "tta"):
        for path in (root / package).rglob("*.py"):
            names |= {path.name for word in words if word in path.read_text()}
    assert names == {"resources.py"}
