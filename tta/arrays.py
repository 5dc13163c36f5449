"""Float64 array operations on network outputs: numpy on the CPU, torch on an accelerator.

After the network a method handles B x K numbers. On the CPU the cost of such small operations is the overhead of each
call, which is several times lower in numpy than in torch; on an accelerator the numbers stay where they are. Everything
here is float64 whatever the model's dtype; the result is cast to the model's dtype at the very end.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import array_api_compat.numpy as numpy_namespace
import array_api_compat.torch as torch_namespace
import numpy as np
import torch
from torch import Tensor

#: A float64 numpy array (CPU) or torch tensor (elsewhere).
Array = Any


def namespace(array: Array) -> ModuleType:
    """Return the array API namespace that works on `array`."""
    return numpy_namespace if isinstance(array, np.ndarray) else torch_namespace


def largest(array: Array, axis: int = 0) -> Array:
    """Return the maximum along `axis`; the method, because numpy's function costs twice as much on few numbers."""
    return array.max(axis) if isinstance(array, np.ndarray) else array.amax(axis)


def from_tensor(tensor: Tensor) -> Array:
    """Return `tensor` as a float64 array; float64 on the CPU is not copied."""
    tensor = tensor.detach()
    if not tensor.is_cpu:
        return tensor.to(torch.float64)
    if tensor.dtype in (torch.float16, torch.bfloat16):  # numpy has no bfloat16
        tensor = tensor.float()
    return np.asarray(tensor.numpy(), dtype=np.float64)


def to_tensor(array: Array, like: Tensor | None = None) -> Tensor:
    """Return `array` as a contiguous tensor, with the dtype of `like` if it is given."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return (tensor if like is None else tensor.to(like.dtype)).contiguous()


def to_host(array: Array) -> np.ndarray:
    """Return a copy of `array` as numpy."""
    return np.array(array) if isinstance(array, np.ndarray) else array.cpu().numpy().copy()


def class_major(first: Tensor, second: Tensor) -> Array:
    """Stack the logits [B, K] of two heads as [K, 2, B].

    With the classes first, sums over them run along the outer axis, which is the fast way for K much below B.
    """
    one, two = from_tensor(first), from_tensor(second)
    samples, classes = one.shape
    shape = classes, 2, samples
    stacked = np.empty(shape) if isinstance(one, np.ndarray) else one.new_empty(shape)
    stacked[:, 0], stacked[:, 1] = one.T, two.T
    return stacked


def softmax_entropy(logits: Array) -> tuple[Array, Array]:
    """Return the softmax over the first axis, and its entropy in nats.

    Parameters
    ----------
    logits : Array [K, ...]
        Finite; any size of number (the largest is subtracted first).

    Returns
    -------
    probabilities : Array [K, ...]
    entropy : Array [...]
        In [0, ln K], never negative; 0 ln 0 is 0.
    """
    xp = namespace(logits)
    shifted = logits - largest(logits)
    mass = xp.exp(shifted)
    total = mass.sum(0)
    probabilities = mass / total
    # ln p = shifted - ln total, so that a probability of zero meets a finite logarithm: 0 ln 0 = 0 by itself.
    return probabilities, xp.log(total) - (probabilities * shifted).sum(0)


def softmax(logits: Array) -> Array:
    """Return the softmax of `logits` [K, ...] over the first axis."""
    mass = namespace(logits).exp(logits - largest(logits))
    return mass / mass.sum(0)


class Constants:
    """Named float64 arrays that an adapter needs at every step, kept once per device.

    Parameters
    ----------
    **values : np.ndarray
        Kept as they are for the CPU, copied to an accelerator when it first asks.
    """

    def __init__(self, **values: np.ndarray) -> None:
        self._host = values
        self._elsewhere: dict[torch.device, dict[str, Array]] = {}

    def on(self, like: Array) -> dict[str, Array]:
        """Return the arrays by name, where `like` lives."""
        if isinstance(like, np.ndarray):
            return self._host
        if like.device not in self._elsewhere:
            self._elsewhere[like.device] = {name: to_device_of(value, like) for name, value in self._host.items()}
        return self._elsewhere[like.device]


def to_device_of(value: np.ndarray, like: Array) -> Array:
    """Return the numpy array `value` where `like` lives."""
    return value if isinstance(like, np.ndarray) else torch.from_numpy(value).to(like.device)
