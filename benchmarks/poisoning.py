"""`poisoning`: what one client of ten, or two, cost the others, with the default limits and without.

Ten clients of the digits in this process, a small CNN with BatchNorm. Every number is the mean accuracy of the honest
clients; an attack is compared with the same seed's run without one. Runs that are kept are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.console import Console

from fedtta.benchmarks import attacks
from fedtta.benchmarks.provenance import RESULTS, provenance, write_json
from fedtta.client.sites import simulated_nodes
from fedtta.messages.flower import allow_messages
from fedtta.server.events import Event, Events
from fedtta.server.run import run as run_federation
from fedtta.settings import Settings, SettingsError
from fedtta.simulation.vectorized import VectorizedTransport, at_once

FILE = "poisoning.json"
SPLITS: dict[str, dict[str, Any]] = {
    "equal parts": {"partition": "iid"},
    "Dirichlet(0.5)": {"partition": "dirichlet", "alpha": 0.5},
}
NETWORK: dict[str, Any] = {"model": "cnn", "model_options": "norm=batch", "image_size": 16, "channels": 1}
COMMON: dict[str, Any] = {**NETWORK, "device": "cpu", "checkpoint_every": 0, "node_timeout": 5.0}
TRAINING = Settings(
    methods="fedavg,fedthe[training=cross_entropy],btfl",
    shifts="original",
    rounds=6,
    momentum=0.9,
    **COMMON,
)
TEST_TIME = Settings(
    methods="tent,bbn",
    collaborations="pfedbbn",
    rounds=0,
    severity=1,
    stream_size=50,
    stream_batch=50,
    stream_rounds=6,
    **COMMON,
)
NONE = "no attack"
#: Name → attack, on training and its statistics, and on test-time rounds.
ON_TRAINING: dict[str, attacks.Attack] = {
    NONE: attacks.honest,
    "sign flip × 1": attacks.sign_flip(1),
    "sign flip × 10": attacks.sign_flip(10),
    "10⁸ samples and a sign flip": attacks.size_lie,
    "a little is enough": attacks.alie(),
    "descriptor × 10, DLE = 1 - own": attacks.statistics,
}
ON_TEST_TIME: dict[str, attacks.Attack] = {NONE: attacks.honest, "arrays × -10": attacks.shared_arrays}


@dataclass(frozen=True)
class Case:
    """One run: `poisoners` of ten clients attack, with the default limits or without any."""

    split: str
    seed: int
    attack: str
    poisoners: int = 1
    limits: bool = True


@dataclass(frozen=True)
class Measured:
    """Row → mean accuracy of the honest clients in percent, and how often limits acted on them and on poisoners."""

    case: Case
    accuracy: dict[str, float]
    limited: int
    limited_poisoners: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `poisoning`."""
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 1 to N (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"of {FILE} (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure what is not kept, keep it, and print the tables.

    Raises
    ------
    SettingsError
        There is no seed, or kept results cannot be read.
    RunError
        A run failed.
    """
    if arguments.seeds < 1:
        raise SettingsError(f"--seeds {arguments.seeds}: allowed is 1 or more")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    allow_messages()
    path = arguments.out / FILE
    content = {**read_poisoning(path)}
    kept = {row.case: row for row in rows_of(content)}
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(arguments.seeds, kept, Path(folder)):
            kept[found.case] = found
            now = provenance()
            commits = dict.fromkeys([*filter(None, str(content.get("commit") or "").split(", ")), str(now["commit"])])
            content = {**now, "commit": ", ".join(commits), "measured": [asdict(one) for one in kept.values()]}
            write_json(path, content)
            console.print(f"{found.case}: {found.accuracy}", highlight=False)
    console.print(poisoning_page(content), highlight=False)


def cases(seeds: int) -> list[Case]:
    """Return what is measured: everything with limits; without limits, and with two poisoners, one seed."""
    without = [Case(split, 1, attack, limits=False) for split in SPLITS for attack in _attacks()]
    worst = ("sign flip × 1", "sign flip × 10", "arrays × -10")
    two = [Case(split, 1, attack, 2) for split in SPLITS for attack in (NONE, *worst)]
    first, *more = (
        [Case(split, seed, attack) for split in SPLITS for attack in _attacks()] for seed in range(1, seeds + 1)
    )
    return [*first, *without, *two, *(case for found in more for case in found)]


def _attacks() -> list[str]:
    return [*ON_TRAINING, *(name for name in ON_TEST_TIME if name != NONE)]


def measure(seeds: int, kept: Mapping[Case, Measured], folder: Path) -> Iterator[Measured]:
    """Run the cases that are not kept; test-time rounds start from the model that the seed's honest clients train."""
    for case in cases(seeds):
        if case in kept:
            continue
        source = folder / f"{case.split}-{case.seed}-{case.limits}"
        if case.attack not in ON_TRAINING and not source.exists():
            federate(settings_of(TRAINING, case), [], attacks.honest, source)
        accuracy: dict[str, float] = {}
        counts = [0, 0]
        for settings, attack in _parts(case, source):
            trains = settings.rounds and case.attack == NONE
            events = federate(settings, poisoners(case), attack, source if trains else folder / "run")
            accuracy |= accuracies(events, poisoners(case))
            for event in (event for event in events if event["event"] == "limited"):
                counts[event["partition"] in poisoners(case)] += 1
        yield Measured(case, accuracy, *counts)


def _parts(case: Case, source: Path) -> Iterator[tuple[Settings, attacks.Attack]]:
    if case.attack in ON_TRAINING:
        yield settings_of(TRAINING, case), ON_TRAINING[case.attack]
    if case.attack in ON_TEST_TIME:
        init = str(source / "model.safetensors")
        yield settings_of(TEST_TIME, case).replace(init=init), ON_TEST_TIME[case.attack]


def settings_of(settings: Settings, case: Case) -> Settings:
    """Return the settings of a case."""
    limits = {} if case.limits else {"clip_factor": 0.0, "max_share": 0.0}
    # test-time streams are of all images, so their clients differ in class mix by the streams' own settings
    mix = {"stream_mix": "iid" if case.split == "equal parts" else "dirichlet", "stream_concentration": 0.5}
    return settings.replace(seed=case.seed, **SPLITS[case.split], **mix, **limits)


def poisoners(case: Case) -> list[int]:
    """Return the partitions that attack: the last ones."""
    return list(range(TRAINING.clients - case.poisoners, TRAINING.clients))


def federate(settings: Settings, partitions: Sequence[int], attack: attacks.Attack, folder: Path) -> list[Event]:
    """Run a federation in this process, and return its events."""
    events: list[Event] = []
    folder.mkdir(parents=True, exist_ok=True)
    transport = VectorizedTransport(simulated_nodes(settings), at_once(settings))
    nodes = [partition + 1 for partition in partitions]
    run_federation(attacks.Poisoned(transport, nodes, attack), settings, folder, Events(events.append))
    return events


def accuracies(events: Sequence[Event], left_out: Sequence[int]) -> dict[str, float]:
    """Return row → mean accuracy of the other clients in percent; of a client over its rounds at test time."""
    counts: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if event["event"] == "evaluation":
            row, pair = event["method"].partition("[")[0], (event["correct"], event["total"])
        elif event["event"] == "adapted":
            row, pair = f"{event['method']}@{event['collaboration']}", (sum(event["correct"]), sum(event["total"]))
        else:
            continue
        if event["partition"] not in left_out:
            total = counts.setdefault((row, event["partition"]), [0, 0])
            total[0], total[1] = total[0] + pair[0], total[1] + pair[1]
    rows = dict.fromkeys(row for row, _ in counts)
    return {
        one: round(100 * fmean(right / total for (row, _), (right, total) in counts.items() if row == one), 2)
        for one in rows
    }


def read_poisoning(path: Path = RESULTS / FILE) -> dict[str, Any]:
    """Return what is kept; nothing without a file, SettingsError if it cannot be read."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows_of(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(f"{path} cannot be read ({error}); remove it, or choose another --out") from error
    return dict(content)


def rows_of(content: Mapping[str, Any]) -> list[Measured]:
    """Return the runs that are kept."""
    return [Measured(**{**one, "case": Case(**one["case"])}) for one in content.get("measured", [])]


def poisoning_page(content: Mapping[str, Any]) -> str:
    """Return all kept runs as a Markdown page; SettingsError for an attack without the run that it is compared with."""
    rows = rows_of(content)
    without = {replace(one.case, attack=NONE) for one in rows} - {one.case for one in rows}
    if without:
        missing = ", ".join(sorted(map(str, without)))
        raise SettingsError(
            f"{FILE} lacks {missing}, which attacks are compared with: `fedtta bench poisoning` runs it"
        )
    lines = ["# Poisoning", "", "`fedtta bench poisoning`; accuracies of honest clients in %."]
    if rows:
        lines += ["", f"{content['hardware']}, commit {content['commit']}, {content['time']}."]
    for title, limits, number in (
        ("One poisoner of ten, default settings", True, 1),
        ("One poisoner of ten, no limits (clip-factor = 0, max-share = 0)", False, 1),
        ("Two poisoners of ten, default settings", True, 2),
    ):
        chosen = [row for row in rows if (row.case.limits, row.case.poisoners) == (limits, number)]
        if chosen:
            lines += ["", f"## {title}", "", *_table(chosen, rows)]
    return "\n".join(lines) + "\n"


def _table(chosen: Sequence[Measured], rows: Sequence[Measured]) -> list[str]:
    """Return a table: accuracies without an attack, and what each attack adds in the same seeds' runs."""
    honest = {one.case: one for one in rows if one.case.attack == NONE}
    columns = list(dict.fromkeys(name for one in rows for name in one.accuracy))
    lines = [f"| split | attack | {' | '.join(columns)} | seeds |", "| --- | --- |" + " --: |" * (len(columns) + 1)]
    for split in SPLITS:
        for attack in _attacks():
            found = [one for one in chosen if (one.case.split, one.case.attack) == (split, attack)]
            pairs = [(one, honest[replace(one.case, attack=NONE)]) for one in found]
            cells = [_cell(column, pairs) for column in columns]
            if found:
                lines.append(f"| {split} | {attack} | {' | '.join(cells)} | {len(found)} |")
    return lines


def _cell(column: str, pairs: Sequence[tuple[Measured, Measured]]) -> str:
    """Return a mean over seeds: the accuracy of honest runs, or the points by which an attack changes it."""
    both = [(one, base) for one, base in pairs if column in one.accuracy]
    if not both:
        return ""
    if all(one.case.attack == NONE for one, _ in both):
        values = [one.accuracy[column] for one, _ in both]
        return f"{fmean(values):.1f} ± {pstdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"
    changes = [one.accuracy[column] - base.accuracy[column] for one, base in both]
    return f"{fmean(changes):+.1f} ({min(changes):+.1f})" if len(changes) > 1 else f"{changes[0]:+.1f}"
