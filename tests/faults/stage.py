"""A deployment with agents, TLS and node authentication, whose parts a test can kill and start again."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from fedtta.messages import agent_pb2, agent_pb2_grpc
from fedtta.settings import Settings
from fedtta.simulation import control, deployment, submit, superlink
from fedtta.simulation.keys import Keys, make_keys

PATIENCE = 600.0  # seconds that what takes at most two minutes may take on a busy machine
#: What a SuperNode says last of a message: the answer was sent, not taken as the run had ended, or lost; or it starts.
ENDS = ("Sent successfully", "Ignoring reply message", "Failed to send message", "Starting Flower SuperNode")
POLL = 0.2  # seconds; a look may read the command line of every process


def wait_until(reached: Callable[[], bool], what: str, run: Future[None] | None = None) -> None:
    """Fail when it is not reached within PATIENCE, or before the run ends, with the run's reason if it failed."""
    end = time.monotonic() + PATIENCE
    while not reached():
        if run is not None and run.done():
            run.result()
            assert reached(), f"the run ended before {what}"
            return
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(POLL)


def processes(home: Path, word: str) -> list[int]:
    """Return the ids of what was started in a home and has this name, or it in its command; without zombies."""
    found = []
    for pid in superlink.started(home):
        with contextlib.suppress(OSError):  # it has just ended
            process = Path(f"/proc/{pid}")
            name = (process / "comm").read_text().strip()  # a forked process has its parent's command
            if name == word[:15] or word.encode() in (process / "cmdline").read_bytes():
                found.append(pid)
    return found


@dataclass
class Stage:
    """What runs; node and agent i belong to the client with name i of `names`."""

    root: Path
    sockets: Path
    keys: Keys
    fleet: str  # where nodes reach it
    own_fleet: str  # where it listens; a proxy may be in between
    names: list[str]
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    restarted: subprocess.Popen[bytes] | None = None  # a SuperLink

    @property
    def home(self) -> Path:
        return self.root / "flower"

    def start_agent(self, partition: int) -> None:
        """Start an agent, again with the config of before."""
        started = deployment.start_agent(
            self.home / f"agent-{partition}", self.root / f"device-{self.names[partition]}.toml"
        )
        self.agents[partition:] = [started, *self.agents[partition + 1 :]]

    def start_node(self, partition: int) -> None:
        """Start a SuperNode, again with the key of before."""
        name = self.names[partition]
        config = {"name": name, "agent": f"unix:{self.sockets}/r{name}"}
        own = (self.keys.ca, self.keys.node(partition)[0])
        started = deployment.supernode(self.home / f"node-{partition}", self.fleet, config, own)
        self.nodes[partition:] = [started, *self.nodes[partition + 1 :]]

    @contextlib.contextmanager
    def managed(self, *parts: str, delay: float = 2.0) -> Iterator[None]:
        """Start again what ends, of "node-0", "agent-1", "superlink", and clear what it has left, as a service manager.

        It looks every `delay` seconds; a SuperNode is started `deployment.RESTART` seconds after it was found ended.
        """
        stopping, due = threading.Event(), dict[str, float]()

        def rests(part: str) -> bool:
            if not part.startswith("node-") or self.nodes[int(part.removeprefix("node-"))].poll() is None:
                due.pop(part, None)
                return False
            return time.monotonic() < due.setdefault(part, time.monotonic() + deployment.RESTART)

        def manage() -> None:
            while not stopping.wait(delay):
                for part in parts:
                    if not rests(part):
                        self._restart_if_ended(part)

        thread = threading.Thread(target=manage)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def _restart_if_ended(self, part: str) -> None:
        kind, _, partition = part.partition("-")
        if kind == "superlink":
            if not self.processes("flower-superlink"):
                self.restart_superlink()
        elif (self.nodes if kind == "node" else self.agents)[int(partition)].poll() is not None:
            superlink.stop(self.home / part)
            (self.start_node if kind == "node" else self.start_agent)(int(partition))

    def processes(self, word: str, folder: str = "") -> list[int]:
        """Return the ids of what was started in a folder such as "node-0" and has this name, or it in its command."""
        return processes(self.home / folder, word)

    def status(self, partition: int) -> agent_pb2.StatusReply | None:
        """Return what an agent says of itself, None when it does not answer."""
        with grpc.insecure_channel(f"unix:{self.sockets}/a{self.names[partition]}") as channel:
            try:
                return agent_pb2_grpc.PredictorStub(channel).Status(agent_pb2.StatusRequest(), timeout=5)
            except grpc.RpcError:
                return None

    def in_training(self, partition: int) -> bool:
        """Return whether an agent is training now."""
        status = self.status(partition)
        return status is not None and status.training == "train"

    @contextlib.contextmanager
    def held(self, partition: int) -> Iterator[None]:
        """Hold an agent: a round that needs it does not end while this is open."""
        agent = self.agents[partition]
        agent.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            agent.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def held_at_work(self, partition: int) -> Iterator[None]:
        """Hold an agent whose SuperNode has taken a message, which it does not answer while this is open."""
        with self.held(partition):
            wait_until(lambda: self.at_work(partition), "a message")
            time.sleep(1)  # a reply that was on its way has arrived
            wait_until(lambda: self.at_work(partition), "the next message")
            yield

    def kill_node_at_work(self, partition: int) -> None:
        """kill -9 of a SuperNode that has taken a message and not answered it: its agent is held until it is dead."""
        with self.held_at_work(partition):
            self.nodes[partition].kill()
            self.nodes[partition].wait()

    def at_work(self, partition: int) -> bool:
        """Return whether a SuperNode has taken a message and neither answered it nor dropped its answer since."""
        log = self.log(f"node-{partition}")
        return log.rfind("Received successfully") > max(map(log.rfind, ENDS))

    def answered(self, partition: int) -> int:
        """Return how many messages a SuperNode has answered."""
        return self.log(f"node-{partition}").count("Sent successfully")

    def log(self, name: str) -> str:
        """Return a process' log, such as 'node-0' or 'agent-1' or 'superlink'."""
        path = {"n": deployment.NODE_LOG, "a": deployment.AGENT_LOG}[name[0]] if "-" in name else "superlink.log"
        folder = self.home / name if "-" in name else self.home
        return (folder / path).read_text(encoding="utf-8", errors="replace")

    def run(self, settings: Settings, resumes: int = 0, **changes: Any) -> Future[None]:
        """Submit a run, supervised with `resumes`; its results are in `results/<run-name>`."""
        config = settings.replace(results=str(self.root / "results"), **changes).flat()
        executor = ThreadPoolExecutor(1)
        try:
            if not resumes:
                return executor.submit(deployment.run, self.home, config, PATIENCE)
            begin = functools.partial(superlink.start, self.home)
            return executor.submit(submit.supervise, self.home, config, PATIENCE, resumes, begin)
        finally:
            executor.shutdown(wait=False)

    def ends(self, name: str) -> list[str]:
        """Return status and Flower's reason of each submission of a run, sorted."""
        found = control.runs(*superlink.connection(self.home))
        return sorted(f"{run.status} {run.details}".strip() for run in found if run.config["run-name"] == name)

    def results(self, name: str) -> Path:
        return self.root / "results" / name

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what a run has told so far."""
        path = self.results(name) / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rounds(self, name: str) -> int:
        """Return how many training rounds of a run have ended."""
        return sum(event["event"] == "round" for event in self.events(name))

    def restart_superlink(self) -> None:
        """Start a SuperLink on the database, addresses and keys of the one that was killed."""
        address, _ = superlink.connection(self.home)
        port = int(address.rpartition(":")[2])
        command = superlink.superlink_command("127.0.0.1", port, self.own_fleet, self.keys)
        log = self.home / "superlink.log"
        with log.open("ab") as file:
            self.restarted = subprocess.Popen(
                [*command, "--database", str(self.home / superlink.DATABASE)], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, cwd=superlink.PROJECT, env=superlink.environment(self.home),
                start_new_session=True,
            )  # fmt: skip
        superlink.wait_until_healthy(self.restarted, f"https://{address}/health", log, self.keys)


def kill(*pids: int) -> None:
    """kill -9, and reap: Flower's processes look for their parent by its id, which a zombie would keep."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_until(functools.partial(ended, pid), f"the end of process {pid}")


def ended(pid: int) -> bool:
    """Return whether a process has ended, and reap it if it is a child of this one; others have their own parents."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            return False
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except FileNotFoundError:
        return True
    return state == "Z" and int(parent) != os.getpid()


@contextlib.contextmanager
def stage(
    root: Path,
    clients: int | Mapping[str, Mapping[str, Any]] = 2,
    through: Callable[[str], AbstractContextManager[str]] = nullcontext,
    late: int = 0,
    **device: Any,
) -> Iterator[Stage]:
    """Start SuperLink, SuperNodes and agents.

    `clients` are so many parts of a divided data set, or name → keys of devices, of which the last `late` ones are not
    started. `through` gets the SuperLink's address and gives the nodes another.
    """
    own = {str(i): {} for i in range(clients)} if isinstance(clients, int) else clients
    home = root / "flower"
    home.mkdir()
    keys = make_keys(home / "keys", len(own))[0]
    with ExitStack() as stack:
        sockets = stack.enter_context(deployment.sockets_folder())
        fleet = stack.enter_context(superlink.superlink(home, simulation=False, keys=keys))
        superlink.register(home, [keys.node(i)[1] for i in range(len(own))])
        made = Stage(root, sockets, keys, stack.enter_context(through(fleet)), fleet, list(own))
        for name, chosen in own.items():
            deployment.agent_config(root, sockets, name, {"device": "cpu", **device, **chosen})
        begin = range(len(own) - late)
        for i in begin:
            made.start_agent(i)
            made.start_node(i)
        deployment.wait_for_agents({f"unix:{sockets}/a{made.names[i]}": made.agents[i] for i in begin})
        try:
            yield made
        finally:
            for process in filter(None, [*made.nodes, *made.agents, made.restarted]):
                process.kill()
                process.wait()
