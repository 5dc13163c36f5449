"""The optimizers against `torch.optim`, bit for bit, and that training leaves torch's compiler alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta.models.optim import FunctionalOptimizer, Optimizer, StackedOptimizer

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


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(["adam", "sgd"]),
    lr=st.floats(1e-4, 1.0),
    steps=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_functional_steps_equal_torch_optim(kind: str, lr: float, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = {name: torch.randn(3, 2, generator=generator, dtype=torch.float64) for name in ("a", "unused")}
    parameter = start["a"].clone().requires_grad_()
    theirs: torch.optim.Optimizer = torch.optim.Adam([parameter], lr=lr)
    if kind == "sgd":
        theirs = torch.optim.SGD([parameter], lr=lr, momentum=0.9)
    ours = FunctionalOptimizer(kind, lr)
    values, memory = {name: value.clone().requires_grad_() for name, value in start.items()}, ours.init(start)
    for _ in range(steps):
        gradient = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        theirs.step()
        kept = {name: value.clone() for name, value in memory.items()}
        moved, remembered = ours.step(values, [gradient, None], memory)
        assert all(torch.equal(memory[name], value) for name, value in kept.items())  # nothing in place
        values, memory = moved, remembered
    torch.testing.assert_close(values["a"].detach(), parameter.detach(), atol=1e-12, rtol=0)
    assert torch.equal(values["unused"], start["unused"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("rmsprop", 0.1), "unknown optimizer 'rmsprop'; there are: adam, sgd"),
        (("adam", -1.0), "lr=-1"),
        (("adam", float("nan")), "lr=nan"),
        (("sgd", 0.1, 1.5), "momentum=1.5"),
    ],
)
def test_options_out_of_range_are_named(options: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionalOptimizer(*options)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_step_that_leaves_the_finite_numbers_names_the_values(kind: str) -> None:
    start = {"a": torch.ones(2), "b": torch.ones(3)}
    ours = FunctionalOptimizer(kind, 3e38)
    with pytest.raises(ValueError, match=r"lr=3e\+38 left the finite numbers in b"):
        ours.step(start, [torch.zeros(2) if kind == "sgd" else None, torch.full((3,), 2.0)], ours.init(start))


@pytest.mark.parametrize("decay", [0.0, 5e-2])
@pytest.mark.parametrize("name", list(CASES))
def test_stacked_networks_step_as_each_alone(name: str, decay: float) -> None:
    """Three networks, of which the first k take a step."""
    own, _, _ = CASES[name]
    alone = [values(seed) for seed in range(3)]
    optimizers = [Optimizer(one, learning_rate=0.03, weight_decay=decay, **own) for one in alone]
    stacked = {str(i): torch.stack([one[i].detach() for one in alone]) for i in range(3)}
    together = StackedOptimizer(stacked, learning_rate=0.03, weight_decay=decay, **own)
    for step, count in enumerate((3, 2, 3, 1)):
        gradients = [[value.data for value in values(10 * step + seed)] for seed in range(count)]
        for one, optimizer, given_ in zip(alone, optimizers, gradients, strict=False):
            for value, gradient in zip(one, given_, strict=True):
                value.grad = gradient.clone()
            optimizer.step()
        together.step({str(i): torch.stack([given_[i] for given_ in gradients]) for i in range(3)})
    for seed, one in enumerate(alone):
        for i, value in enumerate(one):
            torch.testing.assert_close(stacked[str(i)][seed], value.detach(), atol=1e-6, rtol=1e-5)


def test_a_process_that_trains_and_adapts_imports_neither_compiler_nor_torchvision(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
from fedtta.models import build
from fedtta.server.report import page
from tests.server.test_run import SMALL, run
page.build_page = lambda *about: "not drawn"
build("resnet18", 10, 32)  # a network of torchvision's
rows = "fedavg,fedavg_ft,ditto,fedrep,fedicon,fedthe_plus,btfl,tent,shot,atp[mode=online]"
few = dict(clients=2, fraction=0.1, rounds=1, shifts="original", tune_samples=2)
run(Path({str(tmp_path)!r}), SMALL.replace(methods=rows, model_options="norm=batch", optimizer="adam", **few))
assert not {{"torch._dynamo", "torchvision"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
