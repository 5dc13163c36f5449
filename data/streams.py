"""Test streams: what a client meets at test time under each shift, in one seeded random order.

The shifts are those of BRFL (FedTHE, appendix D) and BTGFL (BTFL, section 5.1). A recipe returns the parts of a stream:
(elementary shift, indices). Common properties of all recipes:

- No stream contains an image twice, and the parts of a mixture come from different images.
- A client has 0.2 · 3,000 test images in the papers' set-up, but only about 100 of CIFAR-10.1's 2,000. If a recipe
  has equal parts and one part has fewer images, all parts are cut to its size. An empty part (a federation of one
  client has no other clients) gives an empty stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .corruptions import CORRUPTIONS, corrupt
from .federation import Federation
from .images import Images, LazyRows, Rows
from .partition import match_class_mixes
from .rng import generator

#: One part of a stream: the elementary shift, and indices into the federation's images (or the natural ones).
Part = tuple[str, np.ndarray]

#: Elementary shifts whose indices point into the natural data set.
NATURAL = ("natural", "natural_out_of_client")
#: Elementary shifts whose images are corrupted.
CORRUPTED = ("corrupted", "corrupted_out_of_client")


@dataclass(frozen=True)
class Sources:
    """The images a recipe may use for one client, in seeded random orders that are the same for every recipe."""

    federation: Federation
    partition: int
    seed: int
    natural: Images | None

    @cached_property
    def own(self) -> np.ndarray:
        """The client's test split, shuffled."""
        return self._rng("own").permutation(self.federation.splits[self.partition].test)

    @cached_property
    def others(self) -> np.ndarray:
        """As many of the other clients' pooled test samples as the client has test samples (or all of them)."""
        return self._rng("others").permutation(self.federation.others_test(self.partition))[: len(self.own)]

    @cached_property
    def unseen(self) -> np.ndarray:
        """The images of the held-out domain, shuffled."""
        return self._rng("unseen").permutation(self.federation.unseen)

    @cached_property
    def natural_own(self) -> np.ndarray:
        """The client's share of the natural images, shuffled."""
        return self._rng("natural_own").permutation(self._natural_shares[self.partition])

    @cached_property
    def natural_others(self) -> np.ndarray:
        """The other clients' shares of the natural images, pooled and shuffled."""
        shares = [share for number, share in enumerate(self._natural_shares) if number != self.partition]
        return self._rng("natural_others").permutation(np.concatenate([np.empty(0, np.int64), *shares]))

    @cached_property
    def _natural_shares(self) -> list[np.ndarray]:
        if self.natural is None:
            return [np.empty(0, np.int64) for _ in self.federation.splits]
        return match_class_mixes(self.federation.class_counts(), self.natural.labels, self.seed)

    def _rng(self, purpose: str) -> np.random.Generator:
        return generator("recipe", purpose, self.seed, self.federation.numbers[self.partition])


def original(sources: Sources) -> list[Part]:
    """Return the client's test split: distributed like its training data."""
    return [("original", sources.own)]


def corrupted(sources: Sources) -> list[Part]:
    """Return the client's test split, each sample under one of the 15 common corruptions."""
    return [("corrupted", sources.own)]


def natural(sources: Sources) -> list[Part]:
    """Return natural images with the class mix of the client's training split."""
    return [("natural", sources.natural_own)]


def out_of_client(sources: Sources) -> list[Part]:
    """Return samples of the other clients' test splits, as many as the client's own."""
    return [("out_of_client", sources.others)]


def corrupted_out_of_client(sources: Sources) -> list[Part]:
    """Return samples of the other clients' test splits, each under one of the 15 common corruptions."""
    return [("corrupted_out_of_client", sources.others)]


def unseen_domain(sources: Sources) -> list[Part]:
    """Return the held-out domain (FedICON's domain shift); empty without one."""
    return [("unseen_domain", sources.unseen)]


def mixture(sources: Sources) -> list[Part]:
    """Return equal parts of original, corrupted, natural (if available) and out-of-client samples.

    A part is the client's test size divided by the number of parts (rounded down), or less if there are fewer natural
    or out-of-client samples.
    """
    if sources.natural is None:
        part = min(len(sources.own) // 3, len(sources.others))
    else:
        part = min(len(sources.own) // 4, len(sources.others), len(sources.natural_own))
    parts = [
        ("original", sources.own[:part]),
        ("corrupted", sources.own[part : 2 * part]),
        ("out_of_client", sources.others[:part]),
    ]
    return parts if sources.natural is None else [*parts, ("natural", sources.natural_own[:part])]


def shifted_ind(sources: Sources) -> list[Part]:
    """Return the client's own distribution, shifted: half corrupted, half natural (if available)."""
    return _shifted(sources, "", sources.own, sources.natural_own)


def shifted_exd(sources: Sources) -> list[Part]:
    """Return the other clients' distribution, shifted: half corrupted, half natural (if available)."""
    return _shifted(sources, "_out_of_client", sources.others, sources.natural_others)


def synthetical(sources: Sources) -> list[Part]:
    """Return equal parts of original and shifted, internal and external samples; shifted as in the sets above.

    A part is a quarter of the client's test size (rounded down; to an even number if it is halved), or less if there
    are fewer external or natural samples.
    """
    part = min(len(sources.own) // 4, len(sources.others) // 2)
    if sources.natural is not None:
        part = 2 * min(part // 2, len(sources.natural_own), len(sources.natural_others))
    return [
        ("original", sources.own[:part]),
        ("out_of_client", sources.others[:part]),
        *_shifted(sources, "", sources.own[part : 2 * part], sources.natural_own),
        *_shifted(sources, "_out_of_client", sources.others[part : 2 * part], sources.natural_others),
    ]


def _shifted(sources: Sources, suffix: str, samples: np.ndarray, natural: np.ndarray) -> list[Part]:
    """Return corrupted `samples`; with a natural data set, half of them and as many natural samples."""
    if sources.natural is None:
        return [("corrupted" + suffix, samples)]
    half = min(len(samples) // 2, len(natural))
    return [("corrupted" + suffix, samples[:half]), ("natural" + suffix, natural[:half])]


@dataclass(frozen=True)
class Shift:
    """A named recipe; with `needs_natural` it requires a natural data set, with `needs_others` images of others."""

    description: str
    recipe: Callable[[Sources], list[Part]]
    needs_natural: bool = False
    needs_others: bool = False


SHIFTS: dict[str, Shift] = {
    "original": Shift("the client's own test split", original),
    "corrupted": Shift("own test split, one random corruption per sample", corrupted),
    "natural": Shift("CIFAR-10.1 with the client's class mix", natural, needs_natural=True),
    "out_of_client": Shift("other clients' test samples", out_of_client, needs_others=True),
    "mixture": Shift("equal parts of the four shifts above", mixture, needs_others=True),
    "corrupted_out_of_client": Shift(
        "other clients' test samples, one random corruption per sample", corrupted_out_of_client, needs_others=True
    ),
    "original_ind": Shift("internal distribution: the client's own test split", original),
    "shifted_ind": Shift("internal distribution, corrupted or natural", shifted_ind),
    "original_exd": Shift("external distribution: other clients' test samples", out_of_client, needs_others=True),
    "shifted_exd": Shift("external distribution, corrupted or natural", shifted_exd, needs_others=True),
    "synthetical": Shift("equal parts of the four internal and external sets", synthetical, needs_others=True),
    "unseen_domain": Shift("the held-out domain", unseen_domain, needs_others=True),
}

#: Groups of shifts, by benchmark.
BRFL = ("original", "corrupted", "natural", "out_of_client", "mixture")
BTGFL = ("original_ind", "shifted_ind", "original_exd", "shifted_exd", "synthetical")
GROUPS = {"brfl": BRFL, "btgfl": BTGFL}


@dataclass(frozen=True, eq=False)
class Stream:
    """The test samples of one client under one shift, in order.

    Parameters
    ----------
    name : str
        The shift.
    x : Tensor [n, C, H, W]
        float32 in [0, 1]; `LazyRows` if the images are not in memory.
    y : Tensor [n]
        int64 labels, on the device of `x`: for evaluation, never for adaptation.
    index : ndarray [n]
        Sample number in the federation's images, -1 for an image of the natural data set (CIFAR-10.1).
    source : ndarray [n] of str
        The elementary shift each sample comes from: original, corrupted, natural, out_of_client, unseen_domain,
        corrupted_out_of_client or natural_out_of_client.
    """

    name: str
    x: Rows
    y: Tensor
    index: np.ndarray
    source: np.ndarray

    def __len__(self) -> int:
        return int(self.y.shape[0])


def available(natural: Images | None) -> tuple[str, ...]:
    """Return the names of the shifts that are available with or without a natural data set."""
    return tuple(name for name, shift in SHIFTS.items() if natural is not None or not shift.needs_natural)


def resolve(spec: str, has_natural: bool, alone: bool = False) -> tuple[tuple[str, ...], str | None]:
    """Resolve "brfl", "btgfl" or a comma-separated list of names and groups to shift names and an optional note.

    Without a natural data set, "natural" is dropped; the note describes the effect on all shifts. A device with data
    of its own is `alone`: shifts that need images of other clients are dropped.

    Raises
    ------
    ValueError
        Unknown name (lists the known ones), or no shift is left.
    """
    asked: list[str] = []
    for item in (part.strip().lower() for part in spec.split(",")):
        if item not in SHIFTS and item not in GROUPS:
            raise ValueError(f"unknown shift {item!r}; there are: {', '.join([*GROUPS, *SHIFTS])}")
        asked.extend(GROUPS.get(item, (item,)))
    names = tuple(dict.fromkeys(name for name in asked if has_natural or not SHIFTS[name].needs_natural))
    if alone:
        return _resolve_alone(spec, tuple(dict.fromkeys(asked)))
    if not names:
        raise ValueError(f"shifts {spec!r}: none is available without a natural data set")
    return names, None if has_natural else _note(asked)


def _resolve_alone(spec: str, asked: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """Return the shifts of a device that has its own images only, and a note on the others."""
    names = tuple(name for name in asked if not (SHIFTS[name].needs_others or SHIFTS[name].needs_natural))
    if not names:
        allowed = ", ".join(name for name, one in SHIFTS.items() if not (one.needs_others or one.needs_natural))
        raise ValueError(f"shifts {spec!r}: none is available with data of one's own; there are: {allowed}")
    left_out = ", ".join(name for name in asked if name not in names)
    return names, f"data of one's own: {left_out} left out, which need other images" if left_out else None


def _note(asked: list[str]) -> str | None:
    """Describe the effect of a missing natural data set on the requested shifts."""
    effects = {
        "natural": "the natural column is left out",
        "mixture": "mixture is equal parts of the other three",
        "shifted_ind": "shifted sets are all corrupted",
        "shifted_exd": "shifted sets are all corrupted",
        "synthetical": "synthetical's shifted parts are all corrupted",
    }
    notes = list(dict.fromkeys(effects[name] for name in asked if name in effects))
    return f"no natural data set is at hand: {'; '.join(notes)}" if notes else None


def stream(
    federation: Federation,
    partition: int,
    shift: str,
    seed: int,
    severity: int = 5,
    device: torch.device | str = "cpu",
    natural: Images | None = None,
) -> Stream:
    """Return the test stream of one client under one shift.

    The stream depends on the arguments only. A sample's corruption is drawn from (seed, sample number), so an image is
    corrupted identically in every stream. Sizes are described at the recipes; a client without test samples has an
    empty stream.

    Parameters
    ----------
    federation : Federation
    partition : int
        The client, 0 to N-1.
    shift : str
        A name in `SHIFTS`.
    seed : int
        Seed of the samples drawn, the corruptions and the order.
    severity : int
        1 to 5, of the corruptions.
    device : device
        Device on which images are corrupted and returned.
    natural : Images, optional
        The natural data set, with the classes and image shape of the federation's.

    Raises
    ------
    ValueError
        Unknown shift (lists the available ones), partition or severity, or natural images that do not match.
    """
    if shift not in available(natural):
        lacking = " without a natural data set" if shift in SHIFTS else ""
        raise ValueError(f"unknown shift {shift!r}{lacking}; there are: {', '.join(available(natural))}")
    if not 0 <= partition < federation.num_clients:
        raise ValueError(f"partition={partition} is not in 0..{federation.num_clients - 1}")
    if severity not in range(1, 6):
        raise ValueError(f"severity={severity} must be an integer from 1 to 5")
    images = federation.images
    if natural is not None and (natural.classes != images.classes or natural.shape != images.shape):
        raise ValueError(f"{natural.name} does not fit {images.name}: classes or image shapes differ")
    if SHIFTS[shift].needs_others and not federation.divided:
        raise ValueError(f"shift {shift!r} needs images of other clients; this device has its own only")
    parts = SHIFTS[shift].recipe(Sources(federation, partition, seed, natural))
    draw = generator("order", shift, seed, federation.numbers[partition])
    order = draw.permutation(sum(len(indices) for _, indices in parts))
    if not images.in_memory:
        return _lazy_stream(shift, parts, order, images, seed, severity, device)
    rendered = [_render(part, images, natural, seed, severity, device) for part in parts]
    permutation = torch.from_numpy(order).to(device)
    return Stream(
        name=shift,
        x=torch.cat([x for x, _, _ in rendered])[permutation],
        y=torch.from_numpy(np.concatenate([y for _, y, _ in rendered])[order]).to(device),
        index=np.concatenate([index for _, _, index in rendered])[order],
        source=np.repeat([name for name, _ in parts], [len(indices) for _, indices in parts])[order],
    )


def _lazy_stream(
    shift: str,
    parts: list[Part],
    order: np.ndarray,
    images: Images,
    seed: int,
    severity: int,
    device: torch.device | str,
) -> Stream:
    """Return a stream of images that are read, and corrupted, when a batch is asked for."""
    index = np.concatenate([indices for _, indices in parts])[order]
    source = np.repeat([name for name, _ in parts], [len(indices) for _, indices in parts])[order]

    def read(positions: np.ndarray) -> Tensor:
        x = images.batch(index[positions], device)
        corrupted = np.isin(source[positions], CORRUPTED)
        if corrupted.any():
            rows = torch.from_numpy(np.flatnonzero(corrupted)).to(device)
            x[rows] = _corrupted(x[rows], index[positions][corrupted], seed, severity)
        return x

    x = LazyRows(np.arange(len(index)), read)
    return Stream(shift, x, torch.from_numpy(images.labels[index]).to(device), index, source)


def _render(
    part: Part, images: Images, natural: Images | None, seed: int, severity: int, device: torch.device | str
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Return images [n, C, H, W], labels [n] and stream indices [n] of one part."""
    name, indices = part
    if name in NATURAL:
        assert natural is not None, "recipes use natural samples only if there are some"
        return natural.batch(indices, device), natural.labels[indices], np.full(len(indices), -1, np.int64)
    x = images.batch(indices, device)
    if name in CORRUPTED:
        x = _corrupted(x, indices, seed, severity)
    return x, images.labels[indices], indices


def _corrupted(x: Tensor, indices: np.ndarray, seed: int, severity: int) -> Tensor:
    """Corrupt each sample of x [n, C, H, W] by its own draw, with one call per corruption."""
    # (corruption, seed) of a sample depend on its number only, not on the other samples.
    draws = [generator("corruption", seed, int(index)).integers((len(CORRUPTIONS), 2**31)) for index in indices]
    kinds = np.array([kind for kind, _ in draws], dtype=np.int64)
    out = torch.empty_like(x)
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        seeds = [int(draws[member][1]) for member in members]
        rows = torch.from_numpy(members).to(x.device)
        out[rows] = corrupt(x[rows], CORRUPTIONS[kind], severity, seeds)
    return out


def check_no_leak(stream: Stream, federation: Federation, rounds: int | None = None) -> int:
    """Return how many samples of the stream any client trains or tunes on; without resampled splits it must be 0.

    With resampled splits the number grows with the training rounds.

    Raises
    ------
    ValueError
        Splits are resampled in every round and `rounds` is not given.
    """
    if rounds is None and federation.resample_splits:
        raise ValueError("splits are resampled in every round: the leak depends on rounds")
    return int(federation.among(stream.index, federation.trained_on(rounds or 0)).sum())
