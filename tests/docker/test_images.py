"""Images that `make images` built, started with the commands of the compose file: TLS, a run, a prediction.

`make test-images`; `make edge-arm64` for the image of another architecture.
"""

from __future__ import annotations

import contextlib
import platform
import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tomli_w
from numpy.typing import NDArray

from fedtta.benchmarks.speed.served import PARTITION, fabricate, sample_images
from fedtta.benchmarks.speed.streams import batches, requests
from fedtta.client.agent.store import Store
from fedtta.client.resources import federation_of
from fedtta.client.served import NETWORK
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc
from fedtta.models import load_arrays
from fedtta.models.export import export_encoder
from fedtta.settings import Settings
from fedtta.simulation import deployment
from fedtta.simulation.superlink import free_ports
from tests.docker.containers import Container, architecture, container, handed_over, kill
from tests.docker.test_recipes import COMPOSE, SERVICES
from tests.faults.device import OPTIONS

PATIENCE = 1800.0  # seconds; emulated, an agent starts in minutes
pytestmark = [pytest.mark.images, pytest.mark.timeout(2 * PATIENCE)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets, and which the images' user may enter."""
    with deployment.sockets_folder() as made:
        yield handed_over(made)


class Fleet:
    """The commands of the compose file's services, on free ports of this machine's loopback address."""

    def __init__(self, folder: Path) -> None:
        self._ports = dict(zip(("8000", "9092", "9094", "8080", "8081"), map(str, free_ports(5)), strict=True))
        self._folders = {
            name: handed_over(folder / name)
            for name in ("keys", "results", "superlink", "supernode-0", "agent-0", "relay-0", "predict-0", "config")
        }

    def here(self, word: str) -> str:
        """Return a word of a command with the addresses that it has here."""
        word = re.sub(r"0\.0\.0\.0|superlink(?=:\d)", "127.0.0.1", word)
        return re.sub(r"(?<=[:=])(8000|9092|9094|808\d)$", lambda port: self._ports[port[0]], word)

    def command(self, service: str, health: str = "8080") -> list[str]:
        words = [self.here(word.replace("8080", health)) for word in SERVICES[service]["command"]]
        return [word for word in words if not re.search(r"node-[12]\.pub$", word)]

    def volumes(self, service: str) -> dict[Path, str]:
        """Return what a service mounts: its volumes, secrets and config."""
        named = dict(volume.split(":")[:2] for volume in SERVICES[service].get("volumes", []))
        found = {self._folders[name]: inside for name, inside in named.items()}
        if "secrets" in SERVICES[service]:
            found[self._folders["keys"]] = "/run/secrets"
        if "configs" in SERVICES[service]:
            found[self._folders["config"]] = "/etc/fedtta"
        return found

    def healthy(self, made: Container, service: str, health: str = "8080") -> None:
        """Wait for a service as its health check asks it, but longer."""
        words = SERVICES[service]["healthcheck"]["test"][1:]
        made.run(
            [*(self.here(word.replace("8080", health)) for word in words), f"--wait={PATIENCE}"],
            self.volumes(service), PATIENCE,
        )  # fmt: skip


@pytest.mark.parametrize(("image", "runtime"), [("fedtta-edge", "torch"), ("fedtta-edge-onnx", "onnx")])
def test_superlink_client_and_agent_of_the_images_predict_what_a_run_trained(
    image: str, runtime: str, folder: Path
) -> None:
    fleet = Fleet(folder)
    config = tomllib.loads(COMPOSE["configs"]["device-0"]["content"])
    # which by default does nothing for a run of one device
    device = tomli_w.dumps(config | {"device": "cpu", "runtime": runtime, "policy": {"least-clients": 1}})
    with (
        container("fedtta-server", folder) as server,
        container("fedtta-client", folder) as client,
        container(image, folder) as edge,
    ):
        server.run(
            ["python", "-m", "fedtta", "keys", "--nodes", "1", "--folder", "/run/secrets"],
            {folder / "keys": "/run/secrets"}, PATIENCE,
        )  # fmt: skip
        (folder / "config" / "device.toml").write_text(device)
        handed_over(folder / "config")
        server.start(fleet.command("superlink"), fleet.volumes("superlink"), "superlink.log")
        edge.start(fleet.command("agent-0"), fleet.volumes("agent-0"), "agent.log")
        fleet.healthy(server, "superlink")
        assert "1 new" in server.run(fleet.command("register"), fleet.volumes("register"), PATIENCE)
        fleet.healthy(edge, "agent-0")
        client.start(fleet.command("supernode-0", "8081"), fleet.volumes("supernode-0"), "supernode.log")
        fleet.healthy(client, "supernode-0", "8081")
        run = [*fleet.command("run"), "clients=1", "rounds=1", "methods=fedavg,personal,fedthe", "run-name=built"]
        said = server.run(run, fleet.volumes("run"), PATIENCE)
        images = federation_of(Settings(clients=1)).images
        status, reply = deployment.ask(f"unix:{folder}/predict-0/agent.sock", images.pixels[:40])
    assert reply is not None, said
    assert status.model_version, said
    assert (status.adapter.partition("[")[0], status.samples) == ("fedthe", 40)
    assert (deployment.predicted(reply) == images.labels[:40]).mean() > 0.3  # of ten classes, after a round
    assert (folder / "results" / "built" / "table.csv").stat().st_size


IMAGES = ["fedtta-server", "fedtta-client", "fedtta-edge", "fedtta-edge-light", "fedtta-edge-onnx"]


def certificates(text: str) -> set[str]:
    """Return the PEM blocks of a text."""
    return set(re.findall(r"-----BEGIN CERTIFICATE-----[^-]+", text))


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_keeps_nothing_of_how_packages_were_reached(image: str, folder: Path) -> None:
    """Neither the builder's pip.conf nor a host name in it, nor its certificates, nor what the build stage had."""
    conf, bundle = Path("/etc/pip.conf"), Path("/etc/ssl/certs/ca-certificates.crt")
    with container(image, folder) as made:
        found = made.run(["sh", "-c", "cat /etc/pip.conf; ls -d /build /root/.cache || true"], {}, PATIENCE)
        assert "global" not in found
        assert not [line for line in found.splitlines() if line.startswith("/")]
        text = conf.read_text() if conf.is_file() else ""
        for host in set(re.findall(r"//(?:[^/@\s]*@)?([\w.-]+)", text)) - {"pypi.org"}:
            assert not made.run(["sh", "-c", f"grep -rlIF '{host}' /etc /opt /app /root || true"], {}, PATIENCE)
        public = certificates(made.run(["sh", "-c", "cat /usr/share/ca-certificates/*/*"], {}, PATIENCE))
        kept = certificates(made.run(["cat", str(bundle)], {}, PATIENCE))
        own = certificates(bundle.read_text()) if bundle.is_file() else set()
    assert public
    assert kept
    assert not (own - public) & kept


# --- an agent of an image against one of this machine ---

BATCH = 8
SAVED, LOST, LAST = 12, 3, 24  # batches: saved, then lost by the kill, and in the end


class Local:
    """An agent of this machine's environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, config: Path) -> None:
        self.process = deployment.start_agent(self._folder / "home", config)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Built:
    """An agent in a container, with the folder at the same path."""

    def __init__(self, made: Container, folder: Path) -> None:
        self._made, self._folder = made, folder

    def start(self, config: Path) -> None:
        handed_over(self._folder)
        words = ["python", "-m", "fedtta.client.agent", "--config", str(config)]
        self.process = self._made.start(words, {self._folder: str(self._folder)}, "agent.log")

    def kill(self) -> None:
        assert kill(self.process, lambda command: b"fedtta.client.agent" in command)


History = tuple[dict[str, NDArray[Any]], dict[str, str]]


@contextlib.contextmanager
def alive(agent: Local | Built, folder: Path, config: Path) -> Iterator[agent_pb2_grpc.PredictorStub]:
    """Start an agent and kill it in the end.

    Each start has a channel of its own: that of an agent that was killed may yet send to it, as long as gRPC's threads
    have not noticed the end.
    """
    own = ("grpc.use_local_subchannel_pool", 1)
    agent.start(config)
    try:
        with grpc.insecure_channel(f"unix:{folder}/a{PARTITION}", [*OPTIONS, own]) as channel:
            while not (folder / f"a{PARTITION}").exists():
                assert agent.process.poll() is None, "the agent has ended"
                time.sleep(0.1)
            yield agent_pb2_grpc.PredictorStub(channel)
    finally:
        agent.kill()


def live(
    agent: Local | Built, folder: Path, adapter: str, runtime: str = "torch"
) -> tuple[NDArray[np.float32], History]:
    """Stream images with a kill in between, after a save and some more; return predictions [n, K] and the history."""
    keys: dict[str, Any] = {"device": "cpu", "adapter": adapter, "runtime": runtime, "deadline": PATIENCE}  # it is slow
    keys |= {"save-every-samples": 10**6, "save-every-seconds": 1e6}
    config = deployment.agent_config(folder, folder, str(PARTITION), keys)
    parts = requests(batches(sample_images(LAST * BATCH), BATCH))

    def stream(stub: agent_pb2_grpc.PredictorStub, begin: int, end: int) -> list[pb.PredictReply]:
        found = list(stub.PredictStream(iter(parts[begin:end]), timeout=PATIENCE, wait_for_ready=True))
        assert not [reply.error for reply in found if reply.error]
        assert [reply.position for reply in found] == [i * BATCH for i in range(begin, end)]
        return found

    with alive(agent, folder, config) as stub:
        replies = stream(stub, 0, SAVED)
        stub.Snapshot(pb.SnapshotRequest(), timeout=PATIENCE)
        replies += stream(stub, SAVED, SAVED + LOST)
    with alive(agent, folder, config) as stub:
        replies += stream(stub, SAVED, LAST)  # which its positions say: the lost ones never came
        stub.Snapshot(pb.SnapshotRequest(), timeout=PATIENCE)
        snapshots = stub.Status(pb.StatusRequest(), timeout=PATIENCE).snapshots
    history = load_arrays(folder / f"agent-{PARTITION}" / "snapshots" / f"{snapshots[-1]}.safetensors")
    table = np.concatenate([np.frombuffer(reply.probabilities, "<f4").reshape(BATCH, -1) for reply in replies])
    return table, history


def same(
    image: str, adapter: str, here: tuple[NDArray[np.float32], History], there: tuple[NDArray[np.float32], History]
) -> None:
    """Compare an image's predictions and history with this machine's."""
    difference = float(np.abs(there[0] - here[0]).max())
    print(f"{image}, {adapter}: {len(here[0])} predictions, largest difference {difference:.1e}")
    assert difference < 1e-5
    assert (there[0].argmax(1) == here[0].argmax(1)).all()
    history, other = here[1], there[1]
    assert other[1] == history[1]
    assert other[0].keys() == history[0].keys()
    for name, values in history[0].items():
        np.testing.assert_allclose(other[0][name], values, atol=1e-5, rtol=1e-5, err_msg=name)


def stored(folder: Path, export: bool = False) -> None:
    """Write a state directory with a served model, and with its exported encoder if asked."""
    store, served = Store(folder / f"agent-{PARTITION}", 1, print), fabricate()
    store.add(served, "served")
    store.close()
    if export:
        (model,) = (folder / f"agent-{PARTITION}" / "models").iterdir()
        export_encoder(served.network, served.shape, model / NETWORK)


@pytest.mark.parametrize("image", ["fedtta-edge-light", "fedtta-edge-light-arm64"])
@pytest.mark.parametrize("adapter", ["fedthe", "btfl"])
def test_the_agent_without_pytorch_predicts_and_remembers_as_with_it(image: str, adapter: str, folder: Path) -> None:
    for name in ("here", "there"):
        stored(folder / name, export=name == "there")
    here, history = live(Local(folder / "here"), folder / "here", adapter)
    with container(image, folder) as made:
        made.run(["python", "-c", "from importlib.util import find_spec as f; assert not f('torch')"], {}, PATIENCE)
        there, other = live(Built(made, folder / "there"), folder / "there", adapter, runtime="onnx")
    same(image, adapter, (here, history), (there, other))


@pytest.mark.parametrize("adapter", ["fedthe", "btfl"])
def test_the_agent_on_arm64_predicts_and_remembers_as_here(folder: Path, adapter: str) -> None:
    assert architecture("fedtta-edge-arm64") == "arm64" != platform.machine()
    for name in ("here", "there"):
        stored(folder / name)
    here, history = live(Local(folder / "here"), folder / "here", adapter)
    with container("fedtta-edge-arm64", folder) as made:
        assert (
            made.run(["python", "-c", "import platform; print(platform.machine())"], {}, PATIENCE).strip() == "aarch64"
        )
        there, other = live(Built(made, folder / "there"), folder / "there", adapter)
    same("fedtta-edge-arm64", adapter, (here, history), (there, other))
