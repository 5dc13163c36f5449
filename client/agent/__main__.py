"""`python -m fedtta.client.agent --config device.toml`: run a device's resident agent until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from fedtta.client.config import AgentConfig
from fedtta.settings import SettingsError, logs
from fedtta.settings.memory import return_large_blocks

if TYPE_CHECKING:
    from fedtta.client.agent.core import Agent

LOG = logging.getLogger("fedtta.agent")
LOOK = 1.0  # seconds
USAGE, LOST = 2, 3  # exit status for an invalid config, and where the adapter's state could not be saved


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent and return the exit status."""
    parser = argparse.ArgumentParser(prog="fedtta agent", description="The resident agent of one device.")
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file of the agent's keys")
    chosen = parser.parse_args(arguments)
    try:
        config = AgentConfig.from_toml(chosen.config)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return USAGE
    logging.captureWarnings(True)
    logs.configure(config.log_format, config.log_level, lambda: {"device": config.name})
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()  # unlike an Event, safe to use in a signal's handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.put(number))
    return run(config, asked)


def run(config: AgentConfig, asked: queue.SimpleQueue[int]) -> int:
    """Serve until a signal arrives in `asked`; then answer accepted requests, save, and return the exit status."""
    from fedtta.client.agent.core import Agent  # slow to import, which refusing an invalid config does not need

    if config.runtime == "onnx":
        return_large_blocks()
    try:
        agent = Agent(config)
    except (ValueError, OSError, RuntimeError) as error:
        LOG.error("%s", error)
        return 1
    with ExitStack() as stack:
        stack.callback(logs.configure(config.log_format, config.log_level, agent.log.fields))
        return _serve(agent, config, asked)


def _serve(agent: Agent, config: AgentConfig, asked: queue.SimpleQueue[int]) -> int:
    """Serve an agent as `run` does."""
    from fedtta.client.agent.server import serve

    try:
        running = serve(agent, config)
    except (ValueError, OSError) as error:
        LOG.error("%s", error)
        agent.close()
        return 1
    LOG.info("stopping on %s", signal.Signals(next_signal(asked)).name)
    if left := running.stop(config.deadline):
        LOG.warning("%d calls were not answered within %g s", left, config.deadline)
    lost = agent.close()
    if lost:
        LOG.error("stopped; %s", lost)
    else:
        LOG.info("stopped; the adapter's state is saved")
    status = LOST if lost else 0
    if left or agent.scanning:  # the thread of a training or a scan must neither keep the process nor end inside torch
        logging.shutdown()
        os._exit(status)
    return status


def next_signal(asked: queue.SimpleQueue[int]) -> int:
    """Wait for a signal that its handler puts into `asked`, and return its number.

    A handler runs in this thread. A signal that arrives just before the wait, or that the system gives to another
    thread, does not wake it, so it looks around from time to time.
    """
    while True:
        with suppress(queue.Empty):
            return asked.get(timeout=LOOK)


if __name__ == "__main__":
    sys.exit(main())
