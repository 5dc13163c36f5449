"""A SuperLink refuses unknown nodes and operators with a reason, and accepts registered nodes."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedtta.server.report import METRICS_FILE, read_results
from fedtta.settings import Settings
from fedtta.simulation import deployment, devices, signing, submit, superlink
from fedtta.simulation.keys import Keys, make_keys
from tests.faults.stage import PATIENCE, wait_until
from tests.server.test_run import assert_same_results, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]

CONFIG = {"name": "0"}
SMALL = Settings(
    fraction=0.2, image_size=20, device="cpu", rounds=1, local_epochs=1, personal_epochs=0, augment=False,
    methods="fedavg", shifts="original", round_timeout=300.0,
)  # fmt: skip
#: What is wrong → what the SuperNode says before it ends.
TOLD = {
    "another authority": "CERTIFICATE_VERIFY_FAILED",
    "not registered": "Failed to activate SuperNode",
    "no key": "All SuperNodes must be registered",
}


@dataclass(frozen=True)
class Link:
    """A SuperLink, and Flower's own SuperNode with a registered key that trusts the key of an app."""

    home: Path
    fleet: str
    keys: Keys


def flowers(ours: Callable[..., list[str]], *given: Any) -> list[str]:
    """Return the command of `flower-supernode`, which takes the options of `fedtta supernode`."""
    words = ours(*given)
    return [superlink.program("flower-supernode"), *words[words.index("supernode") + 1 :]]


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    home = tmp_path_factory.mktemp("flower")
    keys = make_keys(home / "keys", 2, app=True)[0]
    with superlink.superlink(home, simulation=False, keys=keys) as fleet:
        superlink.register(home, [keys.node(0)[1]])
        own, trusting = {**CONFIG, "state-dir": str(home / "state")}, ["--trusted-entities", str(keys.trusted)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(deployment, "supernode_command", partial(flowers, deployment.supernode_command))
            started = deployment.supernode(home / "node", fleet, own, (keys.ca, keys.node(0)[0]), trusting)
        with started as node:
            wait_until(lambda: statuses(home) == ["online"], "the node")
            yield Link(home, fleet, keys)
            assert node.poll() is None
            assert "Starting Flower SuperExec" in log_of(home / "node")
            node.kill()


def test_nodes_and_operators_without_the_right_keys_are_refused(link: Link, tmp_path: Path) -> None:
    """Another node with the right keys is online."""
    home, fleet, ca = link.home, link.fleet, link.keys.ca
    mine, not_registered = (link.keys.node(i)[0] for i in range(2))
    other = make_keys(tmp_path / "other", 1)[0]
    started = {
        "another authority": deployment.supernode(home / "another authority", fleet, CONFIG, (other.ca, mine)),
        "not registered": deployment.supernode(home / "not registered", fleet, CONFIG, (ca, not_registered)),
        "no key": without_key(home / "no key", fleet, ca, mine),
    }
    # this one takes the SuperLink for one that is not there yet, and keeps trying
    plain = deployment.supernode(home / "no TLS", fleet, CONFIG, None)
    for what, process in started.items():
        assert process.wait(PATIENCE) != 0, what
        assert TOLD[what] in log_of(home / what), f"{what}: {log_of(home / what)}"
    wait_until(lambda: "Connection attempt failed" in log_of(home / "no TLS"), "the node without TLS")
    assert plain.poll() is None
    plain.kill()
    plain.wait()
    address, _ = superlink.connection(home)
    for trusted, reason in ((other.ca, "CERTIFICATE_VERIFY_FAILED"), (None, "no SuperLink answers")):
        superlink.write_connection(tmp_path, address, trusted)
        with pytest.raises(superlink.FlowerError, match=reason):
            superlink.register(tmp_path, [other.node(0)[1]])
    assert statuses(home) == ["online"]


def test_a_node_that_trusts_a_key_runs_what_it_has_signed_and_nothing_else(link: Link, tmp_path: Path) -> None:
    """A folder's app has no signature; the same app, signed, is submitted through the SuperLink's database."""
    bundle = tmp_path / "app.fab"
    assert signing.main([str(link.keys.app), "--out", str(bundle)]) == 0
    settings = SMALL.replace(clients=1, results=str(tmp_path))
    with pytest.raises(superlink.FlowerError, match="could not be verified"):
        deployment.run(link.home, settings.replace(run_name="unsigned").flat(), PATIENCE)
    address, ca = superlink.connection(link.home)
    words = ["--superlink", address, "--root-certificates", str(ca), "run", "--timeout", str(PATIENCE)]
    words += ["--signed", str(bundle), "--database", str(link.home / superlink.DATABASE), "--set"]
    words += [f"{key}={value}" for key, value in settings.replace(run_name="signed").flat().items()]
    assert submit.main(words) == 0
    started = read_results(tmp_path / "signed" / METRICS_FILE).run
    assert started is not None
    assert (started.commit, started.bundle) == (None, hashlib.sha256(bundle.read_bytes()).hexdigest())
    assert_same_results(tmp_path / "signed", run(tmp_path / "alone", settings.replace(state_dir=str(tmp_path / "one"))))


def without_key(home: Path, fleet: str, ca: Path, key: Path) -> subprocess.Popen[bytes]:
    """Start a SuperNode that trusts the SuperLink and shows no key."""
    home.mkdir()
    command = deployment.supernode_command(fleet, superlink.free_ports(1)[0], CONFIG, (ca, key))
    place = command.index("--auth-supernode-private-key")
    del command[place : place + 2]
    with (home / deployment.NODE_LOG).open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=home,
            env=deployment.node_environment(home), start_new_session=True,
        )  # fmt: skip


def log_of(home: Path) -> str:
    return (home / deployment.NODE_LOG).read_text(encoding="utf-8")


def statuses(home: Path) -> list[str]:
    """Return the status of every node that is registered."""
    return [node.status for node in devices.listed(*superlink.connection(home))]
