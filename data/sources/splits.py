"""Splits of a device's samples by hash: new samples never move old ones, and no seed matters.

u in [0, 1) is a hash of a sample's group, or of its content where it has none. With shares (0.6, 0.2, 0.2), u < 0.6 is
in the training split, u < 0.8 in the validation split, and the rest in the test split. A stated split comes before the
hash, for the whole group. So a group is never in two splits, and equal content without groups is in one.

Two rules leave samples out. What was ever in the test split never trains or validates; and content that groups or
stated splits put into several splits is used in one of them only: test comes before validation, and validation before
training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from fedtta.data.domains import Role
from fedtta.data.federation import SOURCE

from .base import SPLITS
from .scan import Sample

#: Shares of training, validation and test by role.
SHARES: dict[Role, tuple[float, float, float]] = {
    "both": (0.6, 0.2, 0.2),
    "source": SOURCE,
    "target": (0.0, 0.0, 1.0),
}
TESTED = "was in the test split before: it never trains"
TWICE = "same content in another split"


def unit_hash(kind: str, text: str) -> float:
    """Return a number in [0, 1) that depends on the two texts only."""
    digest = hashlib.sha256(f"{kind}\0{text}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # 53 bits: below 1 also after rounding


def hashed_split(sample: Sample, role: Role) -> str:
    """Return the split that the hash of a sample's group or content decides."""
    u = unit_hash("group", sample.group) if sample.group else unit_hash("content", sample.identity)
    train, validation, _ = SHARES[role]
    return "train" if u < train else "validation" if u < train + validation else "test"


def stated_by_group(samples: Iterable[Sample]) -> dict[str, str]:
    """Return group → stated split of the groups that have one.

    Raises
    ------
    ValueError
        Two samples of a group state different splits.
    """
    stated: dict[str, Sample] = {}
    for sample in samples:
        if not (sample.group and sample.split):
            continue
        other = stated.setdefault(sample.group, sample)
        if other.split != sample.split:
            both = f"{other.name} is in {other.split} and {sample.name} in {sample.split}"
            raise ValueError(f"group {sample.group!r}: {both}; a group has one split")
    return {group: sample.split for group, sample in stated.items()}


def assign(samples: Sequence[Sample], role: Role, tested: AbstractSet[str]) -> tuple[list[str], dict[str, str]]:
    """Assign every sample of labelled data to a split.

    Parameters
    ----------
    samples : sequence of Sample
    role : Role
        Decides the shares.
    tested : set of str
        Identities that were in the test split before.

    Returns
    -------
    list of str
        The split of each sample, "" for one that is left out.
    dict
        Name → reason of those that are left out.

    Raises
    ------
    ValueError
        As `stated_by_group`.
    """
    stated = stated_by_group(samples)
    splits = [one.split or stated.get(one.group, "") or hashed_split(one, role) for one in samples]
    left_out: dict[str, str] = {}
    used: dict[str, str] = {}  # identity → its split
    for wanted in reversed(SPLITS):
        for i, sample in enumerate(samples):
            if splits[i] != wanted:
                continue
            if wanted != "test" and sample.identity in tested:
                left_out[sample.name] = TESTED
            elif used.setdefault(sample.identity, wanted) != wanted:
                left_out[sample.name] = TWICE
    return ["" if one.name in left_out else split for one, split in zip(samples, splits, strict=True)], left_out
