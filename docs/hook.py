"""MkDocs hook: adds the generated pages to the site and fills the markers of the written ones.

A marker is a line `<!-- generated: NAME -->`; `docs.generated.SECTIONS` lists the names.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs import generated  # noqa: E402

#: Shapes in docstrings, such as `[clients][K]`, look like links to mkdocs-autorefs; a link that is meant names a path.
NO_LINK = re.compile(r"\.py:\d+: .*Could not find cross-reference target '\w+'")
MARKER = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the generated pages to the sections of the navigation that they belong to."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("mkdocs.plugins.mkdocs_autorefs") and isinstance(logger, logging.Logger):
            logger.addFilter(lambda record: not NO_LINK.search(record.getMessage()))
    for entry in config.nav or []:
        for title, children in entry.items():
            if folder := generated.FOLDERS.get(title):
                children += [{name: path} for name, path in generated.navigation(folder)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every generated page that no written page replaces."""
    for path, text in generated.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace markers by what the code and the kept results say."""

    def filled(match: re.Match[str]) -> str:
        try:
            return generated.section(match[1])
        except KeyError as error:
            raise PluginError(f"marker {match[0]}: {error}") from error

    return MARKER.sub(filled, markdown)
