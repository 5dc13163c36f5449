"""The code of CONTRIBUTING.md, applied to a copy of the project as it stands: each addition is at most two files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "client",
    "data",
    "messages",
    "models",
    "privacy",
    "server",
    "settings",
    "simulation",
    "strategies",
    "tta",
    "watch",
)
ADDITIONS = {
    "An adapter": ["tta/confident.py", "tta/registry.py"],
    "A personalized training": ["client/algorithms/fedbabu.py", "server/trainings.py"],
    "A server aggregation": ["strategies/sqrt_fedavg.py", "strategies/registry.py"],
    "A statistic": ["tta/statistics.py", "client/statistics.py"],
    "An evaluation metric": ["client/evaluation.py", "server/report/scores.py"],
    "A data set": ["data/datasets/stripes.py", "data/datasets/registry.py"],
}


def blocks() -> list[tuple[str, str, str, str]]:
    """(section, file, name of what a row belongs to or "", code) of every block of Python."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = []
    for section, text in re.findall(r"^### (.+?)\n(.*?)(?=^##)", page, re.DOTALL | re.MULTILINE):
        for file, name, code in re.findall(
            r"^```python\n# ([\w./]+)(?:, in (\w+))?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
        ):
            found.append((section, file, name, code))
    return found


def insert(text: str, name: str, code: str) -> str:
    """Return a file with a row in the collection or class `name`, and its imports at the end of the others."""
    imports = [line for line in code.splitlines() if line.startswith(("from ", "import "))]
    row = "\n".join(line for line in code.splitlines() if line not in imports)
    row = "".join(f"    {line}\n" for line in row.splitlines())
    lines = text.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if re.match(rf"(class )?{name}\b.*[:={{(]", line))
    if lines[start].rstrip().endswith("{}"):
        lines[start] = lines[start].rstrip()[:-1] + f"\n{row}}}\n"
    elif lines[start].startswith("class "):
        last = next(i for i in range(start, len(lines)) if re.match(r"    \w+: .* = None$", lines[i]))
        lines.insert(last, row)
    else:
        end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith((")", "}")))
        lines.insert(end, row)
    if imports:
        last = max(i for i, line in enumerate(lines) if line.startswith(("from ", "import ")))
        lines[last] += "\n".join(imports) + "\n"
    return "".join(lines)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product to which all six additions have been made."""
    top = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, top / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "fedtta", top / "fedtta", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for _, file, name, code in blocks():
        path = top / file
        assert path.exists() is bool(name), f"{file}: a new file, or a row in an old one"
        path.write_text(insert(path.read_text(encoding="utf-8"), name, code) if name else code, encoding="utf-8")
    return top


def python(top: Path, code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=top, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_addition_touches_two_files() -> None:
    found: dict[str, list[str]] = {}
    for section, file, _, _ in blocks():
        found.setdefault(section, [])
        if file not in found[section]:
            found[section].append(file)
    assert found == ADDITIONS
    assert (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").count("```") == 2 * len(blocks())


#: Prints whether each addition is in its table.
TABLES = """
import json
from fedtta.data import DATASETS
from fedtta.server.methods import METHODS, plan
from fedtta.server.report.scores import METRICS
from fedtta.settings import Settings
from fedtta.strategies import AGGREGATIONS
from fedtta.tta import ADAPTERS
from fedtta.tta.statistics import ON_REQUEST
chosen = [row.label for one in plan(Settings(methods="all")) for row in one.rows]
print(json.dumps([name in table for name, table in (
    ("confident", ADAPTERS), ("confident", chosen), ("fedbabu", METHODS), ("fedbabu", chosen), ("spread", ON_REQUEST),
    ("sqrt_fedavg", AGGREGATIONS), ("log_loss", [one.name for one in METRICS]), ("stripes", DATASETS),
)]))
"""
#: The adapter's equation, sample by sample.
DEFINITION = """
import numpy as np, torch
from fedtta.models import build
from fedtta.tta import create
model = build("cnn", 5, image_size=16, seed=3)
with torch.no_grad():
    model.personal_head.weight *= 2
x = torch.rand(23, 3, 16, 16, generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    z = model.eval().features(x)
    heads = [head(z).softmax(1).numpy() for head in (model.head, model.personal_head)]
expected, surer = [], 0
for p, own in zip(*heads):
    entropies = [-(one * np.log(one)).sum() for one in (p, own)]
    expected.append(p if entropies[0] <= entropies[1] else own)
    surer += entropies[0] <= entropies[1]
assert 0 < surer < 23, surer
for size in (1, 7, 23):
    adapter = create("confident", model)
    found = torch.cat([adapter.predict(part) for part in x.split(size)]).numpy()
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-6)
"""
#: What aggregation, training and statistic say they do.
OTHERS = """
import numpy as np, torch
from fedtta.client.algorithms import find_algorithm
from fedtta.client.algorithms.base import LocalContext
from fedtta.client.statistics import Samples, requested_statistics
from fedtta.client.algorithms.training import TrainingSet, cross_entropy
from fedtta.models import build
from fedtta.settings import Settings
from fedtta.strategies.aggregation import TrainReply
from fedtta.strategies.sqrt_fedavg import SqrtFedAvg
from fedtta.server.evaluation import statistics_shapes
from fedtta.tta.statistics import Statistics

sent = ((1, 0.0, 1), (2, 3.0, 4))
replies = [TrainReply(n, {"w": np.array([value])}, {"num-examples": count}) for n, value, count in sent]
assert SqrtFedAvg().aggregate(replies)["w"] == [2.0]  # (1 * 0 + 2 * 3) / 3

model = build("cnn", 3, image_size=16, seed=3)
pixels = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8)
labels = torch.arange(12) % 3
data = TrainingSet(np.arange(12), pixels, labels, torch.bincount(labels))
before = {name: value.clone() for name, value in model.state_dict().items()}
settings = Settings(local_epochs=1, augment=False)
context = LocalContext(model, data, cross_entropy, settings, torch.Generator().manual_seed(1))
find_algorithm("fedbabu").train(context)
changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
assert changed and all(name.startswith("encoder.") for name in changed), changed
find_algorithm("fedbabu").personalize(context)
assert not torch.equal(model.head.weight, before["head.weight"])

x = pixels.float() / 255
found = requested_statistics(Samples(model.eval(), data.counts, x, labels, settings), ["spread"])
z = model.features(x).detach().double().numpy()
np.testing.assert_allclose(found["spread"], z.var(0, ddof=1), rtol=1e-6)
assert statistics_shapes({"spread"}, model)["spread"] == ((model.feature_dim,), "float64")
assert "spread" not in statistics_shapes(set(), model)
assert Statistics.combine({}, found).spread is not None
"""


@pytest.fixture(scope="module")
def told(copy: Path) -> str:
    """Output of the checks and of a run, in one process: to import what they need takes most of its time."""
    chosen = {
        "dataset": "stripes", "dataset-options": "count=240", "image-size": 16, "clients": 3, "partition": "iid",
        "rounds": 2, "local-epochs": 1, "shifts": "original", "engine": "vectorised", "aggregation": "sqrt_fedavg",
        "model-options": "norm=batch", "methods": "fedavg,personal,confident,fedbabu", "results": "out",
        "run-name": "added",
    }  # fmt: skip
    words = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    a_run = f"from fedtta.simulation.__main__ import main\nassert main({words}) == 0\n"
    return python(copy, TABLES + DEFINITION + OTHERS + a_run)


def test_the_additions_are_in_the_tables_and_do_what_they_say(told: str) -> None:
    assert json.loads(told.splitlines()[0]) == [True] * 8


def test_all_additions_in_one_run(copy: Path, told: str) -> None:
    """Methods, aggregation, data set and metric through the program; the table has the metric's columns."""
    assert "confident" in told
    lines = (copy / "out" / "added" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert found[-1]["status"] == "completed"
    assert not [event for event in found if event["event"] in ("failed", "late", "refused")]
    tested = [event for event in found if event["event"] == "evaluation"]
    assert {event["method"] for event in tested} == {"fedavg", "personal", "confident", "fedbabu"}
    assert all(event["log_loss"] > 0 for event in tested)
    header = (copy / "out" / "added" / "table.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "log_loss" in header
    assert "Log loss in nats" in (copy / "out" / "added" / "report.html").read_text(encoding="utf-8")
