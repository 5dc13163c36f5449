"""ImageNet at 32 x 32 and its natural shifts, from image folders (FedTHE, appendix D; BTFL, section 5.1).

P. Chrabaszcz et al., "A Downsampled Variant of ImageNet as an Alternative to the CIFAR Datasets", 2017; D. Hendrycks et
al., "Natural Adversarial Examples" (ImageNet-A) and "The Many Faces of Robustness" (ImageNet-R), both 2021; B. Recht et
al., "Do ImageNet Classifiers Generalize to ImageNet?", 2019 (ImageNet-V2).

As in FedTHE, only the classes that A and R share (86) are used if both are available.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .base import IMAGENET_MEAN, IMAGENET_STD, Dataset, Raw, Request
from .files import labelled_files, read_images, subfolders

WHOLE, A, R, V2 = "imagenet32", "imagenet-a", "imagenet-r", "imagenet-v2"


def load_imagenet(request: Request, *, name: str, natural: str = "") -> Raw:
    """Return the images of one of the four folders at `image_size`, for the classes in use.

    Parameters
    ----------
    request : Request
        Its root holds `imagenet32/<WordNet id>/*.png`, and optionally `imagenet-a`, `imagenet-r` and `imagenet-v2` in
        the same form. A folder name may also be a class number in the order of the ids, as in ImageNet-V2.
    name : str
        Which folder.
    natural : str
        Which of the other three is the natural shift (`load_natural`); not used here.

    Raises
    ------
    ValueError
        No class is left, a class folder without an image, a folder that is no class, or a damaged image.
    FileNotFoundError
        The folder or ImageNet-32, which determines the classes, does not exist.
    """
    root = request.root
    for folder in (WHOLE, name):
        if root is None or not (root / folder).is_dir():
            raise FileNotFoundError(f"{name} not found: it needs {root or '<root>'}/{folder}/<class>/*.png")
    assert root is not None
    every, classes = subfolders(root / WHOLE), classes_of(root)
    folders = {_class_of(one, every, root / name): root / name / one for one in subfolders(root / name)}
    files, labels = labelled_files([folders.get(one) for one in classes])
    if not files:
        raise ValueError(f"{root / name} contains none of the {len(classes)} classes")
    return Raw(read_images(files, request.image_size), labels, classes)


def classes_of(root: Path) -> tuple[str, ...]:
    """Return the classes in use: those of ImageNet-32, restricted to A and R if both are available."""
    shared = set(subfolders(root / WHOLE))
    if (root / A).is_dir() and (root / R).is_dir():
        shared &= set(subfolders(root / A)) & set(subfolders(root / R))
    return tuple(sorted(shared))


def _class_of(folder: str, every: list[str], where: Path) -> str:
    """Return the class of a folder; a number is an index into all classes."""
    if folder in every or not folder.isdigit():
        return folder
    if int(folder) >= len(every):
        raise ValueError(f"{where / folder}: {WHOLE} has {len(every)} classes; allowed are 0 to {len(every) - 1}")
    return every[int(folder)]


IMAGENET32 = Dataset(
    "ImageNet at 32 x 32, from folders, the classes that ImageNet-A and -R have too",
    partial(load_imagenet, name=WHOLE),
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    classes=None,
    flip=True,
    natural=(V2, A, R),
)


def _natural_shift(name: str) -> Dataset:
    return Dataset(
        f"{name}, a natural shift of imagenet32",
        partial(load_imagenet, name=name, natural=""),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        classes=None,
        flip=True,
        present=lambda root: (root / name).is_dir(),
    )


IMAGENET_V2, IMAGENET_A, IMAGENET_R = _natural_shift(V2), _natural_shift(A), _natural_shift(R)
