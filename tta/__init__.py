"""Test-time adaptation: methods that adapt while they predict, one file a method, each an `Adapter`.

An adapter takes samples in stream order and returns probabilities: `predict`, `reset`, `state_dict`, `load_state_dict`,
`report`. Nothing here depends on federated learning: `fedtta.tta.BTFL` works in a plain PyTorch program. Names are
imported when they are first used, so that the names of the methods can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedtta.tta.registry import ADAPTERS, PATHS, create, parse_options

if TYPE_CHECKING:
    from fedtta.tta.atp import ATP
    from fedtta.tta.auto import Auto
    from fedtta.tta.base import Adapter
    from fedtta.tta.bbn import BBN
    from fedtta.tta.bn_adapt import BNAdapt
    from fedtta.tta.btfl import BTFL
    from fedtta.tta.collaborator import Collaborator
    from fedtta.tta.cotta import CoTTA
    from fedtta.tta.eata import EATA
    from fedtta.tta.fedicon import FedICON
    from fedtta.tta.fedthe import FedTHE
    from fedtta.tta.fedthe_plus import FedTHEPlus
    from fedtta.tta.heads import FedRoD, FixedMix, NoAdaptation, Personal
    from fedtta.tta.knn_per import KNNPer
    from fedtta.tta.label_shift import BBSE, EM
    from fedtta.tta.memo import MEMO
    from fedtta.tta.roid import ROID
    from fedtta.tta.rotta import RoTTA
    from fedtta.tta.shot import SHOT
    from fedtta.tta.statistics import Statistics
    from fedtta.tta.surgical import Surgical
    from fedtta.tta.t3a import T3A
    from fedtta.tta.tent import Tent
    from fedtta.tta.tsa import TSA
    from fedtta.tta.ttt import TTT

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
    "Auto",
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
    "Adapter": "fedtta.tta.base:Adapter",
    "Collaborator": "fedtta.tta.collaborator:Collaborator",
    "Statistics": "fedtta.tta.statistics:Statistics",
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
    if f"{__name__}.{name}" in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY) | {module.rpartition(".")[2] for module in _MODULES})
