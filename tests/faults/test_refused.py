"""A SuperLink refuses unknown nodes and operators with a reason, and accepts registered nodes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedtta.simulation import deployment, superlink
from fedtta.simulation.keys import make_keys
from tests.faults.stage import PATIENCE, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]

CONFIG = {"name": "0"}
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
