"""No adapter can see labels: with permuted labels each predicts the same, sample by sample."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtta import tta
from fedtta.client import adapters
from fedtta.client.adapters import AdapterContext
from fedtta.client.evaluation import Labelled, calibrate_row, evaluate_row, memorize
from fedtta.client.statistics import join_statistics
from fedtta.messages.requests import AdapterRow as Row
from fedtta.models import build
from fedtta.tta.atp import zero_rates
from tests.client import tiny
from tests.client.tiny import Task

WANTED = ["label_prior", "confusion", "block_scores"]
OPTIONS: dict[str, dict[str, Any]] = {
    "memo": {"views": 2, "steps": 1},
    "fedthe_plus": {"views": 2, "steps": 1},
    "ttt": {"views": 2},
    "cotta": {"views": 2},
}


@pytest.mark.parametrize("name", list(tta.ADAPTERS))
def test_permuted_labels_change_no_prediction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("cnn", tiny.CLASSES, image_size=tiny.SIZE, seed=3, norm="batch", rotation_head=True)
    client = tiny.device(model=model, adapt_batch_size=4, eval_batch_size=4)
    arrays = tiny.global_arrays(model)
    means, _ = client.statistics(1, Task("t"), arrays, WANTED)
    private = client.state.load("t", 1)
    assert private is not None
    known = join_statistics(private, means, 1, client.device)
    rates = {"all": dict.fromkeys(zero_rates(model), 0.05)}
    own = memorize(model, client.federation, 0, client.settings, client.device)
    samples = client._stream("corrupted")
    order = torch.randperm(len(samples.y), generator=torch.Generator().manual_seed(1))
    poisoned = dataclasses.replace(samples, y=(samples.y[order] + 1) % tiny.CLASSES)

    seen: list[list[Tensor]] = []
    create = adapters.create

    def noting(*args: Any, **options: Any) -> Any:
        adapter, log = create(*args, **options), list[Tensor]()
        predict = adapter.predict
        monkeypatch.setattr(adapter, "predict", lambda x: log.append(predict(x)) or log[-1])
        if args[0] == name:  # not a candidate
            seen.append(log)
        return adapter

    monkeypatch.setattr(adapters, "create", noting)
    row = Row(name, name, OPTIONS.get(name, {}))
    labels = Labelled(samples.x, samples.y, True)  # what candidates are calibrated on, for both alike
    context = AdapterContext(model, client.settings, known, rates, own)
    calibrated = calibrate_row(row, context, labels)
    for one in (samples, poisoned):
        evaluate_row(row, context, one, calibrated)
    first, second = (torch.cat(log) for log in seen)
    assert len(first) == len(samples.y)
    assert torch.equal(first, second)
