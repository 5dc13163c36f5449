"""The GPU of the tests: the pretended one, or with FEDTTA_TEST_DEVICE=cuda the machine's.

Both are contexts with `device`, and `waits`: "<file>:<line>" → how often the host waited for the device there.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gpu.pretended import PretendedGPU, site

CHOICES = ("pretended", "cuda")
CHOSEN = os.environ.get("FEDTTA_TEST_DEVICE", "pretended")
if CHOSEN not in CHOICES:
    raise ValueError(f"FEDTTA_TEST_DEVICE={CHOSEN!r}: allowed are {', '.join(CHOICES)}")

#: By which results may differ from the CPU's, by type: floats absolutely and relatively, integers absolutely. A GPU
#: sums in another order, which a few steps of training amplify; of integers, one decision near a threshold may fall the
#: other way. What is float64 was averaged from float32.
TOLERANCES: dict[str, dict[str, float]] = {
    "pretended": {"float64": 1e-9, "float32": 1e-6, "int": 0, "without effect": 1e-6},
    "cuda": {"float64": 1e-4, "float32": 5e-3, "int": 1, "without effect": 5e-2},
}
#: The contract's biases before a BatchNorm layer change nothing that follows: their gradients are rounding, which Adam
#: enlarges to steps of its rate. The layer's mean moves with them.
WITHOUT_EFFECT = re.compile(r"encoder\.(0|3)\.bias$|encoder\.(1|4)(\.mean|/0)$")


class RealGPU:
    """The first GPU of the machine, in float32 without TF32; waits are those that CUDA's debug mode warns of.

    `torch.cuda.synchronize`, which is asked for on purpose, is not among them.
    """

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> RealGPU:
        """Begin to count."""
        self._stack = ExitStack()
        self._stack.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        self._stack.enter_context(warnings.catch_warnings())
        self._stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _note(self, message: Warning | str, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.waits[site()] += 1


def gpu() -> PretendedGPU | RealGPU:
    """Return the GPU of the tests, to be entered."""
    return RealGPU() if CHOSEN == "cuda" else PretendedGPU()


def product_waits(waits: Counter[str]) -> Counter[str]:
    """Return the waits in the product's own code."""
    return Counter({place: count for place, count in waits.items() if not place.startswith(("tests/", "?"))})


def on_host(results: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return results as arrays."""
    return {name: np.asarray(_plain(value)) for name, value in results.items()}


def _plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    """Return what differs by more than the tolerances, in words."""
    if found.keys() != expected.keys():
        return [f"names differ: {sorted(found.keys() ^ expected.keys())}"]
    tolerances, lines = TOLERANCES[CHOSEN], []
    for name, value in expected.items():
        kind = str(value.dtype) if str(value.dtype) in tolerances else "int"
        kind = "without effect" if WITHOUT_EFFECT.search(name) else kind
        if (found[name].shape, found[name].dtype) != (value.shape, value.dtype):
            lines.append(f"{name}: {found[name].dtype}{found[name].shape} instead of {value.dtype}{value.shape}")
        elif not np.allclose(found[name], value, 0 if kind == "int" else tolerances[kind], tolerances[kind], True):
            most = np.abs(found[name].astype(float) - value.astype(float)).max()
            lines.append(f"{name} differs by {most:.3g}")
    return lines
