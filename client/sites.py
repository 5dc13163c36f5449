"""Nodes of a simulation: the clients of one divided data set, or devices with data of their own from their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedtta.client.names import LEFT, TABLES, absolute_source
from fedtta.client.node import Node
from fedtta.client.state import MemoryState
from fedtta.settings import Settings, SettingsError, from_toml, keys_in, name_order, parse_class_map

#: Keys of a device's file that say where it runs, which the simulation decides.
ELSEWHERE = ("state-dir", "device")


def simulated_nodes(settings: Settings) -> list[Node]:
    """Return the nodes of a simulation in the order of their names, each with private state of its own.

    With `devices` every file is one node; otherwise they are the clients "0" to "N-1" of the data set.

    Raises
    ------
    SettingsError
        No file is found, one cannot be read, has no name or no data, a key that no agent has, or a value that is not
        allowed, or two have the same name.
    """
    if settings.devices:
        nodes = _from_files(str(Path(settings.devices).expanduser().absolute()))  # a cache of files, not of words
        memory = max(1, settings.image_cache_mb // len(nodes))  # they share this machine's
        return [
            replace(node, state=MemoryState(), settings={"image-cache-mb": memory, **node.settings}) for node in nodes
        ]
    return [Node(str(i), MemoryState()) for i in range(settings.clients)]


def device_files(pattern: str) -> list[Path]:
    """Return the files of `devices`, a path or a glob pattern below a folder, whose own name is no pattern.

    Raises
    ------
    SettingsError
        There is none.
    """
    path = Path(pattern).expanduser().absolute()
    top = next(folder for folder in path.parents if folder.is_dir())
    files = [path] if path.is_file() else sorted(top.glob(str(path.relative_to(top))))
    if not files:
        raise SettingsError(f"devices = {pattern!r}: no such file")
    return files


@lru_cache(maxsize=4)
def _from_files(pattern: str) -> Sequence[Node]:
    nodes: dict[str, Node] = {}
    for path in device_files(pattern):
        content = from_toml(path, TABLES)
        try:
            node = _from_content(content, path.parent)
            if node.name in nodes:
                raise SettingsError(f"name = {node.name!r}: another device has it")
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from error
        nodes[node.name] = node
    return tuple(sorted(nodes.values(), key=lambda node: name_order(node.name)))


def _from_content(content: Mapping[str, Any], folder: Path) -> Node:
    """Return the node of a `device.toml` in a folder; keys of the agent alone are checked, and play no part."""
    from fedtta.client.config import AgentConfig

    AgentConfig.from_mapping({"state-dir": ".", **content}, folder)
    if missing := [key for key in ("name", "data") if not content.get(key)]:
        raise SettingsError(f"{', '.join(missing)}: must be set")
    return Node(
        str(content["name"]),
        MemoryState(),
        absolute_source(str(content["data"]), folder),
        str(content.get("role", "")) or None,
        {
            key: content[key]
            for key in keys_in("node")
            if key in content and key not in ELSEWHERE and content[key] != LEFT.get(key)
        },
        class_map=parse_class_map(str(content.get("class-map", ""))),
    )
