"""A simulation on a Ray cluster: addresses and resources, and a real cluster of three nodes, one of which is killed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError

from fedtta.client.state import DirectoryState
from fedtta.messages.record import Record
from fedtta.settings import Settings, SettingsError
from fedtta.simulation import cluster as cluster_module
from fedtta.simulation import simulate, workers
from fedtta.simulation.cluster import Keeper, KeptState, connected, gpu_share
from fedtta.simulation.engine import cluster_address, engine
from fedtta.simulation.workers import RayTransport, Worker
from tests.server.test_run import assert_same_results, run

PATIENCE = 300.0
SETTINGS = Settings(
    dataset="npz", dataset_options="path=images.npz", clients=3, partition="iid", rounds=3, local_epochs=1,
    image_size=16, methods="fedavg,personal,fedthe", shifts="original", learning_rate=0.1, device="cpu", workers=2,
    node_timeout=PATIENCE, round_timeout=PATIENCE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "variable", "address"),
    [
        ("", "", ""), ("local", "10.0.0.1:6379", ""), ("", "10.0.0.1:6379", "10.0.0.1:6379"), ("", "local", ""),
        ("auto", "", "auto"), ("auto", "ray://head:10001", "ray://head:10001"),
        ("[::1]:6379", "10.0.0.1:6379", "[::1]:6379"),
    ],
)  # fmt: skip
def test_the_setting_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, setting: str, variable: str, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    settings = Settings(ray_address=setting, device="cpu")
    assert cluster_address(settings) == address
    assert engine(settings) == "ray"


def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("head", "http://head:8265", "ray://head", "head:port", "a b:1"):
        with pytest.raises(SettingsError, match=f"ray-address = '{wrong}': allowed are auto, local, HOST:PORT"):
            Settings(ray_address=wrong)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(SettingsError, match=r"environment variable RAY_ADDRESS.*'http://head:8265'"):
        cluster_address(Settings())
    with pytest.raises(SettingsError, match="engine = 'ray'"):
        engine(Settings(ray_address="head:6379", engine="vectorised"))


@pytest.mark.parametrize("kind", ["", "ray://"])
def test_where_nothing_answers_is_said_at_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken, and not listening
        address = f"{kind}127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SettingsError, match=f"ray-address = '{address}'.*refused"), connected(address):
            pass


def test_gpus_of_a_cluster_are_used_if_and_only_if_a_share_is_asked_for() -> None:
    assert gpu_share(Settings()) == ("cpu", 0.0)  # whatever the driver has
    assert gpu_share(Settings(num_gpus=0.25)) == gpu_share(Settings(num_gpus=0.25, device="cuda")) == ("cuda", 0.25)
    for wrong in ({"device": "cuda"}, {"device": "cuda:1"}, {"device": "cpu", "num_gpus": 1.0}, {"num_gpus": 1.5}):
        with pytest.raises(SettingsError, match="allowed"):
            gpu_share(Settings(**wrong))


def test_kept_state_is_in_the_files_of_a_run_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(str(tmp_path))

    def call(method: Any) -> Any:
        def remote(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except ValueError as error:
                return RayTaskError("load", "", error)

        return SimpleNamespace(remote=remote)

    def get(result: Any) -> Any:
        if isinstance(result, RayTaskError):
            raise result
        return result

    handle = SimpleNamespace(**{name: call(getattr(keeper, name)) for name in ("load", "save", "tags")})
    exceptions = SimpleNamespace(RayTaskError=RayTaskError)
    monkeypatch.setattr(
        cluster_module, "ray", SimpleNamespace(get_actor={"k": handle}.get, get=get, exceptions=exceptions)
    )
    kept, other = KeptState("k", "run", "3"), KeptState("k", "run", "4")
    local = DirectoryState(tmp_path, "run", "3")
    value = np.arange(24.0).reshape(1, 2, 3, 4).transpose(0, 3, 1, 2)  # as of a network in channels-last memory
    for round in (1, 2, 3):
        kept.save("head", round, {"w": value * round}, keep=[1])
    loaded, stored = kept.load("head", 2), local.load("head", 2)
    assert loaded is not None
    assert stored is not None
    assert np.array_equal(loaded["w"], value * 2)
    assert (loaded["w"].strides, loaded["w"].flags.writeable) == (stored["w"].strides, True)
    assert kept.tags() == local.tags() == {"head": [1, 2, 3]}
    assert (kept.load("head", 0), other.load("head", 3), other.tags()) == (None, None, {})
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="head@1") as caught:
        kept.load("head", 3)
    assert not isinstance(caught.value, RayTaskError)  # the client's answer says it in one line


# A real cluster: the driver on a head without CPUs; node A has the images, B has not


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    y = np.arange(150) % 3
    x = draw.integers(0, 80, (150, 16, 16)) + 80 * y[:, None, None]
    np.savez(folder / "images.npz", x=x.astype(np.uint8), y=y)
    return folder


@pytest.fixture(scope="module")
def cluster(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Nodes that know nothing of this checkout: it is neither their folder nor on their path."""
    fast = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 5}
    # nor needless processes: the autoscaler's, those that read logs, and workers without our environment
    bare = {"include_log_monitor": False}
    config = {**fast, "prestart_worker_first_driver": False}
    head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, "_system_config": config, **bare}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        patch.delenv("PYTHONPATH", raising=False)
        patch.delenv("FEDTTA_DATA", raising=False)
        for name in ("ray._private.utils.write_ray_address", "ray._common.utils.reset_ray_address"):
            patch.setattr(name, lambda *_: None)  # other programs of this machine would take the cluster for theirs
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            b = made.add_node(num_cpus=1, wait=False, **bare)
            patch.setenv("FEDTTA_DATA", str(images))
            a = made.add_node(num_cpus=2, wait=False, **bare)
            made.wait_for_nodes(PATIENCE)
            yield SimpleNamespace(made=made, a=a, b=b, address=made.address)
        finally:
            made.shutdown()


def interrupted(mark: Path, node: str) -> type[Worker]:
    """Return a worker that hangs on one node in the second round; defined here, it travels by value."""

    class Interrupted(Worker):
        def answer(self, record: Record, number: int) -> Any:
            here = ray.get_runtime_context().get_node_id()
            if record.kind == "train" and record.values["round"] == 2 and here == node:
                from fedtta.client import node as module

                mark.write_text(str(module.__file__))
                time.sleep(PATIENCE)
            return super().answer(record, number)

    return Interrupted


@pytest.mark.slow
def test_a_node_that_is_killed_costs_nothing_but_time(
    cluster: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private state, images, code and what was being computed survive: the bits are those of one process."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("FEDTTA_DATA", str(images))
    mark, made, facts = tmp_path / "mark", list[RayTransport](), dict[str, Any]()
    monkeypatch.setattr(workers, "Worker", interrupted(mark, cluster.b.node_id))

    class Seen(RayTransport):
        def __init__(self, *about: Any) -> None:
            super().__init__(*about)
            made.append(self)
            facts["before"] = settled()
            facts["images"] = ray.experimental.get_object_locations([self.stored_images])

    def settled() -> dict[str, str]:
        """Wait until all workers and the keeper are ready; return name → node of all actors that live."""
        end, live = time.monotonic() + PATIENCE, dict[str, str]()
        while made[0]._opening:
            list(made[0]._finished(1.0))
        while "fedtta-r-keeper" not in live and time.monotonic() < end:
            actors = ray._private.state.actors().values()
            live = {one["Name"]: one["Address"]["NodeID"] for one in actors if one["State"] == "ALIVE"}
            time.sleep(0.1)
        return live

    def kill() -> None:
        end = time.monotonic() + PATIENCE
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.1)
        cluster.made.remove_node(cluster.b, allow_graceful=False)

    def watch(event: Any) -> None:
        if event["event"] in ("failed", "refused"):
            facts["failed"] = event
        elif event["event"] == "end":
            facts["after"] = settled()
            keeper = ray.get_actor("fedtta-r-keeper")
            (pid,) = (
                one["Pid"] for one in ray._private.state.actors().values() if one["ActorID"] == keeper._actor_id.hex()
            )
            facts["keeper"] = Path(f"/proc/{pid}/maps").read_text()

    monkeypatch.setattr(workers, "RayTransport", Seen)
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    ours = simulate(SETTINGS, tmp_path / "r", [watch])
    killer.join()

    assert "failed" not in facts
    assert "runtime_resources" in mark.read_text()
    a, b = cluster.a.node_id, cluster.b.node_id
    assert sorted(facts["before"]) == ["fedtta-r-keeper", "fedtta-r-worker-0", "fedtta-r-worker-1"]
    assert {facts["before"][f"fedtta-r-worker-{i}"] for i in (0, 1)} == {a, b}
    assert {facts["after"][f"fedtta-r-worker-{i}"] for i in (0, 1)} == {a}
    (stored,) = facts["images"].values()
    assert "libtorch" not in facts["keeper"]  # hundreds of megabytes that it has no use for
    assert set(stored["node_ids"]) == {cluster.made.head_node.node_id, b}  # A has files of its own
    assert_same_results(ours, run(tmp_path / "one process", SETTINGS))


@pytest.mark.slow
def test_more_workers_than_fit_are_refused_with_the_numbers(
    cluster: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTTA_DATA", str(images))
    settings = SETTINGS.replace(ray_address=cluster.address, workers=64, num_gpus=0.25, device="auto")
    with pytest.raises(SettingsError, match=r"asked are 64 CPUs and 16 GPUs; Ray has .* at most 0 workers"):
        simulate(settings, tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert not ray.is_initialized()
