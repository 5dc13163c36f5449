"""Building devices, and what clients of one process share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedtta.client.node import Node, perform
from fedtta.client.resources import federation_of
from fedtta.client.state import MemoryState
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Train, TrainingTask
from fedtta.settings import Settings, SettingsError, to_json
from tests.client.tiny import made

SETTINGS = Settings(dataset="digits", fraction=0.1, image_size=16, clients=3, device="cpu", partition="iid")


def test_clients_of_one_process_share_data_and_network() -> None:
    one, other = (made(SETTINGS, partition) for partition in (0, 2))
    assert one.federation is other.federation
    assert one.model is other.model
    assert (one.partition, other.partition) == (0, 2)
    assert one.natural is None


def test_state_that_is_not_flushed_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("os.fsync", flushed.append)
    initial = {name: value.numpy().copy() for name, value in made(SETTINGS, 1).model.global_state().items()}
    sent, written = [], []
    for durable in (True, False):
        flushed.clear()
        settings = SETTINGS.replace(state_dir=str(tmp_path / str(durable)), personal_epochs=1)
        about = {"settings": to_json(settings), "run": "r", "task": TrainingTask("cross_entropy")}
        arrays = initial
        for round in (1, 2):
            reply = perform(Train(round=round, arrays=arrays, **about), Node("1", MemoryState(), durable=durable))
            assert isinstance(reply, Trained)
            arrays = reply.arrays
        assert bool(flushed) is durable
        files = sorted((tmp_path / str(durable)).rglob("*.safetensors"))
        sent.append({name: value.tobytes() for name, value in arrays.items()})
        written.append({path.name: path.read_bytes() for path in files})
    assert sent[0] == sent[1]
    assert written[0] == written[1]
    assert len(written[0]) == 2


def test_settings_that_do_not_move_images_do_not_deal_them_again() -> None:
    current = federation_of(SETTINGS)
    assert federation_of(SETTINGS.replace(rounds=3, learning_rate=0.5, methods="btfl", severity=1)) is current
    for changes in ({"seed": 2}, {"clients": 4}, {"fraction": 0.2}, {"partition": "dirichlet", "alpha": 5.0}):
        other = federation_of(SETTINGS.replace(**changes))
        assert other is not current


def test_another_process_would_deal_alike() -> None:
    from fedtta.client.resources import _federation

    current = federation_of(SETTINGS)
    _federation.cache_clear()
    again = federation_of(SETTINGS)
    assert again is not current
    for one, other in zip(current.splits, again.splits, strict=True):
        assert all(np.array_equal(getattr(one, part), getattr(other, part)) for part in ("train", "validation", "test"))


@pytest.mark.parametrize("partition", [-1, 3])
def test_a_partition_that_does_not_exist_is_refused(partition: int) -> None:
    with pytest.raises(SettingsError, match=f"name = '{partition}': allowed are '0' to '2'"):
        made(SETTINGS, partition)


@pytest.mark.usefixtures("_no_gpu")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="device = 'cuda': this process sees 0 GPUs; allowed are auto, cpu"):
        made(SETTINGS.replace(device="cuda"), 0)


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_one_thread_computes() -> None:
    torch.set_num_threads(2)
    made(SETTINGS, 0)
    assert torch.get_num_threads() == 1


def test_the_network_fits_the_data_and_the_options() -> None:
    model = made(SETTINGS.replace(model_options="bias=false;hidden_layers=2"), 0).model
    assert model.num_classes == 10
    assert model.head.bias is not None
    assert not [name for name in model.global_state() if name.startswith("encoder.body") and name.endswith("bias")]
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize("option", ["width=4", "depth=1"])
def test_unknown_model_options_list_what_exists(option: str) -> None:
    with pytest.raises(ValueError, match="hidden_layers"):
        made(SETTINGS.replace(model_options=option), 0)
