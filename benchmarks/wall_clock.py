"""`wall-clock`: adaptation under a constant-speed stream, where a method that is too slow loses what it misses.

After Evaluation of Test-Time Adaptation Under Computational Time Constraints (Alfarra et al., ICML 2024), which says it
for batches; here samples arrive one by one, for methods defined per sample and per batch alike.

- Speed 1: a sample arrives every t seconds, t what the `--reference` takes for a sample that comes alone. The default,
  FedTHE, is the slowest of the methods that only weigh two heads: all of these keep pace with speed 1 one by one, and
  with faster streams by batching what waits, which changes none of their predictions. At speed s samples arrive every
  t/s seconds.
- A method's time is that of the processor, one thread, as a function of the batch: medians over turns in the same run.
  The clock is simulated from them (`benchmarks.arrivals`), so a machine that is busy elsewhere decides nothing else.
- Each adapter really gets the samples that it has time for, in order, and no others: history and accuracy are real.
  Each client and test distribution is a stream of its own, which finds a fresh adapter and a free device: the first
  sample, or batch, is never missed.
- Accuracy, the headline: a missed sample has the answer of the unadapted network, as if that cost nothing. It is what a
  user gets who has both, `fedavg` is the same at any speed, and a method below it does more harm than good. Beside it,
  as the lower bound for a device that has no time even for this, the accuracy with every missed sample wrong.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.batch_cost import Cost, measure
from benchmarks.central import RECIPE, train_centrally
from benchmarks.paced import TASK, Score, Scores, play, prepare
from benchmarks.protocol import load_protocol
from benchmarks.record import RESULTS, provenance, write_json
from benchmarks.start import check_start
from benchmarks.training import spec_of
from benchmarks.wall_clock_tables import markdown, rendered
from client.runtime import federation_of
from data import Federation, resolve
from models import TwoHead, write_atomically
from server.methods import MethodRow, plan
from server.run import initial_model
from settings import Settings, SettingsError

PROTOCOL = "wall-clock"
SPEEDS = (1.0, 2.0, 5.0)
REFERENCE = "fedthe"
QUEUE = 32  # samples that can wait
EPOCHS, QUICK_EPOCHS = 8, 3
REPEATS, QUICK_REPEATS = 15, 5
#: What changes where the protocol's pictures are not at hand, and with --quick.
DIGITS = ("dataset=digits", "fraction=1", "image-size=20", "clients=4")
QUICK = (*DIGITS, "shifts=corrupted,mixture")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `wall-clock`."""
    parser.add_argument("--seed", type=int, default=1, help="of splits, training and streams (default: 1)")
    parser.add_argument("--init", type=Path, metavar="PATH", help="network of `central --protocol wall-clock`")
    text = f"of the network that is trained without --init (default: {EPOCHS}, with --quick {QUICK_EPOCHS})"
    parser.add_argument("--epochs", type=_positive, help=text)
    text = "stream speeds; 1 is the reference's own (default: 1,2,5)"
    parser.add_argument("--speeds", type=speeds_of, default=SPEEDS, metavar="1,2,5", help=text)
    text = f"method whose time for a sample that comes alone is one interval (default: {REFERENCE})"
    parser.add_argument("--reference", default=REFERENCE, metavar="METHOD", help=text)
    parser.add_argument("--queue", type=_positive, default=QUEUE, help=f"samples that can wait (default: {QUEUE})")
    text = f"turns of the timing (default: {REPEATS}, with --quick {QUICK_REPEATS})"
    parser.add_argument("--repeats", type=_positive, help=text)
    parser.add_argument("--quick", action="store_true", help="the embedded digits, within half a minute")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of wall-clock.json and .md")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Get a network, time the methods, play the streams, print the table, write `wall-clock.json` and `.md`.

    Raises
    ------
    SettingsError
        A bad argument or setting, a method that does not fit, or data or network that cannot be read.
    Leak
        A test sample had been trained on.
    FloatingPointError
        Training diverged.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        content = measured(arguments, console)
    finally:
        torch.set_num_threads(threads)
    console.print(rendered(content))
    path = write_json(arguments.out / f"{PROTOCOL}.json", content)
    write_atomically(path.with_suffix(".md"), markdown(content, command_line(arguments)).encode())
    console.print(f"Written: {path} and .md", highlight=False)


def measured(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Do all the work of `run` and return what is written."""
    began = time.perf_counter()
    settings, federation, notes = settings_of(arguments)
    rows = rows_of(settings)
    reference = reference_of(rows, arguments.reference)
    model, network = network_of(settings, federation, arguments, console)
    clients, told = prepare(settings, federation, model, rows, console)
    repeats = arguments.repeats or (QUICK_REPEATS if arguments.quick else REPEATS)
    adapters = {label: served.build() for label, served in clients[0].served.items()}
    costs = measure(adapters, clients[0].streams[0].x, settings, arguments.queue, repeats, console)
    interval = costs[reference].unhurried
    scores = play(clients, costs, interval, arguments.speeds, arguments.queue, settings.eval_batch_size, console)
    return {
        "protocol": PROTOCOL,
        "seed": settings.seed,
        "network": network,
        "reference": reference,
        "interval_milliseconds": round(1000 * interval, 4),
        "queue": arguments.queue,
        "repeats": repeats,
        "costs": {label: described(cost, interval) for label, cost in costs.items()},
        "results": results(scores),
        "notes": notes + told,
        "settings": {key: value for key, value in settings.flat().items() if key != "init"},
        "seconds": round(time.perf_counter() - began, 1),
        **provenance(),
    }


def settings_of(arguments: argparse.Namespace) -> tuple[Settings, Federation, list[str]]:
    """Return the settings, who has what, and a note where the protocol's pictures are not at hand.

    Raises
    ------
    SettingsError
        A bad setting, or pictures asked for by name that cannot be read.
    """
    small = QUICK if arguments.quick else ()
    named = arguments.quick or any(change.startswith("dataset=") for change in arguments.set)
    settings, notes = load_protocol(PROTOCOL, [*small, *arguments.set]), []
    try:
        federation = federation_of(settings.replace(seed=arguments.seed))
    except (ValueError, OSError) as error:
        if named or not isinstance(error, FileNotFoundError):
            raise SettingsError(f"dataset = {settings.dataset!r}: {error}") from error
        notes.append(f"{settings.dataset} was not at hand: these are the embedded digits")
        settings = load_protocol(PROTOCOL, [*DIGITS, *arguments.set])
        federation = federation_of(settings.replace(seed=arguments.seed))
    _check(settings, federation, arguments.queue)
    return settings.replace(seed=arguments.seed, init=str(arguments.init or "")), federation, notes


def _check(settings: Settings, federation: Federation, queue: int) -> None:
    """Refuse before any training what could not be played; SettingsError."""
    try:
        resolve(settings.shifts, has_natural=True)
    except ValueError as error:
        raise SettingsError(f"shifts = {settings.shifts!r}: {error}") from error
    if queue < settings.adapt_batch_size:
        raise SettingsError(f"--queue {queue}: allowed is adapt-batch-size, {settings.adapt_batch_size}, or more")
    if settings.device != "cpu":
        raise SettingsError(f"device = {settings.device!r}: allowed is cpu, whose processor time is what counts")
    if settings.split != "once":
        raise SettingsError(f"split = {settings.split!r}: allowed is once: the network here is trained on one split")
    if any(role != "both" for role in federation.roles):
        raise SettingsError("target-fraction, target-domain: allowed are clients that all train and test")


def rows_of(settings: Settings) -> list[MethodRow]:
    """Return the rows; SettingsError for one that is defined on another training, or needs learned rates."""
    rows = [row for training in plan(settings) for row in training.rows]
    for row in rows:
        if row.training != TASK.training:
            raise SettingsError(
                f"methods: {row.label} is defined on the training {row.training}; all rows share one network here: "
                f"allowed is training={TASK.training}"
            )
        if "rates" in row.needs:
            raise SettingsError(f"methods: {row.label} needs adaptation rates, which nobody learns here")
    return rows


def reference_of(rows: Sequence[MethodRow], name: str) -> str:
    """Return the label of the row that is named, options apart; SettingsError lists what there is."""
    labels = [row.label for row in rows]
    for label in sorted(labels, key=len):  # one without options goes before one with some
        if name in (label, label.partition("[")[0]):
            return label
    raise SettingsError(f"--reference {name!r}: allowed is one of the methods, {', '.join(labels)}")


def network_of(
    settings: Settings, federation: Federation, arguments: argparse.Namespace, console: Console
) -> tuple[TwoHead, dict[str, Any]]:
    """Return the network of --init, or train one, and what is to be said of it."""
    if label := check_start(settings) if settings.init else None:
        model = initial_model(settings, spec_of(settings, federation.images)).eval()
        return model, {key: label[key] for key in ("recipe", "validation_accuracy")}
    epochs = arguments.epochs or (QUICK_EPOCHS if arguments.quick else EPOCHS)
    model, _, history = train_centrally(settings, federation, epochs, console)
    recipe = replace(RECIPE, epochs=epochs).as_json()
    return model, {"recipe": recipe, "validation_accuracy": history[-1]["validation_accuracy"]}


def described(cost: Cost, interval: float) -> dict[str, Any]:
    """Return a cost as JSON values; `keeps_up_to` is the highest speed at which the device misses nothing for long."""
    return {
        "milliseconds": {str(size): round(1000 * one, 4) for size, one in zip(cost.sizes, cost.seconds, strict=True)},
        "least": cost.least,
        "most": cost.most,
        "keeps_up_to": round(interval / cost.at_best, 4),
    }


def results(scores: Scores) -> list[dict[str, Any]]:
    """Return one entry a method and speed, shares in percent: means over clients, then over test distributions."""
    entries = []
    for (label, speed), shifts in scores.items():
        by_shift = {shift: means_of(of_clients) for shift, of_clients in shifts.items()}
        mean = {
            key: round(float(np.mean([one[key] for one in by_shift.values()])), 4)
            for key in next(iter(by_shift.values()))
        }
        delay = max(one.delay for of_clients in shifts.values() for one in of_clients)
        entries.append({"method": label, "speed": speed, **mean, "longest_delay_milliseconds": round(1000 * delay, 4)})
        entries[-1]["by_shift"] = by_shift
    return entries


def means_of(scores: Sequence[Score]) -> dict[str, float]:
    """Return the means over clients in percent."""
    columns = {
        "answered": [one.answered / one.total for one in scores],
        "accuracy": [one.accuracy for one in scores],
        "accuracy_missed_wrong": [one.accuracy_missed_wrong for one in scores],
    }
    return {name: round(100 * float(np.mean(values)), 4) for name, values in columns.items()}


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command that makes these results again."""
    words = ["python", "-m", "benchmarks", "wall-clock", "--seed", str(arguments.seed)]
    words += ["--speeds", ",".join(f"{speed:g}" for speed in arguments.speeds), "--reference", arguments.reference]
    words += ["--queue", str(arguments.queue)]
    words += ["--quick"] if arguments.quick else []
    words += ["--init", arguments.init.name] if arguments.init else []
    words += ["--epochs", str(arguments.epochs)] if arguments.epochs else []
    words += ["--repeats", str(arguments.repeats)] if arguments.repeats else []
    return shlex.join([*words, *(["--set", *arguments.set] if arguments.set else [])])


def speeds_of(text: str) -> tuple[float, ...]:
    """Return the numbers in '1,2,5'; ArgumentTypeError if one is none above 0, or occurs twice."""
    try:
        speeds = tuple(float(word) for word in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or len(set(speeds)) != len(speeds) or not all(0 < speed < math.inf for speed in speeds):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are different numbers above 0, separated by commas")
    return speeds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number, 1 or more")
    return int(text)
