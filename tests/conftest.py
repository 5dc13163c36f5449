"""What all tests share: one torch thread (bits depend on the number), Flower messages without a Flower process, runs
without pages unless a test reads them, and which test files run side by side.
"""

import gc
import os
import signal

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.pop("RAY_ADDRESS", None)  # tests start a Ray of their own
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "120")  # seconds for Ray's first process to answer, instead of 20
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would make its workers wait for all other tests

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from xdist.scheduler import LoadFileScheduling

from fedtta.server.report import page
from fedtta.simulation.program import ENDING

#: Files that start Ray, each enough for two cores.
RAY = (
    "tests/integration/test_flower_cli.py", "tests/integration/test_simulation.py",
    "tests/simulation/test_cluster.py", "tests/simulation/test_transport_contract.py",
)  # fmt: skip
#: What takes longest, mostly waiting for processes, is begun first. pytest forgets the order of its arguments where one
#: contains another.
LONGEST = (
    "tests/faults/test_killed.py", "tests/faults/test_sites.py", "tests/faults/test_undisturbed.py", *RAY,
    "tests/integration/test_deployment.py", "tests/hostile/test_superlink.py",
)  # fmt: skip

#: Tests whose runs in this process write a page that says nothing: to draw one takes twice as long as a small run.
UNDRAWN = tuple(
    f"tests/{part}/" for part in ("benchmarks", "client", "faults", "hostile", "integration", "server", "simulation")
)
BUILD_PAGE = page.build_page

gc.disable()  # until all tests are collected: to look for garbage takes a third of that time, and there is none
torch.set_num_threads(1)
hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes is no property
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """From here on garbage is looked for, but not among modules and collected tests, which stay."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of `LONGEST` first, in its order."""
    rank = {file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))


@pytest.fixture(autouse=True)
def _flower_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Message(...)` be made outside a Flower process."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the handlers of signals, which commands replace for good."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose before a module's fixtures run; a test that is marked `drawn`, and its fixtures, have pages."""
    plain = item.nodeid.startswith(UNDRAWN) and not item.get_closest_marker("drawn")
    page.build_page = (lambda *_: "not drawn") if plain else BUILD_PAGE


class OneAfterAnother(LoadFileScheduling):
    """Distribution by files, of which those in `RAY` count as one: two Rays that start at a time take longer than two
    that start one after another.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "ray" if file in RAY else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace `--dist loadfile`."""
    return OneAfterAnother(config, log) if config.option.dist == "loadfile" else None
