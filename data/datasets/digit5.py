"""Digit-5: one task, five kinds of pictures. FedICON's and ATP's domain shift.

K. Zhou et al., "Learning to Generate Novel Domains for Domain Generalization", ECCV 2020; X. Peng et al., "Moment
Matching for Multi-Source Domain Adaptation", ICCV 2019. Training and test parts are merged, then drawn from; FedICON
does not say how many pictures it takes, ATP gives each domain about 7,430. MNIST-M is made from MNIST's digits, so
the same handwriting may stand in both; no picture does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .mosaics import tiles
from .raw import Request, as_labels, read_arrays, reading
from .shelves import DomainRaw, Shelf, choose, join

DOMAINS = ("mnist", "svhn", "usps", "synthdigits", "mnistm")
CLASSES = tuple(str(digit) for digit in range(10))
_PARTS = ("train", "test")

#: Packed domains, `<root>/digits/<domain>_<part>.png` or .webp with labels.npz: side of a picture and its channels.
_PACKED = {"mnist": (28, 1), "usps": (16, 1), "mnistm": (32, 3)}
#: Domains in their published MATLAB files, `<root>/<domain>/<file>`.
_MATLAB = {"svhn": "{}_32x32.mat", "synthdigits": "synth_{}_32x32.mat"}


def load_digit5(request: Request, *, domains: str = "", per_domain: int = 2000, draw: int = 0) -> DomainRaw:
    """Return the digits of several domains, in colour and at `image_size`.

    Parameters
    ----------
    request : Request
        Its root holds `digits/labels.npz` with the mosaics of mnist, usps and mnistm, `svhn/train_32x32.mat` and
        `svhn/test_32x32.mat`, `synthdigits/synth_train_32x32.mat` and `synthdigits/synth_test_32x32.mat`.
    domains : str
        Names with commas between them; empty: those at hand, and the images' name says which are not.
    per_domain : int
        Pictures of each domain, classes as even as they can be; 0: all.
    draw : int
        Decides which ones.

    Raises
    ------
    ValueError
        An unknown domain, a bad number, or a damaged file.
    FileNotFoundError
        A domain that is asked for, or a part of one, is not at hand.
    """
    if request.root is None:
        raise FileNotFoundError("digit5 needs root (or FEDTTA_DATA)")
    root = request.root
    present = {name: any(_file(root, name, part).is_file() for part in _PARTS) for name in DOMAINS}
    where = (
        f"{root}/digits/<mnist, usps or mnistm>_<part>.png or .webp with labels.npz, "
        f"{root}/svhn/<part>_32x32.mat, {root}/synthdigits/synth_<part>_32x32.mat"
    )
    chosen = choose(domains, present, "digit5", where)
    absent = () if domains else tuple(name for name in DOMAINS if not present[name])
    return join({name: _shelf(root, name) for name in chosen}, CLASSES, request, per_domain, draw, absent)


def _file(root: Path, name: str, part: str) -> Path:
    """Return the file of one part of a domain, whether it is there or not."""
    if name in _MATLAB:
        return root / name / _MATLAB[name].format(part)
    packed = root / "digits" / f"{name}_{part}.webp"
    return packed if packed.is_file() else packed.with_suffix(".png")


def _shelf(root: Path, name: str) -> Shelf:
    """Return a domain's training part, then its test part."""
    read = _read_matlab if name in _MATLAB else _read_packed
    parts = [read(root, name, part) for part in _PARTS]
    pixels = np.concatenate([one for one, _ in parts])
    return Shelf(np.concatenate([one for _, one in parts]), pixels.__getitem__)


def _read_packed(root: Path, name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [n, C, side, side] and labels [n] of one mosaic."""
    label_file, key = root / "digits" / "labels.npz", f"{name}_{part}"
    stored = read_arrays(label_file)
    if key not in stored:
        raise ValueError(f"{label_file}: no array {key!r}; there are: {', '.join(sorted(stored))}")
    file = _file(root, name, part)
    pixels = tiles(file, *_PACKED[name])
    labels = as_labels(stored[key], len(stored[key]), len(CLASSES), label_file)
    if len(pixels) < len(labels):
        raise ValueError(f"{file}: {len(labels)} labels but only {len(pixels)} tiles")
    return pixels[: len(labels)], labels  # tiles beyond the labels pad the last row


def _read_matlab(root: Path, name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [n, 3, 32, 32] and labels [n] of a file with X [32, 32, 3, n] and y [n, 1]; a 10 means digit 0."""
    from scipy.io import loadmat  # lazily: mosaics do without
    from scipy.io.matlab import MatReadError

    file = _file(root, name, part)
    with reading(file):
        try:
            stored = loadmat(str(file), variable_names=("X", "y"))
        except (MatReadError, NotImplementedError, TypeError) as error:  # what scipy raises for other formats
            raise ValueError(str(error)) from error
    if "X" not in stored or "y" not in stored:
        raise ValueError(f"{file}: arrays X and y are expected")
    pixels = stored["X"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise ValueError(f"{file}: X must be uint8 [32, 32, 3, n], got {pixels.dtype} {pixels.shape}")
    labels = as_labels(stored["y"].reshape(-1), pixels.shape[3], 11, file)
    if {0, 10} <= set(labels.tolist()):
        raise ValueError(f"{file}: labels 0 and 10 both occur; digit 0 has one of them")
    return pixels.transpose(3, 2, 0, 1), labels % 10
