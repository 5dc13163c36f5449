"""`fleet`: a server with many devices beside Flower's own FedAvg, on one SuperLink, with the same devices and replies.

Both apps run one after the other, and then ours for one round each with a sampled fraction, with devices of it that
never answer, and with less time than a round takes. At the end the devices look for messages as fast as the SuperLink
answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from rich.console import Console

from fedtta.benchmarks.provenance import RESULTS, provenance, write_json
from fedtta.benchmarks.speed import fedavg_app
from fedtta.benchmarks.speed.command import read_speed, rendered
from fedtta.benchmarks.speed.deployment import read_events, write_app
from fedtta.benchmarks.speed.devices import AT_ONCE, POLL, LightDevices
from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.messages.arrays import Arrays, array_bytes
from fedtta.messages.flower import CONTENT, SECRET, allow_messages, held_record, to_content
from fedtta.messages.replies import Evaluated, EvaluationResult, Identity, Reply, Telemetry, Trained
from fedtta.messages.requests import Identify, Observe, Train
from fedtta.models import MODELS, build
from fedtta.server.events import Event
from fedtta.server.nodes import sample
from fedtta.server.report import METRICS_FILE
from fedtta.settings import Scalar, Settings, SettingsError, from_config
from fedtta.simulation import superlink

CLASSES = 10
TIMEOUT = 3600.0  # of a run
SERVER, SUPERLINK = "server", "superlink"
FILE = "fleet.json"
FRACTION = 0.1  # of the devices that is sampled; every second one of these never answers in the run "silent"
SHARE, LARGE = 0.2, 4e9  # of Flower's memory is ours, at most, where the replies of a round have so many bytes
STEP, NOISE = 0.05, 0.01  # of a round, and at most that of a device
MOST = 100_000  # devices
SAMPLE = 0.25  # seconds between two looks at the processes
#: Process → what its command line contains.
PROCESSES = {SERVER: "flwr-serverapp", SUPERLINK: "flower-superlink"}
LOOKING = 10.0  # seconds for which idle devices look for messages
LEAST = 4 * POLL  # seconds of a round-timeout: a device that tests looks for messages that seldom
APP = "fleet-fedavg"  # what `flwr build` takes for a name
MEMORY = 1e9  # bytes of the replies that devices work on at once: a reply is there as arrays, as a block and as objects
#: A SuperLink at its limit takes minutes to identify a thousand devices; none of them may be given up for that.
BASE = {"dataset": "digits", "methods": "fedavg", "shifts": "original", "node-timeout": TIMEOUT}


@dataclass
class Prepared:
    """What light devices answer, to our server and to Flower's FedAvg: the same arrays and numbers of examples.

    Parameters
    ----------
    initial : dict
        Arrays of the network, float32; a device's are these, steps, and noise that depends on the device alone.
    silent : set of int
        Devices that never answer a request to train.

    Attributes
    ----------
    asked : list of (int, str)
        Device and kind of each message.
    """

    initial: Arrays
    silent: set[int] = field(default_factory=set)
    asked: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        most = max(value.size for value in self.initial.values())
        # positive, as variances are
        self._noise = NOISE * np.random.default_rng(0).random(most + MOST, dtype=np.float32)

    def __call__(self, number: int, message: Message, config: Mapping[str, Any]) -> RecordDict | None:
        """Return the content of a device's reply; None if it never answers."""
        kind = str(message.metadata.message_type)
        self.asked.append((number, kind))
        if kind == Train.kind and number in self.silent:
            return None
        if CONTENT not in config:  # Flower's FedAvg
            arrays = held_record(self.arrays(number, int(config["server-round"])))
            metrics = MetricRecord({"num-examples": self.examples(number), "train-loss": 1.0})
            return RecordDict({"arrays": arrays, "metrics": metrics})
        reply = self.reply(number, kind, json.loads(str(config[CONTENT])))
        return to_content(reply.to_record(), str(config[SECRET]), blocks=True)

    def reply(self, number: int, kind: str, values: Mapping[str, Any]) -> Reply:
        """Return a device's reply to our server; only device 0 tests."""
        if kind == Identify.kind:
            sizes, role = [self.examples(number), 1, 1], "source" if number else "both"
            data: dict[str, Any] = {"channels": 3, "mean": [0.5] * 3, "std": [0.25] * 3, "images": MOST}
            classes, shifts = [str(i) for i in range(CLASSES)], ["original"]
            return Identity(name=str(number), classes=classes, sizes=sizes, shifts=shifts, note="", role=role, **data)  # type: ignore[arg-type]
        if kind == Train.kind:
            counts: dict[str, Any] = {"num_examples": self.examples(number)}
            counts |= dict.fromkeys(("validation_total", "validation_correct", "personal_validation_correct"), 1)
            return Trained(arrays=self.arrays(number, values["round"]), train_loss=1.0, seconds=0.0, **counts)
        if kind == Observe.kind:  # a reminder, see `fedtta.messages.grid`
            return Telemetry(name=str(number))
        labels = [(row["label"], shift) for row in values["rows"] for shift in values["shifts"]]
        results = [
            EvaluationResult(label=label, shift=shift, correct=1, total=1, seconds=0.0) for label, shift in labels
        ]
        return Evaluated(checked=1, leaked=0, results=results)

    def arrays(self, number: int, round: int) -> Arrays:
        """Return a device's arrays: all move the same way in each round, and are equally far from each other.

        None of them is limited by our server then.
        """
        return {
            name: value + (round * STEP + self._noise[number : number + value.size].reshape(value.shape))
            for name, value in self.initial.items()
        }

    def examples(self, number: int) -> int:
        """Return a device's number of examples."""
        return 10 + number % 3


@dataclass
class Used:
    """What a process has used.

    Parameters
    ----------
    peak : float
        MB of resident memory, at most.
    seconds : float
        Of the processors.
    """

    peak: float = 0.0
    seconds: float = 0.0


class Watch:
    """Follows the processes of a Flower home while this is entered.

    Attributes
    ----------
    used : dict
        Key of `PROCESSES` → what the process of this kind has used since then.
    """

    def __init__(self, home: Path) -> None:
        self._home, self._ended = home, threading.Event()
        self.used: dict[str, Used] = {name: Used() for name in PROCESSES}
        self._before: dict[int, float] = {}  # process → its processor seconds at the beginning
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        """Begin; peaks are those from now on."""
        for pid in superlink.started(self._home):
            with contextlib.suppress(OSError):
                (Path("/proc") / str(pid) / "clear_refs").write_text("5", encoding="ascii")
                self._before[pid] = _used(pid).seconds
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.look()
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(SAMPLE):
            self.look()

    def look(self) -> None:
        """Note what the processes have used so far."""
        for pid in superlink.started(self._home):
            with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
                words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode()
                now = _used(pid)
                for name, mark in PROCESSES.items():
                    if mark in words:
                        past = self.used[name]
                        seconds = now.seconds - self._before.get(pid, 0.0)
                        self.used[name] = Used(max(past.peak, now.peak), max(past.seconds, seconds))


def _used(pid: int) -> Used:
    """Return what a process has used so far."""
    folder = Path("/proc") / str(pid)
    lines = (folder / "status").read_text(encoding="utf-8").splitlines()
    peak = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
    if peak is None:
        raise ProcessLookupError(f"process {pid} has ended, and is not yet waited for")
    times = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return Used(peak * 1024 / 1e6, (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True)
class App:
    """What one run of an app took.

    Parameters
    ----------
    rounds : list of float
        Seconds of each round.
    used : dict
        See `Watch`.
    calls : dict
        Calls of the devices by method.
    failures : dict
        Calls that failed, by reason.
    lost : dict
        Replies that our server missed or left out, by event.
    """

    rounds: list[float]
    used: dict[str, Used]
    calls: dict[str, int]
    failures: dict[str, int]
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return the mean seconds of a round."""
        return sum(self.rounds) / len(self.rounds)


@dataclass(frozen=True)
class Fleet:
    """A SuperLink with light devices, and the apps that run there one after another.

    Parameters
    ----------
    home : Path
        Flower home, absolute.
    devices : LightDevices
    prepared : Prepared
    model : str
    rounds : int
    count : int
        Devices.
    """

    home: Path
    devices: LightDevices
    prepared: Prepared
    model: str
    rounds: int
    count: int

    def ours(self, name: str, **changed: Scalar) -> App:
        """Run our app under a name, with changed settings; results are in `folder(name)`.

        Raises
        ------
        FlowerError
            It did not complete.
        """
        config = {**BASE, "model": self.model, "clients": self.count, "rounds": self.rounds, **changed}
        config |= {"results": str(self.home / "results"), "run-name": name}
        measured = self._measured(from_config(config).flat(), superlink.PROJECT)
        return replace(measured, rounds=round_seconds(self.events(name)), lost=lost_replies(self.events(name)))

    def flowers(self, name: str) -> App:
        """Run Flower's FedAvg under a name; the final model is in `<name>.npz` of the home.

        Raises
        ------
        FlowerError
            It did not complete.
        """
        initial, results = self.home / "initial.npz", self.home / f"{name}.json"
        np.savez(initial, allow_pickle=False, **self.prepared.initial)
        config = {"nodes": self.count, "rounds": self.rounds, "timeout": TIMEOUT, "results": str(results)}
        app = write_app(self.home / APP, fedavg_app, {**config, "initial": str(initial)})
        return replace(self._measured({}, app), rounds=json.loads(results.read_text(encoding="utf-8")))

    def looks(self, seconds: float) -> tuple[int, float]:
        """Let idle devices look for messages without a pause; return how often, and the SuperLink's seconds."""
        usual, self.devices.poll = self.devices.poll, 0.0
        time.sleep(usual)  # until all of them do
        before = self.devices.calls["PullMessages"]
        with Watch(self.home) as watch:
            time.sleep(seconds)
        self.devices.poll = usual
        return self.devices.calls["PullMessages"] - before, watch.used[SUPERLINK].seconds

    def events(self, name: str) -> list[Event]:
        """Return the events of a run of ours."""
        return read_events(self.folder(name) / METRICS_FILE)

    def folder(self, name: str) -> Path:
        """Return the folder of a run of ours."""
        return self.home / "results" / name

    def _measured(self, config: Mapping[str, Scalar], project: Path) -> App:
        calls, failures = self.devices.calls.copy(), self.devices.failures.copy()
        with Watch(self.home) as watch:
            superlink.run(self.home, config, TIMEOUT, project=project)
        made, failed = self.devices.calls - calls, self.devices.failures - failures
        return App([], watch.used, dict(made), dict(failed))


@contextlib.contextmanager
def fleet_of(home: Path, count: int, model: str, rounds: int, database: bool = True) -> Iterator[Fleet]:
    """Start a SuperLink in a home, and light devices; stop both at the end.

    Raises
    ------
    FlowerError
        The SuperLink does not answer in time.
    RunError
        The devices cannot connect, or one has ended.
    """
    allow_messages()
    network = build(model, CLASSES, image_size=32, in_channels=3)
    prepared = Prepared({name: value.numpy() for name, value in network.global_state().items()})
    at_once = max(2, min(AT_ONCE, int(MEMORY / (3 * array_bytes(prepared.initial)))))
    with (
        superlink.superlink(home, simulation=False, database=database) as address,
        LightDevices(address, count, prepared, at_once=at_once) as devices,
    ):
        yield Fleet(home, devices, prepared, model, rounds, count)


def round_seconds(events: Sequence[Event]) -> list[float]:
    """Return the seconds of each training round, with what comes between two rounds, such as a checkpoint."""
    found = [event for event in events if event["event"] == "round"]
    ends = [found[0]["at"] - found[0]["wall_seconds"], *(event["at"] for event in found)]
    return [after - before for before, after in pairwise(ends)]


def lost_replies(events: Sequence[Event]) -> dict[str, int]:
    """Return event → replies that did not count as they were."""
    kinds = ("late", "failed", "refused", "limited", "left_alone")
    return dict(Counter(event["event"] for event in events if event["event"] in kinds))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fleet`."""
    parser.add_argument("--devices", type=int, default=1000, help="light devices (default: 1000)")
    parser.add_argument("--model", default="cnn", choices=list(MODELS), help="the network (default: cnn)")
    parser.add_argument("--rounds", type=int, default=2, help="of Flower's FedAvg and of ours (default: 2)")
    parser.add_argument(
        "--database", action="store_true", help="the SuperLink keeps its state in a file, not in memory"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"of {FILE} (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure one case, print it, and keep it beside the cases that were measured before.

    Raises
    ------
    SettingsError
        A number of devices or rounds that is not possible, or kept results that cannot be read.
    RunError
        Something did not start, or a run did not complete.
    """
    for name, number, least, most in (("devices", arguments.devices, 2, MOST), ("rounds", arguments.rounds, 1, 1000)):
        if not least <= number <= most:
            raise SettingsError(f"--{name} {number}: allowed is {least} to {most}")
    path = arguments.out / FILE
    content = read_speed(path)
    title = f"{arguments.devices:,} devices, {arguments.model}, {'database' if arguments.database else 'in memory'}"
    measured = measure(arguments.devices, arguments.model, arguments.rounds, arguments.database, console)
    console.print(rendered(title, measured.ratios))
    rows = [asdict(ratio) for ratio in measured.ratios]
    content[title] = {**provenance(), "ratios": rows, "details": dict(measured.details)}
    console.print(f"Written: {write_json(path, content)}", highlight=False)


def measure(count: int, model: str, rounds: int, database: bool, console: Console) -> Measured:
    """Run Flower's FedAvg and ours on one SuperLink, ours under load that does not answer in time, and idle devices.

    Raises
    ------
    RunError
        Something did not start, or a run did not complete.
    """
    found: dict[str, App] = {}
    began = time.monotonic()

    def note(name: str, app: App) -> App:
        found[name] = app
        taken, lost = f"{app.seconds:.1f} s a round", f", {app.lost}" if app.lost else ""
        console.print(f"{time.monotonic() - began:6.0f} s  {name}: {taken}{lost}", highlight=False)
        return app

    with (
        tempfile.TemporaryDirectory(prefix="fedtta-bench-", ignore_cleanup_errors=True) as folder,
        fleet_of(Path(folder).resolve(), count, model, rounds, database) as one,
    ):
        console.print(f"{time.monotonic() - began:6.0f} s  {count:,} devices are active", highlight=False)
        large = count * array_bytes(one.prepared.initial) >= LARGE
        note("flower", one.flowers("flower"))
        ours = note("ours", one.ours("ours"))
        few: dict[str, Scalar] = {"rounds": 1, "fraction-train": FRACTION}
        sampled = note("sampled", one.ours("sampled", **few))
        one.prepared.silent.update(sample(range(count), FRACTION, Settings().seed, 1)[1::2])
        patience = float(ceil(max(2 * sampled.seconds, LEAST)))
        note("silent", one.ours("silent", **few, **{"round-timeout": patience}))
        one.prepared.silent.clear()
        hurry = max(ours.seconds / 2, LEAST)
        note("deadline", one.ours("deadline", rounds=1, **{"round-timeout": hurry}))
        looks, seconds = one.looks(LOOKING)
    other = found["flower"]
    sides: list[tuple[str, str, float, float, float | None]] = [("a round", "s", ours.seconds, other.seconds, 1.0)]
    for process, bound in ((SERVER, SHARE if large else None), (SUPERLINK, None)):
        mine, theirs = ours.used[process], other.used[process]
        sides += [(f"peak memory, {process}", "MB", mine.peak, theirs.peak, bound)]
        sides += [(f"processors, {process}", "s", mine.seconds, theirs.seconds, None)]
    than = "Flower's FedAvg"
    ratios = [Ratio(what, mine / theirs, unit, mine, theirs, than, to) for what, unit, mine, theirs, to in sides]
    for name, limit in (("silent", patience), ("deadline", hurry)):
        mean = found[name].seconds
        ratios.append(Ratio(f"a round, {name}", mean / limit, "s", mean, limit, "round-timeout"))
    kept = {name: asdict(app) for name, app in found.items()}
    return Measured(ratios, {**kept, "looks": looks, "processor_seconds_of_looks": seconds})
