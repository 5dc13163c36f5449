"""`atp`: ATP's Table 5 for the shallow CNN, its ablation (Table 4) and its cross table (Table 3), beside the paper's.

What a shift needs builds on each other: the global model, the rates on it (all modules, parameters only, statistics
only), and these rates on other shifts. Global models and one small file a cell are kept beside the results, so that the
tables can grow over several calls, on several machines.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.atp_tables import markdown
from benchmarks.protocol import WHERE_KEYS, load_protocol
from benchmarks.record import RESULTS, about, differing, write_json
from benchmarks.stages import stage
from benchmarks.start import label_path
from models import write_atomically
from server.rates import save_rates
from server.report import Results, table
from settings import Settings, SettingsError

#: What makes a shift of the protocol's hybrid one.
ARMS: dict[str, dict[str, Any]] = {"feature": {"step_ratio": 1.0}, "label": {"domains": "none"}, "hybrid": {}}
#: What is run with the rates of a variant.
VARIANTS = {"all": "fedavg,atp,atp[mode=online]", "params": "atp[adapt=params]", "stats": "atp[adapt=stats]"}
#: Global training knows nothing of rates; equal settings then mean an equal model.
NO_RATES: dict[str, Any] = {
    key: getattr(Settings(), key)
    for key in ("rates_rounds", "rates_clients", "rates_batch_size", "rates_learning_rate", "adapt_batch_size")
}
#: Settings that name a file of one machine.
FILES = ("init", "rates-init")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `atp`."""
    parser.add_argument("--shifts", default="feature,label,hybrid", help="default: feature,label,hybrid")
    parser.add_argument("--variants", default="all,params,stats", help="default: all,params,stats")
    parser.add_argument("--no-cross", action="store_true", help="leave the cross table as it is")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--rounds", action="append", default=[], metavar="SHIFT=TRAINING+RATES", help="e.g. feature=60+120"
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--folder", type=Path, default=Path("results/atp"), help="of the run folders")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "atp", help="of what is kept (default: benchmarks/results/atp)"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run what is missing, write a file a cell and atp.md, print the tables.

    Raises
    ------
    SettingsError, RunError
        As `stage`, or what is kept was made with other settings.
    """
    shifts, variants = (
        known("--shifts", arguments.shifts, ARMS),
        known("--variants", arguments.variants, VARIANTS),
    )
    base = load_protocol("atp", arguments.set).replace(seed=arguments.seed)
    settings = settings_of(shifts, base, arguments.rounds)
    out, folder = arguments.out, arguments.folder
    for shift in shifts:
        start = on_model(global_model(out, folder, shift, settings[shift]), settings[shift])
        for variant in variants:
            cell(out, folder, f"{shift}-{variant}", start.replace(methods=VARIANTS[variant]), settings[shift].rounds)
    for learned, tested in [] if arguments.no_cross else [(a, b) for a in shifts for b in shifts if a != b]:
        start = on_model(global_model(out, folder, tested, settings[tested]), settings[tested])
        file = folder / f"{learned}.safetensors"
        save_rates(file, read_cell(out, f"{learned}-all")["rates"], "cross_entropy", "all")
        changed = start.replace(methods="atp", rates_rounds=0, rates_init=str(file))
        cell(out, folder, f"{learned}-on-{tested}", changed, settings[tested].rounds)
    words = ["python", "-m", "benchmarks", "atp", "--shifts", arguments.shifts, "--variants", arguments.variants]
    words += [word for text in arguments.rounds for word in ("--rounds", text)]
    kept = {path.stem: read_cell(out, path.stem) for path in sorted(out.glob("*-*.json"))}
    page = markdown(kept, [shift for shift in ARMS if f"{shift}-all" in kept], arguments.seed, shlex.join(words))
    write_atomically(out / "atp.md", page.encode())
    console.print(page, markup=False, highlight=False)


def known(option: str, text: str, names: Sequence[str] | dict[str, Any]) -> list[str]:
    """Return the names in a comma list; SettingsError lists what is allowed."""
    asked = [name.strip() for name in text.split(",")]
    if unknown := [name for name in asked if name not in names]:
        raise SettingsError(f"{option} {', '.join(unknown)}: allowed are {', '.join(names)}")
    return asked


def settings_of(shifts: Sequence[str], base: Settings, rounds: Sequence[str]) -> dict[str, Settings]:
    """Return each shift's settings, with rounds as asked for (`feature=60+120`)."""
    chosen = {shift: base.replace(**ARMS[shift]) for shift in shifts}
    for text in rounds:
        shift, _, numbers = text.partition("=")
        training, plus, rates = numbers.partition("+")
        if shift not in chosen or not plus or not (training + rates).isdecimal():
            raise SettingsError(f"--rounds {text!r}: allowed is SHIFT=TRAINING+RATES with a shift of --shifts")
        chosen[shift] = chosen[shift].replace(rounds=int(training), rates_rounds=int(rates))
    return chosen


def global_model(out: Path, folder: Path, shift: str, settings: Settings) -> Path:
    """Return the file of a shift's global model: the one kept, or a newly trained one, then kept.

    Raises
    ------
    SettingsError
        What is kept was trained with other settings.
    """
    kept = out / f"{shift}.safetensors"
    training = settings.replace(methods="fedavg", **NO_RATES)
    if not kept.exists():
        results = stage(folder / f"{shift}-train", training)
        write_json(label_path(kept), {"settings": training.flat(), **about(results)})
        write_atomically(kept, (folder / f"{shift}-train" / "model.safetensors").read_bytes())
    require_same(kept, json.loads(label_path(kept).read_text())["settings"], training)
    return kept


def on_model(model: Path, settings: Settings) -> Settings:
    """Return settings that start from a trained global model."""
    return settings.replace(init=str(model), rounds=0)


def cell(out: Path, folder: Path, name: str, settings: Settings, trained: int) -> None:
    """Run one cell, unless it is kept, and keep what the tables need, with its report page beside it.

    Parameters
    ----------
    trained : int
        Rounds of the global model it starts from.
    """
    path = out / f"{name}.json"
    if path.exists():
        require_same(path, read_cell(out, name)["settings"], settings)
        return
    results = stage(folder / name, settings)
    learned = next(iter(results.rates), None)
    content = {
        "settings": settings.flat(),
        "rounds": [trained, settings.rates_rounds],
        "accuracy_percent": {row.label: 100 * float(row.average or 0) for row in table(results)},
        "rates": learned.rates if learned else {},
        "traffic": traffic(results),
        **about(results),
    }
    write_json(path, content)
    write_atomically(path.with_suffix(".html"), (folder / name / "report.html").read_bytes())


def read_cell(out: Path, name: str) -> dict[str, Any]:
    """Return what is kept of a cell; SettingsError if there is nothing."""
    path = out / f"{name}.json"
    if not path.exists():
        raise SettingsError(f"{path} is not there: run that cell first")
    return json.loads(path.read_text())


def require_same(path: Path, found: dict[str, Any], settings: Settings) -> None:
    """Raise SettingsError unless a kept file was made with these settings, wherever its files lay."""
    if other := differing(found, settings, (*WHERE_KEYS, *FILES)):
        raise SettingsError(f"{path} was made with other settings ({', '.join(other)}); choose another --out")


def traffic(results: Results) -> dict[str, float]:
    """Return the number of modules D, and the bytes of rates that one client sends, and that all rounds moved."""
    rounds = results.rates_rounds
    if not rounds:
        return {}
    return {
        "modules": len(results.rates[0].rates),
        "bytes_up_a_client_and_round": rounds[-1].bytes_up / len(rounds[-1].replied),
        "bytes_down_a_client_last_round": rounds[-1].bytes_down / len(rounds[-1].sampled),
        "bytes_down_all_rounds": sum(one.bytes_down for one in rounds),
        "context_bytes_all_rounds": sum(one.context_bytes for one in rounds),
    }
