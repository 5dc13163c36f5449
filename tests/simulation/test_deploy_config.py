"""What a deployment starts with which flags, and what its command lines refuse; nothing is started here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.common.config import parse_config_args
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse, RegisterNodeRequest, RegisterNodeResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedtta.client.config import AgentConfig
from fedtta.client.relay import RelayTransport
from fedtta.messages import agent_pb2, agent_pb2_grpc
from fedtta.messages.flower import allow_messages
from fedtta.server.app import serve
from fedtta.server.report import METRICS_FILE, read_results, render_tables
from fedtta.settings import SettingsError
from fedtta.simulation import control, deploy_local, deployment, devices, flower_cli, submit, superlink
from fedtta.simulation.certificates import KeysError
from fedtta.simulation.keys import Keys, make_keys
from fedtta.simulation.superlink import PROJECT, FlowerError
from tests.client.folders import OWN, device_file, sites

KEYS = Keys(Path("/keys"))


def test_a_superlink_with_keys_encrypts_and_asks_nodes_for_theirs() -> None:
    command = superlink.superlink_command("127.0.0.1", 8000, "127.0.0.1:9092", KEYS)
    parsed = _parse_args_run_superlink().parse_args(command[1:])
    assert parsed.insecure is not True
    assert parsed.enable_supernode_auth is True
    assert (parsed.ssl_ca_certfile, parsed.ssl_certfile, parsed.ssl_keyfile) == (
        "/keys/ca.crt", "/keys/server.crt", "/keys/server.key",
    )  # fmt: skip
    assert (parsed.host, parsed.port, parsed.fleet_api_address) == ("127.0.0.1", 8000, "127.0.0.1:9092")


def test_a_supernode_with_keys_trusts_the_authority_and_has_its_own() -> None:
    config = {"name": "1", "agent": "unix:/tmp/r1"}
    command = deployment.supernode_command("127.0.0.1:9092", 9094, config, (KEYS.ca, KEYS.node(1)[0]))
    parsed = _parse_args_run_supernode().parse_args(command[command.index("supernode") + 1 :])
    assert parsed.insecure is False
    assert (str(parsed.root_certificates), str(parsed.auth_supernode_private_key)) == ("/keys/ca.crt", "/keys/node-1")
    assert parsed.superlink == "127.0.0.1:9092"
    assert parse_config_args([parsed.node_config]) == config


def test_a_node_config_is_what_flower_reads() -> None:
    config = {"name": "site-a", "rounds": 1, "state-dir": "/var/lib/a folder = ü", "fraction": 0.5, "download": True}
    assert parse_config_args([deployment.node_config(config)]) == config
    with pytest.raises(ValueError, match="without quotes"):
        deployment.node_config({"state-dir": 'a "b"'})


def test_insecure_is_said_to_both() -> None:
    assert "--insecure" in superlink.superlink_command("127.0.0.1", 8000, "127.0.0.1:9092", None)
    command = deployment.supernode_command("127.0.0.1:9092", 9094, {}, None)
    assert "--insecure" in command
    assert not [word for word in command if "key" in word or "cert" in word]


def test_a_deployment_is_secure_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Stop(Exception):
        pass

    def superlink_of(home: Path, simulation: bool, keys: Keys | None) -> None:
        seen.append((simulation, keys))
        raise Stop

    monkeypatch.setattr(superlink, "superlink", superlink_of)
    for insecure in (False, True):
        with pytest.raises(Stop), deployment.deployment(tmp_path, [{}, {}], insecure=insecure):
            pass
    assert seen == [(False, Keys(tmp_path / "keys")), (False, None)]
    assert sorted(path.name for path in (tmp_path / "keys").glob("node-*")) == [
        "node-0",
        "node-0.pub",
        "node-1",
        "node-1.pub",
    ]


def test_a_supervised_supernode_is_started_again_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            return stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

        node = deployment.Supervised(start)
        first = node.process
        assert node.tend() is None
        first.kill()
        first.wait()
        assert node.tend() == -signal.SIGKILL
        assert node.tend() is None  # told once, and not started before RESTART seconds have passed
        assert node.process is first
        monkeypatch.setattr(deployment, "RESTART", 0.0)
        assert node.tend() is None
        second = node.process
        assert second is not first
        assert second.poll() is None
        node.replace()
        second.wait()
        assert node.tend() == -signal.SIGKILL
        node.tend()
        assert node.process is not second
        node.process.kill()


def test_flwr_is_told_whom_to_trust(tmp_path: Path) -> None:
    def told() -> dict:
        return tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]["own"]

    superlink.write_connection(tmp_path, "fl.example.org:8000", KEYS.ca)
    assert told() == {"address": "fl.example.org:8000", "root-certificates": "/keys/ca.crt"}
    superlink.write_connection(tmp_path, "127.0.0.1:8000", None)
    assert told() == {"address": "127.0.0.1:8000", "insecure": True}


def test_a_run_that_an_earlier_deployment_left_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"{superlink.DATABASE}{suffix}").touch()
    program = tmp_path / "flower-superlink"
    program.write_text(f"#!{sys.executable}\n")  # ends at once
    program.chmod(0o755)
    monkeypatch.setattr(superlink, "program", lambda name: str(program))
    with (
        pytest.raises(FlowerError, match="the SuperLink ended with status 0"),
        superlink.superlink(tmp_path, simulation=False),
    ):
        pass
    assert list(tmp_path.glob(f"{superlink.DATABASE}*")) == []


def test_a_deployment_on_this_machine_needs_the_nodes_private_keys(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", 2)[0]
    keys.node(1)[0].unlink()
    with (
        pytest.raises(KeysError, match=r"node-1 is missing: it must be here"),
        deployment.deployment(tmp_path, [{}, {}]),
    ):
        pass
    assert not list(tmp_path.glob("*.log"))


def test_a_deployment_in_a_folder_that_is_in_use_leaves_the_other_alone(tmp_path: Path) -> None:
    """It took the other one's database, failed as the agents' state was locked, and stopped all processes."""
    (tmp_path / superlink.DATABASE).touch()
    environ = {**os.environ, "FLWR_HOME": str(tmp_path / "node-0")}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environ) as other:
        try:
            while superlink.started(tmp_path) != [other.pid]:
                time.sleep(superlink.POLL)
            with (
                pytest.raises(FlowerError, match=rf"is in use by the processes \[{other.pid}\]: stop them, or choose"),
                superlink.superlink(tmp_path, simulation=False),
            ):
                pass
            assert other.poll() is None
        finally:
            other.kill()
    assert (tmp_path / superlink.DATABASE).exists()


class Control:
    """A SuperLink that registers keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: str = "Public key already in use.") -> None:
        self.error, self.asked, self.known = error, list[tuple[str, bytes]](), list[bytes]()
        for module in (control, devices):
            monkeypatch.setattr(module, "client", self.client)

    @contextlib.contextmanager
    def client(self, superlink: str, ca: Path | None) -> Iterator[Control]:
        assert superlink == "h:1"
        yield self

    def ListNodes(self, _: ListNodesRequest) -> ListNodesResponse:
        nodes = [NodeInfo(name=name, node_id=1, status="online", public_key=key) for name, key in self.asked]
        return ListNodesResponse(nodes_info=nodes)

    def RegisterNode(self, request: RegisterNodeRequest) -> RegisterNodeResponse:
        self.asked.append((request.name, request.public_key))
        if request.public_key in self.known:
            raise FlowerError(self.error)
        self.known.append(request.public_key)
        return RegisterNodeResponse(node_id=len(self.known))


def test_nodes_that_are_registered_already_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(tmp_path / "keys", 3)[0]
    public = [keys.node(i)[1] for i in range(3)]
    superlink.write_connection(tmp_path, "h:1", None)
    made = Control(monkeypatch)
    assert superlink.register(tmp_path, public[1:2]) == 1
    assert superlink.register(tmp_path, public, ["site-a", "", "site-c"]) == 2
    assert [name for name, _ in made.asked] == ["node-1", "site-a", "node-1", "site-c"]
    assert made.asked[0][1].startswith(b"-----BEGIN PUBLIC KEY-----")
    with pytest.raises(FileNotFoundError, match=r"node-9\.pub: no such file"):
        superlink.register(tmp_path, [tmp_path / "node-9.pub"])


def test_keys_are_registered_under_the_names_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(tmp_path / "keys", 2)[0]
    public = [str(keys.node(i)[1]) for i in range(2)]
    made = Control(monkeypatch)
    words = ["--superlink", "h:1", "--root-certificates", str(keys.ca), "register"]
    assert submit.main([*words, f"site-a={public[0]}", public[1]]) == 0
    assert [name for name, _ in made.asked] == ["site-a", "node-1"]
    assert submit.main([*words, f"a/b={public[0]}"]) == 2
    assert len(made.asked) == 2


def test_a_name_is_registered_for_one_device_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run and its alerts say of a device, they say by its name."""
    keys = make_keys(tmp_path / "keys", 3)[0]
    public = [str(keys.node(i)[1]) for i in range(3)]
    made = Control(monkeypatch)
    words = ["--superlink", "h:1", "--root-certificates", str(keys.ca), "register"]
    assert submit.main([*words, f"site-a={public[0]}", f"site-a={public[1]}"]) == 2
    assert f"error: site-a={public[1]}: the name is given twice" in capsys.readouterr().err
    assert submit.main([*words, f"site-a={public[0]}", public[2]]) == 0
    assert submit.main([*words, f"site-a={public[1]}"]) == 2
    assert "error: another key is enrolled as site-a (node 1): remove it first" in capsys.readouterr().err
    assert submit.main([*words, f"site-b={public[0]}"]) == 2  # it would have stayed site-a
    assert f"error: {public[0]} is enrolled already, as site-a" in capsys.readouterr().err
    assert submit.main([*words, f"site-a={public[0]}"]) == 0  # as when containers start again
    assert [name for name, _ in made.asked] == ["site-a", "node-2", "site-a"]


def test_other_refusals_of_a_node_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = make_keys(tmp_path / "keys", 1)[0].node(0)[1]
    superlink.write_connection(tmp_path, "h:1", None)
    Control(monkeypatch, "connection refused")
    superlink.register(tmp_path, [public])
    with pytest.raises(FlowerError, match="connection refused"):
        superlink.register(tmp_path, [public])
    public.write_text("no key")
    with pytest.raises(FlowerError, match=r"node-0\.pub is not the public key of a node"):
        superlink.register(tmp_path, [public])


def test_an_answer_of_flwr_that_is_no_success_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, answer in enumerate(('{"success": false, "error-message": "no"}', "", "no JSON")):
        program = tmp_path / f"flwr-{number}"
        program.write_text(f"#!{sys.executable}\nprint({answer!r})\n")
        program.chmod(0o755)
        monkeypatch.setattr(superlink, "program", lambda name, path=str(program): path)
        with pytest.raises(FlowerError, match="flwr run x"):
            superlink.flwr(tmp_path, "run", "x")


def test_the_local_deployment_is_planned_before_anything_starts(tmp_path: Path) -> None:
    words = ["--nodes", "2", "--set", "rounds=1", "seed=7", f"results={tmp_path}/r", "run-name=n", "--adapter", "btfl"]
    plan = deploy_local.parse(words)
    assert (plan.settings.clients, plan.settings.rounds, plan.settings.seed) == (2, 1, 7)
    assert plan.settings.local_epochs == deploy_local.DEFAULTS["local-epochs"]
    assert plan.results == tmp_path / "r" / "n"
    assert [keys["adapter"] for keys in plan.agents.values()] == ["btfl", "btfl"]
    assert list(plan.agents) == ["0", "1"]
    assert not plan.insecure
    assert not plan.results.exists()


def test_every_file_of_devices_is_an_agent_and_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own keys hold, relative paths are those of the file, and what the deployment decides is its own."""
    files = sites(tmp_path / "sites")
    tcp = {"listen": "0.0.0.0:1", "metrics": "0.0.0.0:2", "certificate": "c", "key": "k", "client_ca": "a"}
    place = {"relay_group": "fedtta-relay", **tcp}
    device_file(tmp_path / "sites", "site-d", "c", adapter="tent", role="target", **place)
    monkeypatch.chdir(tmp_path)
    words = ["--devices", "sites/*.toml", "--set", "rounds=1", f"classes={OWN.classes}", "image-size=16"]
    plan = deploy_local.parse(words)
    assert plan.settings.clients == len(files) + 1
    assert plan.settings.devices == ""  # for simulations only
    assert list(plan.agents) == ["site-a", "site-b", "site-c", "site-d"]
    started: list[Any] = []

    @contextlib.contextmanager
    def nodes(home: Path, config: list[dict], *_: Any) -> Iterator[None]:
        started.extend(config)
        yield

    asked: dict[str, np.ndarray] = {}

    def ask(address: str, images: np.ndarray) -> tuple[agent_pb2.StatusReply, agent_pb2.PredictReply]:
        name = address.rpartition("/a")[2]
        if name == "site-a" and len(images):
            raise FlowerError("FAILED_PRECONDITION: no model")
        asked.setdefault(name, images)
        if len(images):
            asked[name] = images
        table = np.tile(np.array([0.2, 0.5, 0.3], "<f4"), (len(images), 1))
        reply = agent_pb2.PredictReply(samples=len(images), classes=3, probabilities=table.tobytes())
        status = agent_pb2.StatusReply(model_version="" if name == "site-a" else "v", adapter="a")
        return status, reply if len(images) else None

    configs: dict[str, AgentConfig] = {}

    def start(home: Path, path: Path) -> None:
        configs[path.stem] = AgentConfig.from_toml(path)

    monkeypatch.setattr(deployment, "deployment", nodes)
    monkeypatch.setattr(deployment, "start_agent", start)
    monkeypatch.setattr(deployment, "wait_for_agents", lambda agents: None)
    monkeypatch.setattr(deployment, "run", lambda *_, **__: None)
    monkeypatch.setattr(deployment, "ask", ask)
    table = deploy_local.deploy(plan)
    assert [node["name"] for node in started] == list(plan.agents)
    for node in started:
        config = configs[f"device-{node['name']}"]
        assert node["agent"] == config.relay_address
        assert config.listen_address.endswith(f"/a{node['name']}")
        assert config.data == f"folder:{tmp_path / 'sites' / config.name[-1].replace('d', 'c')}"
        assert Path(config.state_dir).name == f"agent-{config.name}"
        assert not config.state_dir.startswith(str(tmp_path))
        assert config.metrics == config.relay_group == ""  # ports and groups of the device, not of this machine
    assert configs["device-site-b"].class_map == "rouge=red"
    assert [configs[f"device-{name}"].adapter for name in plan.agents] == ["fedthe", "fedthe", "fedthe", "tent"]
    assert configs["device-site-d"].role == "target"
    # every agent is asked for images of its own test data
    assert asked.keys() == plan.agents.keys()
    assert all(images.shape[1:] == (3, 16, 16) and len(images) <= deploy_local.SHOWN for images in asked.values())
    assert [len(images) > 0 for images in asked.values()] == [False, True, True, True]
    assert not np.array_equal(asked["site-b"], asked["site-c"][: len(asked["site-b"])])
    results = list(map(str, table.columns[-1].cells))
    assert results[0].startswith("no model")  # refused by its agent, which is no failure of the deployment
    assert results[1].endswith(f"of {len(asked['site-b'])} right")
    assert results[2:] == [f"{len(asked['site-c'])} without labels"] * 2


def test_a_device_file_that_is_not_toml_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.toml").write_text("name = [")
    assert deploy_local.main(["--devices", str(tmp_path / "*.toml"), "--set", "classes=a,b"]) == 2
    assert capsys.readouterr().err.count("wrong.toml") == 1


def test_class_names_of_a_file_are_read_where_the_run_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("covid\nnormal\n")
    word = f"classes={tmp_path / 'classes.txt'}"
    assert superlink.run_config([word])["classes"] == "covid,normal"
    assert flower_cli.parse(["--set", word]).config["classes"] == "covid,normal"
    assert deploy_local.parse(["--set", word]).settings.classes == "covid,normal"
    with pytest.raises(SettingsError, match="no such file"):
        superlink.run_config([f"classes={tmp_path / 'classes'}"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "runds=1"], "unknown setting 'runds'"),
        (["--set", "rounds"], "allowed is key=value"),
        (["--set", "rounds=-1"], "rounds = -1"),
        (["--set", "clients=3"], "--set clients: allowed is --nodes"),
        (["--set", "state-dir=/x"], "--set state-dir: allowed is --folder"),
        (["--set", "devices=*.toml"], "--set devices: allowed is --devices"),
        (["--set", "classes=a,b", "--devices", "/nowhere/*.toml"], "no such file"),
        (["--devices", __file__], "classes = ''"),
        (["--nodes", "0"], "clients = 0"),
        (["--adapter", "fedthee"], "fedthee"),
        (["--base", "own"], "base = 'own'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy_local.main(words) == 2
    assert reason in capsys.readouterr().err


def test_keys_are_of_no_use_without_tls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        deploy_local.main(["--insecure", "--keys", "keys"])
    assert "argument --keys: not allowed with argument --insecure" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process remain
    (tmp_path / "file").touch()
    assert deploy_local.main(["--folder", str(tmp_path / "file"), "--insecure"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("deployment failed: ")
    assert str(tmp_path / "file") in told


def test_an_agents_file_is_what_agents_read(tmp_path: Path) -> None:
    with deployment.sockets_folder() as sockets:
        assert sockets.stat().st_mode & 0o777 == 0o700
        chosen = {"adapter": "btfl", "base": "personalised", "device": "cpu"}
        path = deployment.agent_config(tmp_path, sockets, "site-a", chosen)
        config = AgentConfig.from_toml(path)
        assert (config.name, config.adapter) == ("site-a", "btfl")
        assert config.state_folder == tmp_path / "agent-site-a"
        assert config.relay_address == f"unix:{sockets}/rsite-a"
        assert len(os.fsencode(f"{sockets}/r999")) < 60
    assert not sockets.exists()
    assert deployment.agent_command(path)[1:] == ["-m", "fedtta.client.agent", "--config", str(path)]


class Fixed(agent_pb2_grpc.PredictorServicer):
    """An agent that always predicts class 1 of 3."""

    def Predict(self, request: agent_pb2.PredictRequest, context: grpc.ServicerContext) -> agent_pb2.PredictReply:
        images = np.frombuffer(request.images.values, np.uint8).reshape(tuple(request.images.shape))
        if images.max() > 200:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too bright")
        table = np.tile(np.array([0.2, 0.5, 0.3], "<f4"), (len(images), 1))
        return agent_pb2.PredictReply(samples=len(images), classes=3, probabilities=table.tobytes())

    def Status(self, request: agent_pb2.StatusRequest, context: grpc.ServicerContext) -> agent_pb2.StatusReply:
        return agent_pb2.StatusReply(model_version="a/b/1/c", samples=4)


def test_agents_are_waited_for_and_asked() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    agent_pb2_grpc.add_PredictorServicer_to_server(Fixed(), server)
    answers = health.HealthServicer()
    answers.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(answers, server)
    still_running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with still_running, deployment.sockets_folder() as sockets:
        address = f"unix:{sockets}/a0"
        server.add_insecure_port(address)
        server.start()
        try:
            deployment.wait_for_agents({address: still_running})
            images = np.full((4, 3, 8, 8), 7, np.uint8)
            status, reply = deployment.ask(address, images)
            assert (status.model_version, status.samples) == ("a/b/1/c", 4)
            assert reply is not None
            assert deployment.predicted(reply).tolist() == [1] * 4
            assert deployment.ask(address, images[:0])[1] is None
            with pytest.raises(FlowerError, match="INVALID_ARGUMENT: too bright"):
                deployment.ask(address, images + 200)
        finally:
            server.stop(None).wait(10)


def test_an_agent_that_ends_is_not_waited_for() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as ended,
        pytest.raises(FlowerError, match="the agent at unix:/tmp/fedtta-absent ended with status 3"),
    ):
        deployment.wait_for_agents({"unix:/tmp/fedtta-absent": ended})


def test_who_is_interrupted_does_not_wait_for_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise SystemExit(143)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        monkeypatch.setattr(deployment.time, "sleep", interrupted)
        begin = time.monotonic()
        with pytest.raises(SystemExit):
            deployment.wait_for_agents({"unix:/tmp/fedtta-absent": running})
    assert time.monotonic() - begin < deployment.PATIENCE / 2


def test_an_agent_that_is_not_there_is_not_healthy() -> None:
    command = [sys.executable, str(PROJECT / "docker" / "health.py"), "unix:/tmp/fedtta-absent", "--wait", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "unix:/tmp/fedtta-absent: " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_agents_take_part_in_a_run_and_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `deploy_local` but Flower's own processes: the server relays its requests to the agents."""
    monkeypatch.delenv("FEDTTA_DATA", raising=False)
    words = ["rounds=1", "fraction=0.15", "image-size=16", "local-epochs=1", "device=cpu", "shifts=original"]
    plan = deploy_local.parse(
        ["--nodes", "2", "--set", *words, "methods=fedavg,personal,fedthe", f"results={tmp_path}", "run-name=r"]
    )
    with deployment.sockets_folder() as sockets:
        running = {}
        try:
            for i in range(2):
                lenient = {"accept-one-class": 1.0}  # after one round the network hardly predicts a second class
                config = deployment.agent_config(tmp_path, sockets, str(i), plan.agents[str(i)] | lenient)
                running[f"unix:{sockets}/a{i}"] = deployment.start_agent(tmp_path / f"home-{i}", config)
            deployment.wait_for_agents(running)
            with pytest.raises(FlowerError, match="FAILED_PRECONDITION"):
                deployment.ask(f"unix:{sockets}/a0", np.zeros((1, 3, 16, 16), np.uint8))
            allow_messages()
            transport = RelayTransport({i + 1: f"unix:{sockets}/r{i}" for i in range(2)})
            serve(transport, plan.settings, plan.results)
            table = deploy_local._ask_all(plan, sockets)
        finally:
            for process in running.values():
                process.terminate()
            ends = [process.wait(300) for process in running.values()]
    assert ends == [0, 0]
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["agent"] == ["0", "1"]
    assert columns["adapter"] == ["fedthe", "fedthe"]
    assert len({version.rsplit("/", 1)[0] for version in columns["model"]}) == 1  # each with its own personal head
    assert columns["samples"] == [str(deploy_local.SHOWN)] * 2
    assert all(text.endswith("right") for text in columns[f"first {deploy_local.SHOWN} test images"])
    assert render_tables(read_results(plan.results / METRICS_FILE))


def test_a_supernode_starts_in_a_home_that_is_made_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is there, and it is the head of a process group of its own."""
    started: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: started.append((command, more)))
    home = tmp_path / "deployment" / "node-0"
    deployment.supernode(home, "127.0.0.1:9092", {"name": "0"}, None)
    ((command, more),) = started
    assert "--insecure" in command
    assert (more["cwd"], more["start_new_session"]) == (home, True)
    assert (home / deployment.NODE_LOG).is_file()


def test_other_settings_are_compared_with_the_number_of_device_files(tmp_path: Path) -> None:
    """There are four files, more than --nodes has by default; --set clients is not allowed."""
    sites(tmp_path)
    device_file(tmp_path, "site-d", "c")
    words = ["--devices", str(tmp_path / "*.toml"), "--set", f"classes={OWN.classes}", "image-size=16"]
    assert deploy_local.parse([*words, "min-replies=4"]).settings.min_replies == 4
    with pytest.raises(SettingsError, match="min-replies = 5: allowed is at most clients = 4"):
        deploy_local.parse([*words, "min-replies=5"])
