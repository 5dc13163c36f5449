"""What a run knows of its clients' data: what they have in common, and each client's own sizes. No label counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from fedtta.messages.replies import Identity

#: Fields of `Identity` that all clients must agree on. Those with labels must agree on the test distributions, too.
COMMON = ("classes", "channels", "mean", "std", "corruptions")
#: What a client that comes back must report unchanged. New files may change the sizes of a device's own data.
OWN = ("role", "labelled", "own_data")
#: What the files of a run say of each client's data.
DATA = ("own_data", "labelled", "samples", "skipped", "classes_present", "notes")

#: Grey levels by which the mean of one data set may differ between machines that decode and round differently.
SAME_MEAN = 0.25


@dataclass(frozen=True)
class FederationInfo:
    """What the server knows of the clients' data.

    Parameters
    ----------
    classes : list of str
    channels : int
    mean, std : list of float
        Normalization of the images, per channel.
    shifts : list of str
        Test distributions that the settings stand for.
    note : str
        See `fedtta.messages.replies.Identity`; those of several clients are joined.
    sizes : list of [int, int, int]
        Samples for training, validation and test, by partition.
    roles : list of str
        "both", "source" or "target", by partition.
    corruptions : list of str
        Of the test-time streams; empty without collaborations.
    stream_rounds : int
        Length of the shortest of these streams, of the clients that test; 0 without collaborations.
    images, pixel_mean : int, float
        Of the data set that the run divides; 0 if every device has its own data.
    names : list of str
        By partition; without any (runs of earlier versions) the partitions themselves.
    data : list of dict
        The fields `DATA` of each client's identity, by partition.
    """

    classes: list[str]
    channels: int
    mean: list[float]
    std: list[float]
    shifts: list[str]
    note: str
    sizes: list[list[int]]
    roles: list[str] = field(default_factory=list)
    corruptions: list[str] = field(default_factory=list)
    stream_rounds: int = 0
    images: int = 0
    pixel_mean: float = 0.0
    names: list[str] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Fill in what earlier versions did not write."""
        object.__setattr__(self, "names", self.names or [str(partition) for partition in range(len(self.sizes))])
        object.__setattr__(self, "data", self.data or [{} for _ in self.sizes])

    @classmethod
    def of(cls, identities: Sequence[Identity]) -> Self:
        """Return what clients that fit each other report, in the order given."""
        first = next((one for one in identities if one.labelled), identities[0])
        divided = next((one for one in identities if one.images), first)
        testers = [one for one in identities if one.role != "source"] or identities
        return cls(
            **{name: getattr(first, name) for name in COMMON},
            shifts=first.shifts if first.labelled else [],
            note="; ".join(dict.fromkeys(part for one in identities if one.note for part in one.note.split("; "))),
            sizes=[list(one.sizes) for one in identities],
            roles=[one.role for one in identities],
            stream_rounds=min(one.stream_rounds for one in testers),
            images=divided.images,
            pixel_mean=divided.pixel_mean,
            names=[one.name for one in identities],
            data=[data_of(one) for one in identities],
        )

    @classmethod
    def agreed(cls, identities: Sequence[Identity]) -> Self:
        """Return what most of the clients report; the first in the order given decides a tie."""
        voters = [one for one in identities if one.labelled] or list(identities)
        names = [(*COMMON, "shifts", *_streams(one)) for one in voters]
        kinds = [
            (repr([one.images, *(_plain(one, name) for name in common)]), one.pixel_mean)
            for one, common in zip(voters, names, strict=True)
        ]
        counts = Counter(kinds)

        def votes(kind: tuple[str, float]) -> int:
            near = (n for (same, mean), n in counts.items() if same == kind[0] and abs(mean - kind[1]) <= SAME_MEAN)
            return sum(near)

        decisive = voters[kinds.index(max(counts, key=votes))]
        info = cls.of([decisive])
        return cls.of([decisive, *(one for one in identities if one is not decisive and not _other(info, one))])

    @property
    def labelled_roles(self) -> list[str]:
        """Roles of the clients with labels, which decide the methods that fit; all roles if none has labels."""
        roles = [role for role, data in zip(self.roles, self.data, strict=False) if data.get("labelled", True)]
        return roles or self.roles

    def misfit(self, identity: Identity) -> str:
        """Return why a client cannot take part in this run; empty if it can."""
        if reason := _other(self, identity):
            return reason
        if identity.role != "source" and identity.stream_rounds < self.stream_rounds:
            return f"stream-rounds = {identity.stream_rounds}, the run has {self.stream_rounds}"
        return ""


def data_of(identity: Identity) -> dict[str, Any]:
    """Return what the files of a run say of a client's data."""
    return {name: getattr(identity, name) for name in DATA}


def difference(before: Identity, now: Identity) -> str:
    """Return how a client that came back differs from its first identity; empty if no difference matters."""
    names = [*COMMON, *OWN, *(["shifts"] if before.labelled else [])]
    if not before.own_data:
        names += ["sizes", "stream_rounds"]
    for name in names:
        if _plain(now, name) != _plain(before, name):
            return f"{_key(name)} = {getattr(now, name)!r}, at first it was {getattr(before, name)!r}"
    return ""


def known_members(world: Mapping[str, Any], identities: Mapping[str, Identity]) -> dict[str, Identity]:
    """Return the identities of a checkpoint's members by name; of those that are not there, what the checkpoint says.

    Parameters
    ----------
    world : mapping
        Fields of the run's `FederationInfo`, in a checkpoint.
    identities : mapping
        Name → identity of the clients that are there, at least one.
    """
    names = member_names(world)
    there = list(identities.values())
    some = next((one for one in there if one.labelled), there[0])  # one without labels knows no shifts
    data = world.get("data") or [data_of(some)] * len(names)
    rows = zip(names, world["sizes"], world.get("roles") or ["both"] * len(names), data, strict=True)
    common = {name: getattr(some, name) for name in (*COMMON, "channels")}
    return {
        name: identities.get(name)
        or Identity(
            **common, name=name, sizes=sizes, role=role, **about, shifts=list(world.get("shifts", some.shifts)),
            note="", stream_rounds=world.get("stream_rounds", some.stream_rounds),
        )
        for name, sizes, role, about in rows
    }  # fmt: skip


def member_names(world: Mapping[str, Any]) -> list[str]:
    """Return the names of a checkpoint's members by partition; runs of earlier versions had numbers only."""
    return list(world.get("names") or [str(partition) for partition in range(len(world["sizes"]))])


def _other(info: FederationInfo, identity: Identity) -> str:
    """Return in what a client's data are of another kind than the run's; streams of a device's own may be longer."""
    same = identity.images == info.images and abs(identity.pixel_mean - info.pixel_mean) <= SAME_MEAN
    if identity.images and info.images and not same:
        return (
            f"the run divides one data set among the clients, and this one has another: {_mean_of(identity)}, the "
            f"run's: {_mean_of(info)}; a device with data of its own names them in its config (data = 'folder:...')"
        )
    for name in (*COMMON, *(["shifts"] if identity.labelled else []), *_streams(identity)):
        if _plain(identity, name) != _plain(info, name):
            return f"{_key(name)} = {getattr(identity, name)!r}, the run has {getattr(info, name)!r}"
    return ""


def _mean_of(one: Identity | FederationInfo) -> str:
    return f"{one.images} images of mean {one.pixel_mean:.1f}"


def _streams(identity: Identity) -> tuple[str, ...]:
    return () if identity.own_data else ("stream_rounds",)


def _plain(one: Identity | FederationInfo, name: str) -> Any:
    value = getattr(one, name)
    return list(value) if isinstance(value, tuple) else value


def _key(name: str) -> str:
    return name.replace("_", "-")
