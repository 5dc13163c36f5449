"""GPUs of a machine, pretended: which ones a simulation uses, shares of them, and workers that do not fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client.app import app as client_app
from fedtta.settings import Settings, SettingsError
from fedtta.simulation import flower, flower_cli, workers
from fedtta.simulation.gpus import MASK, allocate, chosen_gpus, environment_with, room, spread

Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return a function that pretends so many GPUs, with a mask or without one."""

    def made(count: int, mask: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv(MASK, raising=False)
        if mask is not None:
            monkeypatch.setenv(MASK, mask)

    return made


def nodes(*resources: dict[str, float]) -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": one} for one in resources]


@pytest.mark.parametrize(
    ("count", "mask", "device", "expected"),
    [
        (0, None, "auto", []), (0, "", "auto", []), (2, None, "cpu", []),
        (2, None, "auto", ["0", "1"]), (2, None, "cuda", ["0", "1"]), (2, None, "cuda:1", ["1"]),
        (2, "2,3", "auto", ["2", "3"]), (2, "2,3", "cuda:1", ["3"]), (2, "3,2", "cuda:1", ["2"]),
        (2, "GPU-89-f9, GPU-1b-5a", "cuda", ["GPU-89-f9", "GPU-1b-5a"]), (2, "GPU-89,GPU-1b", "cuda:1", ["GPU-1b"]),
        (1, "2,99,3", "auto", ["2"]),  # CUDA stops at a GPU that is not there
        (1, "MIG-41,MIG-59", "auto", ["MIG-41", "MIG-59"]), (1, "MIG-41,MIG-59", "cuda:1", ["MIG-59"]),  # it shows one
    ],
)  # fmt: skip
def test_an_index_counts_in_the_mask(
    pretend: Pretend, count: int, mask: str | None, device: str, expected: list[str]
) -> None:
    pretend(count, mask)
    assert chosen_gpus(device) == expected


@pytest.mark.parametrize(
    ("count", "mask", "device", "seen"),
    [
        (0, None, "cuda", "0 GPUs; allowed are auto, cpu"),
        (0, "", "cuda:0", "0 GPUs (CUDA_VISIBLE_DEVICES = ''); allowed are auto, cpu"),
        (2, "2,3", "cuda:2", "2 GPUs (CUDA_VISIBLE_DEVICES = '2,3'); allowed are auto, cpu, cuda:0, cuda:1"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    pretend: Pretend, count: int, mask: str | None, device: str, seen: str
) -> None:
    pretend(count, mask)
    with pytest.raises(SettingsError) as caught:
        allocate(Settings(device=device))
    assert str(caught.value) == f"device = {device!r}: this process sees {seen}"


def test_by_default_workers_are_spread_evenly(pretend: Pretend) -> None:
    # by hand: workers of one GPU have equal shares, no two GPUs differ by more than one worker, and all fit
    assert spread(2, 1) == [0.5, 0.5]
    assert spread(2, 4) == [1.0, 1.0]
    assert spread(5, 4) == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert spread(8, 3) == [0.5, 0.5, *[0.3333] * 6]
    for count in range(1, 65):
        assert room(nodes({"CPU": 999.0, "GPU": 1.0}), spread(count, 1)) == count
    pretend(2)
    for device in ("auto", "cuda"):
        found = allocate(Settings(workers=3, device=device))
        assert (found.gpus, found.shares) == (["0", "1"], [1.0, 0.5, 0.5])
        assert (found.settings.device, found.settings.num_gpus) == ("cuda", 0.5)  # none may compute elsewhere
    assert allocate(Settings(workers=2, num_gpus=0.25)).shares == [0.25, 0.25]
    one = allocate(Settings(workers=2, device="cuda:1"))
    assert (one.gpus, one.shares, one.settings.device) == (["1"], [0.5, 0.5], "cuda")
    alone = Settings(workers=3, device="cpu")
    assert (allocate(alone).settings, allocate(alone).shares) == (alone, [0.0] * 3)


@pytest.mark.parametrize(
    ("count", "changes", "text"),
    [
        (0, {"num_gpus": 0.5}, "num-gpus = 0.5: with device = 'auto' workers have 0 GPUs here; allowed is 0"),
        (1, {"num_gpus": 0.5, "device": "cpu"}, "device = 'cpu' workers have 0 GPUs here; allowed is 0"),
        (4, {"num_gpus": 1.5}, "num-gpus = 1.5: allowed is at most 1, or a whole number"),
        (1, {"num_gpus": 0.00009}, "num-gpus = 9e-05: allowed is 0, or at least 0.0001"),
        (1, {"num_gpus": 0.5, "workers": 3}, "workers = 3, num-gpus = 0.5: asked are 3 CPUs and 1.5 GPUs; Ray has 3 "
         "CPUs and 1 GPUs on 1 nodes; allowed with this share are at most 2 workers"),
        (2, {"num_gpus": 0.6, "workers": 3}, "asked are 3 CPUs and 1.8 GPUs; .* 2 GPUs .* at most 2 workers"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_the_numbers(
    pretend: Pretend, count: int, changes: dict[str, Any], text: str
) -> None:
    pretend(count)
    with pytest.raises(SettingsError, match=text):
        allocate(Settings(**changes))


def test_a_ray_that_runs_is_asked_what_it_has(pretend: Pretend) -> None:
    pretend(4)
    assert allocate(Settings(workers=2), nodes({"CPU": 2.0, "GPU": 1.0})).shares == [0.5, 0.5]
    with pytest.raises(SettingsError, match="sees 4 GPUs, and the Ray that was started before has 0; allowed is cpu"):
        allocate(Settings(workers=2), nodes({"CPU": 2.0}))
    with pytest.raises(SettingsError, match="device = 'cuda:1': a Ray that was started before chooses the GPUs"):
        allocate(Settings(workers=2, device="cuda:1"), nodes({"CPU": 2.0, "GPU": 4.0}))
    with pytest.raises(SettingsError, match=r"asked are 3 CPUs and 0 GPUs; Ray has 2 CPUs .* at most 2 workers"):
        allocate(Settings(workers=3, device="cpu"), nodes({"CPU": 2.0}))
    pretend(0)
    assert allocate(Settings(workers=2), nodes({"CPU": 2.0, "GPU": 1.0})).shares == [0.0, 0.0]


def test_room_is_counted_node_by_node() -> None:
    there = nodes({"CPU": 8.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 4.0}, {})
    there.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    # by hand: CPUs; halves; two of 0.4 in a GPU; one of 0.6; two GPUs for one worker; as many as CPUs
    expected = {0.0: 14, 0.5: 4 + 2, 0.4: 4 + 2, 0.6: 2 + 1, 2.0: 1, 0.1: 8 + 2}
    assert {share: room(there, [share] * 64) for share in expected} == expected
    assert room(nodes({"CPU": 9.0, "GPU": 1.0}), [1 / 6] * 7) == 6  # Ray rounds 0.16667 down
    assert room(nodes({"CPU": 9.0, "GPU": 3.0}), [0.5, 0.5, *[0.3333] * 6]) == 8


def test_the_environment_is_as_before_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASK, "2,3")
    monkeypatch.delenv("FEDTTA_NEW", raising=False)

    def fail() -> None:
        assert (os.environ[MASK], os.environ["FEDTTA_NEW"]) == ("3", "1")
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"), environment_with({MASK: "3", "FEDTTA_NEW": "1"}):
        fail()
    assert (os.environ[MASK], "FEDTTA_NEW" in os.environ) == ("2,3", False)


# What starts Ray gets the mask and the numbers


def test_ray_starts_with_the_chosen_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def init(**options: Any) -> None:
        seen.append((os.environ.get(MASK), options["num_cpus"], options["num_gpus"]))

    fake = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None)
    monkeypatch.setattr(workers, "ray", fake)
    monkeypatch.setenv(MASK, "2,3")
    for gpus in (["3"], []):
        with workers._ray(2, gpus):
            assert os.environ[MASK] == "2,3"  # this process goes on as before
    assert seen == [("3", 2, 1), ("2,3", 2, 0)]


def test_each_worker_starts_in_the_bundle_of_its_share(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(2)
    started, kept = list[dict[str, Any]](), list[Any]()
    worker = SimpleNamespace(remote=lambda *about: None)
    kind = SimpleNamespace(options=lambda **options: [started.append(options), worker][1])
    monkeypatch.setattr(workers, "ray", SimpleNamespace(remote=lambda made: kind, kill=lambda one: None))
    monkeypatch.setattr(workers, "running", lambda: None)
    monkeypatch.setattr(workers, "_ray", lambda count, gpus: nullcontext(kept.append((count, gpus))))
    monkeypatch.setattr(workers, "reserved", lambda shares, name: nullcontext(kept.append(shares)))
    monkeypatch.setattr(workers, "RayTransport", lambda *about: None)
    with workers.ray_transport(Settings(workers=3)):
        pass
    assert kept == [(3, ["0", "1"]), [1.0, 0.5, 0.5]]
    places = [(one["num_gpus"], one["scheduling_strategy"].placement_group_bundle_index) for one in started]
    assert places == [(1.0, 0), (0.5, 1), (0.5, 2)]


def test_flowers_simulation_gets_the_chosen_gpus_or_is_not_started(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(3, "2,3,5")
    monkeypatch.setattr(flower, "running", lambda: None)
    seen: list[Any] = []

    def run_simulation(backend_config: dict[str, Any], **more: Any) -> None:
        resources, started = backend_config["client_resources"], backend_config["init_args"]
        seen.append((os.environ[MASK], resources["num_gpus"], started["num_cpus"], started["num_gpus"]))

    monkeypatch.setattr(flower, "run_simulation", run_simulation)
    for settings in (Settings(workers=2, device="cuda:1"), Settings(workers=4)):
        flower.run_on_flower(settings, tmp_path, [], [], client_app)
    assert seen == [("3", 0.5, 2, 1), ("2,3,5", 0.5, 4, 3)]  # all have the smallest share
    assert os.environ[MASK] == "2,3,5"
    with pytest.raises(SettingsError, match="at most 3 workers"):
        flower.run_on_flower(Settings(workers=4, num_gpus=0.6), tmp_path, [], [], client_app)
    assert len(seen) == 2


def federation(submission: flower_cli.Submission) -> dict[str, str]:
    return dict(word.split("=") for word in submission.federation().split())


def test_flowers_cli_gets_the_chosen_gpus(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(2, "2,3")
    submission = flower_cli.parse(["--cpus", "3", "--set", "device=cuda:1"])
    assert submission.gpus == ["3"]
    assert {key: submission.config[key] for key in ("device", "num-gpus")} == {"device": "cuda", "num-gpus": 0.3333}
    assert federation(submission)["init-args-num-gpus"] == "1"
    monkeypatch.setattr(flower_cli, "superlink", lambda home: environment_with({"FEDTTA_SEEN": os.environ[MASK]}))
    monkeypatch.setattr(flower_cli, "run_app", lambda *_, **more: seen.append(os.environ["FEDTTA_SEEN"]))
    seen: list[str] = []
    flower_cli.run(submission)
    assert (seen, os.environ[MASK]) == (["3"], "2,3")
    assert flower_cli.parse(["--cpus", "2"]).config["device"] == "cuda"  # `auto` would turn to the CPU without a word
    with pytest.raises(SettingsError, match="at most 2 workers"):
        flower_cli.parse(["--cpus", "3", "--set", "num-gpus=0.6"])


@pytest.mark.parametrize("cpus", [1, 2, 3, 5, 10, 20, 41])
def test_flowers_cli_has_room_for_all_in_its_32_bits(pretend: Pretend, cpus: int) -> None:
    pretend(1)
    share = np.float32(federation(flower_cli.parse(["--cpus", str(cpus)]))["client-resources-num-gpus"])
    assert int(1 / float(share)) == cpus  # as Flower counts them


def test_without_a_gpu_flowers_cli_changes_nothing(pretend: Pretend) -> None:
    pretend(0)
    submission = flower_cli.parse([])
    assert (submission.gpus, "device" in submission.config, "num-gpus" in submission.config) == ([], False, False)
    assert {federation(submission)[f"{key}-num-gpus"] for key in ("client-resources", "init-args")} <= {"0", "0.0"}
    with pytest.raises(SettingsError, match="device = 'cuda': this process sees 0 GPUs"):
        flower_cli.parse(["--set", "device=cuda"])
