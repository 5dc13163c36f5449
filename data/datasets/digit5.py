"""Digit-5: five domains of digits, the domain shift of FedICON and ATP.

K. Zhou et al., "Learning to Generate Novel Domains for Domain Generalization", ECCV 2020; X. Peng et al., "Moment
Matching for Multi-Source Domain Adaptation", ICCV 2019. Training and test parts are merged, then sampled; FedICON does
not give a number of images, ATP gives each domain about 7,430. MNIST-M is made from MNIST's digits, so the same
handwriting may occur in both; no image does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .base import HALF, Dataset, Request
from .files import as_labels, read_arrays, read_labelled_tiles, reading
from .multi_domain import DomainSource, MultiDomainRaw, combine_domains, select_domains

DOMAINS = ("mnist", "svhn", "usps", "synthdigits", "mnistm")
CLASSES = tuple(str(digit) for digit in range(10))
_PARTS = ("train", "test")

#: Packed domains, `<root>/digits/<domain>_<part>.png` or .webp with labels.npz: image side and channels.
_PACKED = {"mnist": (28, 1), "usps": (16, 1), "mnistm": (32, 3)}
#: Domains in their published MATLAB files, `<root>/<domain>/<file>`.
_MATLAB = {"svhn": "{}_32x32.mat", "synthdigits": "synth_{}_32x32.mat"}


def load_digit5(request: Request, *, domains: str = "", per_domain: int = 2000, draw: int = 0) -> MultiDomainRaw:
    """Return the digits of several domains, in colour at `image_size`.

    Parameters
    ----------
    request : Request
        Its root holds `digits/labels.npz` with the mosaics of mnist, usps and mnistm, `svhn/train_32x32.mat` and
        `svhn/test_32x32.mat`, `synthdigits/synth_train_32x32.mat` and `synthdigits/synth_test_32x32.mat`.
    domains, per_domain, draw
        See `select_domains` and `combine_domains`.

    Raises
    ------
    ValueError
        Unknown domain, a bad number, or a damaged file.
    FileNotFoundError
        A requested domain, or a part of one, is not available.
    """
    if request.root is None:
        raise FileNotFoundError("digit5 needs a data folder: data-dir, or the environment variable FEDTTA_DATA")
    root = request.root
    available = {name: any(_file(root, name, part).is_file() for part in _PARTS) for name in DOMAINS}
    expected = (
        f"{root}/digits/<mnist, usps or mnistm>_<part>.png or .webp with labels.npz, "
        f"{root}/svhn/<part>_32x32.mat, {root}/synthdigits/synth_<part>_32x32.mat"
    )
    chosen, absent = select_domains(domains, available, "digit5", expected)
    return combine_domains({name: _source(root, name) for name in chosen}, CLASSES, request, per_domain, draw, absent)


def _file(root: Path, name: str, part: str) -> Path:
    """Return the path of one part of a domain, whether it exists or not."""
    if name in _MATLAB:
        return root / name / _MATLAB[name].format(part)
    packed = root / "digits" / f"{name}_{part}.webp"
    return packed if packed.is_file() else packed.with_suffix(".png")


def _source(root: Path, name: str) -> DomainSource:
    """Return the training part of a domain, then its test part."""
    read = _read_matlab if name in _MATLAB else _read_packed
    parts = [read(root, name, part) for part in _PARTS]
    pixels = np.concatenate([one for one, _ in parts])
    return DomainSource(np.concatenate([one for _, one in parts]), pixels.__getitem__)


def _read_packed(root: Path, name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [n, C, side, side] and labels [n] of one mosaic."""
    label_file, key = root / "digits" / "labels.npz", f"{name}_{part}"
    stored = read_arrays(label_file, key)[key]
    labels = as_labels(stored, len(stored), len(CLASSES), label_file)
    return read_labelled_tiles(_file(root, name, part), labels, *_PACKED[name]), labels


def _read_matlab(root: Path, name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [n, 3, 32, 32] and labels [n] of a file with X [32, 32, 3, n] and y [n, 1]; a 10 means digit 0."""
    from scipy.io import loadmat  # lazily: not needed for mosaics
    from scipy.io.matlab import MatReadError

    file = _file(root, name, part)
    with reading(file):
        try:
            stored = loadmat(str(file), variable_names=("X", "y"))
        except (MatReadError, NotImplementedError, TypeError) as error:  # scipy's errors for other formats
            raise ValueError(str(error)) from error
    if "X" not in stored or "y" not in stored:
        raise ValueError(f"{file}: arrays X and y are expected")
    pixels = stored["X"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise ValueError(f"{file}: X must be uint8 [32, 32, 3, n], got {pixels.dtype} {pixels.shape}")
    labels = as_labels(stored["y"].reshape(-1), pixels.shape[3], 11, file)
    if {0, 10} <= set(labels.tolist()):
        raise ValueError(f"{file}: labels 0 and 10 both occur; digit 0 must have one of them")
    return pixels.transpose(3, 2, 0, 1), labels % 10


DIGIT5 = Dataset(
    "Digit-5: MNIST, SVHN, USPS, SynthDigits and MNIST-M, those available, 2,000 images per domain",
    load_digit5,
    mean=HALF,
    std=HALF,
    classes=len(CLASSES),
    flip=False,
    crop=0.6,
)
