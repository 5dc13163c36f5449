"""What a measurement of speed is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One ratio, and the two sides of it.

    Parameters
    ----------
    what : str
        Such as "btfl, batch 512".
    ratio : float
    unit : str
        What `ours` and `other` are in.
    ours, other : float
    than : str
        What `other` is.
    target : float or None
        Where the ratio should be.
    least : bool
        Whether the target is a lower bound; otherwise it is an upper one.
    """

    what: str
    ratio: float
    unit: str
    ours: float
    other: float
    than: str
    target: float | None = None
    least: bool = False

    @property
    def mark(self) -> str:
        """Return a check mark or a cross; nothing without a target."""
        if self.target is None:
            return ""
        return "✓" if (self.ratio >= self.target if self.least else self.ratio <= self.target) else "✗"

    @property
    def wanted(self) -> str:
        """Return the target as it is printed."""
        return "" if self.target is None else f"{'≥' if self.least else '≤'} {self.target:g}"
