"""`collaborate`: test-time methods under collaborations on class-imbalanced corruption streams (pFedBBN, Table 1).

One run a class mix fills the matrix of methods and collaborations; what is complete is not run again, so that a table
can grow over several calls (`--cells` adds a run of its own).
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.papers import printed
from benchmarks.protocol import WHERE_KEYS, load_protocol
from benchmarks.record import RESULTS, provenance, write_json
from benchmarks.stages import stage
from benchmarks.start import label_path
from client.runtime import federation_of
from client.streams import streams_of
from models import write_atomically
from server.report import Results
from server.report.collaboration import matrix, mixing_rounds, plain_mixing
from settings import Settings, SettingsError


def table_1() -> dict[str, dict[str, dict[str, float]]]:
    """Return the paper's global accuracy in percent on CIFAR-10-C: method → collaboration → mix."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for one in printed("pfedbbn"):
        if one.table == "1" and one.setting["dataset"] == "cifar10":
            mix = str(one.setting.get("stream-concentration", one.setting["stream-mix"]))
            found.setdefault(one.method, {}).setdefault(str(one.setting["collaborations"]), {})[mix] = one.mean
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `collaborate`."""
    parser.add_argument("--source", type=Path, required=True, metavar="PATH", help="network of `benchmarks source`")
    parser.add_argument("--mixes", default="iid,0.01,0.005", help="iid, published, or δ (default: iid,0.01,0.005)")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--cells",
        action="append",
        default=[],
        metavar="METHODS@COLLABORATIONS[@MIXES]",
        help="one run a mix each, e.g. 'tent,bbn@none,pfedbbn' or 'cotta@none@0.01' (default: the protocol's)",
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--folder", type=Path, default=Path("results/collaborate"), help="of the run folders")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of the summary (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run what is missing, write collaborate.json and .md, print the table; each run's page is in its folder.

    Raises
    ------
    SettingsError, RunError
        As `stage`, or the source network is missing.
    """
    if not arguments.source.is_file():
        raise SettingsError(f"--source {arguments.source}: there is no such file; make one with benchmarks source")
    trained = label(arguments.source)
    base = load_protocol("pfedbbn", arguments.set).replace(seed=arguments.seed, init=str(arguments.source))
    plans = [one.split("@") for one in arguments.cells] or [[base.methods, base.collaborations]]
    path, same = arguments.out / "collaborate.json", identity(base, arguments.source)
    known = earlier(path, same)
    cells: dict[str, dict[str, dict[str, Any]]] = known.get("cells", {})
    constant: dict[str, float] = known.get("constant_percent", {})
    for plan in plans:
        if len(plan) not in (2, 3):
            raise SettingsError(f"--cells {'@'.join(plan)!r}: allowed is METHODS@COLLABORATIONS, or with @MIXES")
        for mix in (plan[2] if len(plan) == 3 else arguments.mixes).split(","):
            settings = with_mix(base, mix).replace(methods=plan[0], collaborations=plan[1])
            folder = arguments.folder / folder_name(mix, plan[0], plan[1])
            collect(stage(folder, settings), mix, cells)
            constant[mix] = round(100 * constant_accuracy(settings), 2)
    content = {"protocol": "pfedbbn", **same, "source_label": trained, "cells": cells, "constant_percent": constant}
    content |= provenance()
    words = ["python", "-m", "benchmarks", "collaborate", "--source", arguments.source.name, "--mixes", arguments.mixes]
    words += [word for text in arguments.cells for word in ("--cells", text)]
    write_json(path, content)
    page = markdown(content, shlex.join(words))
    write_atomically(path.with_suffix(".md"), page.encode())
    console.print(page, markup=False, highlight=False)


def identity(settings: Settings, source: Path) -> dict[str, Any]:
    """Return what cells of one table have in common: settings but for what is run, and the source network's bytes."""
    run = ("init", "methods", "collaborations", *WHERE_KEYS)
    common = {key: value for key, value in settings.flat().items() if key not in run}
    return {"settings": common, "source": source.name, "source_sha256": sha256(source.read_bytes()).hexdigest()}


def earlier(path: Path, same: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier call wrote; nothing without a file.

    Raises
    ------
    SettingsError
        The file's cells were made otherwise.
    """
    if not path.exists():
        return {}
    known: dict[str, Any] = json.loads(path.read_text())
    defaults = Settings().flat()
    missing = {key: defaults[key] for key in same["settings"] if key not in known["settings"]}
    known["settings"] |= missing  # a younger setting had what is its default today
    if other := [key for key, value in same.items() if known.get(key) != value]:
        raise SettingsError(f"{path} holds cells of another {' and '.join(other)}; choose another --out")
    return known


def constant_accuracy(settings: Settings) -> float:
    """Return how often each client would be right by always naming the most frequent class of its own stream."""
    counts = streams_of(settings, federation_of(settings)).counts  # (N, K)
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())


def with_mix(settings: Settings, mix: str) -> Settings:
    """Return settings with a class mix: "iid", "published" or the concentration δ of a Dirichlet distribution."""
    if mix in ("iid", "published"):
        return settings.replace(stream_mix=mix)
    try:
        return settings.replace(stream_mix="dirichlet", stream_concentration=float(mix))
    except ValueError as error:
        raise SettingsError(f"--mixes {mix!r}: allowed are iid, published and a number: {error}") from error


def folder_name(mix: str, methods: str, collaborations: str) -> str:
    """Return a plain name for one run's folder."""
    words = f"{mix}-{methods}-{collaborations}"
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in words)


def collect(results: Results, mix: str, cells: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Add the outcomes of a run: method → collaboration → mix → accuracies in percent."""
    found, commit = matrix(results), results.run.commit if results.run else None
    mixing = mixing_rounds(results)
    for one in found.outcomes if found else []:
        scores = one.scores
        cells.setdefault(one.method, {}).setdefault(one.collaboration, {})[mix] = {
            "global": round(100 * float(scores.accuracy), 2),
            "mean_over_classes": round(100 * float(scores.mean_class), 2),
            "per_client": [round(100 * float(value), 2) for value in scores.per_client],
            "rounds": len(one.rounds),
            "commit": commit,
        }
        shown = mixing.get((one.method, one.collaboration), [])
        if shown and not plain_mixing(shown):
            cells[one.method][one.collaboration][mix]["weights"] = {str(w.round): matrix_text(w.weights) for w in shown}


def matrix_text(rows: Sequence[Sequence[float]]) -> str:
    """Return W in a line: numbers with three digits, rows parted by semicolons."""
    return "; ".join(" ".join(f"{value:.3f}" for value in row) for row in rows)


def label(source: Path) -> dict[str, Any]:
    """Return what the source network's label says of its training.

    Raises
    ------
    SettingsError
        There is no label, or it does not say that the streams' images, part "test", were not trained on.
    """
    path = label_path(source)
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"--source {source}: its label {path} cannot be read: {error}") from error
    if known.get("measured_on") != "part=test":
        raise SettingsError(f"--source {source}: {path} does not say that part=test was left out of its training")
    return {key: known[key] for key in ("recipe", "accuracy", "measured_on", "training_samples") if key in known}


def _label_words(label: Mapping[str, Any]) -> str:
    """Return what a label says, in words."""
    words = [f"{100 * label['accuracy']:.1f} %" + (f" on {label['measured_on']}" if "measured_on" in label else "")]
    if "recipe" in label:
        words.append(f"{label['recipe']['epochs']} epochs on {label.get('training_samples', 'its')} images")
    return ", ".join(words)


def markdown(content: Mapping[str, Any], command: str) -> str:
    """Return the page: global accuracy here beside the paper's, and the mean over the classes that occur."""
    cells: Mapping[str, Mapping[str, Mapping[str, Any]]] = content["cells"]
    mixes = sorted({mix for row in cells.values() for cell in row.values() for mix in cell}, key=_number)
    lines = [f"| method | collaboration | {' | '.join(mixes)} |", "| --- | --- |" + " --: |" * len(mixes)]
    paper = table_1()
    papers = list(paper)
    for method, row in sorted(cells.items(), key=lambda item: _place(papers, item[0])):
        known = paper.get(method.partition("[")[0], {})
        for together, cell in sorted(row.items(), key=lambda item: _place([*known], item[0])):
            texts = []
            for mix in mixes:
                theirs = known.get(together.partition("[")[0], {}).get(mix)
                beside = f" \\| {theirs:.1f}" if theirs is not None else ""
                ours = f"{cell[mix]['global']:.1f} ({cell[mix]['mean_over_classes']:.1f})" if mix in cell else "–"
                texts.append(ours + beside)
            lines.append(f"| {method} | {together} | {' | '.join(texts)} |")
    commits = sorted({str(cell["commit"]) for row in cells.values() for one in row.values() for cell in one.values()})
    constant = [f"{content['constant_percent'][mix]:.1f}" for mix in mixes]
    lines.append(f"| always the client's most frequent class | | {' | '.join(constant)} |")
    parts = [
        "# Collaboration at test time on CIFAR-10-C streams",
        "Global accuracy in % here (in brackets the mean over the classes that occur), beside it the paper's (pFedBBN, "
        f"Table 1, WideResNet-28). Source network: {content['settings']['model']}, "
        f"{content['settings']['model-options']}, {_label_words(content['source_label'])}; "
        f"seed {content['settings']['seed']}; `fedavg` is the source network unadapted. The last row knows each "
        "stream's labels and nothing of its images: what comes near it has learned which classes a client has, more "
        "than what is to be seen (accuracies of each client are in the JSON file).",
        "\n".join(lines),
        f"{content['hardware']}; torch {content['versions'].get('torch')}, flwr {content['versions'].get('flwr')}; "
        f"cells of commit {', '.join(commits)}.",
        f"```\n{command}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _place(papers: list[str], label: str) -> tuple[int, str]:
    """Order as the paper's table does; what it does not have comes last."""
    name = label.partition("[")[0]
    return (papers.index(name) if name in papers else len(papers), label)


def _number(mix: str) -> float:
    """Order class mixes as the paper's table does: iid, then by concentration."""
    return float(mix) if mix.replace(".", "", 1).isdigit() else -1.0
