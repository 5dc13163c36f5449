"""Networks with one encoder and two linear heads (`TwoHead`), built by name, saved and loaded.

    model = models.build("cnn", num_classes=10)
    models.save_model("model.safetensors", model, {"name": "cnn", "num_classes": 10})

Images are [B, C, H, W] floats in [0, 1]; mean/std normalization is the encoder's first layer. Every encoder returns
non-negative features z [B, d]. `balance` replaces the BatchNorm layers of a network by `BalancedBatchNorm`.
`save_arrays` and `load_arrays` store named arrays (statistics, private state) as safely as checkpoints.

The package depends on torch only: not on federated learning, adaptation or data sets.
"""

from fedtta.models.arrays import load_arrays, save_arrays, write_atomically
from fedtta.models.balanced import BalancedBatchNorm, balance
from fedtta.models.checkpoint import load_model, save_model
from fedtta.models.info import ModelInfo
from fedtta.models.layers import Normalise
from fedtta.models.registry import MODELS, build
from fedtta.models.two_head import PERSONAL_PREFIX, ROTATION_PREFIX, TwoHead

__all__ = [
    "MODELS",
    "PERSONAL_PREFIX",
    "ROTATION_PREFIX",
    "BalancedBatchNorm",
    "ModelInfo",
    "Normalise",
    "TwoHead",
    "balance",
    "build",
    "load_arrays",
    "load_model",
    "save_arrays",
    "save_model",
    "write_atomically",
]
