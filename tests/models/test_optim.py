"""The optimiser against `torch.optim`, bit for bit, and that it leaves torch's compiler alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.optim import Optimizer

CASES: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": ({"kind": "sgd", "momentum": 0.0}, torch.optim.SGD, {}),
    "momentum": ({"kind": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "adam": ({"kind": "adam", "momentum": 0.9}, torch.optim.Adam, {}),
}


def values(seed: int) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    convolution = torch.randn(4, 3, 3, 3, generator=draw).to(memory_format=torch.channels_last)
    shapes: list[Tensor] = [convolution, torch.randn(5, generator=draw), torch.randn(2, 5, generator=draw)]
    return [nn.Parameter(value) for value in shapes]


@pytest.mark.parametrize("decay", [0.0, 5e-2])
@pytest.mark.parametrize("name", list(CASES))
def test_bits_of_torch_optim(name: str, decay: float) -> None:
    own, peer, options = CASES[name]
    ours, theirs = values(1), values(1)
    descent = Optimizer(ours, learning_rate=0.03, weight_decay=decay, **own)
    reference = peer(theirs, lr=0.03, weight_decay=decay, **options)
    for round in range(6):
        gradients = [value.data for value in values(10 + round)]
        for parameters, step in ((ours, descent), (theirs, reference)):
            step.zero_grad()
            for place, (value, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                if (place + round) % 4:  # sometimes the network does not use one
                    value.grad = gradient.clone()
            step.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


def test_no_gradient_no_step() -> None:
    for name, (own, _, _) in CASES.items():
        ours = values(2)
        Optimizer(ours, learning_rate=0.1, weight_decay=0.5, **own).step()
        assert all(torch.equal(one, other) for one, other in zip(ours, values(2), strict=True)), name


def test_a_process_that_trains_and_adapts_imports_no_compiler(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
from tests.server.test_run import SMALL, run
rows = "fedavg,fedavg_ft,ditto,fedrep,fedicon,fedthe_plus,btfl,tent,shot,atp[mode=online]"
run(Path({str(tmp_path)!r}), SMALL.replace(methods=rows, model_options="norm=batch", rounds=1, optimizer="adam"))
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
