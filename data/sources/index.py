"""The index file of a device's data: what the last scan found, and the content that was ever in the test split."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedtta.settings.files import write_atomically

SCHEMA = 1


class Entry(NamedTuple):
    """What a scan found of a usable sample: its stamp, see `Source`, the hash of its content, and its patient."""

    stamp: Any
    identity: str
    patient: str


@dataclass
class Index:
    """What a device remembers of its data between scans.

    Parameters
    ----------
    path : Path or None
        The file, written atomically; None remembers nothing.
    key : dict
        Source, limits, and whether there is a window and patients are read, as JSON values. Entries of another key are
        forgotten, apart from those without a window, see `windowless`. `tested` is never forgotten.
    entries : dict
        Name → `Entry` of every usable sample.
    tested : set of str
        Identities of all samples that were ever in the test split.
    windowless : bool
        Whether the entries are of a scan without a window, and this one has a window: they hold but for 16-bit colours.
    note : str
        What is wrong with the file that was found; "" if nothing is.
    """

    path: Path | None
    key: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    tested: set[str] = field(default_factory=set)
    windowless: bool = False
    note: str = ""

    @classmethod
    def load(cls, path: Path | None, key: dict[str, Any]) -> Index:
        """Read the file; without one, or with a damaged one (noted), the index is empty."""
        if path is None or not path.exists():
            return cls(path, key)
        try:
            return cls(path, key, *_parse(json.loads(path.read_text(encoding="utf-8")), key))
        except (ValueError, TypeError, KeyError, AttributeError):
            lost = "the index of the data was damaged and is rebuilt; what was tested before is not known any more"
            return cls(path, key, note=lost)

    def find(self, name: str, stamp: Any) -> Entry | None:
        """Return the entry of a sample that has not changed since the last scan, else None."""
        found = self.entries.get(name)
        return found if found is not None and stamp is not None and found.stamp == stamp else None

    def save(self, entries: dict[str, Entry], tested: set[str]) -> None:
        """Replace the entries, add to what was tested, and write the file if anything changed.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        everything = self.tested | tested
        changed = entries != self.entries or everything != self.tested or self.note
        self.entries, self.tested = entries, everything
        if self.path is not None and (changed or not self.path.exists()):
            content = {
                "schema": SCHEMA,
                "key": self.key,
                "entries": {name: (entry.stamp, entry.identity) for name, entry in entries.items()},
                "patients": {name: entry.patient for name, entry in entries.items() if entry.patient},
                "tested": sorted(everything),
            }
            write_atomically(self.path, json.dumps(content).encode())


def _parse(content: Any, key: dict[str, Any]) -> tuple[dict[str, Entry], set[str], bool]:
    """Return entries, what was tested, and `windowless`; an error of some type for another form than that of `save`."""
    if content["schema"] != SCHEMA:
        raise ValueError(f"schema {content['schema']}")
    tested = content["tested"]
    if not isinstance(tested, list) or not all(isinstance(one, str) for one in tested):
        raise TypeError("tested")
    patients, found = content.get("patients", {}), content["entries"].items()
    entries = {name: Entry(stamp, str(identity), str(patients.get(name, ""))) for name, (stamp, identity) in found}
    windowless = content["key"] != key and content["key"] == {**key, "windowed": False}
    return entries if windowless or content["key"] == key else {}, set(tested), windowless
