"""Export of model files for use without this project: torch.export programs, ONNX, Hugging Face folders.

    python -m fedtta.models.export results/<run> --format onnx --out model.onnx

Every form contains the class names and the preprocessing of images (`Preprocessing.to_dict`), and predicts with the
global head. Images are [B, C, S, S], float32 in [0, 1], for any B; mean/std normalization is part of the network.
"""

from __future__ import annotations

import argparse
import copy
import json
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtta.models.checkpoint import load_model
from fedtta.models.exported import FEATURES, IMAGES, save_encoder, session_of
from fedtta.models.preprocessing import Preprocessing
from fedtta.models.two_head import TwoHead
from fedtta.settings.files import write_atomically

#: In the metadata of a torch.export program (`extra_files`) and of an ONNX file (`metadata_props`).
METADATA = "metadata.json"
TOLERANCE = 1e-4  # of an exported encoder's features
CALIBRATION, LEAST_CALIBRATION = 256, 16  # images, at most and at least
OWN_FILES = ("modeling_fedtta.py", "preprocessing.py")


class Predictor(nn.Module):
    """A network's predictions: images [B, C, S, S] to probabilities, or logits, [B, K]."""

    def __init__(self, network: nn.Module, probabilities: bool = True) -> None:
        super().__init__()
        self.network = network
        self.probabilities = probabilities

    def forward(self, images: Tensor) -> Tensor:
        """Return the predictions."""
        logits = self.network(images)
        return torch.softmax(logits, 1) if self.probabilities else logits


def export(model: str | Path, out: str | Path, format: str) -> Path:
    """Export a model file.

    Parameters
    ----------
    model : path
        A file of `save_model`, or a folder (of a run) with one such file.
    out : path
        The file to write, replaced atomically; of "huggingface" a folder, which must not exist.
    format : "torch-export", "onnx" or "huggingface"

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    FileNotFoundError
        There is no model file.
    FileExistsError
        The folder `out` exists.
    ValueError
        The format is unknown, the file is damaged, there are several, or the network cannot be exported.
    ImportError
        A package that the format needs is missing.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; there are: {', '.join(FORMATS)}")
    path, out = find_model(Path(model)), Path(out)
    network, spec = load_model(path)
    FORMATS[format](network.float().eval(), describe(spec), out)
    return out


def find_model(path: Path) -> Path:
    """Return `path`, or the only model file in the folder `path`."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("model*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{path}: no model*.safetensors")
    if len(found) > 1:
        raise ValueError(f"{path} has several models, name one: {', '.join(one.name for one in found)}")
    return found[0]


def describe(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of an export: preprocessing and classes, with defaults for files that have none."""
    channels, size = spec.get("in_channels", 3), spec.get("image_size", 32)
    preprocessing = Preprocessing.from_dict(
        {"channels": channels, "image_size": size, **(spec.get("preprocessing") or {})}
    )
    classes = spec.get("classes") or [str(label) for label in range(spec["num_classes"])]
    return {
        "format": "fedtta-export",
        "version": 1,
        "model": spec["name"],
        "classes": list(classes),
        "preprocessing": preprocessing.to_dict(),
        "input": f"images [B, {channels}, {size}, {size}], float32 in [0, 1], not normalized",
    }


def _program(network: nn.Module, about: Mapping[str, Any], probabilities: bool = True) -> torch.export.ExportedProgram:
    """Return the network as a program for any batch size."""
    made = about["preprocessing"]
    images = torch.rand(2, made["channels"], made["image_size"], made["image_size"])
    batch = {"images": {0: torch.export.Dim("batch", min=1)}}
    try:
        with torch.no_grad():
            return torch.export.export(Predictor(network, probabilities).eval(), (images,), dynamic_shapes=batch)
    except Exception as error:  # torch.export documents no error types
        raise ValueError(f"{about['model']} cannot be exported: {error}") from error


def _saved(program: torch.export.ExportedProgram, about: Mapping[str, Any]) -> bytes:
    buffer = BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA: json.dumps(about)})
    return buffer.getvalue()


def _to_torch_export(network: nn.Module, about: Mapping[str, Any], out: Path) -> None:
    """Write a file for `torch.export.load(out, extra_files={"metadata.json": ""})`."""
    write_atomically(out, _saved(_program(network, about), about))


def _to_onnx(network: nn.Module, about: Mapping[str, Any], out: Path) -> None:
    """Write an ONNX file; each item of the metadata is an entry of `metadata_props`, as JSON unless it is text."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (what torch.onnx translates with)
    except ImportError as error:
        raise ImportError("ONNX needs onnx and onnxscript: pip install 'fedtta[onnx]'") from error
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"]}
    program = torch.onnx.export(_program(network, about), dynamo=True, verbose=False, **names)
    assert program is not None
    proto = program.model_proto
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value if isinstance(value, str) else json.dumps(value))
    content = proto.SerializeToString()
    onnx.checker.check_model(content)
    write_atomically(out, content)


def export_encoder(
    network: TwoHead, shape: tuple[int, int, int], model: Path, calibration: NDArray[np.float32] | None = None
) -> None:
    """Export a network's encoder for `fedtta.models.exported`, beside the file of its model.

    The exporter is the one by tracing: it takes a second on a device where that of `torch.export` takes half a minute.
    What it made is compared with the network.

    Parameters
    ----------
    network : TwoHead
    shape : (int, int, int)
        C, H, W of the images.
    model : Path
        The model's file.
    calibration : float32 [n, C, H, W], optional
        Quantize the layers to int8 with the ranges of these images.

    Raises
    ------
    ValueError
        The encoder cannot be exported or quantized, or its export in float32 gives other features.
    ImportError
        A package that it needs is missing.
    """
    encoder = copy.deepcopy(network.encoder).cpu().float().eval()
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    batch, graph = {0: "batch"}, BytesIO()
    file: Any = graph  # which the exporter by tracing takes, against its annotation
    names: dict[str, Any] = {"input_names": [IMAGES], "output_names": [FEATURES]}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that tracing is the older way
            expected = encoder(images).numpy()
            torch.onnx.export(
                encoder, (images[:2],), file, dynamo=False, dynamic_axes={IMAGES: batch, FEATURES: batch}, **names
            )
    except (ImportError, OSError):
        raise
    except Exception as error:  # torch.onnx documents no error types
        raise ValueError(f"the encoder cannot be exported to ONNX: {error}") from error
    found = session_of(graph.getvalue(), "the exported encoder").run([FEATURES], {IMAGES: images.numpy()})[0]
    if not np.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(abs(expected).max()))):
        raise ValueError(f"the exported encoder gives other features, up to {abs(found - expected).max():.2g} off")
    if calibration is None:
        save_encoder(model, graph.getvalue(), network.features_nonnegative, "float32")
    else:
        save_encoder(model, quantized(graph.getvalue(), calibration), network.features_nonnegative, "int8")


def quantized(graph: bytes, calibration: NDArray[np.float32]) -> bytes:
    """Return an exported encoder with 8-bit weights and activations, calibrated on images [n, C, H, W].

    Raises
    ------
    ValueError
        There are too few images, or the graph cannot be quantized.
    ImportError
        onnx is missing.
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if len(calibration) < LEAST_CALIBRATION:
        raise ValueError(f"int8 needs {LEAST_CALIBRATION} images for its calibration, there are {len(calibration)}")
    chosen = calibration[np.linspace(0, len(calibration) - 1, min(len(calibration), CALIBRATION)).astype(int)]
    with tempfile.TemporaryDirectory() as folder:
        plain, prepared, made = (Path(folder) / name for name in ("plain.onnx", "prepared.onnx", "made.onnx"))
        plain.write_bytes(graph)
        try:
            quant_pre_process(str(plain), str(prepared), skip_symbolic_shape=True)
            quantization.quantize_static(
                str(prepared),
                str(made),
                _Images(iter(chosen[:, None])),
                per_channel=True,
                reduce_range=True,  # processors without VNNI add two products in 16 bits: 8-bit weights would saturate
                weight_type=quantization.QuantType.QInt8,
            )
        except ImportError:
            raise
        except Exception as error:  # onnxruntime documents no error types
            raise ValueError(f"the encoder cannot be quantized: {error}") from error
        return made.read_bytes()


@dataclass(frozen=True)
class _Images:
    """Calibration images, one at a time, as onnxruntime's `CalibrationDataReader`."""

    rows: Iterator[NDArray[np.float32]]

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        """Return the next image as the graph's input, or None."""
        row = next(self.rows, None)
        return None if row is None else {IMAGES: row}

    def __iter__(self) -> _Images:
        return self

    def __next__(self) -> dict[str, NDArray[np.float32]]:
        if (found := self.get_next()) is None:
            raise StopIteration
        return found


def _to_huggingface(network: nn.Module, about: Mapping[str, Any], out: Path) -> None:
    """Write a folder for transformers' Auto classes with `trust_remote_code=True`."""
    if out.exists():
        raise FileExistsError(f"{out} exists; name a folder that does not")
    labels = dict(enumerate(about["classes"]))
    code = {
        "AutoConfig": "FedTTAConfig",
        "AutoModelForImageClassification": "FedTTAForImageClassification",
        "AutoImageProcessor": "FedTTAImageProcessor",
    }
    auto_map = {auto: f"modeling_fedtta.{name}" for auto, name in code.items()}
    config = {
        "model_type": "fedtta",
        "architectures": [code["AutoModelForImageClassification"]],
        "auto_map": auto_map,
        "id2label": labels,
        "label2id": {name: label for label, name in labels.items()},
        "fedtta": dict(about),
    }
    processor = {
        "image_processor_type": code["AutoImageProcessor"],
        "auto_map": auto_map,
        "preprocessing": about["preprocessing"],
    }
    files = {
        "config.json": json.dumps(config, indent=2).encode(),
        "preprocessor_config.json": json.dumps(processor, indent=2).encode(),
        "program.pt2": _saved(_program(network, about, probabilities=False), about),
        **{name: Path(__file__).with_name(name).read_bytes() for name in OWN_FILES},
    }
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        for name, content in files.items():
            write_atomically(temporary / name, content)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


FORMATS: Mapping[str, Callable[[nn.Module, Mapping[str, Any], Path], None]] = {
    "torch-export": _to_torch_export,
    "onnx": _to_onnx,
    "huggingface": _to_huggingface,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="fedtta export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a run's folder, or a model file")
    parser.add_argument("--format", required=True, choices=list(FORMATS))
    parser.add_argument("--out", required=True, help="file to write; of huggingface a new folder")
    given = parser.parse_args(arguments)
    try:
        print(export(given.model, given.out, given.format))
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, FileNotFoundError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
