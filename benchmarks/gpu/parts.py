"""The parts of `gpu`: of each the cases by name, the most telling first."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics as averages
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtta.benchmarks.gpu.process import Case, GpuPart, NotPretended, Run, pretend_here
from fedtta.benchmarks.speed import adapters, agent, federation, loops, options, served
from fedtta.benchmarks.speed.measurement import Ratio
from fedtta.benchmarks.spy import accuracy
from fedtta.benchmarks.tables.protocol import select_cells
from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.client.algorithms.training import autocast
from fedtta.server.events import Event, RunError
from fedtta.settings import Settings
from fedtta.simulation.deployment import sockets_folder
from fedtta.tta.registry import ADAPTERS

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = ("shallow-cnn",)  # the network of a pretended GPU

# -- tests

OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
#: Settings of pytest under which it prints a line for each test.
PYTEST = ("-m", "pytest", "-vv", "-p", "no:cacheprovider", "-p", "no:randomly", "--color=no", "-o", "addopts=")


def tests(run: Run) -> dict[str, Case]:
    """Run `tests/gpu` on the device; for a pretended one they are only collected, since the test suite has them."""
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    return {"tests/gpu": lambda seconds: tested(paths, run.pretended, seconds)}


def tested(paths: list[str], pretended: bool, seconds: float) -> Iterator[Ratio | Mapping[str, Any]]:
    """Yield how many tests passed, and which did not.

    Raises
    ------
    RunError
        There are none, one failed, or time was over before the end.
    NotPretended
        After they have been collected.
    """
    if not paths:
        raise RunError("tests/gpu holds no tests")
    env = {**os.environ, "FEDTTA_TEST_DEVICE": "pretended" if pretended else "cuda"}
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, *PYTEST, *(["--collect-only"] if pretended else []), *paths]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        status = process.poll()
        process.kill()
        process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    found = {match[1]: match[2] for line in lines if (match := OUTCOME.match(line))}
    passed, bad = [sum(one in kinds for one in found.values()) for kinds in (("PASSED", "XFAIL"), ("FAILED", "ERROR"))]
    yield {"outcomes": {kind: list(found.values()).count(kind) for kind in sorted(set(found.values()))}}
    yield {"not passed": [name for name, one in found.items() if one not in ("PASSED", "XFAIL")]}
    if passed + bad:
        every = passed + bad
        yield Ratio("tests that passed, of those that ran", passed / every, "tests", passed, every, "all", 1.0, True)
    if status != 0:
        yield {"output": "\n".join(lines[-200:])[-12000:]}
        why = "were not through in time" if status is None else f"ended with status {status}, {bad} failed"
        raise RunError(f"{len(found)} tests: pytest {why}")
    if pretended:
        raise NotPretended


# -- equal results

STEPS = 4  # of training, beside the one that a `TrainingStep` makes
#: Precision on the GPU → the largest difference of a class's probability from that of the CPU's float32.
NETWORK_TOLERANCES = {"float32": 1e-4, "TF32": 1e-2, "bfloat16": 5e-2}
ADAPTER_TOLERANCES = {"float32": 5e-3, "TF32": 5e-2}  # steps of Adam enlarge rounding of gradients near zero


def equal(run: Run) -> dict[str, Case]:
    """Compare networks after five steps of training, and every adapter on a stream, with the CPU."""
    networks = SMALL if run.pretended else (*options.NETWORKS, "cct-4/3x2")
    cases: dict[str, Case] = {}
    for network in networks:
        for name in NETWORK_TOLERANCES:
            cases[f"{network}, {name}"] = lambda _, network=network, name=name: [_network_apart(run, network, name)]  # type: ignore[misc]
    for name in ("btfl", "tent") if run.pretended else ADAPTERS:
        cases[name] = lambda _, name=name: _adapter_apart(run, name)  # type: ignore[misc]
    return cases


def _network_apart(run: Run, network: str, name: str) -> Ratio:
    expected = _expected(network)
    with precision(name == "TF32"):
        found = trained(network, run.device, name == "bfloat16")
    what = f"{network}, {name}: after {STEPS + 1} steps of training"
    return apart(what, found, expected, NETWORK_TOLERANCES[name])


@cache
def _expected(network: str) -> Tensor:
    return trained(network, CPU, False)


def trained(network: str, device: torch.device, half: bool) -> Tensor:
    """Return the probabilities [B, K], on the CPU, of a network after a few steps on a batch.

    What is dropped at random is drawn on the device, so that nothing is dropped here.
    """
    step = options.TrainingStep(network, options.Options(channels_last=True, half=half), device, drop=False)
    for _ in range(STEPS):
        step()
    with torch.no_grad(), autocast(device, half):
        return step.model.eval()(step.x).float().softmax(1).cpu()


def _adapter_apart(run: Run, name: str) -> Iterator[Ratio]:
    batch = 4 if run.pretended else 16
    expected = predictions(run, name, CPU, batch)
    for kind, tolerance in ADAPTER_TOLERANCES.items():
        with precision(kind == "TF32"):
            found = predictions(run, name, run.device, batch)
        yield apart(f"{name}, {kind}: two batches of {batch}", found, expected, tolerance)


def predictions(run: Run, name: str, device: torch.device, batch: int) -> Tensor:
    """Return an adapter's probabilities [2 B, K], on the CPU, for a stream of two batches."""
    x = adapters.random_images(2 * batch, device)
    adapter = client(run, name, device, batch).adapter(name)
    return torch.cat([adapter.predict(part).float().cpu() for part in x.split(batch)])


def client(run: Run, name: str, device: torch.device, batch: int) -> adapters.Client:
    """Return a synthetic client that has what an adapter needs; every adapter fits its network."""
    setup = adapters.make_setup(SMALL[0] if run.pretended else "cnn", None, batch, batch)
    setup = replace(setup, memorised=12) if run.pretended else setup
    return _client(setup, "rotation_head" in ADAPTERS[name].needs, device)


@cache
def _client(setup: adapters.Setup, rotation_head: bool, device: torch.device) -> adapters.Client:
    return adapters.Client.of(setup, rotation_head, where=device)


def apart(what: str, found: Tensor, expected: Tensor, tolerance: float) -> Ratio:
    """Return the largest difference of a probability beside its tolerance; RunError beyond it."""
    difference = float((found.double() - expected.double()).abs().max())
    if not difference <= tolerance:
        raise RunError(f"{what}: a probability differs from the CPU's by {difference:.2g}; allowed is {tolerance:g}")
    return Ratio(what, difference, "", difference, tolerance, "what is allowed", tolerance)


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Compute products of float32 in TF32, or not."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


# -- speed at test time

BATCHES = (32, 1, 512)
BARE_SECONDS = 1.0


def images(run: Run) -> dict[str, Case]:
    """Measure images a second of every adapter in batches; the first batch of a stream warms up."""
    bare = cache(lambda batch: rate(run, "none", batch, BARE_SECONDS))

    def case(name: str, batch: int, seconds: float) -> Iterator[Ratio]:
        other = bare(batch)
        ours = other if name == "none" else rate(run, name, batch, seconds)
        yield Ratio(f"{name}, batch {batch}", ours / other, "images/s", ours, other, "none")

    names = ["none", "btfl", "tent"] if run.pretended else ADAPTERS
    batches = (4,) if run.pretended else BATCHES
    return {f"{name}, batch {batch}": partial(case, name, batch) for batch in batches for name in names}


def rate(run: Run, name: str, batch: int, seconds: float) -> float:
    """Return images a second: a batch over the median time until its predictions are there."""
    x = adapters.random_images(batch, run.device)
    adapter = client(run, name, run.device, batch).adapter(name)

    def predict() -> None:
        adapter.predict(x).cpu()

    predict()
    return batch / averages.median(timed_within(predict, 0.0 if run.pretended else seconds))


def timed_within(work: Callable[[], Any], seconds: float) -> list[float]:
    """Return the seconds of each call, of which there are as many as fit, one at least."""
    found: list[float] = []
    while not found or sum(found) + averages.median(found) < seconds:
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def views(run: Run) -> dict[str, Case]:
    """Measure MEMO and FedTHE+ for 1,000 samples, beside a loop over samples and views."""
    samples = 1 if run.pretended else 32

    def case(name: str, seconds: float) -> Iterator[Ratio]:
        start, found = time.perf_counter(), list[Ratio]()
        while not found or (time.perf_counter() - start) * (1 + 1 / len(found)) < (0 if run.pretended else seconds):
            found.append(loops.tuned(name, samples, 1, run.device))
        yield sorted(found, key=lambda one: one.ratio)[len(found) // 2]

    return {name: partial(case, name) for name in (["FedTHE+"] if run.pretended else loops.TUNED)}


def requests(run: Run) -> dict[str, Case]:
    """Measure agents on the GPU; a pretended one ends at the border of a process."""
    device = CPU if run.pretended else run.device
    count, repeats = (agent.STREAMS, 1) if run.pretended else (400, 2)

    def case(number: int, adapter: str, guard: bool, _: float) -> Iterator[Ratio | Mapping[str, Any]]:
        with sockets_folder() as folder:
            pixels = served.sample_images(count)
            found = agent.measure(folder / str(number), served.fabricate(), adapter, guard, pixels, repeats, device)
        run.only_on_a_gpu()
        yield from agent.ratios([found])
        yield {f"{adapter}, guard {guard}": asdict(found)}

    chosen = agent.CASES[:1] if run.pretended else agent.CASES
    return {f"{name}, guard {guard}": partial(case, i, name, guard) for i, (name, guard) in enumerate(chosen)}


# -- training

CLIENTS = {"clients": 100, "rounds": 3, "device": "cuda"}
GOAL = "the goal is 5, then 20"


def engines(run: Run) -> dict[str, Case]:
    """Measure clients a second: stacked beside one after another, and beside Ray's workers with a share each."""
    changes = {**CLIENTS, **run.data, **({"fraction": 0.2} if run.data["dataset"] == "cifar10" else {})}
    what = f"{CLIENTS['clients']} clients, CNN, {run.data['dataset']}"

    @cache
    def stacked(at_once: int) -> float:
        return federation.clients_a_second(
            {**changes, "engine": "vectorised", "stacked_clients": at_once}, run.pretended
        )

    @cache
    def by_ray(workers: int) -> float:
        with pretended_ray(workers) if run.pretended else nullcontext():
            share = {"workers": workers, "num_gpus": 1 / workers}
            return federation.clients_a_second({**changes, **share, "engine": "ray"}, run.pretended)

    def in_one_process(at_once: int, _: float) -> Iterator[Ratio]:
        ours, other = stacked(at_once), stacked(1)
        yield Ratio(f"{what}, {at_once} stacked", ours / other, "clients/s", ours, other, "one after another")

    def beside_ray(workers: int, _: float) -> Iterator[Ratio]:
        each, ours = by_ray(workers), stacked(federation.AT_ONCE)
        title = f"{what}, one process over {workers} Ray workers"
        yield Ratio(title, ours / each, "clients/s", ours, each, f"Ray; {GOAL}", federation.STACKED, least=True)
        alone = by_ray(1)
        yield Ratio(f"{what}, 1/{workers} of the GPU each", each / alone, "clients/s", each, alone, "one worker")

    numbers = [1] if run.pretended else [2, 1, 4, 8]
    cases: dict[str, Case] = {"stacked": partial(in_one_process, federation.AT_ONCE)}
    return cases | {f"Ray, {number} workers": partial(beside_ray, number) for number in numbers}


@contextmanager
def pretended_ray(workers: int) -> Iterator[None]:
    """Start a Ray that believes in a GPU, and whose workers pretend."""
    import ray

    modules = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init(
        address="local", num_cpus=workers, num_gpus=1, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": modules, "worker_process_setup_hook": f"{pretend_here.__module__}.pretend_here"},
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


TURNS, STEPS_A_TURN = 20, 50


def steps(run: Run) -> dict[str, Case]:
    """Measure options of a training step beside the plain one: formats, bfloat16, CUDA graphs, torch.compile."""
    ways = options.GPU_WAYS | options.WAYS  # graphs first: compilation takes longest, and ends the list
    if run.pretended:
        ways = {title: way for title, way in ways.items() if title in ("CUDA graph", "all three", "torch.compile")}

    def case(network: str, title: str, seconds: float) -> Iterator[Ratio]:
        way = ways[title]
        if way.graph or way.compiled:
            run.only_on_a_gpu()
        begin = time.perf_counter()
        plain, faster = (options.TrainingStep(network, one, run.device) for one in (options.PLAIN, way))
        before = [value.clone() for value in faster.values]
        faster()
        if all(torch.equal(*pair) for pair in zip(before, faster.values, strict=True)):
            raise RunError("a step changes no weight")
        turns: list[tuple[float, float]] = []
        while not turns or (not run.pretended and time.perf_counter() - begin < seconds and len(turns) < TURNS):
            count = 1 if run.pretended else STEPS_A_TURN
            turns.append((options.timed(plain, count, run.device), options.timed(faster, count, run.device)))
        yield options.compared(f"{network}, {title}", turns)

    networks = SMALL if run.pretended else options.NETWORKS
    pairs = itertools.product(ways, networks)
    return {f"{network}, {title}": partial(case, network, title) for title, network in pairs}


MIB = 1 << 20
#: Title → settings of a simulation, beside the data set's.
HELD: dict[str, dict[str, Any]] = {
    "10 clients": {"clients": 10},
    "100 clients": {"clients": 100},
    "1,000 clients": {"clients": 1000},
    "10 clients, ResNet-18, 224 pixels": {"clients": 10, "model": "resnet18", "image_size": 224},
}


def memory(run: Run) -> dict[str, Case]:
    """Measure the GPU's peak memory in simulations in one process, beside that of the first."""
    found: dict[str, float] = {}

    def case(title: str, _: float) -> Iterator[Ratio | Mapping[str, Any]]:
        fraction = {"fraction": 0.02 if "image_size" in HELD[title] else 0.2}
        changes = {**HELD[title], **run.data, **(fraction if run.data["dataset"] == "cifar10" else {})}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        federation.simulated({"rounds": 2, "engine": "vectorised", "device": "cuda", **changes}, run.pretended)
        run.only_on_a_gpu()
        peak, reserved = torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB
        found[title] = peak
        than, other = next(iter(found.items()))
        yield Ratio(title, peak / other, "MiB", peak, other, than)
        yield {title: {"allocated_mib": peak, "reserved_mib": reserved}}

    return {title: partial(case, title) for title in (["10 clients"] if run.pretended else HELD)}


PAPER_ROUNDS = 100
SPARE = 0.85  # of the time left is planned for


def cell(run: Run) -> dict[str, Case]:
    """Run FedTHE's Table 1 cell with all data for as many of its 100 rounds as there is time for."""

    def case(seconds: float) -> Iterator[Ratio | Mapping[str, Any]]:
        start = time.monotonic()
        name = "cnn-dir-0.1" if run.pretended else "full"
        (chosen,) = select_cells(read_protocol("brfl", quick=run.pretended), [name])
        changes = {} if run.data["dataset"] == "cifar10" else run.data
        settings = chosen.settings.replace(device="cuda", checkpoint_every=0, **changes)
        goal = 2 if run.pretended else PAPER_ROUNDS
        each, rest = times(simulated_cell(settings, 2))  # tells the time of a round, and of all the rest
        left = SPARE * (seconds - (time.monotonic() - start)) - rest
        rounds = goal if run.pretended else max(2, min(goal, int(left / each)))
        events = simulated_cell(settings, rounds)
        each, rest = times(events)
        about = f"{settings.clients} clients, {settings.dataset}, {rounds} rounds"
        yield {"seconds_a_round": each, "seconds_beside_rounds": rest}
        yield Ratio(f"{about} in the time there was", rounds / goal, "rounds", rounds, goal, "the paper's", 1.0, True)
        tested = [event for event in events if event["event"] == "evaluation"]
        for method, shift in dict.fromkeys((event["method"], event["shift"]) for event in tested):
            ours = accuracy([event for event in tested if event["shift"] == shift], method)
            yield {f"{method}, {shift}, %": ours}
            paper = chosen.references[0].number(method, shift)
            if paper is not None and not changes:
                than = f"the paper, {PAPER_ROUNDS} rounds"
                yield Ratio(f"accuracy of {method}, {shift}", ours / paper.mean, "%", ours, paper.mean, than)

    return {"brfl": case}


def simulated_cell(settings: Settings, rounds: int) -> list[Event]:
    """Return the events of a simulation, each with the seconds since its start."""
    from fedtta.simulation import simulate

    events: list[Event] = []
    start = time.monotonic()

    def note(event: Event) -> None:
        events.append({**event, "since_start": time.monotonic() - start})

    with tempfile.TemporaryDirectory() as folder:
        simulate(settings.replace(rounds=rounds), Path(folder) / "run", [note])
    return events


def times(events: list[Event]) -> tuple[float, float]:
    """Return the seconds of a round, the first left out where there are others, and those of all the rest."""
    walls = [event["wall_seconds"] for event in events if event["event"] == "round"]
    return averages.median(walls[1:] or walls), events[-1]["since_start"] - sum(walls)


#: What `gpu` measures; its seconds sum up to less than 25 minutes, and each fits into a command of ten.
PARTS: dict[str, GpuPart] = {
    "tests": GpuPart("All tests that know a GPU", 200, tests),
    "equal": GpuPart("Probabilities beside those of the CPU's float32", 120, equal),
    "images": GpuPart("Images a second of every adapter over no adaptation, papers' CNN with BatchNorm", 200, images),
    "views": GpuPart("Tuning on views over a loop, seconds for 1,000 samples", 60, views),
    "agent": GpuPart("Seconds of requests to the agent over the bare forward pass", 90, requests),
    "engines": GpuPart("Clients a second in one process, and under Ray with fractions of the GPU", 150, engines),
    "memory": GpuPart("Peak memory of the GPU in a simulation over that with 10 clients", 90, memory),
    "cell": GpuPart("FedTHE's Table 1: CNN, Dirichlet(0.1), all images", 330, cell),
    "steps": GpuPart("Speed of a training step over the plain one, batch 32", 160, steps),
}
