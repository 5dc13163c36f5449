"""Federated learning with test-time adaptation on the device: the one import name of all parts.

In a wheel the parts (`fedtta.tta`, `fedtta.client`, ...) are folders in this one. In a checkout, and in the bundle that
Flower sends to its nodes, they are folders beside it: there the search path of this package begins with them. The links
beside this file lead to the same folders; they are for programs that do not execute this, such as mypy and editors.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
if (_HERE / "settings").is_symlink() or not (_HERE / "settings").exists():
    __path__.insert(0, str(_HERE.parent))
