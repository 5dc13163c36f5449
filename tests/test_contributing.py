"""The code of CONTRIBUTING.md, run as it stands: new files beside the packages' own, rows added to the tables."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.tables.methods import entries
from client.evaluation import Row
from client.task import Task
from server.methods import METHODS, parse_rows, plan
from server.trainings import TRAININGS
from settings import Settings, SettingsError
from tests.client import tiny
from tests.server.test_run import SMALL, events, run
from tta import create

ROOT = Path(__file__).parent.parent
#: File → the table in it that a row belongs to.
TABLES = {
    "tta/registry.py": "PATHS",
    "client/rules/__init__.py": "RULES",
    "server/trainings.py": "TRAININGS",
    "server/methods.py": "METHODS",
}


def blocks() -> list[tuple[str, str]]:
    """(file, code) of every block of Python; its first line names the file."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^```python\n# (\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def rows_of(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """The rows in a block: entries of a dictionary, or of a tuple of things with a name."""
    if code.startswith('"'):
        return eval(f"{{{code}}}", names)
    return {row.name: row for row in eval(f"({code})", names)}


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is there after somebody did what the page says."""
    defined: dict[str, Any] = {}
    new: list[str] = []
    for file, code in blocks():
        if file in TABLES:
            module = importlib.import_module(module_of(file))
            for name, row in rows_of(code, {**vars(module), **defined}).items():
                assert name not in getattr(module, TABLES[file]), f"{name} is there already: {file}"
                monkeypatch.setitem(getattr(module, TABLES[file]), name, row)
            continue
        assert not (ROOT / file).exists(), f"{file} is no new file"
        path = tmp_path / "new" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        package = importlib.import_module(module_of(str(Path(file).parent)))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(path.parent)])
        made = importlib.import_module(module_of(file))
        new.append(made.__name__)
        defined |= {name: value for name, value in vars(made).items() if isinstance(value, type)}
    yield
    for name in new:
        del sys.modules[name]


def test_the_page_has_the_blocks_that_are_run() -> None:
    assert [file for file, _ in blocks()] == [
        "tta/confident.py", "tta/registry.py", "server/methods.py",
        "client/rules/fedbabu.py", "client/rules/__init__.py", "server/trainings.py", "server/methods.py",
    ]  # fmt: skip
    assert (ROOT / "CONTRIBUTING.md").read_text().count("```") == 2 * len(blocks())
    assert all(len(code.splitlines()) <= 40 for _, code in blocks())
    assert "confident" not in METHODS


@pytest.mark.usefixtures("followed")
def test_the_new_adapter_is_a_method() -> None:
    (row,) = parse_rows("confident")
    (training,) = plan(Settings(methods="fedavg,personal,confident"))
    assert [one.label for one in training.rows] == ["fedavg", "personal", "confident"]
    assert "confident" in {one.label for training in plan(Settings(methods="all")) for one in training.rows}
    with pytest.raises(SettingsError, match="confident need clients that train"):
        plan(Settings(methods="confident", target_fraction=0.5))
    assert [entry.needs[0] for entry in entries() if entry.method == "confident"] == ["a personal head"]

    client = tiny.device()
    arrays, means = tiny.through_statistics(client)
    rows = [Row(one.label, one.method.adapter, one.options) for one in (row, *parse_rows("fedavg,personal"))]
    _, results = client.evaluate(3, Task("ce"), arrays, means, rows, ["mixture"])
    samples = client._stream("mixture")
    with torch.no_grad():
        z = client.model.features(samples.x)
        heads = [head(z).softmax(1).numpy() for head in (client.model.head, client.model.personal_head)]
    expected = []
    for p_global, p_personal in zip(*heads, strict=True):  # the readable form: one sample at a time
        entropies = [-(p * np.log(p)).sum() for p in (p_global, p_personal)]
        expected.append(p_global if entropies[0] <= entropies[1] else p_personal)
    right = (np.stack(expected).argmax(1) == samples.y.numpy()).sum()
    assert {one["method"]: one["correct"] for one in results}["confident"] == right
    for size in (1, 7, len(samples.y)):
        adapter = create("confident", client.model)
        found = torch.cat([adapter.predict(part) for part in samples.x.split(size)])
        np.testing.assert_allclose(found.numpy(), np.stack(expected), atol=1e-6)


@pytest.mark.usefixtures("followed")
def test_the_new_training_is_a_method() -> None:
    (training,) = plan(Settings(methods="fedbabu,t3a[training=fedbabu]"))
    assert (training.name, [row.base for row in training.rows]) == ("fedbabu", ["personalised", "global"])
    with pytest.raises(SettingsError, match=r"btfl.*training = 'fedbabu'; with a personal head are"):
        plan(Settings(methods="btfl[training=fedbabu]"))

    phase = TRAININGS["fedbabu"].phases[0]
    client, task = tiny.device(), Task("fedbabu", phase.rule, phase.objective)
    first = tiny.global_arrays(tiny.network(seed=4))
    arrays = first
    for round in (1, 2):
        arrays, _ = client.train(round, task, arrays)
    same = {name for name in first if arrays[name].tobytes() == first[name].tobytes()}
    assert same == {"head.weight", "head.bias"}
    before = tiny.snapshot(client.model)
    client.evaluate(2, task, arrays, None, [Row("fedbabu", "none", base="personalised")], ["original"])
    assert {"head.weight", "head.bias"} <= tiny.changed(before, client.model)  # tuned before it tests


@pytest.mark.usefixtures("followed")
def test_both_in_a_whole_run(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", SMALL.replace(methods="fedavg,personal,confident,fedbabu", shifts="original"))
    found = events(folder)
    assert found[-1]["status"] == "completed"
    assert not [event for event in found if event["event"] in ("failed", "late", "refused")]
    cells = {(event["method"], event["partition"]) for event in found if event["event"] == "evaluation"}
    assert cells == {(m, c) for m in ("fedavg", "personal", "confident", "fedbabu") for c in range(3)}
