"""ImageNet at 32 x 32 and its natural shifts, from picture folders (FedTHE, appendix D; BTFL, section 5.1).

P. Chrabaszcz et al., "A Downsampled Variant of ImageNet as an Alternative to the CIFAR Datasets", 2017; D. Hendrycks et
al., "Natural Adversarial Examples" (ImageNet-A) and "The Many Faces of Robustness" (ImageNet-R), both 2021; B. Recht et
al., "Do ImageNet Classifiers Generalize to ImageNet?", 2019 (ImageNet-V2).

FedTHE takes the classes that A and R share (86) and no others, and so does this, where both are at hand.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from .folder import SUFFIXES, picture, subfolders
from .raw import Raw, Request

WHOLE, A, R, V2 = "imagenet32", "imagenet-a", "imagenet-r", "imagenet-v2"


def is_present(root: Path | None, name: str) -> bool:
    """Return whether the folder of ImageNet-32 or of a natural shift is there."""
    return root is not None and (root / name).is_dir()


def load_imagenet(request: Request, *, name: str, natural: str = "") -> Raw:
    """Return the pictures of one of the four folders at `image_size`, of the classes that are used.

    Parameters
    ----------
    request : Request
        Its root holds `imagenet32/<WordNet id>/*.png`, and `imagenet-a`, `imagenet-r` and `imagenet-v2` likewise, as
        far as they are at hand; a folder may also be the number of a class in the order of the ids, as ImageNet-V2's
        are.
    name : str
        Which folder.
    natural : str
        Which of the other three is the natural shift (`load_natural`); nothing here depends on it.

    Raises
    ------
    ValueError
        No class is left, a class folder without a picture, a folder that is no class, or a damaged picture.
    FileNotFoundError
        ImageNet-32, which decides on the classes, or the folder is not there.
    """
    for folder in (WHOLE, name):
        if request.root is None or not is_present(request.root, folder):
            raise FileNotFoundError(f"{name} is not there: it needs {request.root or '<root>'}/{folder}/<class>/*.png")
    root = Path(str(request.root))
    every = subfolders(root / WHOLE)
    classes = classes_of(root)
    folders = {_class_of(one, every, root / name): root / name / one for one in subfolders(root / name)}
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for label, one in enumerate(classes):
        if one not in folders:
            continue
        files = sorted(file for file in folders[one].iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(f"{folders[one]} holds no picture ({', '.join(SUFFIXES)})")
        pixels.extend(picture(file, request.image_size) for file in files)
        labels.extend([label] * len(files))
    if not pixels:
        raise ValueError(f"{root / name} holds none of the {len(classes)} classes")
    return Raw(np.stack(pixels), np.asarray(labels, np.int64), classes)


load_imagenet32 = partial(load_imagenet, name=WHOLE)
load_imagenet_a = partial(load_imagenet, name=A)
load_imagenet_r = partial(load_imagenet, name=R)
load_imagenet_v2 = partial(load_imagenet, name=V2)


def classes_of(root: Path) -> tuple[str, ...]:
    """Return the classes that are used: those of ImageNet-32 that A and R have too, where both are at hand."""
    shared = set(subfolders(root / WHOLE))
    if is_present(root, A) and is_present(root, R):
        shared &= set(subfolders(root / A)) & set(subfolders(root / R))
    return tuple(sorted(shared))


def _class_of(folder: str, every: list[str], where: Path) -> str:
    """Return the class of a folder; a number is a place among all classes."""
    if folder in every or not folder.isdigit():
        return folder
    if int(folder) >= len(every):
        raise ValueError(f"{where / folder}: {WHOLE} has {len(every)} classes; allowed are 0 to {len(every) - 1}")
    return every[int(folder)]
