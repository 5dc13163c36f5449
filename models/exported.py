"""An exported encoder and the network made of it: numpy arrays in and out, run by onnxruntime, without torch.

The encoder is an ONNX graph, "images" [B, C, S, S] → "features" [B, d], stored as an array beside its model, with the
SHA-256 of the model's file. The heads are two small matrices; they come from the model's file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedtta.models.arrays import load_arrays, save_arrays
from fedtta.models.constants import HEAD_PREFIX, PERSONAL_PREFIX

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

ENCODER = "encoder.safetensors"  # beside the model's file
FORMAT, VERSION = "fedtta-encoder", "1"
Precision = Literal["float32", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
MISSING = "runtime = onnx needs onnxruntime: pip install 'fedtta[onnx]'"
IMAGES, FEATURES = "images", "features"  # names in the graph


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Parameters
    ----------
    weight : float32 [K, d]
    bias : float32 [K] or None
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Linear:
        """Return the layer whose values have names that begin with `prefix`; ValueError if there is none."""
        weight, bias = (arrays.get(f"{prefix}{name}") for name in ("weight", "bias"))
        if weight is None:
            raise ValueError(f"the model has no {prefix}weight")
        return cls(weight.astype(np.float32), None if bias is None else bias.astype(np.float32))

    @property
    def in_features(self) -> int:
        """Return d."""
        return int(self.weight.shape[1])

    def __call__(self, z: NDArray[Any]) -> NDArray[Any]:
        """Return the logits [B, K] of features [B, d]."""
        logits = z @ self.weight.T
        return logits if self.bias is None else logits + self.bias


class ExportedNetwork:
    """A two-head network whose encoder has been exported; the counterpart of `fedtta.models.TwoHead`.

    Parameters
    ----------
    path : Path
        The model's file, beside which the exported encoder is.
    session : InferenceSession
    head, personal_head : Linear
    features_nonnegative : bool
        As of `TwoHead`.
    """

    def __init__(
        self, path: Path, session: InferenceSession, head: Linear, personal_head: Linear, features_nonnegative: bool
    ) -> None:
        self.path, self._session, self.head, self.personal_head = path, session, head, personal_head
        self.features_nonnegative = features_nonnegative
        self.num_classes = len(head.weight)

    def eval(self) -> ExportedNetwork:
        """Return this network, which is in evaluation mode for good."""
        return self

    def features(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return z [B, d], the input of both heads."""
        found: NDArray[np.float32] = self._session.run([FEATURES], {IMAGES: x})[0]
        return found

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the global head's logits [B, K]."""
        return self.head(self.features(x))


def save_encoder(model: Path, graph: bytes, nonnegative: bool, precision: Precision) -> None:
    """Write an exported encoder beside the file of its model, atomically.

    Parameters
    ----------
    model : Path
        The model's file.
    graph : bytes
        ONNX.
    nonnegative : bool
        Whether the features cannot be negative.
    precision : "float32" or "int8"
        Of the graph's layers.
    """
    metadata = {"format": FORMAT, "version": VERSION, "model": file_digest(model), "precision": precision}
    metadata["nonnegative"] = str(nonnegative).lower()
    save_arrays(model.with_name(ENCODER), {"graph": np.frombuffer(graph, np.uint8)}, metadata)


def load_network(model: Path, arrays: Mapping[str, NDArray[Any]], precision: Precision) -> ExportedNetwork:
    """Return the network of a model and the exported encoder beside it.

    Parameters
    ----------
    model : Path
        The model's file.
    arrays : mapping
        Its content.
    precision : "float32" or "int8"
        That the exported encoder must have.

    Raises
    ------
    FileNotFoundError, ValueError
        The exported encoder is missing, damaged, of another version or precision, or of another model.
    ImportError
        onnxruntime is missing.
    """
    path = model.with_name(ENCODER)
    found, metadata = load_arrays(path)
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path}: not of format {FORMAT}, version {VERSION}")
    if metadata.get("model") != file_digest(model):
        raise ValueError(f"{path}: exported from another model than {model.name}")
    if metadata.get("precision") != precision:
        raise ValueError(f"{path}: its precision is {metadata.get('precision')}, not {precision}")
    heads = Linear.of(arrays, HEAD_PREFIX), Linear.of(arrays, PERSONAL_PREFIX)
    session = session_of(found["graph"].tobytes(), str(path))
    return ExportedNetwork(model, session, *heads, metadata["nonnegative"] == "true")


def session_of(graph: bytes, name: str) -> InferenceSession:
    """Return what runs a graph, on one thread of the CPU as the agent's other runtime.

    Raises
    ------
    ValueError
        The graph cannot be read; the message begins with `name`.
    ImportError
        onnxruntime is missing.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(MISSING) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # which would keep the memory of the largest batch
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an error type for each status
        raise ValueError(f"{name}: cannot be run: {error}") from error


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
