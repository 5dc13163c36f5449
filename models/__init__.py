"""The networks: one encoder and two linear heads (`TwoHead`), built by name, saved and loaded.

    model = models.build("cnn", num_classes=10)
    models.save_model("model.safetensors", model, {"name": "cnn", "num_classes": 10})

Images are [B, C, H, W] floats in [0, 1]; mean/std normalisation is the encoder's first layer. Every encoder
ends with non-negative features z [B, d]. `balance` makes `BalancedBatchNorm` of a network's BatchNorm layers.
This room knows torch and nothing of federation, adaptation or data sets. `save_arrays` and `load_arrays` write
and read any named arrays (statistics, private state) in the same safe way as checkpoints.
"""

from models.arrays import load_arrays, save_arrays
from models.balanced import BalancedBatchNorm, balance
from models.checkpoint import load_model, save_model
from models.files import write_atomically
from models.normalise import Normalise
from models.registry import MODELS, ModelInfo, build
from models.two_head import PERSONAL_PREFIX, ROTATION_PREFIX, TwoHead

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
