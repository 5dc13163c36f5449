"""Settings from Flower's run config, a message, a TOML file or the command line."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from fedtta.settings.fields import SettingsError, near, types_of_fields
from fedtta.settings.names import class_names
from fedtta.settings.schema import GROUPS, Scalar, Settings, fields_by_key


def from_config(config: Mapping[str, Any], ignore: Iterable[str] = ()) -> Settings:
    """Build settings from a flat mapping of hyphenated keys, such as Flower's run config.

    Parameters
    ----------
    config : mapping
        Key → value; what is missing keeps its default.
    ignore : iterable of str
        Keys of other owners.

    Raises
    ------
    SettingsError
        A key is unknown, or a value is of the wrong type or impossible.
    """
    fields, skip = fields_by_key(), set(ignore)
    values: dict[str, Any] = {}
    for key, value in config.items():
        if key in skip:
            continue
        if key not in fields:
            raise SettingsError(_unknown(key, fields))
        values[fields[key].name] = value
    return Settings(**values)


@lru_cache(maxsize=64)
def from_json(text: str) -> Settings:
    """Build settings from one JSON object of hyphenated keys, as requests carry it; parsed once per process.

    Raises
    ------
    SettingsError
        The text is no JSON object, or as `from_config`.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"settings: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"settings: allowed is a JSON object, not {type(config).__name__}")
    return from_config(config)


@lru_cache(maxsize=64)
def to_json(settings: Settings) -> str:
    """Return the settings as JSON text that `from_json` reads."""
    return json.dumps(settings.flat(), allow_nan=False)


def from_toml(path: str | Path, tables: Collection[str] = ()) -> dict[str, Any]:
    """Read a TOML file of flat hyphenated keys and return it as a mapping for `from_config`.

    Parameters
    ----------
    tables : collection of str
        Names of tables that the file may have, each a mapping in the result.

    Raises
    ------
    SettingsError
        The file is missing or not TOML; the message names it.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows begin it with a mark
    except (OSError, ValueError, RecursionError) as error:  # beside TOMLDecodeError, of bytes and numbers
        raise SettingsError(f"settings file {path}: {error}") from error
    return flatten_toml(content, path, tables)


def flatten_toml(content: Mapping[str, Any], path: str | Path, tables: Collection[str] = ()) -> dict[str, Any]:
    """Refuse tables in a settings file, other than `tables`: every other key stands at the top level."""
    for key, value in content.items():
        if isinstance(value, dict) and key not in tables:
            raise SettingsError(f"settings file {path}: table [{key}]; allowed are keys at the top level only")
    return dict(content)


def to_toml(settings: Settings) -> str:
    """Return the settings as TOML text that `from_toml` reads back."""
    return tomli_w.dumps(settings.flat())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--settings FILE` and one `--key VALUE` for every setting."""
    parser.add_argument("--settings", metavar="FILE", help="TOML file of settings; the command line wins over it")
    sections: dict[str, Any] = {}
    for key, field in fields_by_key().items():
        name, text = field.metadata["groups"][0], field.metadata["help"].replace("%", "%%")
        if name not in sections:
            sections[name] = parser.add_argument_group(name, GROUPS[name])
        sections[name].add_argument(f"--{key}", metavar="VALUE", help=f"{text} (default: {field.default!r})")


def from_arguments(arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> Settings:
    """Build settings from `defaults`, then `--settings FILE`, then the command line; the later wins.

    A file of class names is read here.

    Raises
    ------
    SettingsError
        As `from_config`; a word that is no value of the setting's type is refused, naming the key.
    """
    config: dict[str, Any] = dict(defaults or {})
    if arguments.settings:
        config.update(from_toml(arguments.settings))
    for key in fields_by_key():
        word = getattr(arguments, key.replace("-", "_"))
        if word is not None:
            config[key] = convert(key, word)
    settings = from_config(config)
    return settings.replace(classes=class_names(settings.classes))  # a file of this machine


def convert(key: str, word: str) -> Scalar:
    """Turn a word from the command line into a value of the setting `key`."""
    fields = fields_by_key()
    if key not in fields:
        raise SettingsError(_unknown(key, fields))
    kind = types_of_fields(Settings)[fields[key].name]
    if kind is bool:
        meant = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if word.lower() not in meant:
            raise SettingsError(f"{key} = {word!r}: allowed are true and false")
        return meant[word.lower()]
    try:
        return kind(word)
    except ValueError as error:
        raise SettingsError(f"{key} = {word!r}: allowed is a value of type {kind.__name__}") from error


def assignments(text: str, key: str) -> dict[str, Scalar]:
    """Parse options such as 'width=4;norm=batch;bias=false' that the setting `key` holds.

    Whole numbers, decimal numbers, true and false become such values; everything else stays a string.

    Raises
    ------
    SettingsError
        As `words`.
    """
    return {name: _literal(word) for name, word in words(text, key).items()}


def parse_class_map(text: str) -> dict[str, str]:
    """Parse 'pneumo=pneumonia;healthy=normal': the device's class names, and what the run calls them.

    Raises
    ------
    SettingsError
        A part is not of the form own=run's, or a name occurs twice on the left.
    """
    return words(text, "class-map", form="own=run's")


def words(text: str, key: str, form: str = "name=value") -> dict[str, str]:
    """Return options such as `assignments` parses, each as it was written: a folder may be called 007.

    Raises
    ------
    SettingsError
        A part is not of this form, or a name occurs twice.
    """
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, word = (piece.strip() for piece in part.partition("="))
        if not (name and equals and word):
            raise SettingsError(f"{key}: {part!r} is not of the form {form}")
        if name in values:
            raise SettingsError(f"{key}: {name} is given twice")
        values[name] = word
    return values


def _literal(word: str) -> Scalar:
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _unknown(key: str, names: Mapping[str, Any]) -> str:
    return f"unknown setting {key!r}{near(key, names)}; there are: {', '.join(sorted(names))}"
