"""`fedtta supernode`: Flower's SuperNode, whose client processes are forked from one that has loaded what they need.

`flower-supernode` starts a Python for each message, and importing Flower and PyTorch is most of what that takes. Here
an executor takes the place of Flower's SuperExec: it imports them once, and forks a child that waits for work. The
child becomes `flwr-clientapp` when there is some, and the next one is forked: a message still has a process of its own,
which imports the app from its bundle and ends with the reply.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import signal
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flwr.common.config import parse_config_args
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.address import resolve_bind_address
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, flower_supernode
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

#: Seconds between two questions for work. Flower's SuperExec waits 1 s, which is a large part of a short round; each
#: question takes both processes 4 ms.
POLL = 0.25
WATCH = 0.2  # seconds between two looks at whether the SuperNode is still there
RETRY = 1.0  # seconds until the next child, after one that ended without work


def main(words: Sequence[str]) -> None:
    """Run `flower-supernode` with these options; with `--isolation process` the executor is the caller's affair."""
    parser = _parse_args_run_supernode()
    parser.prog = "fedtta supernode"
    options = parser.parse_args(words)
    check_files(options, parser)
    if options.isolation == "subprocess":
        if options.superexec_auth_secret_file:
            parser.error("--superexec-auth-secret-file: allowed with --isolation process only")
        # an agent computes by itself
        computes = "agent" not in parse_config_args([options.node_config] if options.node_config else None)
        node, executor = os.getpid(), os.fork()
        if executor == 0:
            sys.argv = ["flwr-clientapp", *wait_for_work(options, node, computes)]
            return flwr_clientapp()
        signal.signal(signal.SIGCHLD, lambda number, frame: end_without(executor))
    rename("flower-supernode")
    sys.argv = ["flower-supernode", *words, "--isolation", "process"]
    return flower_supernode()


def check_files(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse files that cannot be used: Flower shows a traceback without its key, and asks for ever with any ca.crt."""
    try:
        if authority := options.root_certificates:
            ssl.create_default_context(cafile=Path(authority).expanduser())
    except OSError as error:  # an SSLError is one
        parser.error(f"--root-certificates {authority}: {error}")
    try:
        if key := options.auth_supernode_private_key:
            Path(key).expanduser().read_bytes()
    except OSError as error:
        parser.error(f"--auth-supernode-private-key {key}: {error}")


def end_without(executor: int) -> None:
    """End the SuperNode if the executor has ended: a service manager starts both again."""
    if os.waitpid(executor, os.WNOHANG)[0]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        flwr_exit(ExitCode.TASK_PROC_EXCEPTION, "the executor has ended; without it, no ClientApp is started")


def wait_for_work(options: argparse.Namespace, node: int, computes: bool) -> list[str]:
    """Fork children that wait for work until the SuperNode ends; return in each, with the options of its program."""
    rename("fedtta-executor")
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the SuperNode too, whose end ends this
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    if computes:
        with contextlib.suppress(ImportError):  # if the app needs it, the app says so
            importlib.import_module("torch")
    executor = os.getpid()
    while True:
        working, tell = os.pipe()
        if os.fork() == 0:
            os.close(working)
            token = acquire(options, executor)
            os.write(tell, b"1")
            os.close(tell)
            return [*connection(options), "--token", token]
        os.close(tell)
        while not select.select([working], [], [], WATCH)[0]:
            if os.getppid() != node:
                os._exit(0)
        if not os.read(working, 1):
            time.sleep(RETRY)
        os.close(working)


def acquire(options: argparse.Namespace, executor: int) -> str:
    """Ask the SuperNode for work until there is some, and the executor; return the token that its process needs."""
    rename("flwr-clientapp")
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(0))  # until Flower's program has handlers of its own
    start_parent_process_monitor(executor)  # raises SIGINT
    forget_this_package()
    insecure = options.ssl_ca_certfile is None
    client = RuntimeHttpClient.from_server_address(
        server_address=address(options),
        insecure=insecure,
        root_certificates=validate_and_resolve_root_certificates(options.ssl_ca_certfile, insecure),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    with contextlib.closing(client):
        while True:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            if found.HasField("task") and found.token:
                return str(found.token)
            time.sleep(POLL)


def address(options: argparse.Namespace) -> str:
    """Return where this machine reaches the SuperNode's Runtime API."""
    return resolve_bind_address(
        f"[{options.host}]:{options.port}" if ":" in options.host else f"{options.host}:{options.port}"
    )


def connection(options: argparse.Namespace) -> list[str]:
    """Return the options by which `flwr-clientapp` reaches the SuperNode."""
    secure = ["--root-certificates", options.ssl_ca_certfile] if options.ssl_ca_certfile else ["--insecure"]
    installs = ["--allow-runtime-dependency-installation"] if options.runtime_dependency_install else []
    return ["--runtime-api-address", address(options), *secure, *installs]


def forget_this_package() -> None:
    """Let the app be imported from its bundle: drop what is imported of this package, and a checkout from the path."""
    folder = Path(str(sys.modules["fedtta"].__file__)).resolve().parents[1]
    if folder.name not in ("site-packages", "dist-packages"):  # a checkout
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedtta"]:
        del sys.modules[name]


def rename(name: str) -> None:
    """Set the name by which `ps` and `top` show this process: on Linux, at most 15 letters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15], encoding="ascii")
