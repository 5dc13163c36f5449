"""A network that is slow, narrow and cut off for a while: between nodes and SuperLink, between program and agent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fedtta.benchmarks.speed.served import sample_images
from fedtta.benchmarks.speed.streams import batches, requests
from fedtta.settings import Settings
from fedtta.simulation.keys import make_keys
from fedtta.simulation.superlink import free_ports
from tests.faults.device import OPTIONS, device
from tests.faults.proxy import Proxy, proxy
from tests.faults.stage import PATIENCE, stage, wait_until
from tests.server.test_run import assert_same_results, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]

DELAY, RATE, CUT = 0.1, 1e6, 20.0  # seconds, bytes a second, seconds
RUN = "slow"
SMALL = Settings(
    clients=2, fraction=0.3, image_size=20, device="cpu", rounds=2, local_epochs=5, personal_epochs=1, augment=False,
    methods="fedavg,fedthe", shifts="original", node_timeout=300.0, round_timeout=300.0, run_name=RUN, min_replies=2,
)  # fmt: skip


def test_a_run_over_a_bad_line_has_the_bits_of_one_process(tmp_path: Path) -> None:
    lines: list[Proxy] = []

    @contextlib.contextmanager
    def through(fleet: str) -> Iterator[str]:
        with proxy(fleet, DELAY, RATE) as line:
            lines.append(line)
            yield line.address

    with stage(tmp_path, through=through) as made:
        running = made.run(SMALL)
        wait_until(lambda: made.rounds(RUN) >= 1, "a round", running)
        with made.held_at_work(0):
            before = lines[0].connections
            assert before >= 2  # nodes do come this way
            cutting = threading.Thread(target=lines[0].cut, args=(CUT,))
            cutting.start()
        # The agent goes on and answers while the line is cut.
        running.result(PATIENCE)
        cutting.join()
        assert lines[0].connections > before
    # A node whose heartbeats come too late after the cut, or whose reply the cut has hit on its way, is named, and its
    # message is sent again, since the quorum needs it. No other is affected, and what arrives is intact.
    lost = [event for event in made.events(RUN) if event["event"] in ("failed", "late", "refused")]
    assert {event["event"] for event in lost} <= {"failed", "late"}
    assert len({(event["training"], event["round"]) for event in lost}) <= 1
    assert_same_results(made.results(RUN), run(tmp_path / "undisturbed", SMALL))


def test_a_program_finds_its_agent_again(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", 1, agents=["127.0.0.1"])[0].folder
    (port,) = free_ports(1)
    tls = {"certificate": "agent-127.0.0.1.crt", "key": "agent-127.0.0.1.key", "client-ca": "agents-ca.crt"}
    own = {"listen": f"127.0.0.1:{port}", **{name: str(keys / file) for name, file in tls.items()}}
    credentials = grpc.ssl_channel_credentials(
        *((keys / name).read_bytes() for name in ("agents-ca.crt", "program.key", "program.crt"))
    )
    asked = requests(batches(sample_images(20), 1))
    with proxy(own["listen"], DELAY, RATE) as line:
        channel = grpc.secure_channel(line.address, credentials, OPTIONS)
        with device(channel, **own) as made:
            assert [made.predict(request).position for request in asked[:10]] == list(range(10))
            line.cut(3.0)
            assert [made.predict(request).position for request in asked[10:]] == list(range(10, 20))
            assert line.connections == 2
