"""Names: the order of clients, class names from a setting or a file, sources of data, and hosts."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from pathlib import Path

from fedtta.settings.fields import SettingsError

#: Kinds of sources of a device's own data whose text is a path.
PATH_KINDS = ("folder", "npz", "hf")
#: A class of one's own: "package.module:Class", or "package.module:Class(text)".
SOURCE_CLASS = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?:\((?P<text>.*)\))?", re.DOTALL)


def is_number(name: str) -> bool:
    """Return whether a name is a decimal number in its shortest form, as those of a divided data set are."""
    return re.fullmatch(r"0|[1-9][0-9]*", name) is not None


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback, which no other machine reaches; of names only localhost is."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@lru_cache(maxsize=1 << 17)  # asked for every client, several times a round
def name_order(name: str) -> tuple[int, int, str]:
    """Return the sort key of a client's name: numbers first, by value, then the others as text.

    Everything that depends on the order of clients (sums, cohorts, partition indices) follows it, so results do not
    depend on the order of arrival.
    """
    return (0, int(name), "") if is_number(name) else (1, 0, name)


def class_names(classes: str) -> str:
    """Return the class names of the setting `classes` as a comma-separated list; a text file has one name a line.

    Empty lines of a file do not count. To be called on the machine that submits a run: the others have no such file.

    Raises
    ------
    SettingsError
        The file does not exist or is no text, there are fewer than two names, or one occurs twice or has a comma.
    """
    if not classes.strip():
        return ""
    path = Path(classes).expanduser()
    where = f"classes = {classes!r}"
    if "," in classes and not _is_file(path):
        names = [name.strip() for name in classes.split(",")]
    else:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except FileNotFoundError:
            raise SettingsError(
                f"{where}: no such file; allowed are names 'a,b,...' or a file, a name a line"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{where}: {error}") from error
        names = [line.strip() for line in lines if line.strip()]
        where = f"classes: file {path}"
    for name in names:
        if not name or "," in name or not name.isprintable():
            raise SettingsError(f"{where}: class name {name!r}; allowed are printable names without a comma")
        if names.count(name) > 1:
            raise SettingsError(f"{where}: {name!r} is named twice")
    if len(names) < 2:
        raise SettingsError(f"{where}: {len(names)} class names; allowed are two or more")
    return ",".join(names)


def check_source(text: str) -> str:
    """Return the text of a device's own data, if it has the form of one.

    Raises
    ------
    SettingsError
        It has another form; nothing is opened or imported.
    """
    kind, _, rest = text.partition(":")
    if not (rest and kind in PATH_KINDS) and not SOURCE_CLASS.fullmatch(text):
        raise SettingsError(f"data = {text!r}: allowed are folder:PATH, npz:FILE, hf:PATH and package.module:Class")
    return text


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a list of names that is too long for a path
        return False
