"""The SuperNode whose ClientApps are forked: real processes, killed; what it imports, and what it tells them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from flwr.supernode.cli.flwr_clientapp import _parse_args_run_flwr_clientapp

from fedtta.client import supernode
from fedtta.simulation import deployment, superlink

PATIENCE = 60.0


def wait_until(found: Callable[[], Any], what: str) -> Any:
    """Return what is found, once there is something."""
    end = time.monotonic() + PATIENCE
    while not (there := found()):
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.05)
    return there


def named(home: Path, name: str) -> list[int]:
    """Return the processes of a home that have this name; a zombie has no environment, and so no home."""
    return [pid for pid in superlink.started(home) if Path(f"/proc/{pid}/comm").read_text().strip() == name]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A SuperNode that looks for a SuperLink in vain."""
    (nowhere,) = superlink.free_ports(1)
    process = deployment.supernode(tmp_path, f"127.0.0.1:{nowhere}", {"name": "a", "agent": "unix:/nowhere"}, None)
    yield process
    process.kill()
    process.wait(PATIENCE)
    superlink.stop(tmp_path)


def test_each_ends_with_the_one_before_it_and_is_replaced(node: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (waiting,) = wait_until(lambda: named(tmp_path, "flwr-clientapp"), "process that waits for work")
    os.kill(waiting, 9)
    (another,) = wait_until(
        lambda: [pid for pid in named(tmp_path, "flwr-clientapp") if pid != waiting], "process in its place"
    )
    (executor,) = named(tmp_path, "fedtta-executor")
    os.kill(executor, 15)  # as with a service's stop, which reaches all: it ends with the SuperNode
    assert node.poll() is None
    os.kill(executor, 9)
    assert node.wait(PATIENCE) == 1
    assert "the executor has ended; without it, no ClientApp is started" in (tmp_path / deployment.NODE_LOG).read_text(
        encoding="utf-8"
    )
    wait_until(lambda: not superlink.started(tmp_path), f"end of {another}")


def test_nothing_outlives_a_killed_supernode(node: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_until(lambda: named(tmp_path, "flwr-clientapp"), "process that waits for work")
    assert named(tmp_path, "flower-supernod") == [node.pid]
    node.kill()
    node.wait(PATIENCE)
    wait_until(lambda: not superlink.started(tmp_path), "end of its processes")


def test_the_app_is_imported_from_its_bundle_alone() -> None:
    program = (
        "import sys, importlib.util; from fedtta.client import supernode; supernode.forget_this_package();"
        "print([name for name in sys.modules if name.startswith('fedtta')], importlib.util.find_spec('fedtta'))"
    )
    environ = os.environ | {"PYTHONPATH": str(superlink.PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd="/", stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "[] None\n"


def test_a_secret_that_the_executor_would_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        supernode.main(["--insecure", "--superexec-auth-secret-file", "secret"])
    assert "--superexec-auth-secret-file: allowed with --isolation process only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "address", "expected"),
    [
        (["--insecure"], "127.0.0.1:8000", {"insecure": True, "runtime_dependency_install": False}),
        (["--insecure", "--host=::", "--port=7"], "[::1]:7", {"insecure": True}),
        (
            ["--insecure", "--host=0.0.0.0", "--ssl-ca-certfile=ca.crt", "--allow-runtime-dependency-installation"],
            "127.0.0.1:8000",
            {"insecure": False, "root_certificates": "ca.crt", "runtime_dependency_install": True},
        ),
    ],
)
def test_what_a_clientapp_is_told(words: list[str], address: str, expected: dict[str, object]) -> None:
    options = _parse_args_run_supernode().parse_args(words)
    told = vars(_parse_args_run_flwr_clientapp().parse_args([*supernode.connection(options), "--token", "t"]))
    assert told["runtime_api_address"] == supernode.address(options)
    assert told["runtime_api_address"].rpartition(":")[0] == address.rpartition(":")[0]
    assert {key: told[key] for key in expected} == expected
