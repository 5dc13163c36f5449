"""`alerts.toml`: the rules of `fedtta.watch.alerts`, limits of single devices, and the webhook.

::

    silent-minutes = 10
    guard-holding-samples = 1000
    webhook = "https://hooks.example.org/fedtta"

    [devices."mobile-*"]
    silent-minutes = 240

A table in `devices` is for devices whose name matches its pattern; of several, the later one wins, key by key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import httpx

from fedtta.settings import SettingsError, from_toml
from fedtta.settings.fields import by_field, check_fields, setting
from fedtta.settings.names import is_loopback

DEVICES = "devices"  # the table of limits by pattern


@dataclass(frozen=True)
class Limits:
    """Limits of the rules about one device; a key is the field's name with hyphens, and 0 or false switches it off.

    Raises
    ------
    SettingsError
        A value has the wrong type or lies outside what is allowed.
    """

    silent_minutes: float = setting(10.0, "minutes without a sign of the device", low=0)
    guard_holding_samples: int = setting(1000, "images predicted while its guard holds", low=0)
    least_estimated_accuracy: float = setting(0.0, "estimated accuracy, a share", low=0, high=1)
    most_drift: float = setting(0.0, "drift, a share", low=0, high=1)
    least_disk_mb: int = setting(0, "free space on the disk of the state directory, MB", low=0)
    saving_fails: bool = setting(True, "whether the adapter's state cannot be saved")

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)

    def __getitem__(self, key: str) -> float:
        """Return a limit by its key."""
        return getattr(self, key.replace("-", "_"))


@dataclass(frozen=True)
class Rules(Limits):
    """All keys of `alerts.toml`; see `Limits`.

    Parameters
    ----------
    devices : tuple of (str, mapping)
        Pattern of names → the limits that differ, by key.
    """

    certificate_days: float = setting(30.0, "days for which the SuperLink's certificate is still valid", low=0)
    model_refused_by: int = setting(3, "devices whose last refused model is the same", low=0)
    webhook: str = setting("", "URL that is sent every alert that begins or ends; empty: none")
    devices: tuple[tuple[str, Mapping[str, Any]], ...] = field(default=())

    def __post_init__(self) -> None:
        """Check every field, and the limits of all patterns."""
        super().__post_init__()
        if self.webhook:
            check_webhook(self.webhook)
        for pattern, differing in self.devices:
            try:
                Limits(**by_field(Limits, differing))
            except SettingsError as error:
                raise SettingsError(f'[{DEVICES}."{pattern}"]: {error}') from error

    def limits_of(self, device: str) -> Limits:
        """Return the limits of a device."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(Limits)}
        for pattern, differing in self.devices:
            if fnmatchcase(device, pattern):
                values |= by_field(Limits, differing)
        return Limits(**values)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a TOML file.

        Raises
        ------
        SettingsError
            The file is missing or not TOML, a key is unknown, or a value is not allowed; the message names the file
            and the key.
        """
        try:
            return cls.from_mapping(from_toml(path, (DEVICES,)))
        except SettingsError as error:
            text = str(error)
            raise SettingsError(text if str(path) in text else f"{path}: {text}") from error

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> Self:
        """Build rules from hyphenated keys and the table `devices`."""
        values = by_field(cls, content)
        tables = values.get(DEVICES, {})
        if not isinstance(tables, Mapping) or not all(isinstance(one, Mapping) for one in tables.values()):
            raise SettingsError(f'{DEVICES} = {tables!r}: allowed are tables [{DEVICES}."<pattern>"]')
        return cls(**{**values, DEVICES: tuple(tables.items())})


def check_webhook(webhook: str) -> None:
    """Refuse what is no https URL; http is allowed to this machine.

    The message does not name the path, which often is a secret, nor what cannot be read as a host and a port: that may
    be a user's password.

    Raises
    ------
    SettingsError
    """
    allowed = "allowed are https://<host>/... and, to this machine, http://127.0.0.1:<port>/..."
    try:
        url = httpx.URL(webhook)
    except httpx.InvalidURL:
        raise SettingsError(f"webhook: its host, port or characters are not those of a URL; {allowed}") from None
    if url.userinfo:
        raise SettingsError(f"webhook = '{url.scheme}://...@{url.host}': no user or password; {allowed}")
    if not url.host or url.scheme not in ("http", "https") or (url.scheme == "http" and not is_loopback(url.host)):
        raise SettingsError(f"webhook = '{url.scheme}://{url.host}': {allowed}")
