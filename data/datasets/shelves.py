"""Data sets of several domains: which domains are taken, how many pictures of each, and how they are joined.

A domain is where pictures come from: MNIST or street numbers, photos or sketches. All of them share their classes.
The numbers of pictures follow FedBN (X. Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021), where all domains are cut to one size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..seeds import generator
from .raw import Raw, Request, finish


@dataclass(frozen=True, eq=False)
class DomainRaw(Raw):
    """Pictures of several domains: also the domain of each [N], the domains' names, and what is not at hand."""

    domains: tuple[str, ...]
    domain: np.ndarray
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Shelf:
    """One domain before anything is drawn from it: labels [n], and how to take pictures [m, C, h, w] by index [m]."""

    labels: np.ndarray
    take: Callable[[np.ndarray], np.ndarray]


def choose(asked: str, present: Mapping[str, bool], name: str, where: str) -> tuple[str, ...]:
    """Return the domains to load, in the order of `present`.

    Parameters
    ----------
    asked : str
        Names with commas between them; empty: all that are at hand.
    present : mapping
        Every domain that there is, and whether its files are at hand.
    name, where : str
        The data set, and where its files are expected, for messages.

    Raises
    ------
    ValueError
        An unknown domain (lists what there is).
    FileNotFoundError
        A domain that is asked for is not at hand, or none is.
    """
    wanted = [word.strip() for word in asked.split(",")] if asked else [one for one, there in present.items() if there]
    unknown = [one for one in wanted if one not in present]
    if unknown:
        raise ValueError(f"unknown domain {unknown[0]!r} of {name}; there are: {', '.join(present)}")
    absent = [one for one in wanted if not present[one]]
    if absent or not wanted:
        lacking = ", ".join(absent or present)
        raise FileNotFoundError(f"{name}: {lacking} not at hand; expected: {where}")
    return tuple(one for one in present if one in wanted)


def balanced(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` of n samples with classes as even as they can be; return sorted indices (int64).

    Every class gives the same number, or all it has where that is less; what does not divide goes to the larger
    classes. All samples with a count of 0, or of n and more.
    """
    if count == 0 or count >= len(labels):
        return np.arange(len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    drawn = []
    left = count
    order = np.argsort(sizes, kind="stable")
    for served, place in enumerate(order):
        share = min(int(sizes[place]), left // (len(order) - served))
        drawn.append(rng.permutation(np.flatnonzero(labels == classes[place]))[:share])
        left -= share
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def join(
    shelves: Mapping[str, Shelf],
    classes: tuple[str, ...],
    request: Request,
    per_domain: int,
    draw: int,
    absent: tuple[str, ...] = (),
) -> DomainRaw:
    """Draw from every domain and put them one after the other, in colour and at `request.image_size`, as bytes.

    Parameters
    ----------
    shelves : mapping
        Domain → what it has.
    classes : tuple of str
        The class names.
    request : Request
        Its picture size is taken.
    per_domain : int
        Pictures of each domain, see `balanced`; 0: all.
    draw : int
        Decides which ones, together with the domain's name; other domains do not matter.
    absent : tuple of str
        Domains that are not at hand.

    Raises
    ------
    ValueError
        `per_domain` or `draw` is no integer from 0 on.
    """
    for name, value in (("per_domain", per_domain), ("draw", draw)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name}={value!r} must be an integer from 0 on")
    pixels, labels, domain = [], [], []
    for number, (name, shelf) in enumerate(shelves.items()):
        chosen = balanced(shelf.labels, per_domain, generator("per domain", draw, name))
        raw = Raw(shelf.take(chosen), shelf.labels[chosen], classes)
        pixels.append(finish(raw, name, request.image_size, 3).pixels)
        labels.append(raw.labels)
        domain.append(np.full(len(chosen), number, np.int64))
    return DomainRaw(
        np.concatenate(pixels), np.concatenate(labels), classes, tuple(shelves), np.concatenate(domain), absent
    )
