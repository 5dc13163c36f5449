"""Folders of small images with class names, as devices with data of their own have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from PIL import Image

from fedtta.settings import Settings

CLASSES = ("blue", "green", "red")
SIZE = 16
#: Settings of a run over such devices; those of the data set play no part.
OWN = Settings(
    classes=",".join(CLASSES), image_size=SIZE, clients=3, model="cnn", local_epochs=1, rounds=2, learning_rate=0.02,
    batch_size=8, device="cpu", shifts="brfl", methods="fedavg,fedthe", engine="ray", workers=1,
)  # fmt: skip


def image(label: str, seed: int) -> Image.Image:
    """Noise with more of the class's colour."""
    rng = np.random.default_rng([seed, 3])
    pixels = rng.integers(0, 160, (SIZE, SIZE, 3))
    if label in CLASSES:
        pixels[:, :, 2 - CLASSES.index(label)] += 90
    return Image.fromarray(pixels.astype(np.uint8))


def folder(path: Path, counts: Mapping[str, int], seed: int = 0) -> Path:
    """Write a folder with a subfolder for each class, or with images alone for the class ""."""
    for label, count in counts.items():
        (path / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image(label, 1000 * seed + 100 * sum(label.encode()) + number).save(path / label / f"{number:03}.png")
    return path


def device_file(path: Path, name: str, data: str, **keys: Any) -> Path:
    """Write a `<name>.toml` whose data are a folder."""
    content = {"name": name, "data": f"folder:{data}", "state-dir": "state", **keys}
    file = path / f"{name}.toml"
    file.write_text(tomli_w.dumps({key.replace("_", "-"): value for key, value in content.items()}))
    return file


def sites(path: Path, unlabelled: bool = True) -> Sequence[Path]:
    """Write three sites and their files: one has all classes, one lacks one, one has no labels."""
    path.mkdir(exist_ok=True)
    folder(path / "a", {"blue": 20, "green": 20, "red": 20}, seed=1)
    folder(path / "b", {"blue": 20, "rouge": 20}, seed=2)
    folder(path / "c", {"": 30} if unlabelled else {"green": 30, "red": 10}, seed=3)
    return [
        device_file(path, "site-b", "b", class_map="rouge=red"),
        device_file(path, "site-a", "a"),
        device_file(path, "site-c", "c"),
    ]
