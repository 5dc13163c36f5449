"""`gpu`: what only a GPU can show, part by part, in one file with a page beside it.

Each part runs in a process of its own for at most its seconds: an error of CUDA, a crash or lost memory ends one part
and no other. The file is written after every case of a part. With `--pretend` every part computes its smallest form on
a CPU that pretends (`tests/gpu`); its file has another name and says so.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedtta.benchmarks.gpu import parts, process
from fedtta.benchmarks.gpu.parts import PARTS
from fedtta.benchmarks.gpu.process import GpuPart
from fedtta.benchmarks.provenance import RESULTS, write_json
from fedtta.benchmarks.speed.measurement import Ratio, markdown
from fedtta.server.events import RunError
from fedtta.settings import SettingsError
from fedtta.settings.files import write_atomically

FILE, PRETENDED_FILE = "gpu.json", "gpu-pretended.json"
PRETENDED = Path("results/gpu-pretended")
PATIENCE = 600  # seconds of a pretended part, on however busy a machine
STARTING = 180  # seconds until the first part's modules are imported
GRACE = 10.0  # seconds in which a part that is interrupted may stop what it has started
NOTHING = "No GPU has been measured yet: `make gpu`, on a machine with one, writes what stands here."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gpu`."""
    parser.add_argument("--parts", default="", metavar="NAME,NAME", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--minutes", type=float, metavar="N", help="for these parts together, where they take longer")
    parser.add_argument("--pretend", action="store_true", help="the smallest form of each part, without a GPU")
    parser.add_argument("--out", type=Path, help=f"folder of {FILE} and its page (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure the parts one after another; those that the file has besides are kept.

    Raises
    ------
    SettingsError
        An unknown part, no time, or kept results that cannot be read or are not this GPU's.
    RunError
        There is no GPU, or a part failed; the others have been measured. A pretended part that was cut short has
        failed, too.
    """
    names = [name for name in arguments.parts.split(",") if name] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise SettingsError(f"--parts {','.join(unknown)}: allowed are {', '.join(PARTS)}")
    whole = sum(PARTS[name].seconds for name in names)
    share = 1.0 if arguments.minutes is None else min(1.0, 60 * arguments.minutes / whole)
    if not share > 0:
        raise SettingsError(f"--minutes {arguments.minutes:g}: allowed are numbers above 0")
    pretended, folder = arguments.pretend, arguments.out or (PRETENDED if arguments.pretend else RESULTS)
    if pretended and folder.resolve() == RESULTS.resolve():
        raise SettingsError(f"--pretend --out {folder}: measured results are kept there; choose another folder")
    if not (pretended or torch.cuda.is_available()):
        raise RunError("there is no GPU here (torch.cuda.is_available() is false); nothing was measured")
    path = folder / (PRETENDED_FILE if pretended else FILE)
    content = read_gpu(path, pretended)
    failed = []
    for name in names:
        part = replace(PARTS[name], seconds=math.ceil(share * PARTS[name].seconds))
        console.print(f"{name}: {part.title}, at most {part.seconds} s", highlight=False)
        status = Measuring(path, name, part, pretended, content).run()
        console.print(f"{name}: {status}", highlight=False)
        if status == "failed" or (pretended and status != "whole"):
            failed.append(name)
    console.print(f"Written: {path} and {path.with_suffix('.md')}", highlight=False)
    if failed:
        raise RunError(f"{', '.join(failed)}: {path.with_suffix('.md')} says why")


@dataclass
class Measuring:
    """A part while it is measured; the file is written whenever something has come.

    Parameters
    ----------
    path : Path
        Of the file.
    name : str
    part : GpuPart
    pretended : bool
    content : dict
        Of the file: the other parts, and the GPU that they were measured on.
    """

    path: Path
    name: str
    part: GpuPart
    pretended: bool
    content: dict[str, Any]
    _own: dict[str, Any] = field(default_factory=dict)  # what the file has of this part
    _ahead: list[str] = field(default_factory=list)  # cases that have not begun
    _case: str = "start"  # that is being measured
    _ended: bool = False

    def run(self) -> str:
        """Measure; return "whole", "partly" (cases were left out for lack of time) or "failed".

        Raises
        ------
        SettingsError
            Parts that are kept were measured on another GPU.
        """
        allowed = PATIENCE if self.pretended else self.part.seconds
        self._own = {
            "title": self.part.title, "status": "unfinished", "allowed_seconds": allowed, "ratios": [],
            "errors": {}, "not_pretended": [], "left_out": [], "details": {},
        }  # fmt: skip
        start = time.monotonic()
        context = multiprocessing.get_context("forkserver")  # modules are imported once; nothing of CUDA is inherited
        context.set_forkserver_preload([parts.__name__])
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=process.measure, args=(sender, self.part, allowed, self.pretended))
        child.start()
        sender.close()
        try:
            late = self._receive(receiver, allowed)
        finally:
            stop(child, GRACE if self._ended else 0.0)
        if not self._ended:
            over = f"the {allowed} s of the part were over"
            self._own["errors"][self._case] = over if late else f"its process ended with status {child.exitcode}"
        self._own["left_out"] = self._ahead
        self._own["seconds"] = round(time.monotonic() - start, 1)
        failed, partly = bool(self._own["errors"]), bool(self._ahead)
        self._own["status"] = "failed" if failed else "partly" if partly else "whole"
        self._write()
        return str(self._own["status"])

    def _receive(self, receiver: Connection, allowed: float) -> bool:
        """Take what the process sends until it ends, False, or its time after the start is over, True."""
        end = time.monotonic() + STARTING
        with suppress(EOFError):
            while receiver.poll(max(0.0, end - time.monotonic())):
                kind, value = receiver.recv()
                if kind == "start":
                    end = time.monotonic() + allowed
                self._take(kind, value)
            return True
        return False

    def _take(self, kind: str, value: Any) -> None:
        if kind == "start":
            self._check(value.pop("gpu"))
            self._own |= value
        elif kind == "end":
            self._own |= value
            self._ended = True
        elif kind == "cases":
            self._ahead = list(value)
        elif kind == "case":
            self._case = value
            self._ahead.remove(value)
            self._write()
        elif kind == "ratio":
            self._own["ratios"].append(value)
        elif kind == "details":
            self._own["details"] |= value
        elif kind == "error":
            self._own["errors"][self._case] = value
        elif kind == "not pretended":
            self._own["not_pretended"].append(self._case)

    def _check(self, gpu: str) -> None:
        if self.content["parts"] and self.content["gpu"] != gpu:
            raise SettingsError(
                f"{self.path} holds parts of {self.content['gpu']}, this is {gpu}: choose another --out"
            )
        self.content["gpu"] = gpu

    def _write(self) -> None:
        self.content["parts"][self.name] = self._own
        ordered = {name: self.content["parts"][name] for name in PARTS if name in self.content["parts"]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {**self.content, "parts": ordered})
        write_atomically(self.path.with_suffix(".md"), gpu_page({**self.content, "parts": ordered}).encode())


def stop(child: BaseProcess, patience: float) -> None:
    """Wait for the end of a part's process; interrupt it then, and kill all that it has started and left."""
    with suppress(ProcessLookupError):
        child.join(patience)
        if child.is_alive() and child.pid:
            os.kill(child.pid, signal.SIGINT)
            child.join(GRACE)
        if child.pid:
            os.killpg(child.pid, signal.SIGKILL)
    child.join()


def read_gpu(path: Path = RESULTS / FILE, pretended: bool = False) -> dict[str, Any]:
    """Return what is kept: whether it is pretended, the GPU, and part → what was measured; no parts without a file.

    Raises
    ------
    SettingsError
        It cannot be read, or a pretended result is in the place of a measured one, or the other way round.
    """
    if not path.exists():
        return {"pretended": pretended, "gpu": "", "parts": {}}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for part in content["parts"].values():
            [Ratio(**row) for row in part["ratios"]]
        kind, _ = bool(content["pretended"]), str(content["gpu"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(f"{path} cannot be read ({error}); remove it, or choose another --out") from error
    if kind != pretended:
        raise SettingsError(f"{path}: pretended = {kind}; allowed here is {pretended}")
    return dict(content)


def gpu_page(content: Mapping[str, Any]) -> str:
    """Return all parts as a Markdown page, those that have not been measured by name."""
    kept = content["parts"]
    if not kept:
        return f"# GPU\n\n{NOTHING}\n"
    lines = ["# GPU", ""]
    if content["pretended"]:
        lines += ["**Pretended: a CPU computed this to try the code; its numbers say nothing about a GPU.**", ""]
    lines += [f"{content['gpu']}. `make gpu` measures it; details are in the JSON file beside this page."]
    for name, part in PARTS.items():
        lines += ["", f"## {name}: {part.title}", "", *(_section(kept[name]) if name in kept else ["Not measured."])]
    return "\n".join(lines) + "\n"


def _section(part: Mapping[str, Any]) -> list[str]:
    seconds = f"{part['seconds']:g} of" if "seconds" in part else "unfinished, at most"
    about = [str(part[key]) for key in ("data", "hardware", "time", "commit") if part.get(key)]
    lines = [f"{part['status'].capitalize()}: {seconds} {part['allowed_seconds']} s. {', '.join(about)}.", ""]
    if part["ratios"]:
        lines += [*markdown([Ratio(**row) for row in part["ratios"]]), ""]
    lines += [f"- Failed: {case}: {why}" for case, why in part["errors"].items()]
    for key, words in (("left_out", "Not measured, for lack of time"), ("not_pretended", "Not on a pretended GPU")):
        lines += [f"- {words}: {', '.join(part[key])}."] if part[key] else []
    return lines
