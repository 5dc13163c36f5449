"""The demo's sites: folders of real images, written as their owners would have them.

| site | folder | what is special |
| --- | --- | --- |
| north | class folders | nothing |
| south | `labels.csv` | has no image of one class |
| east | a flat folder | has no labels |
| west | class folders | joins while the federation trains |

After deployment new images arrive, the same at every site, each site under a shift of its own. No site has them in its
folder.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w
from numpy.typing import NDArray
from PIL import Image

from fedtta.data import Images, corrupt, load

PER_SITE = 320
ARRIVALS = 390  # images that arrive after deployment, at most
SEVERITY = 4
SEED = 1


@dataclass(frozen=True)
class Site:
    """A site of the demo.

    Parameters
    ----------
    name : str
    layout : "classes", "table" or "flat"
        How its folder is made.
    shift : str
        Corruption of the images that arrive after deployment.
    cause : str
        What it stands for.
    joins_late : bool
    lacks : int or None
        The class that it has no image of.
    """

    name: str
    layout: str
    shift: str
    cause: str
    joins_late: bool = False
    lacks: int | None = None


SITES = (
    Site("north", "classes", "contrast", "a lamp that is failing"),
    Site("south", "table", "defocus_blur", "a lens out of focus", lacks=2),
    Site("east", "flat", "gaussian_noise", "a new sensor"),
    Site("west", "classes", "fog", "a dirty window", joins_late=True),
)


@dataclass(frozen=True)
class Arrivals:
    """Images uint8 [N, C, H, W] that arrive after deployment, and their labels int64 [N], which no device gets."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def source_images(data_dir: Path | None) -> Images:
    """Return PACS' photographs if they are in the folder of data sets, and the embedded digits otherwise."""
    if data_dir is not None and (data_dir / "pacs64" / "photo.jpg").is_file():
        return load("pacs", root=data_dir, image_size=64, domains="photo")
    return load("digits", image_size=32)


def write_sites(folder: Path, images: Images) -> Arrivals:
    """Write each site's images to `<folder>/<site>/images`; return what arrives later."""
    order = np.random.default_rng(SEED).permutation(len(images))
    for number, site in enumerate(SITES):
        own = order[number * PER_SITE : (number + 1) * PER_SITE]
        if site.lacks is not None:
            own = own[images.labels[own] != site.lacks]
        _write(folder / site.name / "images", site.layout, images, own)
    later = order[len(SITES) * PER_SITE :][:ARRIVALS]
    return Arrivals(images.pixels[later], images.labels[later])


def shifted(arrivals: Arrivals, site: Site) -> NDArray[np.uint8]:
    """Return the arriving images under a site's shift."""
    x = corrupt(arrivals.images.astype(np.float32) / 255, site.shift, SEVERITY, SEED)
    return np.rint(x * 255).astype(np.uint8)


def write_device(folder: Path, site: Site, keys: dict[str, str]) -> Path:
    """Write a site's `device.toml`; return its path."""
    content = {"name": site.name, "data": "folder:images", "state-dir": "state", **keys}
    path = folder / site.name / "device.toml"
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


def _write(folder: Path, layout: str, images: Images, own: NDArray[np.int64]) -> None:
    folder.mkdir(parents=True)
    rows = []
    for index in own:
        label = images.classes[images.labels[index]]
        path = folder / (label if layout == "classes" else "") / f"image-{index:05}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(images.pixels[index].transpose(1, 2, 0)).save(path)
        rows.append({"path": path.name, "label": label})
    if layout == "table":
        with (folder / "labels.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, ["path", "label"])
            table.writeheader()
            table.writerows(rows)
