"""What the nodes say of themselves, joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.errors import RunError

#: What all nodes must agree on, from `query.identify`.
COMMON = (
    "num-partitions", "classes", "channels", "mean", "std", "shifts", "note",
    "corruptions", "stream-rounds",
)  # fmt: skip
#: What a node that comes back must say again beside them.
OWN = ("sizes", "role")


@dataclass(frozen=True)
class World:
    """What the server learned of the clients' data: sizes and kinds, no label counts.

    `corruptions` and `stream_rounds` are those of the test-time streams; none and 0 without collaborations.
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

    @classmethod
    def agree(cls, identities: Mapping[int, Mapping[str, Any]]) -> World:
        """Join what the nodes say; RunError when they do not agree."""
        first = identities[min(identities)]
        for partition, identity in sorted(identities.items()):
            for key in COMMON:
                if identity[key] != first[key]:
                    raise RunError(f"client {partition}: {key} = {identity[key]!r}, others have {first[key]!r}")
        return cls(
            list(first["classes"]),
            int(first["channels"]),
            list(first["mean"]),
            list(first["std"]),
            list(first["shifts"]),
            str(first["note"]),
            [list(identities[partition]["sizes"]) for partition in sorted(identities)],
            [str(identities[partition]["role"]) for partition in sorted(identities)],
            list(first["corruptions"]),
            int(first["stream-rounds"]),
        )


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in what a client that came back differs from what it said at first; empty when in nothing that counts."""
    for key in (*COMMON, *OWN):
        if now.get(key) != before[key]:
            return f"{key} = {now.get(key)!r}, at first it said {before[key]!r}"
    return ""
