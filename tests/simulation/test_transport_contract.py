"""The contract of transports: the same requests over all five, and the same answers from all.

That over gRPC, a whole deployment, is part of `make test-faults`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedtta.client.app import app as client_app
from fedtta.client.relay import RelayTransport
from fedtta.client.sites import simulated_nodes
from fedtta.messages.grid import GridTransport
from fedtta.messages.requests import REQUESTS
from fedtta.simulation import deployment, flower
from fedtta.simulation.superlink import PROJECT
from fedtta.simulation.vectorized import VectorizedTransport
from fedtta.simulation.workers import ray_transport
from tests.simulation.exchanges import CLIENTS, SETTINGS, UNKNOWN, Heard, Played, load, play, save

DEPLOYED = 900.0  # seconds for the deployed exchanges, on a busy machine
#: By name of a request: its kind, and the clients that it goes to.
KINDS = {
    "identify": ("query.identify", [0, 1]), "train": ("train", [0, 1]), "summarize": ("train.statistics", [0]),
    "refine": ("train.rates", [1]), "adapt": ("train.adapt", [0]), "evaluate": ("evaluate", [0]),
    "int8": ("train", [1]), "int8 later": ("train", [1]), "train again": ("train", [0]),
}  # fmt: skip
#: The ServerApp of the deployed exchanges, in a bundle of ours.
APP = """
from pathlib import Path
from flwr.serverapp import ServerApp
from fedtta.messages.grid import GridTransport
from fedtta.server.exchanges import play, save

app = ServerApp()

@app.main()
def main(grid, context):
    # within less time no message would get to the SuperLink, which does not take those that have expired
    save(play(GridTransport(grid), too_short=0.5), Path(context.run_config["results"]))
"""


def vectorized(folder: Path) -> Played:
    return play(VectorizedTransport(simulated_nodes(SETTINGS), stacked=1))


def ray(folder: Path) -> Played:
    with ray_transport(SETTINGS.replace(state_dir=str(folder / "state"))) as (settings, transport):
        return play(transport, settings)


def flower_simulation(folder: Path) -> Played:
    settings, played = SETTINGS.replace(state_dir=str(folder / "state")), Played()
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        played.update(play(GridTransport(grid, window=2), settings))

    flower.start(app, client_app, settings)
    return played


def relay(folder: Path) -> Played:
    """Agents as processes: clients of one process share a network, and agents answer at the same time."""
    with deployment.sockets_folder() as sockets, ExitStack() as stack:
        agents = {}
        for i in range(CLIENTS):
            config = deployment.agent_config(folder, sockets, str(i), {"device": "cpu"})
            agents[f"unix:{sockets}/a{i}"] = deployment.start_agent(folder / f"home-{i}", config)
            stack.callback(agents[f"unix:{sockets}/a{i}"].wait, DEPLOYED)
            stack.callback(agents[f"unix:{sockets}/a{i}"].terminate)
        deployment.wait_for_agents(agents)
        return play(RelayTransport({10 + i: f"unix:{sockets}/r{i}" for i in range(CLIENTS)}))


def grpc(folder: Path) -> Played:
    """SuperLink and SuperNodes as processes; the exchanges are those of a ServerApp in a bundle of its own."""
    project, home = folder / "project", folder / "flower"
    for name in ("server", "client", "strategies", "tta", "models", "data", "messages", "privacy", "settings"):
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PROJECT / "fedtta", project / "fedtta", symlinks=True)
    shutil.copy(Path(__file__).with_name("exchanges.py"), project / "server" / "exchanges.py")
    (project / "server" / "contract.py").write_text(APP)
    for name in ("pyproject.toml", "LICENSE", "README.md", "client_app.py"):
        shutil.copy(PROJECT / name, project)
    text = (PROJECT / "server_app.py").read_text().replace("fedtta.server.app", "fedtta.server.contract")
    (project / "server_app.py").write_text(text)
    home.mkdir()
    nodes = [{"name": str(i), "state-dir": str(folder / f"state {i}")} for i in range(CLIENTS)]
    with deployment.deployment(home, nodes):
        deployment.run(home, {"results": str(folder)}, DEPLOYED, project=project)
    return load(folder)


IN_TIME = pytest.mark.timeout(3 * DEPLOYED)
#: Each with what it starts.
TRANSPORTS: dict[Callable[[Path], Played], list[pytest.MarkDecorator]] = {
    vectorized: [], relay: [pytest.mark.slow, IN_TIME], ray: [pytest.mark.slow, IN_TIME],
    flower_simulation: [pytest.mark.slow, IN_TIME], grpc: [pytest.mark.faults, IN_TIME],
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return vectorized(tmp_path_factory.mktemp("reference"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, id=one.__name__, marks=marks) for one, marks in TRANSPORTS.items()],
)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


def replies(answers: list[Heard]) -> list[tuple[object, ...]]:
    return [(one.partition, one.reply, one.values, one.arrays) for one in answers]


@pytest.mark.parametrize("request_name", KINDS)
def test_every_kind_of_request_is_answered_with_its_reply(played: Played, request_name: str) -> None:
    answers = played[request_name]
    kind, clients = KINDS[request_name]
    assert [(one.partition, one.kind, one.reason) for one in answers] == [(i, "", "") for i in clients]
    assert {one.reply for one in answers} == {REQUESTS[kind].reply.kind}
    assert all(one.read_only for one in answers)
    if request_name not in ("identify", "evaluate"):
        assert all(one.arrays for one in answers)


@pytest.mark.parametrize("request_name", KINDS)
def test_equal_requests_have_equal_bits_over_every_transport(
    played: Played, reference: Played, request_name: str
) -> None:
    assert replies(played[request_name]) == replies(reference[request_name])


def test_clients_have_replies_of_their_own(played: Played) -> None:
    for name in ("identify", "train"):
        first, second = played[name]
        assert (first.values, first.arrays) != (second.values, second.arrays)


def test_a_client_that_fails_is_named_with_its_reason_and_fails_alone(played: Played) -> None:
    (failed,) = played["broken"]
    assert (failed.partition, failed.kind, failed.reply) == (1, "failed", "")
    assert "ValueError" in failed.reason or "shape" in failed.reason
    assert "\n" not in failed.reason
    assert replies(played["train again"]) == replies(played["train"][:1])  # after late ones, in reversed order


def test_a_request_to_an_unknown_node_fails(played: Played) -> None:
    (unknown,) = played["absent"]
    assert (unknown.partition, unknown.kind, unknown.reason) == (UNKNOWN, "failed", "the node is not there")


def test_a_request_without_a_reply_in_time_is_late(played: Played) -> None:
    assert [one.partition for one in played["late"]] == list(range(CLIENTS))
    assert {one.kind for one in played["late"][1:]} == {"late"}
    assert all(one.reason for one in played["late"] if one.kind)


def test_what_is_saved_is_what_is_loaded(reference: Played, tmp_path: Path) -> None:
    save(reference, tmp_path)
    assert load(tmp_path) == reference
