"""A SuperLink refuses unknown nodes and operators with a reason, and accepts registered nodes."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from fedtta.settings import Settings
from fedtta.simulation import deployment, signing, submit, superlink
from fedtta.simulation.keys import make_keys
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


def test_nodes_and_operators_without_the_right_keys_are_refused(tmp_path: Path) -> None:
    home, intruder = tmp_path / "flower", tmp_path / "intruder"
    home.mkdir()
    intruder.mkdir()
    keys, other = make_keys(home / "keys", 2)[0], make_keys(tmp_path / "other", 1)[0]
    mine, not_registered = (keys.node(i)[0] for i in range(2))
    with superlink.superlink(home, simulation=False, keys=keys) as fleet:
        superlink.register(home, [keys.node(0)[1]])
        started = {
            "another authority": deployment.supernode(home / "another authority", fleet, CONFIG, (other.ca, mine)),
            "not registered": deployment.supernode(home / "not registered", fleet, CONFIG, (keys.ca, not_registered)),
            "no key": without_key(home / "no key", fleet, keys.ca, mine),
        }
        # this one takes the SuperLink for one that is not there yet, and keeps trying
        plain = deployment.supernode(home / "no TLS", fleet, CONFIG, None)
        for what, process in started.items():
            assert process.wait(PATIENCE) != 0, what
            assert TOLD[what] in log_of(home / what), f"{what}: {log_of(home / what)}"
        wait_until(lambda: "Connection attempt failed" in log_of(home / "no TLS"), "the node without TLS")
        assert plain.poll() is None
        assert "online" not in statuses(home)
        plain.kill()
        plain.wait()
        connection = (home / "config.toml").read_text(encoding="utf-8")
        (intruder / "config.toml").write_text(connection.replace(str(keys.ca), str(other.ca)), encoding="utf-8")
        with pytest.raises(superlink.FlowerError, match="flwr supernode register"):
            superlink.register(intruder, [other.node(0)[1]])
        with deployment.supernode(home / "node", fleet, CONFIG, (keys.ca, mine)) as node:
            wait_until(lambda: "online" in statuses(home), "the node")
            assert node.poll() is None
            node.kill()


def test_a_node_that_trusts_a_key_runs_what_it_has_signed_and_nothing_else(tmp_path: Path) -> None:
    """A folder's app has no signature; the same app, signed, is submitted through the SuperLink's database."""
    home = tmp_path / "flower"
    home.mkdir()
    keys = make_keys(home / "keys", 1, app=True)[0]
    assert signing.main([str(keys.app), "--out", str(tmp_path / "app.fab")]) == 0
    settings = SMALL.replace(clients=1, results=str(tmp_path))
    own = {**CONFIG, "state-dir": str(tmp_path / "state")}
    trusting = ["--trusted-entities", str(keys.trusted)]
    with superlink.superlink(home, simulation=False, keys=keys) as fleet:
        superlink.register(home, [keys.node(0)[1]])
        with deployment.supernode(home / "node", fleet, own, (keys.ca, keys.node(0)[0]), trusting) as node:
            wait_until(lambda: "online" in statuses(home), "the node")
            with pytest.raises(superlink.FlowerError, match="could not be verified"):
                deployment.run(home, settings.flat() | {"run-name": "unsigned"}, PATIENCE)
            address = tomllib.loads((home / "config.toml").read_text())["superlink"][superlink.CONNECTION]["address"]
            words = ["--superlink", address, "--root-certificates", str(keys.ca), "run", "--signed"]
            words += [
                str(tmp_path / "app.fab"),
                "--database",
                str(home / superlink.DATABASE),
                "--timeout",
                str(PATIENCE),
            ]
            pairs = (settings.flat() | {"run-name": "signed"}).items()
            assert submit.main([*words, "--set", *(f"{key}={value}" for key, value in pairs)]) == 0
            assert node.poll() is None
            node.kill()
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
            env=superlink.environment(home), start_new_session=True,
        )  # fmt: skip


def log_of(home: Path) -> str:
    return (home / deployment.NODE_LOG).read_text(encoding="utf-8")


def statuses(home: Path) -> list[str]:
    """Return the status of every node that is registered."""
    return [node["status"] for node in superlink.flwr(home, "supernode", "list", superlink.CONNECTION)["nodes"]]
