"""Devices that are broken on purpose are found: twelve places of the project, each by the case that comes by it.

`python -m tests.gpu.mutants` breaks every place that names a device.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import replace

import pytest

from tests.gpu.mutants import broken, device_mutants, function, shows, without_device
from tests.mutants import Mutant

#: Function → the case that comes by it.
PLACES = {
    "fedtta.client.adaptation:score": "collaborative tent",
    "fedtta.client.device:Device.end": "client rounds",
    "fedtta.client.serving:Served.given": "agent none",
    "fedtta.client.statistics:summarise": "client rounds",
    "fedtta.client.network:_arrays": "client keeping",
    "fedtta.client.algorithms.training:labelled": "client rounds",
    "fedtta.client.algorithms.training:mean_loss": "client rounds",
    "fedtta.client.cohort:Cohort._descend": "vectorised training",
    "fedtta.data.images:Images.rows": "client rounds",
    "fedtta.data.corruptions._ops:draw": "corruptions",
    "fedtta.tta.tsa:TSA._reset": "adapter tsa",
    "fedtta.tta.arrays:to_host": "agent none",
}


def bugs_of(name: str) -> list[Mutant]:
    module = name.partition(":")[0]
    return device_mutants(module, inspect.getsource(importlib.import_module(module))).get(name, [])


def test_without_device() -> None:
    changed = {
        "x.to(y.device)": "x",
        "x.to(device)": "x",
        "x.to('cuda')": "x",
        "x.cpu()": "x",
        "to_device(x, y.device)": "x",
        "x.to(like)": "x.to(like.dtype)",
        "f(n, device=d, dtype=t)": "f(n, dtype=t)",
        "x.numpy(force=True)": "x.numpy()",
        "x.to(dtype)": None,
        "x.to(torch.float32)": None,
        "f(n, dtype=t)": None,
        "x.numpy()": None,
    }
    for before, after in changed.items():
        call = ast.parse(before, mode="eval").body
        assert isinstance(call, ast.Call)
        found = without_device(call)
        assert (None if found is None else ast.unparse(found)) == after


def test_a_function_is_broken_for_a_while() -> None:
    name = "fedtta.tta.arrays:to_host"
    (bug,) = bugs_of(name)
    assert (bug.before, bug.after) == ("array.detach().cpu()", "array.detach()")
    code = function(name)[1].__code__
    with broken(name, bug):
        assert function(name)[1].__code__ is not code
        assert "cpu" not in function(name)[1].__code__.co_names
    assert function(name)[1].__code__ is code


@pytest.mark.parametrize("name", list(PLACES))
def test_a_broken_device_is_found(name: str) -> None:
    bugs = bugs_of(name)
    assert bugs, f"{name} names no device any more: choose another place"
    for bug in bugs:
        assert shows(PLACES[name], name, bug), f"line {bug.line}: {bug.before} -> {bug.after} is not found"


def test_what_is_not_broken_shows_nothing() -> None:
    name = "fedtta.tta.arrays:to_host"
    (bug,) = bugs_of(name)
    assert shows("agent none", name, replace(bug, after=bug.before)) == ""
