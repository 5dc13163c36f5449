"""Test-time streams: a recipe's samples as tensors, in one seeded random order per client and shift."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .corruptions import CORRUPTIONS, corrupt
from .federation import Federation
from .images import Images
from .recipes import CORRUPTED, NATURAL, SHIFTS, Client, Part
from .seeds import generator

BRFL = ("original", "corrupted", "natural", "out_of_client", "mixture")
BTGFL = ("original_ind", "shifted_ind", "original_exd", "shifted_exd", "synthetical")
GROUPS = {"brfl": BRFL, "btgfl": BTGFL}


@dataclass(frozen=True, eq=False)
class Stream:
    """What one client meets at test time, in order.

    Parameters
    ----------
    name : str
        The shift.
    x : Tensor [n, C, H, W]
        float32 in [0, 1].
    y : Tensor [n]
        int64 labels, on the device of `x`: for scoring, never for adapting.
    index : ndarray [n]
        Sample number in the federation's pictures, -1 for a picture from elsewhere (CIFAR-10.1).
    source : ndarray [n] of str
        The elementary shift each sample comes from: original, corrupted, natural, out_of_client, unseen_domain,
        corrupted_out_of_client or natural_out_of_client.
    """

    name: str
    x: Tensor
    y: Tensor
    index: np.ndarray
    source: np.ndarray

    def __len__(self) -> int:
        return int(self.y.shape[0])


def available(natural: Images | None) -> tuple[str, ...]:
    """Return the names of the shifts that can be made, with or without a natural data set."""
    return tuple(name for name, shift in SHIFTS.items() if natural is not None or not shift.needs_natural)


def resolve(spec: str, has_natural: bool) -> tuple[tuple[str, ...], str | None]:
    """Turn "brfl", "btgfl" or a comma list of names and groups into shift names and, if need be, a note.

    Without a natural data set, "natural" is dropped, and the note says so and what that does to the other
    names.

    Raises
    ------
    ValueError
        An unknown name (lists what there is), or nothing is left.
    """
    asked: list[str] = []
    for item in (part.strip().lower() for part in spec.split(",")):
        if item not in SHIFTS and item not in GROUPS:
            raise ValueError(f"unknown shift {item!r}; there are: {', '.join([*GROUPS, *SHIFTS])}")
        asked.extend(GROUPS.get(item, (item,)))
    names = tuple(dict.fromkeys(name for name in asked if has_natural or not SHIFTS[name].needs_natural))
    if not names:
        raise ValueError(f"shifts {spec!r}: nothing is left without a natural data set")
    return names, None if has_natural else _note(asked)


def _note(asked: list[str]) -> str | None:
    """Say what the lack of a natural data set does to the shifts asked for."""
    effects = {
        "natural": "the natural column is left out",
        "mixture": "mixture is equal parts of the other three",
        "shifted_ind": "shifted sets are all corrupted",
        "shifted_exd": "shifted sets are all corrupted",
        "synthetical": "synthetical's shifted parts are all corrupted",
    }
    told = list(dict.fromkeys(effects[name] for name in asked if name in effects))
    return f"no natural data set is at hand: {'; '.join(told)}" if told else None


def stream(
    federation: Federation,
    partition: int,
    shift: str,
    seed: int,
    severity: int = 5,
    device: torch.device | str = "cpu",
    natural: Images | None = None,
) -> Stream:
    """Make the stream of one client under one shift.

    It depends on the arguments alone, not on which streams were made before. A sample's corruption is drawn
    from (seed, its number), so the same picture is corrupted alike in every stream. See `recipes` for sizes;
    a client without test samples has an empty stream.

    Parameters
    ----------
    federation : Federation
        Who has what.
    partition : int
        The client, 0 to N-1.
    shift : str
        A name in `SHIFTS`.
    seed : int
        Decides what is drawn, the corruptions and the order.
    severity : int
        1 to 5, of the corruptions.
    device : device
        Where pictures are corrupted and end up.
    natural : Images, optional
        The natural data set, with the classes and picture shape of the federation's.

    Raises
    ------
    ValueError
        An unknown shift (lists what can be made), partition or severity, or natural pictures that do not fit.
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
        raise ValueError(f"{natural.name} does not fit {images.name}: classes or picture shapes differ")
    parts = SHIFTS[shift].recipe(Client(federation, partition, seed, natural))
    order = generator("order", shift, seed, partition).permutation(sum(len(indices) for _, indices in parts))
    made = [_render(part, images, natural, seed, severity, device) for part in parts]
    place = torch.from_numpy(order).to(device)
    return Stream(
        name=shift,
        x=torch.cat([x for x, _, _ in made])[place],
        y=torch.from_numpy(np.concatenate([y for _, y, _ in made])[order]).to(device),
        index=np.concatenate([index for _, _, index in made])[order],
        source=np.repeat([name for name, _ in parts], [len(indices) for _, indices in parts])[order],
    )


def _render(
    part: Part, images: Images, natural: Images | None, seed: int, severity: int, device: torch.device | str
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Return pictures [n, C, H, W], labels [n] and stream indices [n] of one part."""
    name, indices = part
    if name in NATURAL:
        assert natural is not None, "a recipe draws natural samples only where there are some"
        return natural.batch(indices, device), natural.labels[indices], np.full(len(indices), -1, np.int64)
    x = images.batch(indices, device)
    if name in CORRUPTED:
        x = _corrupted(x, indices, seed, severity)
    return x, images.labels[indices], indices


def _corrupted(x: Tensor, indices: np.ndarray, seed: int, severity: int) -> Tensor:
    """Corrupt each sample of x [n, C, H, W] by its own draw, one call a corruption."""
    # (corruption, seed) of a sample, from its number alone: grouping and company do not matter.
    draws = [generator("corruption", seed, int(index)).integers((len(CORRUPTIONS), 2**31)) for index in indices]
    kinds = np.array([kind for kind, _ in draws], dtype=np.int64)
    out = torch.empty_like(x)
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        seeds = [int(draws[member][1]) for member in members]
        place = torch.from_numpy(members).to(x.device)
        out[place] = corrupt(x[place], CORRUPTIONS[kind], severity, seeds)
    return out


def check_no_leak(stream: Stream, federation: Federation, rounds: int | None = None) -> int:
    """Return how many of the stream's samples any client trains or tunes on; it must be 0.

    Where splits are drawn anew it is how many were trained on in so many rounds, and grows with them.

    Raises
    ------
    ValueError
        Splits are drawn anew, and `rounds` does not say how often.
    """
    if rounds is None and federation.anew:
        raise ValueError("splits are drawn anew in every round: what leaks depends on rounds")
    return int(np.isin(stream.index, federation.trained_on(rounds or 0)).sum())
