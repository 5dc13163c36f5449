"""CIFAR-10.1: a new test set for CIFAR-10, the natural shift of FedTHE's and BTFL's benchmarks.

B. Recht, R. Roelofs, L. Schmidt, V. Shankar, "Do CIFAR-10 Classifiers Generalize to CIFAR-10?", 2018. The
published files are `cifar10.1_v6_data.npy` [2000, 32, 32, 3] and `cifar10.1_v6_labels.npy` (v4: 2,021
pictures).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .raw import Raw, Request, as_labels, read_array

FOLDER = "cifar10.1"
VERSIONS = ("v6", "v4")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def is_present(root: Path | None, version: str = "v6") -> bool:
    """Return whether the published files of `version` are under `root`."""
    return root is not None and (root / FOLDER / f"cifar10.1_{version}_data.npy").is_file()


def load_cifar10_1(request: Request, *, version: str = "v6") -> Raw:
    """Return CIFAR-10.1 from the two published files under `<root>/cifar10.1/`.

    Raises
    ------
    ValueError
        An unknown version, or a file that is damaged or has the wrong shape.
    FileNotFoundError
        The files are not there (they are never downloaded: the authors publish them in their repository
        only).
    """
    if version not in VERSIONS:
        raise ValueError(f"unknown version {version!r}; there are: {', '.join(VERSIONS)}")
    if not is_present(request.root, version):
        where = "no root is given" if request.root is None else f"looked in {request.root / FOLDER}"
        raise FileNotFoundError(
            f"CIFAR-10.1 is not there: {where}; it needs cifar10.1_{version}_data.npy and "
            f"cifar10.1_{version}_labels.npy, published in the repository modestyachts/CIFAR-10.1"
        )
    folder = Path(str(request.root)) / FOLDER
    data_file, label_file = (
        folder / f"cifar10.1_{version}_data.npy",
        folder / f"cifar10.1_{version}_labels.npy",
    )
    if not label_file.is_file():
        raise FileNotFoundError(f"{label_file} is missing beside its pictures")
    pixels = read_array(data_file)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (32, 32, 3):
        raise ValueError(f"{data_file}: uint8 [N, 32, 32, 3] is expected, got {pixels.dtype} {pixels.shape}")
    labels = as_labels(read_array(label_file), len(pixels), len(CLASSES), label_file)
    return Raw(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels, CLASSES)
