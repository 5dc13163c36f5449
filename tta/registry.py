"""The table of adapters: what each one is, needs and offers, readable without torch.

A server refuses a bad combination before training from this table alone; the class behind a row is imported when an
adapter is made or when its options, which are its constructor's arguments, are asked for.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from tta.base import Adapter
    from tta.statistics import Statistics

#: What an adapter may ask of the training before it, of the model, or of the machine.
NEEDS = frozenset({"personal_head", "descriptor", "dle", "entropy", "gradients", "batchnorm"})


@dataclass(frozen=True)
class AdapterInfo:
    """One row of the table.

    Parameters
    ----------
    name : str
        As in settings and tables.
    path : str
        "module:Class".
    paper : str
        Title and venue; empty for a plain baseline.
    adapts : str
        What changes at test time.
    per : "sample" or "batch"
        Whether a sample's result is independent of how the stream is cut, with default options.
    needs : frozenset of str
        A subset of `NEEDS`.

    Raises
    ------
    ValueError
        A need is unknown.
    """

    name: str
    path: str
    paper: str
    adapts: str
    per: Literal["sample", "batch"]
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.needs <= NEEDS:
            raise ValueError(f"{self.name} has unknown needs {sorted(self.needs - NEEDS)}; there are: {_listed(NEEDS)}")

    @property
    def class_name(self) -> str:
        """Name of the class, as `tta` exports it."""
        return self.path.partition(":")[2]

    def load(self) -> type[Adapter]:
        """Import and return the class (this imports torch)."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """Name → (type, default) of every option, from the constructor (this imports torch)."""
        constructor = self.load().__init__
        hints = typing.get_type_hints(constructor)
        parameters = inspect.signature(constructor).parameters
        fixed = ("self", "model", "statistics")
        return {name: (hints[name], given.default) for name, given in parameters.items() if name not in fixed}


_FEDTHE = "Test-Time Robust Personalization for Federated Learning (ICLR 2023)"
_BTFL = "BTFL: A Bayesian-based Test-Time Generalization Method (KDD 2025)"
_MEMO = "MEMO: Test Time Robustness via Adaptation and Augmentation (NeurIPS 2022)"

_ROWS = (
    AdapterInfo("none", "tta.none:NoAdaptation", "", "nothing: the global head", "sample"),
    AdapterInfo(
        "personal", "tta.personal:Personal", "", "nothing: the personal head", "sample", frozenset({"personal_head"})
    ),
    AdapterInfo(
        "fixed_mix",
        "tta.fixed_mix:FixedMix",
        "",
        "nothing: a fixed mixture of the heads",
        "sample",
        frozenset({"personal_head"}),
    ),
    AdapterInfo(
        "fedthe",
        "tta.fedthe:FedTHE",
        _FEDTHE,
        "the weight of the global head",
        "sample",
        frozenset({"personal_head", "descriptor"}),
    ),
    AdapterInfo(
        "btfl",
        "tta.btfl:BTFL",
        _BTFL,
        "the weight of the global head",
        "sample",
        frozenset({"personal_head", "dle", "entropy"}),
    ),
    AdapterInfo("memo", "tta.memo:MEMO", _MEMO, "all parameters, for one sample", "sample", frozenset({"gradients"})),
    AdapterInfo(
        "fedthe_plus",
        "tta.fedthe_plus:FedTHEPlus",
        _FEDTHE,
        "the weight of the global head, then all parameters for one sample",
        "sample",
        frozenset({"personal_head", "descriptor", "gradients"}),
    ),
)

#: Every adapter by name.
ADAPTERS: dict[str, AdapterInfo] = {row.name: row for row in _ROWS}


def info(name: str) -> AdapterInfo:
    """Return the row of `name`; raise ValueError listing what exists if there is none."""
    if name not in ADAPTERS:
        raise ValueError(f"unknown adapter {name!r}; there are: {_listed(ADAPTERS)}")
    return ADAPTERS[name]


def create(name: str, model: nn.Module, statistics: Statistics | None = None, **options: Any) -> Adapter:
    """Return a new adapter.

    Parameters
    ----------
    name : str
        A key of `ADAPTERS`.
    model : nn.Module
        The network it predicts with.
    statistics : Statistics or None
        What the client knows from training.
    **options
        Arguments of the class; see `AdapterInfo.options`.

    Raises
    ------
    ValueError
        The name or an option is unknown (the message lists what exists), or a value has the wrong type or range.
    """
    row = info(name)
    known = row.options
    for option, value in options.items():
        expected = _option_type(row, known, option)
        if not _fits(value, expected):
            raise ValueError(f"{name}: {option}={value!r} is not {_describe(expected)}")
    constructor: Any = row.load()
    return constructor(model, statistics, **options)


def parse_options(name: str, texts: dict[str, str]) -> dict[str, Any]:
    """Return options given as text, typed as the constructor of adapter `name` wants them.

    Example: `parse_options("fedthe", {"beta": "1", "objective": "em"})` gives `{"beta": 1.0, "objective": "em"}`.

    Raises
    ------
    ValueError
        The name or an option is unknown, or a text is no value of the option's type; the message says what is allowed.
    """
    row = info(name)
    known = row.options
    return {option: _parse(name, option, text, _option_type(row, known, option)) for option, text in texts.items()}


def _option_type(row: AdapterInfo, known: dict[str, tuple[Any, Any]], option: str) -> Any:
    if option not in known:
        raise ValueError(f"{row.name} has no option {option!r}; there are: {_listed(known)}")
    return known[option][0]


def _alternatives(expected: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    is_union = typing.get_origin(expected) in (typing.Union, types.UnionType)
    return typing.get_args(expected) if is_union else (expected,)


def _fits(value: Any, expected: Any) -> bool:
    """Say whether `value` suits the annotation `expected`; an int passes as a float, a bool as neither."""
    for kind in _alternatives(expected):
        if typing.get_origin(kind) is Literal:
            fits = value in typing.get_args(kind)
        elif kind in (int, float):
            fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
        elif isinstance(kind, type):
            fits = isinstance(value, kind)
        else:
            fits = callable(value)  # an annotation such as Callable[[Tensor, Generator], Tensor]
        if fits:
            return True
    return False


def _parse(name: str, option: str, text: str, expected: Any) -> Any:
    """Return `text` as the first alternative of `expected` that it can be read as."""
    for kind in _alternatives(expected):
        if typing.get_origin(kind) is Literal and text in typing.get_args(kind):
            return text
        if kind is bool and text in ("true", "false"):
            return text == "true"
        if kind is type(None) and text == "none":
            return None
        if kind is str:
            return text
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    raise ValueError(f"{name}: {option}={text!r} is not {_describe(expected)}")


def _describe(expected: Any) -> str:
    """Return the allowed values of an annotation, in words."""
    words = []
    for kind in _alternatives(expected):
        if typing.get_origin(kind) is Literal:
            words.append("one of " + ", ".join(map(str, typing.get_args(kind))))
        elif kind in (int, float):
            words.append({int: "an integer", float: "a number"}[kind])
        elif kind is bool:
            words.append("true or false")
        elif kind is type(None):
            words.append("none")
        elif isinstance(kind, type):
            words.append(f"a {kind.__name__}")
        else:
            words.append("a function (which no text can name)")
    return " or ".join(words)


def _listed(names: typing.Iterable[str]) -> str:
    return ", ".join(sorted(names))
