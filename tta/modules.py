"""Modules of a network for ATP: their names, batch statistics of BatchNorm layers, gradients by those statistics.

Adaptive Test-Time Personalization for Federated Learning (Bao, Wei, Wang, He; NeurIPS 2023), section 4.1: a module
is one tensor that gets one adaptation rate. Every trainable tensor is one, and so are the running mean and the running
variance of every BatchNorm layer that keeps them. Nothing depends on an architecture: modules are found by walking the
network, and for the time of a `with` block the forward functions of BatchNorm layers are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtta.models import PERSONAL_PREFIX
from fedtta.tta.checks import check_choice
from fedtta.tta.collaborator import shared_parameters

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
#: Name and layer → the function that takes the place of the layer's `forward`.
Replacement = Callable[[str, BatchNorm], Callable[[Tensor], Tensor]]

#: What of the network is adapted; "params" and "stats" are the variants of the paper's Table 4.
Adapt = Literal["all", "params", "stats"]


def statistic_layers(model: nn.Module) -> dict[str, BatchNorm]:
    """Return by name the BatchNorm layers that keep running statistics, without those of the personal head."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, BatchNorm)
        and layer.running_mean is not None
        and not f"{name}.".startswith(PERSONAL_PREFIX)
    }


def module_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return w_G: the network's own tensors (no copies) by name of module, in order of definition.

    The order is that of `state_dict`: layer by layer, parameters before running statistics. Left out are the personal
    head and frozen parameters (`requires_grad=False`); a tensor that several layers share counts once.

    Raises
    ------
    ValueError
        There are none.
    """
    trainable, layers = shared_parameters(model), statistic_layers(model)
    found: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in layer.named_parameters(recurse=False):
            if prefix + name in trainable:
                found[prefix + name] = value
        if path in layers:
            found[f"{prefix}running_mean"] = layer.get_buffer("running_mean")
            found[f"{prefix}running_var"] = layer.get_buffer("running_var")
    if not found:
        raise ValueError(f"{type(model).__name__} has nothing to adapt: no trainable parameter, no running statistics")
    return found


def modules(model: nn.Module) -> list[str]:
    """Return the names of the network's modules, one rate each, in order of definition."""
    return list(module_tensors(model))


def moved_modules(model: nn.Module, adapt: Adapt) -> list[str]:
    """Return the names of the modules that a variant adapts; raise ValueError if there is no such variant."""
    check_choice("adapt", adapt, get_args(Adapt))
    own = module_tensors(model)
    return [name for name in own if adapt == "all" or isinstance(own[name], nn.Parameter) == (adapt == "params")]


def variance_modules(model: nn.Module) -> frozenset[str]:
    """Return the names of the running variances."""
    return frozenset(_statistic_names(name)[1] for name in statistic_layers(model))


def zero_rates(model: nn.Module) -> dict[str, float]:
    """Return the rates with which training starts (Algorithm 1): 0 for every module."""
    return dict.fromkeys(modules(model), 0.0)


def check_rates(model: nn.Module, rates: Mapping[str, float]) -> dict[str, float]:
    """Return adaptation rates as floats, in order of definition.

    Parameters
    ----------
    model : nn.Module
        The network they belong to.
    rates : mapping
        Name of module → rate, of either sign, in any order; numbers, numpy scalars or tensors of one value.

    Raises
    ------
    ValueError
        A module has no rate, a name is none of a module, or a rate is not finite; all are named.
    """
    names = modules(model)
    missing, unknown = [name for name in names if name not in rates], sorted(set(rates) - set(names))
    if missing or unknown:
        raise ValueError(f"the rates do not fit the network: missing {missing}, unknown {unknown}")
    numbers = {name: float(rates[name]) for name in names}
    bad = [f"{name}={number}" for name, number in numbers.items() if not math.isfinite(number)]
    if bad:
        raise ValueError(f"rates must be finite: {', '.join(bad)}")
    return numbers


def call_with(model: nn.Module, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the network's output [B, K] for `x [B, ...]` with the tensors `w`, by name of module, in place of its own.

    Every place of a shared tensor is exchanged, and each place once: `functional_call` would exchange a layer that has
    two names twice, and then put the wrong tensor back.
    """
    names = {id(value): name for name, value in module_tensors(model).items()}
    replacements = {}
    for path, layer in model.named_modules():  # each layer under one name
        prefix = f"{path}." if path else ""
        for named_tensors in (layer.named_parameters, layer.named_buffers):
            for own, value in named_tensors(recurse=False, remove_duplicate=False):
                if id(value) in names:
                    replacements[prefix + own] = w[names[id(value)]]
    return functional_call(model, replacements, (x,), tie_weights=False)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep a network in evaluation mode inside the block; restore the mode of every layer afterwards."""
    before = [(layer, layer.training) for layer in model.modules() if layer.training]
    try:
        for layer, _ in before:
            layer.training = False
        yield
    finally:
        for layer, mode in before:
            layer.training = mode


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Measure, inside the block, what reaches the BatchNorm layers.

    Yields
    ------
    dict of str to Tensor [C]
        Filled by a forward pass: mean and unbiased variance of each layer's input over samples and positions, under
        the names of the running statistics and in their dtype. The layers normalise as ever. A layer that is used
        several times has the statistics of all its inputs together; with one value a channel there is no variance.
    """
    moments: dict[str, tuple[int, Tensor, Tensor]] = {}
    found: dict[str, Tensor] = {}

    def watched(name: str, layer: BatchNorm) -> Callable[[Tensor], Tensor]:
        forward = layer.forward
        mean_name, variance_name = _statistic_names(name)
        dtype = layer.get_buffer("running_mean").dtype

        def measure(x: Tensor) -> Tensor:
            count, mean, squares = _moments(x.detach().to(dtype))
            if name in moments:
                count, mean, squares = _pooled(moments[name], (count, mean, squares))
            moments[name] = count, mean, squares
            found[mean_name] = mean
            if count > 1:
                found[variance_name] = squares / (count - 1)
            return forward(x)

        return measure

    with _exchanged(statistic_layers(model), watched):
        yield found


@contextmanager
def differentiable_statistics(model: nn.Module) -> Iterator[None]:
    """Let the BatchNorm layers, inside the block, pass gradients on to their running statistics.

    torch's `batch_norm` takes them as constants. Here the same function runs on constants m, v of the same values, and
    the dependence on the running mean μ and variance σ² goes through its weight and bias:

        γ (x - μ)/√(σ²+ε) + β = γ' (x - m)/√(v+ε) + β',  γ' = γ √((v+ε)/(σ²+ε)),  β' = β + γ (m - μ)/√(σ²+ε)

    With m = μ and v = σ² that is γ' = γ and β' = β: the output is what it was, and the cost lies in vectors [C].
    """

    def through(name: str, layer: BatchNorm) -> Callable[[Tensor], Tensor]:
        def normalise(x: Tensor) -> Tensor:
            mean, variance = layer.get_buffer("running_mean"), layer.get_buffer("running_var")  # [C]
            m, v = mean.detach(), variance.detach()
            inverse = torch.rsqrt(variance + layer.eps)
            weight = (v + layer.eps).sqrt() * inverse
            shift = (m - mean) * inverse
            if layer.weight is not None:
                weight, shift = layer.weight * weight, layer.weight * shift
            bias = shift if layer.bias is None else layer.bias + shift
            return F.batch_norm(x, m, v, weight, bias, training=False, eps=layer.eps)

        return normalise

    with _exchanged(statistic_layers(model), through):
        yield


def gradients_of(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ∂loss/∂leaf for every leaf; zero where the loss does not depend on it."""
    if not loss.requires_grad:
        return [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
    return torch.autograd.grad(loss, leaves, materialize_grads=True) if leaves else []


@contextmanager
def _exchanged(layers: Mapping[str, BatchNorm], replacement: Replacement) -> Iterator[None]:
    """Replace the forward function of each layer inside the block; restore it afterwards, also after an error."""
    before = [(layer, layer.__dict__.get("forward")) for layer in layers.values()]
    try:
        for name, layer in layers.items():
            layer.__dict__["forward"] = replacement(name, layer)
        yield
    finally:
        for layer, own in before:
            if own is None:
                layer.__dict__.pop("forward", None)  # the class's forward shows again
            else:
                layer.__dict__["forward"] = own


def _statistic_names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's running mean and variance; the network itself may be the layer."""
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


def _moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return count a channel, mean [C] and sum of squared deviations [C] of x [B, C, ...].

    Two passes: as exact as `torch.var_mean`, which is ten times slower over these axes on a CPU.
    """
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean = x.mean(axes)
    deviations = x - mean.view(-1, *[1] * (x.ndim - 2))
    return x.numel() // x.shape[1], mean, deviations.square_().sum(axes)


def _pooled(one: tuple[int, Tensor, Tensor], two: tuple[int, Tensor, Tensor]) -> tuple[int, Tensor, Tensor]:
    """Return the moments of two sets of values together."""
    (n, mean, squares), (other_n, other_mean, other_squares) = one, two
    total, gap = n + other_n, other_mean - mean
    return total, mean + gap * (other_n / total), squares + other_squares + gap.square() * (n * other_n / total)
