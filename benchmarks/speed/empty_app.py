"""An empty Flower app, to measure the cost of a round without learning.

`fedtta.benchmarks.speed.deployment` bundles this file alone, so it imports nothing of ours. The server sends arrays and
polls for replies as `fedtta.messages.grid.GridTransport` does; the clients answer at once, with arrays of the same
shapes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

POLL, IDLE, REST = 0.05, 19, 1.0  # as in `fedtta.messages.flower`

server = ServerApp()
client = ClientApp()


@client.train()
def answer(message: Message, context: Context) -> Message:
    """Answer with other arrays of the same shapes."""
    arrays = arrays_of([array.shape for array in message.content.array_records["arrays"].values()])
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Wait for the nodes, do the rounds, and write the seconds of each to the file that the run config names."""
    config = context.run_config
    timeout, shapes = float(config["timeout"]), json.loads(str(config["shapes"]))
    nodes = wait(grid, int(config["nodes"]), timeout)
    seconds = [timed_round(grid, nodes, arrays_of(shapes), timeout) for _ in range(int(config["rounds"]))]
    path = Path(str(config["results"]))
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(seconds), encoding="utf-8")
    unfinished.replace(path)


def arrays_of(shapes: Sequence[Sequence[int]]) -> ArrayRecord:
    """Return float32 arrays of these shapes, with values as hard to compress as weights are."""
    draw = np.random.default_rng()  # others each time, as weights are: equal ones need not travel twice
    values = [draw.standard_normal(shape, dtype=np.float32) for shape in shapes]
    return ArrayRecord({str(i): Array(value) for i, value in enumerate(values)})


def wait(grid: Grid, nodes: int, timeout: float) -> list[int]:
    """Return the nodes' ids as soon as so many are there; TimeoutError if that takes too long."""
    end = time.monotonic() + timeout
    while len(found := list(grid.get_node_ids())) < nodes:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(found)} of {nodes} nodes are there after {timeout:g} s")
        time.sleep(POLL)
    return found


def timed_round(grid: Grid, nodes: Sequence[int], arrays: ArrayRecord, timeout: float) -> float:
    """Send arrays to all nodes and return the seconds until the last one has answered.

    Raises
    ------
    RuntimeError
        A node failed; the message has its reason.
    TimeoutError
        Not all have answered in time.
    """
    start = time.perf_counter()
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({})})
    messages = [Message(content, dst_node_id=node, message_type="train", ttl=timeout) for node in nodes]
    sent = [grid.push_messages([message]) for message in messages]
    waiting = {name for names in sent for name in names if name}
    if len(waiting) < len(nodes):
        raise RuntimeError(f"{len(nodes) - len(waiting)} of {len(nodes)} messages were not accepted for sending")
    while waiting:
        looked = time.perf_counter()
        for reply in grid.pull_messages(list(waiting)):
            if reply.has_error():
                raise RuntimeError(f"a node failed: {reply.error.code}: {reply.error.reason}")
            waiting.remove(reply.metadata.reply_to_message_id)
        if waiting and looked - start > timeout:
            raise TimeoutError(f"{len(waiting)} of {len(nodes)} nodes have not answered within {timeout:g} s")
        if waiting:
            time.sleep(max(POLL, min(REST, IDLE * (time.perf_counter() - looked))))
    return time.perf_counter() - start
