"""Test-time adaptation: methods that adapt while they predict, one file a method, each an `Adapter`.

An adapter takes samples in stream order and returns probabilities: `predict`, `reset`, `state_dict`, `load_state_dict`,
`report`. Nothing here depends on federated learning: `tta.BTFL` works in a plain PyTorch program. Names are imported
when they are first used, so that the names of the methods can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tta.registry import ADAPTERS, PATHS, create, parse_options

if TYPE_CHECKING:
    from tta.atp import ATP
    from tta.base import Adapter
    from tta.bbn import BBN
    from tta.bn_adapt import BNAdapt
    from tta.btfl import BTFL
    from tta.collaborator import Collaborator
    from tta.cotta import CoTTA
    from tta.eata import EATA
    from tta.fedicon import FedICON
    from tta.fedthe import FedTHE
    from tta.fedthe_plus import FedTHEPlus
    from tta.heads import FedRoD, FixedMix, NoAdaptation, Personal
    from tta.knn_per import KNNPer
    from tta.label_shift import BBSE, EM
    from tta.memo import MEMO
    from tta.roid import ROID
    from tta.rotta import RoTTA
    from tta.shot import SHOT
    from tta.statistics import Statistics
    from tta.surgical import Surgical
    from tta.t3a import T3A
    from tta.tent import Tent
    from tta.tsa import TSA
    from tta.ttt import TTT

__all__ = [
    "ADAPTERS",
    "ATP",
    "BBN",
    "BBSE",
    "BTFL",
    "EATA",
    "EM",
    "MEMO",
    "ROID",
    "SHOT",
    "T3A",
    "TSA",
    "TTT",
    "Adapter",
    "BNAdapt",
    "CoTTA",
    "Collaborator",
    "FedICON",
    "FedRoD",
    "FedTHE",
    "FedTHEPlus",
    "FixedMix",
    "KNNPer",
    "NoAdaptation",
    "Personal",
    "RoTTA",
    "Statistics",
    "Surgical",
    "Tent",
    "create",
    "parse_options",
]

#: Public name → "module:name"; the methods come from the registry.
_LAZY = {
    "Adapter": "tta.base:Adapter",
    "Collaborator": "tta.collaborator:Collaborator",
    "Statistics": "tta.statistics:Statistics",
    **{path.partition(":")[2]: path for path in PATHS.values()},
}

_MODULES = {path.partition(":")[0] for path in _LAZY.values()}


def __getattr__(name: str) -> Any:
    """Import a public name or a method's module when it is first asked for."""
    if name in _LAZY:
        module, _, member = _LAZY[name].partition(":")
        value = getattr(importlib.import_module(module), member)
        globals()[name] = value
        return value
    if f"tta.{name}" in _MODULES:
        return importlib.import_module(f"tta.{name}")
    raise AttributeError(f"module 'tta' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY) | {module.partition(".")[2] for module in _MODULES})
