"""The one schema of everything a user can set.

Server and client read the same keys and may not import one another, so the schema has a room of
its own; it imports nothing of the project.
"""

from settings.parse import add_arguments, assignments, from_arguments, from_config, from_toml, to_toml
from settings.schema import Scalar, Settings, SettingsError

__all__ = [
    "Scalar",
    "Settings",
    "SettingsError",
    "add_arguments",
    "assignments",
    "from_arguments",
    "from_config",
    "from_toml",
    "to_toml",
]
