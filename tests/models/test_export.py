"""Exported models, loaded where this project is not importable, predict what the model file predicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import BytesIO
from itertools import product
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedtta import models
from fedtta.models.export import FORMATS, export, main

#: Class names with what JSON and protobuf might spoil.
CLASSES = ["covid", "no finding", "größer", '"x"']
SPECS: dict[str, dict[str, Any]] = {
    "own": {"name": "resnet20-bn", "num_classes": 4, "image_size": 16, "depth": 8, "width": 4, "mean": 0.3},
    "timm": {
        "name": "timm:vit_tiny_patch16_224",
        "num_classes": 4,
        "image_size": 32,
        "in_channels": 1,
        "mean": [0.4],
        "depth": 2,
    },
}

#: What a process elsewhere does with exported files of some formats: `path`, `images` and `answer` are files.
LOAD = """
import json, sys
import numpy as np
try:
    from fedtta import models
except ImportError:
    pass
else:
    raise AssertionError("the project is importable here")
"""
READ = """
def read(path, images, answer):
    x = np.load(images)
{}
    np.savez(answer, *p, about=json.dumps(about))
for name in sys.argv[1:]:
    read(f"{{name}}/{}", f"{{name}}/x.npy", f"{{name}}/{}.npz")
assert not {{"timm", "transformers"}} & set(sys.modules) or "{}" == "huggingface"
"""
READERS = {
    "torch-export": """
import torch
extra = {"metadata.json": ""}
program = torch.export.load(path, extra_files=extra).module()
about = json.loads(extra["metadata.json"])
p = [program(torch.tensor(x[:n])).detach().numpy() for n in (1, 2, 5)]
""",
    "onnx": """
import onnxruntime
session = onnxruntime.InferenceSession(path)
stored = session.get_modelmeta().custom_metadata_map
about = {key: json.loads(stored[key]) for key in ("classes", "preprocessing")}
p = [session.run(["probabilities"], {"images": x[:n]})[0] for n in (1, 2, 5)]
""",
    "huggingface": """
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained(path, trust_remote_code=True)
processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=True)
about = {"classes": [model.config.id2label[i] for i in range(4)], "preprocessing": processor.preprocessing}
with torch.no_grad():
    p = [model(pixel_values=torch.tensor(x[:n])).logits.softmax(1).numpy() for n in (1, 2, 5)]
prepared = processor(open(images.replace("x.npy", "image.png"), "rb").read())["pixel_values"]
np.save(answer.replace("huggingface.npz", "prepared.npy"), prepared.numpy())
""",
}


def saved(folder: Path, spec: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """A file of a model whose predictions are decided, and its description."""
    made = models.Preprocessing(spec["image_size"], spec.get("in_channels", 3), "crop", "bicubic", 0.9, (0, 4095))
    spec = {**spec, "classes": CLASSES, "preprocessing": made.to_dict()}
    model = models.build(**spec, seed=3)
    model.train()(torch.rand(8, made.channels, made.image_size, made.image_size))  # moves running statistics
    with torch.no_grad():
        model.head.weight *= 20
    path = folder / "run" / "model.safetensors"
    models.save_model(path, model, spec)
    return path, spec


@pytest.mark.parametrize("formats", [["onnx"], ["torch-export", "huggingface"]], ids="+".join)
def test_predictions_and_metadata(formats: list[str], tmp_path: Path) -> None:
    """One process reads all models, and both formats that torch reads: to import it takes most of the time."""
    picture = np.random.default_rng(0).integers(0, 4096, (40, 60), np.uint16)
    buffer = BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    expected = {}
    for name, one in SPECS.items():
        path, spec = saved(tmp_path / name, one)
        away = tmp_path / "away" / name
        away.mkdir(parents=True)
        for format in formats:
            assert main([str(path.parent), "--format", format, "--out", str(away / format)]) == 0
        assert {left.name for left in away.iterdir()} == set(formats)  # nothing temporary
        made = models.Preprocessing.from_dict(spec["preprocessing"])
        x = torch.rand(5, made.channels, made.image_size, made.image_size, generator=torch.Generator().manual_seed(1))
        np.save(away / "x.npy", x.numpy())
        (away / "image.png").write_bytes(buffer.getvalue())
        network, _ = models.load_model(path)
        with torch.no_grad():
            expected[name] = made, network(x).softmax(1).numpy()
    code = LOAD + "".join(READ.format(indent(READERS[one], "    "), one, one, one) for one in formats)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *SPECS]
    done = subprocess.run(command, cwd=tmp_path / "away", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, format in product(SPECS, formats):
        made, probabilities = expected[name]
        assert np.ptp(probabilities) > 0.2
        answer = np.load(tmp_path / "away" / name / f"{format}.npz")
        for index, n in enumerate((1, 2, 5)):
            np.testing.assert_allclose(answer[f"arr_{index}"], probabilities[:n], atol=1e-5)
        about = json.loads(str(answer["about"]))
        assert about["classes"] == CLASSES
        assert models.Preprocessing.from_dict(about["preprocessing"]) == made
        if format == "huggingface":
            prepared = np.load(tmp_path / "away" / name / "prepared.npy")[0]
            np.testing.assert_array_equal(prepared, made.apply(picture) / np.float32(255))


def test_files_without_description_get_the_defaults(tmp_path: Path) -> None:
    spec = {"name": "cnn", "num_classes": 3, "image_size": 16}
    models.save_model(tmp_path / "m", models.build(**spec, seed=0), spec)
    export(tmp_path / "m", tmp_path / "out.pt2", "torch-export")
    extra = {"metadata.json": ""}
    torch.export.load(tmp_path / "out.pt2", extra_files=extra)
    about = json.loads(extra["metadata.json"])
    assert about["classes"] == ["0", "1", "2"]
    assert about["preprocessing"] == models.Preprocessing(16).to_dict()


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"name": "cnn", "num_classes": 3, "image_size": 16}
    with pytest.raises(ValueError, match="unknown format 'pb'; there are: torch-export, onnx, huggingface"):
        export(tmp_path / "m", tmp_path / "out", "pb")
    with pytest.raises(FileNotFoundError, match="absent"):
        export(tmp_path / "absent", tmp_path / "out", "onnx")
    with pytest.raises(FileNotFoundError, match=r"no model\*\.safetensors"):
        export(tmp_path, tmp_path / "out", "onnx")
    for name in ("model-fedbn.safetensors", "model-ditto.safetensors"):
        models.save_model(tmp_path / name, models.build(**spec, seed=0), spec)
    with pytest.raises(ValueError, match=r"several models, name one: model-ditto\.safetensors, model-fedbn"):
        export(tmp_path, tmp_path / "out", "onnx")
    (tmp_path / "out").mkdir()
    assert main([str(tmp_path / name), "--format", "huggingface", "--out", str(tmp_path / "out")]) == 1
    assert "out exists" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), "--format", "onnx", "--out", str(tmp_path / "out")]) == 2
    assert set(FORMATS) == set(READERS)


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    spec = {"name": "tests.models.nets:branching", "num_classes": 3, "image_size": 16}
    models.save_model(tmp_path / "m", models.build(**spec, seed=0), spec)
    for format in FORMATS:
        with pytest.raises(ValueError, match="branching cannot be exported"):
            export(tmp_path / "m", tmp_path / "out", format)
    assert [one.name for one in tmp_path.iterdir()] == ["m"]


def test_onnx_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "cnn", "num_classes": 3, "image_size": 16}
    models.save_model(tmp_path / "m", models.build(**spec, seed=0), spec)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"fedtta\[onnx\]"):
        export(tmp_path / "m", tmp_path / "out", "onnx")
