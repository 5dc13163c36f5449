"""Networks with one encoder and two linear heads (`TwoHead`), built by name, saved and loaded.

    model = models.build("cnn", num_classes=10)
    models.save_model("model.safetensors", model, {"name": "cnn", "num_classes": 10})

Beside those of `MODELS` there are networks of timm, torchvision and of a user's functions ("timm:resnet18", see
`fedtta.models.libraries`). Images are [B, C, H, W] floats in [0, 1]; mean/std normalization is the encoder's first
layer. The encoders of `MODELS` return non-negative features z [B, d]. `Preprocessing` turns image files and arrays into
such images. `balance` replaces the BatchNorm layers of a network by `BalancedBatchNorm`.
`save_arrays` and `load_arrays` store named arrays (statistics, private state) as safely as checkpoints.

The package depends on torch and Pillow: not on federated learning, adaptation or data sets. Names are imported when
they are first used, so that arrays can be stored and images be prepared without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtta.models.arrays import load_arrays, save_arrays
    from fedtta.models.balanced import BalancedBatchNorm, balance
    from fedtta.models.checkpoint import load_model, save_model
    from fedtta.models.constants import PERSONAL_PREFIX, ROTATION_PREFIX
    from fedtta.models.info import ModelInfo
    from fedtta.models.layers import Normalise
    from fedtta.models.libraries import normalization
    from fedtta.models.preprocessing import Preprocessing
    from fedtta.models.registry import MODELS, abilities, build, check_name, without_weights
    from fedtta.models.two_head import TwoHead

__all__ = [
    "MODELS",
    "PERSONAL_PREFIX",
    "ROTATION_PREFIX",
    "BalancedBatchNorm",
    "ModelInfo",
    "Normalise",
    "Preprocessing",
    "TwoHead",
    "abilities",
    "balance",
    "build",
    "check_name",
    "load_arrays",
    "load_model",
    "normalization",
    "save_arrays",
    "save_model",
    "without_weights",
]

#: Module → the public names that it defines.
_DEFINED = {
    "arrays": ("load_arrays", "save_arrays"),
    "balanced": ("BalancedBatchNorm", "balance"),
    "checkpoint": ("load_model", "save_model"),
    "constants": ("PERSONAL_PREFIX", "ROTATION_PREFIX"),
    "info": ("ModelInfo",),
    "layers": ("Normalise",),
    "libraries": ("normalization",),
    "preprocessing": ("Preprocessing",),
    "registry": ("MODELS", "abilities", "build", "check_name", "without_weights"),
    "two_head": ("TwoHead",),
}
_MODULES = {name: module for module, names in _DEFINED.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_MODULES))
