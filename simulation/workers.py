"""The transport to Ray workers; arrays go through memory that all processes of a machine share.

The model of a round is put there once, for however many clients, and read in place; so are the replies. (Flower's own
simulation copies it there for each message.) Ray sends it to another node of a cluster once. Workers do not import
Flower.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedtta.client.node import Node, perform
from fedtta.client.resources import RunData, data_of, give
from fedtta.client.sites import simulated_nodes
from fedtta.messages.arrays import Arrays, Contiguous, packed, unpacked
from fedtta.messages.record import Record
from fedtta.messages.requests import REQUESTS, Adapt, RefineRates, Request
from fedtta.messages.transport import Addressed, Answer, answer_of, late, reason_of, unknown_node
from fedtta.settings import Settings, class_names
from fedtta.simulation.cluster import KeptState, connected, gpu_share, keeper, own_signals, reserved
from fedtta.simulation.gpus import allocate, environment_with, mask

LOG = logging.getLogger(__name__)
AHEAD = 2  # calls that a worker has: the current one, and the next
TRIES = 3  # times that a request is handed to a worker, all but the first alone: two nodes may be lost in a row
WAIT = 0.5  # seconds for the next reply, at most, so that the deadline is checked
#: A call costs some 7 ms of processor time on all sides, so one may have many requests. A worker answers at least the
#: first, and others for so many seconds and while the replies have so few bytes: large or slow clients have their own.
REQUESTS_AT_ONCE = 16
SECONDS_AT_ONCE = 0.25
BYTES_AT_ONCE = 16 << 20
#: Kind, values and client's number of a request, and its arrays: name → index among those of the call.
Asked = tuple[str, dict[str, Any], int, dict[str, int]]
#: Kind, values and arrays of a reply.
Sent = tuple[str, dict[str, Any], dict[str, dict[str, Contiguous]]]


class ClientError(Exception):
    """A client failed; the text says why."""


class CallError(Exception):
    """Clients of a call failed. Raised in a worker: Ray's dashboard shows the call as failed.

    Parameters
    ----------
    text : str
        Why, of each of them.
    results : list of Sent or ClientError
        What `Worker.perform` would have returned.
    """

    def __init__(self, text: str, results: list[Sent | ClientError]) -> None:
        super().__init__(text, results)
        self.results = results

    def __str__(self) -> str:
        """Return the text alone: the results hold arrays."""
        return str(self.args[0])


class NotOpen(Exception):
    """The worker was started again, and has no images yet."""


@dataclass(frozen=True)
class Elsewhere:
    """What a worker on a cluster needs, since its machine is not the driver's.

    Parameters
    ----------
    settings : Settings
        Of the run, with this cluster's device, and without a download.
    digest : str
        Of the images (`RunData.digest`); empty: the devices have data of their own.
    keeper : str
        Name of the actor `fedtta.simulation.cluster.Keeper`.
    """

    settings: Settings
    digest: str
    keeper: str


class Worker:
    """A process that answers requests for simulated clients, one after the other.

    Data and network stay in it from request to request; private state of the clients is on disk, or with a keeper.

    Parameters
    ----------
    nodes : sequence of Node
        All clients of the federation.
    elsewhere : Elsewhere, optional
        On a cluster.
    """

    def __init__(self, nodes: Sequence[Node], elsewhere: Elsewhere | None = None) -> None:
        self._elsewhere, self._open = elsewhere, False
        place: dict[str, Any] = {}
        if elsewhere:
            own = elsewhere.settings
            place = {"data-dir": own.data_dir, "state-dir": own.state_dir, "device": own.device}
        self.nodes = [replace(node, lends=True, settings={**node.settings, **place}) for node in nodes]

    def open(self, *given: RunData) -> bool:
        """Get ready for requests; return False if this node lacks the run's images and they are not given."""
        if self._elsewhere and self._elsewhere.digest:
            data = given[0] if given else self._found(self._elsewhere)
            if data is None:
                return False
            give(self._elsewhere.settings, data)
        self._open = True
        return True

    @staticmethod
    def _found(run: Elsewhere) -> RunData | None:
        """Return the images of this node's own files if they are those of the run."""
        try:
            data = data_of(run.settings)
        except (OSError, ValueError) as error:
            LOG.warning("images are fetched: %s", error)
            return None
        if data.digest() == run.digest:
            return data
        LOG.warning("images are fetched: those of this node are others than the driver's")
        return None

    def perform(self, asked: Sequence[Asked], *arrays: Mapping[str, Contiguous]) -> list[Sent | ClientError]:
        """Answer the first of these requests, and as many others as are worth one call; see `REQUESTS_AT_ONCE`.

        The arrays are read-only and shared with other processes.

        Raises
        ------
        CallError
            A client failed.
        NotOpen
            `open` comes first.
        """
        if not self._open:
            raise NotOpen
        results: list[Sent | ClientError] = []
        failed, size, end = list[str](), 0, time.monotonic() + SECONDS_AT_ONCE
        for kind, values, number, own in asked:
            try:
                record = Record(kind, dict(values), {name: unpacked(arrays[i]) for name, i in own.items()})
                sent = self.answer(record, number)
            except Exception as error:
                results.append(ClientError(reason_of(error)))
                failed.append(f"{self.nodes[number].name}: {results[-1]}")
                continue
            size += sum(value.nbytes for named in sent[2].values() for value, _ in named.values())
            if len(results) + 1 == len(asked) or time.monotonic() > end or size > BYTES_AT_ONCE:
                results.append(sent)
                break
            results.append(_copied(sent))  # the next client trains the same network
        if failed:
            raise CallError("; ".join(failed), results)
        return results

    def answer(self, record: Record, number: int) -> Sent:
        """Return a client's reply to a request; its arrays may be those of the network."""
        request = REQUESTS[record.kind].from_record(record)
        reply = perform(request, self._node(number, request)).to_record()
        return reply.kind, reply.values, {name: packed(one) for name, one in reply.arrays.items()}

    def _node(self, number: int, request: Request) -> Node:
        node = self.nodes[number]
        if self._elsewhere is None:
            return node
        state = KeptState(self._elsewhere.keeper, request.run, node.name)
        return replace(node, state=state, memory=state)


class RayTransport:
    """A transport to clients that Ray workers simulate; client i is node i + 1.

    A worker that is lost, with its node or alone, is started again by Ray where there is room. Until then the others do
    its work; what it was doing is repeated, with the same bits.

    Parameters
    ----------
    names : sequence of str
        Names of all clients, for Ray's dashboard.
    workers : sequence
        Ray's handles of `Worker`.
    images : callable, optional
        On a cluster: returns the run's images, for nodes that lack them.
    """

    def __init__(
        self, names: Sequence[str], workers: Sequence[Any], images: Callable[[], RunData] | None = None
    ) -> None:
        self._names, self._workers, self._images = list(names), list(workers), images
        self.stored_images: Any = None  # Ray's reference
        self._busy = [0] * len(workers)  # of the `AHEAD` slots of each worker
        self._begun: dict[Any, tuple[int, int]] = {}  # Ray's reference → worker, slots that it takes
        self._most = 1  # requests of a call: twice as many as the last one answered
        self._opening: dict[Any, int] = {}  # Ray's reference → worker that gets ready
        self._lost: dict[int, str] = {}  # worker that cannot be started → why
        self._networks: dict[str, Arrays] = {}  # by digest
        for worker in range(len(workers)):
            self._reopen(worker)

    def nodes(self) -> list[int]:
        """Return all nodes."""
        return list(range(1, len(self._names) + 1))

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """See `Transport.exchange`.

        A worker that dies may have been killed by the request before: the requests that it had are repeated, each alone
        on a worker.
        """
        end = time.monotonic() + timeout
        nodes = set(self.nodes())
        addressed = [one for one in requests if one.node in nodes]
        yield from (unknown_node(one) for one in requests if one.node not in nodes)
        queued, waiting = deque(enumerate(addressed)), dict[Any, list[tuple[int, Addressed]]]()
        stored: dict[int, Any] = {}  # by the identity of named arrays, which `requests` keeps alive
        deaths = Counter[int]()
        while (queued or waiting) and len(self._lost) < len(self._workers) and (left := end - time.monotonic()) > 0:
            self._fill(queued, waiting, deaths, stored)
            for reference, sent in self._finished(min(WAIT, left)):
                if reference not in waiting:  # the result of an earlier exchange, which came too late
                    continue
                batch = waiting.pop(reference)
                if isinstance(sent, Exception):
                    for number, one in reversed(batch):
                        deaths[number] += not isinstance(sent, NotOpen)
                        again = len(batch) > 1 or isinstance(sent, ray.exceptions.RayError | NotOpen)
                        if again and deaths[number] < TRIES:
                            queued.appendleft((number, one))
                        else:
                            yield _answer(one, sent)
                    continue
                for (_, one), result in zip(batch, sent, strict=False):
                    yield _answer(one, result)
                queued.extendleft(reversed(batch[len(sent) :]))
                self._most = min(REQUESTS_AT_ONCE, 2 * len(sent))
        for one in (*(one for batch in waiting.values() for _, one in batch), *(one for _, one in queued)):
            yield late(one, timeout) if len(self._lost) < len(self._workers) else self._unanswered(one)

    def _unanswered(self, one: Addressed) -> Answer:
        return Answer(one.node, None, "failed", f"no worker is left: {next(iter(self._lost.values()))}")

    def _reopen(self, worker: int, *images: Any) -> None:
        """Give a worker that was started (again) what it needs; until then it gets no requests."""
        if worker not in self._opening.values():
            # waits for as long as the worker is being started
            reference = self._workers[worker].open.options(name="open", max_task_retries=-1).remote(*images)
            self._begun[reference], self._opening[reference] = (worker, AHEAD), worker
            self._busy[worker] += AHEAD

    def _finished(self, timeout: float) -> Iterator[tuple[Any, list[Sent | ClientError] | Exception]]:
        """Wait for results, free the slots of their workers, and yield those of calls with requests."""
        done, _ = ray.wait(list(self._begun), timeout=timeout)
        for reference in done:
            worker, slots = self._begun.pop(reference)
            self._busy[worker] -= slots
            opening = self._opening.pop(reference, None) is not None
            sent: Any
            try:
                sent = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                sent = error.cause.results if isinstance(error.cause, CallError) else error.cause
            except ray.exceptions.RayError as error:
                sent = error
            if opening and isinstance(sent, Exception):
                self._give_up(worker, sent)
            elif opening and not sent:
                self._reopen(worker, self._stored_images())
            elif not opening:
                if isinstance(sent, ray.exceptions.RayError | NotOpen):
                    self._reopen(worker)
                yield reference, sent

    def _give_up(self, worker: int, error: Exception) -> None:
        self._lost[worker] = reason_of(error)
        self._busy[worker] += AHEAD
        LOG.warning("worker %d cannot be started: %s", worker, self._lost[worker])

    def _stored_images(self) -> Any:
        """Return Ray's reference of the run's images, which it sends to each node once."""
        if self.stored_images is None and self._images is not None:
            self.stored_images = ray.put(self._images())
        return self.stored_images

    def _fill(
        self,
        queued: deque[tuple[int, Addressed]],
        waiting: dict[Any, list[tuple[int, Addressed]]],
        deaths: Counter[int],
        stored: dict[int, Any],
    ) -> None:
        """Hand requests to the least busy workers while they have free slots."""
        while queued and min(self._busy) < AHEAD:
            worker, alone = self._busy.index(min(self._busy)), deaths[queued[0][0]] > 0
            slots = AHEAD if alone else 1
            if self._busy[worker] + slots > AHEAD:
                break
            most = 1 if alone else min(self._most, max(1, len(queued) // (AHEAD * len(self._workers))))
            batch = [queued.popleft()]
            while len(batch) < most and not deaths[queued[0][0]]:
                batch.append(queued.popleft())
            reference = self._begin(worker, [one for _, one in batch], stored)
            self._begun[reference], waiting[reference] = (worker, slots), batch
            self._busy[worker] += slots

    def _begin(self, worker: int, batch: Sequence[Addressed], stored: dict[int, Any]) -> Any:
        """Hand requests to a worker in one call; return Ray's reference of its results."""
        position: dict[int, int] = {}  # by the identity of named arrays → among those of the call
        asked: list[Asked] = []
        for one in batch:
            record = self._with_network(one.request).to_record()
            for arrays in record.arrays.values():
                if id(arrays) not in stored:
                    stored[id(arrays)] = ray.put(packed(arrays))
                position.setdefault(id(arrays), len(position))
            own = {name: position[id(arrays)] for name, arrays in record.arrays.items()}
            asked.append((record.kind, record.values, one.node - 1, own))
        kind, values, *_ = asked[0]
        names = ", ".join(self._names[number] for _, _, number, _ in asked)
        title = f"{kind} {names} round {values.get('round', 0)}"
        perform = self._workers[worker].perform.options(name=title)
        return perform.remote(asked, *(stored[key] for key in position))

    def _with_network(self, request: Request) -> Request:
        """Return a request with the network that its client got before: on a cluster it may be on another node now."""
        if self._images is None or not isinstance(request, Adapt | RefineRates):
            return request
        if request.arrays is not None:
            self._networks[request.network] = request.arrays
        return replace(request, arrays=self._networks.get(request.network))


def _copied(sent: Sent) -> Sent:
    kind, values, arrays = sent
    return (
        kind,
        values,
        {
            name: {key: (value.copy(), turned) for key, (value, turned) in named.items()}
            for name, named in arrays.items()
        },
    )


def _answer(one: Addressed, sent: Sent | Exception) -> Answer:
    if isinstance(sent, Exception):
        return Answer(one.node, None, "failed", str(sent) if isinstance(sent, ClientError) else reason_of(sent))
    kind, values, arrays = sent
    return answer_of(one, Record(kind, values, {name: unpacked(value) for name, value in arrays.items()}))


@contextmanager
def ray_transport(
    settings: Settings, run: str = "run", address: str = "", temporary: bool = False
) -> Iterator[tuple[Settings, RayTransport]]:
    """Start workers for the clients of a run; yield the settings for the clients, and the transport.

    Parameters
    ----------
    settings : Settings
    run : str
        Names the workers in Ray's dashboard.
    address : str
        Of a cluster; empty: start Ray on this machine.
    temporary : bool
        Remove the folder `state-dir` at the end; what is written there need not outlive a power cut.

    Raises
    ------
    SettingsError
        The cluster does not answer, or Ray cannot give what is asked.
    """
    name, nodes = f"fedtta-{run}", [replace(node, durable=not temporary) for node in simulated_nodes(settings)]
    elsewhere, images = None, None
    with ExitStack() as stack:
        if address:
            stack.enter_context(connected(address))
            device, share = gpu_share(settings)
            shares = [share] * settings.workers
            group = stack.enter_context(reserved(shares, name))
            folder = str(Path(settings.state_dir).expanduser().absolute())
            stack.enter_context(keeper(folder, temporary, f"{name}-keeper"))
            elsewhere, images = _elsewhere(settings, device, f"{name}-keeper"), partial(data_of, settings)
        else:
            allocation = allocate(settings, running())
            settings, shares = allocation.settings, allocation.shares
            stack.enter_context(_ray(settings.workers, allocation.gpus))
            group = stack.enter_context(reserved(shares, name))
        kind: Any = ray.remote(Worker)
        workers = []
        for i, share in enumerate(shares):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            options = {"name": f"{name}-worker-{i}", "num_cpus": 1, "num_gpus": share, "max_restarts": -1}
            workers.append(kind.options(**options, scheduling_strategy=place).remote(nodes, elsewhere))
            stack.callback(ray.kill, workers[-1])
        yield settings, RayTransport([node.name for node in nodes], workers, images)


def _elsewhere(settings: Settings, device: str, keeper: str) -> Elsewhere:
    data_dir = str(Path(settings.data_dir).expanduser().absolute()) if settings.data_dir else ""
    there = settings.replace(
        classes=class_names(settings.classes), device=device, data_dir=data_dir, download=False, state_dir=""
    )
    return Elsewhere(there, "" if settings.devices else data_of(settings).digest(), keeper)


def running() -> Any:
    """Return the nodes of the Ray that this process has already started, as `ray.nodes` does; None if there is none."""
    return ray.nodes() if ray.is_initialized() else None


@contextmanager
def _ray(workers: int, gpus: Sequence[str] = ()) -> Iterator[None]:
    """Start Ray on this machine with these GPUs and stop it at the end; it finds our modules where this process does.

    A Ray that this process has already started is used as it is, and stays.
    """
    if ray.is_initialized():
        yield
        return
    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    try:
        with warnings.catch_warnings(), own_signals(), environment_with({"PYTHONPATH": path, **mask(gpus)}):
            warnings.simplefilter("ignore", FutureWarning)  # about defaults of later versions of Ray
            ray.init(
                address="local", num_cpus=workers, num_gpus=len(gpus), include_dashboard=False, log_to_driver=False,
                logging_level=logging.ERROR,
            )  # fmt: skip
        yield
    finally:
        ray.shutdown()
