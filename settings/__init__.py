"""The schema of everything a user can set, and how it is parsed; server and clients share it."""

from fedtta.settings.fields import SettingsError
from fedtta.settings.names import class_names, is_number, name_order
from fedtta.settings.parse import (
    add_arguments,
    assignments,
    from_arguments,
    from_config,
    from_json,
    from_toml,
    parse_class_map,
    to_json,
    to_toml,
    words,
)
from fedtta.settings.schema import GROUPS, Scalar, Settings, exactly, keys_in

__all__ = [
    "GROUPS",
    "Scalar",
    "Settings",
    "SettingsError",
    "add_arguments",
    "assignments",
    "class_names",
    "exactly",
    "from_arguments",
    "from_config",
    "from_json",
    "from_toml",
    "is_number",
    "keys_in",
    "name_order",
    "parse_class_map",
    "to_json",
    "to_toml",
    "words",
]
