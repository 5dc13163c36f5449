"""`python -m fedtta.simulation.demo`: four sites, real processes over TLS, a shift after deployment, and a page.

Three sites begin, the fourth joins midway. Every site has a SuperNode and a resident agent, which holds its images.
After training, images that no site has arrive at every agent under the site's own shift, as encoded files.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedtta.data import Images
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc
from fedtta.models import load_model
from fedtta.models.preprocessing import Preprocessing
from fedtta.server.events import RunError
from fedtta.server.report import METRICS_FILE
from fedtta.settings import Settings
from fedtta.simulation import deployment, superlink
from fedtta.simulation.demo.page import SHOWN, Outcome, write_page
from fedtta.simulation.demo.sites import SITES, Arrivals, Site, shifted, source_images, write_device, write_sites
from fedtta.simulation.engine import simulate
from fedtta.simulation.keys import KeysError, make_keys
from fedtta.simulation.program import unwind_on_signals
from fedtta.simulation.superlink import POLL, FlowerError

BATCH = 30  # images of a prediction request
LEAST_ROUNDS = 4  # the last site starts after a quarter of the rounds, and needs a few to join
LAPSE = 60.0  # seconds without a heartbeat after which a node is gone
PATIENCE = 900.0  # seconds of the run
ADAPTER = "tent"  # needs no labels, so that all sites can have the same one


def settings_of(images: Images, folder: Path, rounds: int) -> Settings:
    """Return the run's settings; nothing in them is chosen for any site."""
    return Settings(
        classes=",".join(images.classes), clients=len(SITES) - 1, max_clients=len(SITES),
        min_replies=len(SITES), rounds=rounds, local_epochs=2, model="cnn", model_options="norm=batch",
        methods=f"fedavg,{ADAPTER}", shifts="original", results=str(folder), run_name="run",
    )  # fmt: skip


@dataclass
class Demo:
    """A demo under way."""

    folder: Path
    settings: Settings
    sockets: Path
    home: Path
    nodes: dict[str, deployment.Supervised] = field(default_factory=dict)
    told: int = 0  # losses of a SuperNode that the run has reported and that have been dealt with

    def run(self, changed: dict[str, NDArray[np.uint8]], arrivals: Arrivals) -> dict[str, float]:
        """Deploy, train, let the last site join, and ask the agents; return site → accuracy on `changed` images.

        Raises
        ------
        FlowerError, KeysError
            Something did not start, or the run did not complete.
        """
        keys = make_keys(self.home / "keys", len(SITES))[0]
        own = [(keys.ca, keys.node(number)[0]) for number in range(len(SITES))]
        # leaving the SuperLink stops all processes of its home, before the stack waits for them
        with ExitStack() as stack, superlink.superlink(self.home, simulation=False, keys=keys) as fleet:
            public = [keys.node(number)[1] for number in range(len(SITES))]
            superlink.register(self.home, public, [site.name for site in SITES])
            agents = {
                self.address(site, "a"): deployment.start_agent(self.home / f"agent-{site.name}", self.device(site))
                for site in SITES
            }

            def start(number: int) -> subprocess.Popen[bytes]:
                config = {"name": SITES[number].name, "agent": self.address(SITES[number], "r")}
                node = deployment.supernode(self.home / f"node-{number}", fleet, config, own[number])
                return stack.enter_context(node)

            for number, site in enumerate(SITES):
                if not site.joins_late:
                    self.nodes[site.name] = deployment.Supervised(partial(start, number))
            deployment.wait_for_agents(agents)
            say("three sites are up; training begins")
            ended = threading.Event()
            with ThreadPoolExecutor(1) as executor:  # the run in this thread, which a signal interrupts
                supervised = executor.submit(self.supervise, start, ended)
                try:
                    deployment.run(self.home, self.settings.flat(), PATIENCE, show=True)
                finally:
                    ended.set()
            supervised.result()
            self.require_all()
            say("the shift: new images arrive at every site")
            found = {site.name: self.predict(site, changed[site.name]) for site in SITES}
            return {name: float((classes == arrivals.labels).mean()) for name, classes in found.items()}

    def device(self, site: Site) -> Path:
        """Write a site's device.toml."""
        keys = {"adapter": ADAPTER, "listen": self.address(site, "a"), "relay": self.address(site, "r")}
        return write_device(self.folder, site, keys)

    def address(self, site: Site, kind: str) -> str:
        """Return the address of an agent's predictor ("a") or relay ("r")."""
        return f"unix:{self.sockets}/{kind}-{site.name}"

    def rounds(self) -> int:
        """Return how many training rounds have ended."""
        return sum(one["event"] == "round" for one in self.events())

    def require_all(self) -> None:
        """Raise FlowerError if a site has not joined the run in time: it has no model then."""
        events = self.events()
        there = {name for one in events if one["event"] == "clients" for name in one["names"]}
        there |= {one["name"] for one in events if one["event"] == "joined"}
        if absent := [site.name for site in SITES if site.name not in there]:
            raise FlowerError(f"{', '.join(absent)} had not joined when training ended; take more --rounds")

    def supervise(self, start: Callable[[int], subprocess.Popen[bytes]], ended: threading.Event) -> None:
        """Until the run has ended, start the last site after a quarter of its rounds, and tend the SuperNodes."""
        while not ended.wait(POLL):
            for number, site in enumerate(SITES):
                if site.name not in self.nodes and self.rounds() >= self.settings.rounds // 4:
                    say(f"{site.name} starts")
                    self.nodes[site.name] = deployment.Supervised(partial(start, number))
            self.tend()

    def tend(self) -> None:
        """Start SuperNodes again that have ended, or that the run has reported as gone."""
        for name, node in self.nodes.items():
            if (status := node.tend()) is not None:
                say(f"the SuperNode of {name} ended with status {status}; it is started again")
        gone = [one["name"] for one in self.events() if one["event"] == "left"]
        for name in gone[self.told :]:
            self.told += 1
            node = self.nodes[name]
            if node.process.poll() is None and time.monotonic() - node.since > LAPSE:  # no successor of a lost one
                say(f"the run has lost the SuperNode of {name}, which still runs; it is replaced")
                node.replace()

    def events(self) -> list[dict[str, Any]]:
        """Return what the run has written so far."""
        path = self.folder / "run" / METRICS_FILE
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def predict(self, site: Site, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Let a site's agent predict images [N, C, H, W] in order, as PNG files; return classes [N].

        Raises
        ------
        FlowerError
            The agent does not predict; the message has its reason and the nodes' logs.
        """
        found = []
        with grpc.insecure_channel(self.address(site, "a")) as channel:
            stub = agent_pb2_grpc.PredictorStub(channel)
            for start in range(0, len(images), BATCH):
                files = [encoded(one) for one in images[start : start + BATCH]]
                request = pb.PredictRequest(images=pb.Images(kind=pb.Images.ENCODED, files=files))
                try:
                    found.append(deployment.predicted(stub.Predict(request, timeout=PATIENCE)))
                except grpc.RpcError as error:
                    logs = deployment.logs(self.home, "*/*.log")
                    raise FlowerError(f"the agent of {site.name}: {error.details()}\n{logs}") from error
        return np.concatenate(found)


def encoded(image: NDArray[np.uint8]) -> bytes:
    """Return an image [C, H, W] as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def accuracy(model_file: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """Return the accuracy of a model as it is, on images that are prepared as the agents prepare them."""
    network, spec = load_model(model_file)
    preprocessing = Preprocessing.from_dict(spec["preprocessing"])
    x = np.stack([preprocessing.apply(preprocessing.decode(encoded(one))) for one in images])
    with torch.no_grad():
        predicted = network(torch.from_numpy(x).float() / 255).argmax(1).numpy()
    return float((predicted == labels).mean())


def measure(
    demo: Demo, arrivals: Arrivals, changed: dict[str, NDArray[np.uint8]], right: dict[str, float]
) -> list[Outcome]:
    """Return what happened at each site; `right` is the agents' accuracy on the `changed` images."""
    events, model = demo.events(), demo.folder / "run" / "model.safetensors"
    begin = next(one for one in events if one["event"] == "clients")
    late = {one["name"]: one for one in events if one["event"] == "joined"}
    outcomes = []
    for site in SITES:
        joined = late.get(site.name)
        sizes = joined["sizes"] if joined else begin["sizes"][begin["names"].index(site.name)]
        data = joined["data"] if joined else begin["data"][begin["names"].index(site.name)]
        outcomes.append(
            Outcome(
                site,
                samples=data["samples"] - data["skipped"],
                classes=data["classes_present"],
                training=sizes[0],
                joined=joined["round"] if joined else None,
                alone=None if site.layout == "flat" else alone(demo, site, arrivals),
                federated=accuracy(model, arrivals.images, arrivals.labels),
                shifted=accuracy(model, changed[site.name], arrivals.labels),
                adapted=right[site.name],
                arrivals=len(arrivals.labels),
                images=changed[site.name][:SHOWN],
            )
        )
    return outcomes


def alone(demo: Demo, site: Site, arrivals: Arrivals) -> float:
    """Train a site's model on its own images alone, in as many rounds; return its accuracy on the arrivals."""
    say(f"{site.name} trains alone, for comparison")
    name = f"alone-{site.name}"
    own = demo.settings.replace(
        devices=str(demo.folder / site.name / "device.toml"), clients=1, max_clients=0, min_replies=1, run_name=name,
        methods="fedavg", workers=1,
    )  # fmt: skip
    simulate(own)
    return accuracy(demo.folder / name / "model.safetensors", arrivals.images, arrivals.labels)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    """Run the demo; return exit status 0 on success, 1 on failure, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m fedtta.simulation.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, help="a new folder (default: results/demo-<time>)")
    parser.add_argument("--rounds", type=int, default=12, help="training rounds (default: 12)")
    arguments = parser.parse_args(words)
    folder = (arguments.folder or Path("results") / time.strftime("demo-%Y%m%d-%H%M%S")).expanduser().resolve()
    if arguments.rounds < LEAST_ROUNDS:
        print(f"error: --rounds {arguments.rounds}: allowed is {LEAST_ROUNDS} or more", file=sys.stderr)
        return 2
    if folder.exists():
        print(f"error: {folder} exists; choose another --folder", file=sys.stderr)
        return 2
    unwind_on_signals()
    data_dir = Path(os.environ["FEDTTA_DATA"]).expanduser() if os.environ.get("FEDTTA_DATA") else None
    try:
        images = source_images(data_dir)
    except (OSError, ValueError) as error:
        print(f"error: FEDTTA_DATA = {data_dir}: {error}", file=sys.stderr)
        return 2
    start = time.monotonic()
    try:
        arrivals = write_sites(folder, images)
        changed = {site.name: shifted(arrivals, site) for site in SITES}
        home = folder / "flower"
        home.mkdir(mode=0o700)
        with deployment.sockets_folder() as sockets:
            demo = Demo(folder, settings_of(images, folder, arguments.rounds), sockets, home)
            right = demo.run(changed, arrivals)
        outcomes = measure(demo, arrivals, changed, right)
    except (RunError, KeysError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    about = [
        f"{len(SITES)} sites with folders of {images.name}, {arguments.rounds} rounds of federated averaging over TLS, "
        f"agents that adapt with {ADAPTER}. Seed 1; nothing is tuned for a site.",
    ]
    page = write_page(folder / "index.html", outcomes, about)
    say(f"{time.monotonic() - start:.0f} s; open {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
