"""The list of methods: facts from the registries, and costs that `speed` has measured."""

from __future__ import annotations

import pytest

from fedtta.benchmarks.__main__ import main
from fedtta.benchmarks.tables import methods
from fedtta.server.methods import METHODS
from fedtta.server.trainings import TRAININGS
from fedtta.tta.base import NEEDS
from fedtta.tta.registry import ADAPTERS


def test_every_method_is_listed_with_what_the_tables_say() -> None:
    listed = {entry.method: entry for entry in methods.entries()}
    assert list(listed) == list(METHODS)
    assert set(methods.WORDS) == NEEDS
    for name, entry in listed.items():
        method = METHODS[name]
        assert (entry.training, entry.adapter, entry.base) == (method.training, method.adapter, method.base)
        assert entry.training_source == TRAININGS[method.training].summary
        assert (entry.adapts, entry.per) == (ADAPTERS[method.adapter].adapts, ADAPTERS[method.adapter].per)


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ("fedavg", ()),
        ("tent", ("BatchNorm",)),
        ("em", ("pooled label frequencies",)),
        ("memo", ("many gradients for each sample",)),
        ("fedbn", ("BatchNorm", "labels of the client's own")),  # its layers stay on the client
        ("fedavg_ft", ("labels of the client's own",)),  # fine-tuning
        ("fedrod", ("a residual personal head", "labels of the client's own")),
        ("knn_per", ("the client's memorised training samples", "labels of the client's own")),
    ],
)
def test_needs_in_words(method: str, needs: tuple[str, ...]) -> None:
    (entry,) = [entry for entry in methods.entries() if entry.method == method]
    assert entry.needs == needs


def test_costs_stand_beside_the_methods(capsys: pytest.CaptureFixture[str]) -> None:
    cost = {"processor_milliseconds": 1.25, "ratio": 2.5, "forward": 1.0, "backward": 1.0}
    setup = {"model": "cnn", "model_options": "norm=batch", "image_size": 32, "samples": 6, "batch": 3, "repeats": 1}
    listed = methods.entries()
    page = methods.methods_page(listed, {**setup, "adapters": {"tent": cost}})
    lines = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert list(lines) == list(METHODS)
    assert lines["tent"].endswith("| 1.25 | 2.5 | 1 + 1 |")
    assert lines["btfl"].endswith("|  |  |  |")  # not measured
    assert "cnn (norm=batch), 6 images of 32x32 in batches of 3" in page
    facts = methods.methods_page(listed, {})
    assert "ms a sample" not in facts
    assert all(recipe.summary in facts for recipe in TRAININGS.values())
    assert all(info.paper in facts for info in ADAPTERS.values())
    assert main(["methods"]) == 0
    assert f"{len(METHODS)} methods; cnn (norm=batch)" in capsys.readouterr().out
