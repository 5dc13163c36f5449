"""No operation of training and adapters is one that `--deterministic` refuses on a GPU, as torch documents them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fedtta.client.algorithms import ALGORITHMS, find_algorithm
from fedtta.models import MODELS, build
from fedtta.tta.augmix import AugMix
from fedtta.tta.contrastive import ContrastiveViews
from fedtta.tta.views import Views
from tests.client import test_cohort
from tests.client.test_algorithm_contract import made_for, turn
from tests.tta.networks import images
from tests.tta.test_adapter_contract import CASES

#: What raises on a GPU by the docstring of `torch.use_deterministic_algorithms` → the operator below autograd.
REFUSED = {
    "AvgPool3d": "avg_pool3d_backward",
    "AdaptiveAvgPool2d": "_adaptive_avg_pool2d_backward",
    "AdaptiveAvgPool3d": "_adaptive_avg_pool3d_backward",
    "AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "FractionalMaxPool3d": "fractional_max_pool3d_backward",
    "MaxUnpool1d": "max_unpool2d",
    "MaxUnpool2d": "max_unpool2d",
    "MaxUnpool3d": "max_unpool3d",
    "interpolate": "(_?)upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)(_aa)?_backward",
    "ReflectionPad1d": "reflection_pad1d_backward",
    "ReflectionPad2d": "reflection_pad2d_backward",
    "ReflectionPad3d": "reflection_pad3d_backward",
    "NLLLoss": "nll_loss2d_(forward|backward)",
    "CTCLoss": "_ctc_loss_backward",
    "EmbeddingBag": "_embedding_bag(_.*)?",
    "put_": "put_",
    "histc": "histc",
    "bincount": "bincount with weights",
    "median": r"median\.dim",
    "grid_sample": "grid_sampler_[23]d_backward",
    "scatter_reduce": r"scatter_reduce_?\..*",
}


class Operators(TorchDispatchMode):
    """Note the name of every operator that is run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        weighted = name == "bincount" and any(isinstance(one, torch.Tensor) for one in [*args[1:], *kwargs.values()])
        self.names.add(f"{name} with weights" if weighted else name)
        return func(*args, **kwargs)

    def refused(self) -> set[str]:
        return {name for name in self.names if any(re.fullmatch(one, name) for one in REFUSED.values())}


def test_all_that_torch_names_is_looked_for() -> None:
    text = (torch.use_deterministic_algorithms.__doc__ or "").split("nondeterministic operations will throw")[1]
    points = re.split(r"\n {8}\* ", text.split("In addition")[0])[1:]
    names = {point.split("`")[1].rpartition(".")[2] for point in points if "MPS" not in point or "CUDA" in point}
    assert names - {"resize_"} == set(REFUSED)  # resize_: of quantized tensors


def test_an_operation_that_is_refused_is_found() -> None:
    x, seen = torch.rand(1, 2, 6, 6, requires_grad=True), Operators()
    with seen:
        torch.ops.aten._adaptive_avg_pool2d_backward(torch.ones(1, 2, 2, 2), x.detach())
        functional.cross_entropy(x.detach(), torch.zeros(1, 6, 6, dtype=torch.int64))
        functional.grid_sample(x, torch.zeros(1, 2, 2, 2), align_corners=False).sum().backward()
        functional.pad(x, (1, 1, 1, 1), mode="reflect").sum().backward()
        torch.bincount(torch.tensor([0, 1]), torch.ones(2))
        torch.bincount(torch.tensor([0, 1]))
        x.detach().median(0)
    assert seen.refused() == {
        "_adaptive_avg_pool2d_backward", "grid_sampler_2d_backward",
        "reflection_pad2d_backward", "bincount with weights", "median.dim", "nll_loss2d_forward",
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("resnet50", "wide-resnet", "resnext29")])
def test_networks(name: str) -> None:
    edge = 20 if name == "shallow-cnn" else 32
    network, seen = build(name, 3, in_channels=3, image_size=edge, seed=0).train(), Operators()
    with seen:
        functional.cross_entropy(network(torch.rand(2, 3, edge, edge)), torch.tensor([0, 1])).backward()
    assert "convolution_backward" in seen.names
    assert seen.refused() == set()


def test_local_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Operators()
    with seen:
        for name in ALGORITHMS:
            local = turn(made_for(name, norm=True), local_epochs=1)
            find_algorithm(name).train(local)
            find_algorithm(name).personalize(local)
        model, splits = test_cohort.network(norm=True), test_cohort.world(test_cohort.RAGGED[:2])
        members = test_cohort.clients(model, splits, local_epochs=1, augment=True)
        arrays = [test_cohort.global_arrays(model)] * 2
        assert not any(isinstance(one, Exception) for one in test_cohort.together(members, 1, test_cohort.TASK, arrays))
    assert seen.refused() == set()


def test_adapters_and_views() -> None:
    seen = Operators()
    with seen:
        for case in CASES:
            case.make(torch.float32).predict(images(6).float())
        for views in (AugMix(severity=10.0), Views(), Views(padding="reflection"), ContrastiveViews(strength=1.0)):
            views(images(20).float(), torch.Generator().manual_seed(0))
    assert {"grid_sampler_2d", "scatter_add_", "index_put_"} <= seen.names
    assert seen.refused() == set()
