"""An image file gives the same bytes wherever it is read: training data, a device's source, the agent, the examples."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples import predict_folder
from fedtta import models
from fedtta.data import load
from fedtta.data.sources import own_data
from fedtta.models import Preprocessing

ROOT = Path(__file__).parents[2]
CLASSES = ("left", "right")
#: The default; and all that differs from it.
PREPROCESSINGS = [
    Preprocessing(16),
    Preprocessing(20, 3, "crop", "bicubic", 0.8),
    Preprocessing(16, 1, "pad", "lanczos", window=(0, 30_000)),
]


def files(root: Path) -> dict[str, Path]:
    """Write one image of each kind to class folders; return them by name."""
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    alpha = colour.copy()
    alpha.putalpha(Image.fromarray(rng.integers(0, 256, (30, 40), np.uint8)))
    made = {
        "left/a.png": (colour, {}),
        "left/b.jpg": (colour, {"quality": 90}),
        "left/c.jpg": (colour, {"exif": rotated}),
        "left/d.png": (colour.quantize(8), {}),
        "right/e.png": (alpha, {}),
        "right/f.png": (Image.fromarray(rng.integers(0, 2**16, (30, 40), np.uint16)), {}),
        "right/g.tif": (Image.fromarray(rng.integers(0, 2**16, (30, 40), np.uint16)), {}),
        "right/h.webp": (colour, {}),
        "right/i.bmp": (colour.rotate(180).convert("L"), {}),
    }
    for name, (image, options) in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name, **options)
    return {name: root / name for name in made}


@pytest.mark.parametrize("preprocessing", PREPROCESSINGS)
def test_every_way_gives_the_same_bytes(preprocessing: Preprocessing, tmp_path: Path) -> None:
    paths = files(tmp_path / "site")
    expected = {
        name: preprocessing.apply(preprocessing.decode(path.read_bytes())) for name, path in paths.items()
    }  # as the agent prepares the file of a request
    assert len({pixels.tobytes() for pixels in expected.values()}) == len(expected)

    own = own_data(f"folder:{tmp_path / 'site'}", classes=CLASSES, preprocessing=preprocessing)
    by_name = dict(zip(own.names, own.images.pixels[np.arange(own.used)], strict=True))
    assert by_name.keys() == expected.keys()
    for name, pixels in expected.items():
        np.testing.assert_array_equal(by_name[name], pixels, err_msg=name)

    for folder in CLASSES:
        for name, image in predict_folder.images(tmp_path / "site" / folder, preprocessing):
            assert isinstance(image, torch.Tensor)
            np.testing.assert_array_equal(image.numpy(), expected[f"{folder}/{name}"])

    if preprocessing == Preprocessing(16):  # what a divided data set of folders is read with
        divided = load("folder", root=tmp_path / "site", image_size=16)
        np.testing.assert_array_equal(divided.pixels, np.stack([expected[name] for name in sorted(expected)]))


def test_the_example_predicts_a_folder(tmp_path: Path) -> None:
    preprocessing = PREPROCESSINGS[1]
    spec = {
        "name": "cnn", "num_classes": 2, "image_size": 20, "classes": list(CLASSES),
        "preprocessing": preprocessing.to_dict(),
    }  # fmt: skip
    network = models.build(**spec, seed=1).eval()
    models.save_model(tmp_path / "model.safetensors", network, spec)
    paths = files(tmp_path / "site")
    (tmp_path / "site/left/z.txt").write_text("no image")
    command = [sys.executable, "-m", "examples.predict_folder", tmp_path / "model.safetensors", tmp_path / "site/left"]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    assert lines[-1].startswith("z.txt damaged, or of another format")
    for line, name in zip(lines, [name for name in sorted(paths) if name.startswith("left")], strict=False):
        pixels = preprocessing.apply(preprocessing.decode(paths[name].read_bytes()))
        with torch.no_grad():
            p = network(torch.tensor(pixels)[None].float() / 255).softmax(1)[0]
        assert line == f"{Path(name).name} {CLASSES[int(p.argmax())]} {float(p.max()):.3f}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("predict_folder model", "usage: python -m examples.predict_folder MODEL FOLDER"),
        ("predict_folder nowhere.safetensors .", "nowhere.safetensors"),
        ("stream_images .", "usage: python -m examples.stream_images FOLDER ADDRESS"),
        ("stream_images nowhere unix:/nowhere", "nowhere: no such folder"),
    ],
)
def test_the_examples_say_in_one_line_what_they_lack(words: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program ends with: its text is all that Python prints then, with exit status 1."""
    program, *arguments = words.split()
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{program}.py"), run_name="__main__")
    assert isinstance(ended.value.code, str)
    (line,) = ended.value.code.splitlines()
    assert told in line


def test_the_examples_are_short() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path
