"""Vectorized forward pass: N networks of one architecture, stacked along a first dimension (torch.func.vmap).

Batches may be padded: a mask marks the real samples, and BatchNorm computes its statistics over those only. It is
computed here in either mode: on a GPU torch's own refuses, within vmap, what is in the memory format channels-last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedtta.models.cct import DropResidual
from fedtta.models.weights import COUNTER

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
Tensors = dict[str, Tensor]


def is_stochastic(network: nn.Module) -> bool:
    """Return whether a layer draws random numbers in training (dropout); vectorized, it would draw other numbers."""
    return any(_drops(layer) for layer in network.modules())


def _shares(network: nn.Module) -> bool:
    """Return whether layers share a tensor: its second name would be loaded with what was not trained."""
    return any(
        len(list(named(remove_duplicate=False))) > len(list(named()))
        for named in (network.named_parameters, network.named_buffers)
    )


def _drops(layer: nn.Module) -> bool:
    """Return whether a layer drops values or branches: torch's, ours, timm's (DropPath), torchvision's."""
    if isinstance(layer, DropResidual):
        return layer.share > 0
    kind = type(layer).__name__
    if isinstance(layer, nn.modules.dropout._DropoutNd) or kind.startswith(("Drop", "StochasticDepth", "PatchDropout")):
        rates = [getattr(layer, name) for name in ("p", "drop_prob", "prob") if hasattr(layer, name)]
        return not rates or any(rate is None or rate > 0 for rate in rates)  # without a rate: not known
    return isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0


#: What `is_stackable` found out about networks of other libraries.
_tried: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def is_stackable(network: nn.Module) -> bool:
    """Return whether networks of this architecture can be trained at once, with the results of single training.

    No layer may draw random numbers, and no tensor may have two names. A network of another library
    (`TwoHead.input_shape`) is also tried once: its code may do what `vmap` does not support.
    """
    shape = getattr(network, "input_shape", None)
    if is_stochastic(network) or _shares(network):
        return False
    if shape is None:
        return True
    if network not in _tried:
        _tried[network] = _agrees(network, shape)
    return _tried[network]


def _agrees(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether the vectorized pass of two copies computes what the network computes, in either mode.

    Features for personal heads are computed in evaluation mode. In float64: BatchNorm over few values magnifies
    rounding errors; a network that takes no float64 counts as one that cannot be stacked.
    """
    own = copy.deepcopy(network).double()
    x = torch.rand(2, 4, *shape, generator=torch.Generator().manual_seed(0)).to(next(own.parameters()))  # [N, B, ...]
    try:
        with torch.no_grad():
            return all(_agrees_on(copy.deepcopy(own).train(training), x) for training in (True, False))
    except (RuntimeError, ValueError, TypeError, KeyError, NotImplementedError):
        return False


def _agrees_on(own: nn.Module, x: Tensor) -> bool:
    """Return whether outputs agree, and buffers: what the vectorized pass does not move must stay, but for counters."""
    parameters = {name: torch.stack([value.detach()] * 2) for name, value in own.named_parameters()}
    buffers = {name: torch.stack([value] * 2) for name, value in own.named_buffers() if value.is_floating_point()}
    before = {name: value.clone() for name, value in own.named_buffers() if not name.endswith(COUNTER)}
    out, moved = VectorizedNetwork(own)(parameters, buffers, x, torch.ones(2, 4).to(x))
    for index in range(2):
        alone = copy.deepcopy(own)  # which the pass must leave as it was, too
        pairs = [(alone(x[index]), out[index])]
        pairs += [(alone.get_buffer(name), new[index]) for name, new in moved.items()]
        if not all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs):
            return False
        if not all(torch.equal(alone.get_buffer(name), before[name]) for name in before.keys() - moved.keys()):
            return False
    return True


class VectorizedNetwork:
    """The forward pass of N networks at once.

    Under autocast less of it is in bfloat16 than of a single network: within `vmap` a bias is added in float32, as the
    output is then, and on a CPU a convolution is in float32.

    Parameters
    ----------
    network : nn.Module
        One of the networks; its mode is used, its values are not.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._mask: Tensor | None = None
        self._moved: Tensors = {}

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensors]:
        """Return the outputs [N, B, ...] and the updated running statistics of BatchNorm layers.

        Parameters
        ----------
        parameters, buffers : mapping
            Name → [N, ...].
        x : Tensor [N, B, ...]
        mask : Tensor [N, B]
            1 for a sample, 0 for padding; ignored in evaluation mode.

        Raises
        ------
        RuntimeError
            A layer draws random numbers; see `is_stochastic`.
        """

        def one(own: Tensors, kept: Tensors, images: Tensor, there: Tensor) -> tuple[Tensor, Tensors]:
            self._mask, self._moved = there, {}
            return functional_call(self.network, {**own, **kept}, (images,)), self._moved

        try:
            with self._masking():
                return vmap(one)(dict(parameters), dict(buffers), x, mask)
        finally:
            self._mask, self._moved = None, {}

    @contextmanager
    def _masking(self) -> Iterator[None]:
        """Compute BatchNorm layers here inside the block, with the mask where they measure their input."""
        layers = [(name, layer) for name, layer in self.network.named_modules() if isinstance(layer, BatchNorm)]
        try:
            for name, layer in layers:
                layer.__dict__["forward"] = self._masked(name, layer)
            yield
        finally:
            for _, layer in layers:
                layer.__dict__.pop("forward", None)

    def _masked(self, name: str, layer: BatchNorm) -> Callable[[Tensor], Tensor]:
        """Return a forward function of a BatchNorm layer that ignores padding."""

        def forward(x: Tensor) -> Tensor:
            shape = [1, -1, *[1] * (x.ndim - 2)]
            values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
            mean, variance = layer.running_mean, layer.running_var
            if layer.training or mean is None or variance is None:
                mean, variance = self._measured(name, layer, values)
            out = (values - mean.reshape(shape)) * torch.rsqrt(variance + layer.eps).reshape(shape)
            if layer.weight is not None:
                out = out * layer.weight.reshape(shape)
            if layer.bias is not None:
                out = out + layer.bias.reshape(shape)
            return out.to(x.dtype)

        return forward

    def _measured(self, name: str, layer: BatchNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance [C] of x [B, C, ...] without padding; move the layer's running statistics."""
        assert self._mask is not None
        dimensions = [0, *range(2, x.ndim)]
        there = self._mask.reshape([-1] + [1] * (x.ndim - 1)).to(x.dtype)
        count = self._mask.sum() * (x[0, 0].numel())
        mean = (x * there).sum(dimensions) / count
        centred = (x - mean.reshape([1, -1, *[1] * (x.ndim - 2)])) * there
        squares = (centred * centred).sum(dimensions)
        if layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None:
            measured = {"running_mean": mean, "running_var": squares / (count - 1)}
            for own, new in measured.items():
                old = layer.get_buffer(own)
                self._moved[f"{name}.{own}"] = old + layer.momentum * (new.detach() - old)
        return mean, squares / count
