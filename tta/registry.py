"""Adapters by name: looking one up, reading its options, creating one.

What an adapter is and needs stands on its class (`fedtta.tta.base.Adapter`); here is one line a method. Names can be
read without torch; a class is imported when it is looked up.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from fedtta.tta.base import Adapter
    from fedtta.tta.knn_per import Datastore
    from fedtta.tta.statistics import Statistics

#: Name → "module:Class".
PATHS = {
    "none": "fedtta.tta.heads:NoAdaptation",
    "personal": "fedtta.tta.heads:Personal",
    "fixed_mix": "fedtta.tta.heads:FixedMix",
    "fedthe": "fedtta.tta.fedthe:FedTHE",
    "btfl": "fedtta.tta.btfl:BTFL",
    "memo": "fedtta.tta.memo:MEMO",
    "fedthe_plus": "fedtta.tta.fedthe_plus:FedTHEPlus",
    "atp": "fedtta.tta.atp:ATP",
    "bn_adapt": "fedtta.tta.bn_adapt:BNAdapt",
    "tent": "fedtta.tta.tent:Tent",
    "cotta": "fedtta.tta.cotta:CoTTA",
    "rotta": "fedtta.tta.rotta:RoTTA",
    "roid": "fedtta.tta.roid:ROID",
    "bbn": "fedtta.tta.bbn:BBN",
    "eata": "fedtta.tta.eata:EATA",
    "ttt": "fedtta.tta.ttt:TTT",
    "t3a": "fedtta.tta.t3a:T3A",
    "shot": "fedtta.tta.shot:SHOT",
    "surgical": "fedtta.tta.surgical:Surgical",
    "em": "fedtta.tta.label_shift:EM",
    "bbse": "fedtta.tta.label_shift:BBSE",
    "tsa": "fedtta.tta.tsa:TSA",
    "knn_per": "fedtta.tta.knn_per:KNNPer",
    "fedrod": "fedtta.tta.heads:FedRoD",
    "fedicon": "fedtta.tta.fedicon:FedICON",
    "auto": "fedtta.tta.auto:Auto",
}

#: Adapters of arithmetic on a network's outputs alone: with a network that gives numpy arrays they need no torch. The
#: others train, or replace layers, or keep tensors. Of auto it holds if it does of its candidates.
LIGHT = ("none", "personal", "fixed_mix", "fedrod", "fedthe", "btfl", "t3a", "em", "bbse", "auto")


class _Adapters(Mapping[str, "type[Adapter]"]):
    """Name → class, imported at the first look-up."""

    def __getitem__(self, name: str) -> type[Adapter]:
        module, _, member = PATHS[name].partition(":")
        found: type[Adapter] = getattr(importlib.import_module(module), member)
        return found

    def __contains__(self, name: object) -> bool:
        return name in PATHS  # imports nothing

    def __iter__(self) -> Iterator[str]:
        return iter(PATHS)

    def __len__(self) -> int:
        return len(PATHS)


#: Every adapter class by name.
ADAPTERS: Mapping[str, type[Adapter]] = _Adapters()


def info(name: str) -> type[Adapter]:
    """Return the class of `name`; raise ValueError if there is none, listing what exists, or if it has another name."""
    if name not in ADAPTERS:
        raise ValueError(f"unknown adapter {name!r}; there are: {_listed(ADAPTERS)}")
    if (found := ADAPTERS[name]).name != name:  # results and messages would have two names for one thing
        raise ValueError(f"adapter {name!r}: {PATHS[name]} says name = {found.name!r}; allowed is one name in both")
    return found


def candidates_of(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the candidates that the options of an adapter name, if it chooses among others (`fedtta.tta.auto`).

    Raises
    ------
    ValueError
        There is no such adapter, or a candidate is none or chooses among others itself.
    """
    if "candidates" not in info(name).needs:
        return ()
    named = tuple(filter(None, str(options.get("among", "")).split("+")))
    if nested := [one for one in named if "candidates" in info(one).needs]:
        raise ValueError(f"{nested[0]} cannot be a candidate")
    return named


def needs_of(name: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Return what an adapter needs, and the candidates that its options name; raises as `candidates_of`."""
    return info(name).needs.union(*(info(one).needs for one in candidates_of(name, options)))


def create(
    name: str,
    model: nn.Module,
    statistics: Statistics | None = None,
    rates: Mapping[str, float] | None = None,
    datastore: Datastore | None = None,
    candidates: Any = None,
    clients: int | None = None,
    **options: Any,
) -> Adapter:
    """Return a new adapter.

    Parameters
    ----------
    name : str
        A key of `ADAPTERS`.
    model : nn.Module
        The network it predicts with.
    statistics : Statistics or None
        The client's statistics of the training data.
    rates : mapping or None
        Learned adaptation rates, if the adapter needs them.
    datastore : Datastore or None
        The client's memorised samples, if the adapter needs them.
    candidates : Candidates or None
        What the adapter chooses from, if it needs that (`fedtta.tta.auto`).
    clients : int or None
        How many clients the means in `statistics` are over, of which some options make use.
    **options
        Arguments of the class; see `Adapter.options`.

    Raises
    ------
    ValueError
        The name or an option is unknown (the message lists what exists), a value has the wrong type or range, or
        rates, memorised samples or candidates that the adapter needs are missing.
    """
    adapter = info(name)
    declared_options = adapter.options
    for option, value in options.items():
        expected = _option_type(adapter, declared_options, option)
        if not _fits(value, expected):
            raise ValueError(f"{name}: {option}={value!r} is not {_describe(expected)}")
    constructor: Any = adapter
    accepted = inspect.signature(constructor).parameters
    given: dict[str, Any] = {"statistics": statistics} if "statistics" in accepted else {}
    if "clients" in adapter.needs:
        given["clients"] = clients
    for need, value, what in (
        ("rates", rates, "learned adaptation rates"),
        ("datastore", datastore, "memorised samples"),
        ("candidates", candidates, "candidates that were calibrated on labelled samples"),
    ):
        if need in adapter.needs:
            if value is None:
                raise ValueError(f"{name} needs {what}")
            given[need] = value
    return constructor(model, **given, **options)


def parse_options(name: str, texts: dict[str, str]) -> dict[str, Any]:
    """Return options given as text, typed as the constructor of adapter `name` wants them.

    Example: `parse_options("fedthe", {"beta": "1", "objective": "em"})` gives `{"beta": 1.0, "objective": "em"}`.

    Raises
    ------
    ValueError
        The name or an option is unknown, or a text is no value of the option's type; the message says what is allowed.
    """
    adapter = info(name)
    declared_options = adapter.options
    return {
        option: _parse(name, option, text, _option_type(adapter, declared_options, option))
        for option, text in texts.items()
    }


def _option_type(adapter: type[Adapter], declared_options: dict[str, tuple[Any, Any]], option: str) -> Any:
    if option not in declared_options:
        raise ValueError(f"{adapter.name} has no option {option!r}; there are: {_listed(declared_options)}")
    return declared_options[option][0]


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
