"""The process that measures a part of `gpu`: its cases, one after another, each of which may fail alone.

A case gets the seconds that it may take and yields ratios. What there is no time for does not begin. On a pretended GPU
each case runs in its smallest form, or raises `NotPretended`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedtta.benchmarks.provenance import provenance
from fedtta.benchmarks.speed.measurement import Ratio
from fedtta.client.resources import federation_of
from fedtta.settings import Settings

#: A case: the seconds that it may take → ratios, and mappings of further numbers.
Case = Callable[[float], Iterable[Ratio | Mapping[str, Any]]]


class NotPretended(Exception):
    """What was to be measured exists on a real GPU only."""


@dataclass(frozen=True)
class Run:
    """What the cases of a part share.

    Parameters
    ----------
    device : torch.device
    pretended : bool
        Whether a CPU pretends to be the device; cases are as small as they can be then.
    """

    device: torch.device
    pretended: bool

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """Settings of the data set: CIFAR-10 if it can be read, else the embedded digits; always these if pretended."""
        if not self.pretended:
            with contextlib.suppress(ValueError, OSError):  # the result says which data set it was
                federation_of(Settings(dataset="cifar10", fraction=0.01, clients=2))
                return {"dataset": "cifar10"}
        return {"dataset": "digits"}

    def only_on_a_gpu(self) -> None:
        """Raise NotPretended on a pretended GPU."""
        if self.pretended:
            raise NotPretended


@dataclass(frozen=True)
class GpuPart:
    """A part: its title, its seconds, and what returns its cases by name, the most telling first."""

    title: str
    seconds: int
    cases: Callable[[Run], Mapping[str, Case]]


def measure(sender: Connection, part: GpuPart, seconds: float, pretended: bool) -> None:
    """Measure the cases of a part in this process, and send what comes of it, a pair (kind, value) each."""
    os.setpgid(0, 0)  # so that all that it starts can be ended with it
    end = time.monotonic() + 0.9 * seconds  # the rest is for a case that takes longer than it should
    with pretended_gpu() if pretended else nullcontext():
        run = Run(torch.device("cuda"), pretended)
        sender.send(("start", {**provenance(), "gpu": torch.cuda.get_device_name()}))
        cases = part.cases(run)
        sender.send(("cases", list(cases)))
        for i, (name, case) in enumerate(cases.items()):
            if (left := end - time.monotonic()) <= 0:
                break
            sender.send(("case", name))
            _measure_case(sender, name, case, left / (len(cases) - i))
        used = {key: value["dataset"] for key, value in vars(run).items() if key == "data"}  # if a case has asked
        sender.send(("end", {**used, "processor_seconds": round(time.process_time(), 1)}))


def _measure_case(sender: Connection, name: str, case: Case, seconds: float) -> None:
    try:
        for found in case(seconds):
            kind, value = ("ratio", asdict(found)) if isinstance(found, Ratio) else ("details", dict(found))
            json.dumps(value, allow_nan=False)  # what the file cannot hold fails here, in its case
            sender.send((kind, value))
    except NotPretended:
        sender.send(("not pretended", None))
    except Exception as error:  # of this case alone
        first = (str(error).strip() or "no message").partition("\n")[0]
        sender.send(("error", f"{type(error).__name__}: {first}"))
        sender.send(("details", {f"traceback of {name}": traceback.format_exc()[-4000:]}))


def pretended_gpu() -> AbstractContextManager[Any]:
    """Return the pretended GPU of the tests, which is not part of an installed copy."""
    made: AbstractContextManager[Any] = importlib.import_module("tests.gpu.pretended").PretendedGPU()
    return made


def pretend_here() -> None:
    """Let this process, a worker of Ray's, pretend until it ends."""
    pretended_gpu().__enter__()
