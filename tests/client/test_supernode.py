"""The SuperNode whose ClientApps are forked: real processes, killed; what it imports, and what it tells them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from flwr.supernode.cli.flwr_clientapp import _parse_args_run_flwr_clientapp

from fedtta.client import supernode
from fedtta.simulation import deployment, superlink
from tests.faults.stage import PATIENCE, processes, wait_until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A SuperNode that looks for a SuperLink in vain."""
    (nowhere,) = superlink.free_ports(1)
    process = deployment.supernode(tmp_path, f"127.0.0.1:{nowhere}", {"name": "a", "agent": "unix:/nowhere"}, None)
    yield process
    process.kill()
    process.wait(PATIENCE)
    superlink.stop(tmp_path)


def test_what_ends_is_replaced_or_ends_the_supernode(node: subprocess.Popen[bytes], tmp_path: Path) -> None:
    def waiting() -> list[int]:
        return processes(tmp_path, "flwr-clientapp")

    wait_until(lambda: len(waiting()) == 1, "process that waits for work")
    (first,), (executor,) = waiting(), processes(tmp_path, "fedtta-executor")
    os.kill(executor, signal.SIGTERM)  # a service's stop reaches all: the executor ends with the SuperNode only
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(waiting()) == 1 and waiting() != [first], "process in its place")
    os.kill(executor, signal.SIGKILL)
    assert node.wait(PATIENCE) == 1
    log = (tmp_path / deployment.NODE_LOG).read_text(encoding="utf-8")
    assert "the executor has ended; without it, no ClientApp is started" in log
    wait_until(lambda: not superlink.started(tmp_path), "end of all")


def test_nothing_outlives_a_killed_supernode(node: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_until(lambda: len(processes(tmp_path, "flwr-clientapp")) == 1, "process that waits for work")
    assert processes(tmp_path, "flower-supernode") == [node.pid]
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
    ("option", "told"),
    [
        ("--root-certificates=nowhere.crt", "--root-certificates nowhere.crt: [Errno 2] No such file"),
        ("--root-certificates={file}", "no certificate or crl found"),
        ("--auth-supernode-private-key=nowhere", "--auth-supernode-private-key nowhere: [Errno 2] No such file"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    option: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower showed a traceback, or tried to connect for ever."""
    (file := tmp_path / "ca.crt").write_text("half a file")
    with pytest.raises(SystemExit, match="2"):
        supernode.main([option.format(file=file)])
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "address", "expected"),
    [
        (["--insecure", "--port=7"], "127.0.0.1:7", {"insecure": True, "runtime_dependency_install": False}),
        (["--insecure", "--host=::", "--port=7"], "[::1]:7", {"insecure": True}),
        (
            [
                "--insecure",
                "--host=0.0.0.0",
                "--port=7",
                "--ssl-ca-certfile=ca.crt",
                "--allow-runtime-dependency-installation",
            ],
            "127.0.0.1:7",
            {"insecure": False, "root_certificates": "ca.crt", "runtime_dependency_install": True},
        ),
    ],
)
def test_what_a_clientapp_is_told(words: list[str], address: str, expected: dict[str, object]) -> None:
    options = _parse_args_run_supernode().parse_args(words)
    told = vars(_parse_args_run_flwr_clientapp().parse_args([*supernode.connection(options), "--token", "t"]))
    assert told["runtime_api_address"] == address
    assert {key: told[key] for key in expected} == expected
