"""Data sets of several domains: selection of domains, number of images per domain, and their combination.

Domains are sources of images (MNIST or street numbers, photos or sketches) that share their classes. All domains are
cut to one size as in FedBN (X. Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..rng import generator
from .base import Raw, Request, to_images


@dataclass(frozen=True, eq=False)
class MultiDomainRaw(Raw):
    """Images of several domains: with the domain of each image [N], the domain names, and those not available."""

    domains: tuple[str, ...]
    domain: np.ndarray
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class DomainSource:
    """One domain: labels [n], and a function from indices [m] to pixels [m, C, h, w]."""

    labels: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]


def select_domains(
    names: str, available: Mapping[str, bool], dataset: str, expected: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the domains to load, in the order of `available`, and the known domains that are skipped.

    Parameters
    ----------
    names : str
        Comma-separated names; empty: all available ones.
    available : mapping
        Every domain of the data set, and whether its files exist.
    dataset, expected : str
        Name of the data set and the expected location of its files, for messages.

    Raises
    ------
    ValueError
        Unknown domain (lists the known ones).
    FileNotFoundError
        A requested domain is not available, or none is.
    """
    wanted = (
        [word.strip() for word in names.split(",")] if names else [one for one, there in available.items() if there]
    )
    unknown = [one for one in wanted if one not in available]
    if unknown:
        raise ValueError(f"unknown domain {unknown[0]!r} of {dataset}; there are: {', '.join(available)}")
    missing = [one for one in wanted if not available[one]]
    if missing or not wanted:
        raise FileNotFoundError(f"{dataset}: {', '.join(missing or available)} not found; expected: {expected}")
    absent = () if names else tuple(one for one, there in available.items() if not there)
    return tuple(one for one in available if one in wanted), absent


def balanced_sample(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` of n samples with classes as even as possible; return sorted indices (int64).

    Every class contributes the same number, or all its samples if there are fewer; the remainder goes to the larger
    classes. All samples are returned for a count of 0, or of n and more.
    """
    if count == 0 or count >= len(labels):
        return np.arange(len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    drawn = []
    left = count
    order = np.argsort(sizes, kind="stable")
    for served, index in enumerate(order):
        share = min(int(sizes[index]), left // (len(order) - served))
        drawn.append(rng.permutation(np.flatnonzero(labels == classes[index]))[:share])
        left -= share
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def combine_domains(
    sources: Mapping[str, DomainSource],
    classes: tuple[str, ...],
    request: Request,
    per_domain: int,
    draw: int,
    absent: tuple[str, ...] = (),
) -> MultiDomainRaw:
    """Sample every domain and concatenate the images, in colour at `request.image_size`, as bytes.

    Parameters
    ----------
    sources : mapping
        Domain → its source.
    classes : tuple of str
        The class names.
    request : Request
        Determines the image size.
    per_domain : int
        Images per domain, see `balanced_sample`; 0: all.
    draw : int
        Seed of the sample, together with the domain's name; other domains have no effect.
    absent : tuple of str
        Known domains that are skipped.

    Raises
    ------
    ValueError
        `per_domain` or `draw` is not a non-negative integer.
    """
    for name, value in (("per_domain", per_domain), ("draw", draw)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name}={value!r} must be a non-negative integer")
    pixels, labels, domain = [], [], []
    for number, (name, source) in enumerate(sources.items()):
        chosen = balanced_sample(source.labels, per_domain, generator("per domain", draw, name))
        raw = Raw(source.read(chosen), source.labels[chosen], classes)
        pixels.append(to_images(raw, name, request.image_size, 3).pixels[:])
        labels.append(raw.labels)
        domain.append(np.full(len(chosen), number, np.int64))
    return MultiDomainRaw(
        np.concatenate(pixels), np.concatenate(labels), classes, tuple(sources), np.concatenate(domain), absent
    )
