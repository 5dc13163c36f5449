"""Names in a device's own config: of the device and of its data; without torch and without Flower."""

from __future__ import annotations

import re
from pathlib import Path

from fedtta.messages.replies import NAME
from fedtta.settings import SettingsError
from fedtta.settings.names import PATH_KINDS

#: Values by which a device's file leaves a setting to the run.
LEFT = {"max-skipped": -1, "image-cache-mb": 0}
#: Packages whose versions a node tells.
SOFTWARE = ("fedtta", "flwr", "torch")
#: Tables of a device's file; every other key stands at the top level.
TABLES = ("policy",)


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


def absolute_source(text: str, folder: Path) -> str:
    """Return the text of a data source whose relative path is relative to `folder`.

    "hf:" may hold the name of a data set instead of a path: it is a path where such a folder exists.
    """
    kind, colon, rest = text.partition(":")
    if not (colon and rest) or kind not in PATH_KINDS:
        return text
    path = folder / Path(rest).expanduser()
    return text if kind == "hf" and not path.exists() else f"{kind}:{path}"
