"""Names in a device's own config: of the device, of its data, and of classes; without torch and without Flower."""

from __future__ import annotations

import re
from pathlib import Path

from fedtta.messages.replies import NAME
from fedtta.settings import SettingsError

#: Values by which a device's file leaves a setting to the run.
LEFT = {"max-skipped": -1, "image-cache-mb": 0}
#: Packages whose versions a node tells.
SOFTWARE = ("fedtta", "flwr", "torch")
#: Tables of a device's file; every other key stands at the top level.
TABLES = ("policy",)
#: Kinds of sources whose text is a path.
PATH_KINDS = ("folder", "npz", "hf")


def check_name(name: str) -> str:
    """Return a client's name.

    Raises
    ------
    SettingsError
        It is empty, too long, or has characters that a file name should not have.
    """
    if not re.fullmatch(NAME, name) or set(name) == {"."}:
        raise SettingsError(f"name = {name!r}: allowed are 1 to 64 letters, digits, '.', '_' and '-'")
    return name


def parse_class_map(text: str) -> dict[str, str]:
    """Parse 'pneumo=pneumonia;healthy=normal': the device's class names, and what the run calls them.

    Raises
    ------
    SettingsError
        A part is not of the form own=run's, or a name occurs twice on the left.
    """
    names: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        own, equals, target = (piece.strip() for piece in part.partition("="))
        if not (own and equals and target):
            raise SettingsError(f"class-map: {part!r} is not of the form own=run's")
        if own in names:
            raise SettingsError(f"class-map: {own} is given twice")
        names[own] = target
    return names


def absolute_source(text: str, folder: Path) -> str:
    """Return the text of a data source whose relative path is relative to `folder`.

    "hf:" may hold the name of a data set instead of a path: it is a path where such a folder exists.
    """
    kind, colon, rest = text.partition(":")
    if not (colon and rest) or kind not in PATH_KINDS:
        return text
    path = folder / Path(rest).expanduser()
    return text if kind == "hf" and not path.exists() else f"{kind}:{path}"
