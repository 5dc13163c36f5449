"""Mean/std normalisation inside the network, so that images are in [0, 1] everywhere outside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalise(nn.Module):
    """(x - mean) / std per channel, the first layer of every encoder.

    The two constants are non-persistent buffers: they follow the network's device and dtype, but are no part
    of `state_dict`, so that they neither travel nor are averaged.

    Parameters
    ----------
    mean, std : float or sequence of C floats
        Per-channel constants in units of the image range [0, 1]; 0.5 and 0.5 map it onto [-1, 1].
    channels : int, optional
        C; needed to tell images with another number of channels when both constants are single numbers.

    Raises
    ------
    ValueError
        A constant is not finite, `std` is not positive, or a sequence does not have one number a channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            if channels is None and isinstance(value, Sequence):
                channels = len(value)
            constants = _constants(name, value, channels)  # [C, 1, 1]
            self.register_buffer(name, constants, persistent=False)
        if not bool((self.std > 0).all()):
            raise ValueError(f"std={std} must be positive")
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images [..., C, H, W].

        Raises
        ------
        ValueError
            `x` has another number of channels. Broadcasting would otherwise turn grey images into colour ones
            unasked.
        """
        if self.channels is not None and (x.ndim < 3 or x.shape[-3] != self.channels):
            raise ValueError(f"expected images [B, {self.channels}, H, W], got shape {tuple(x.shape)}")
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Return the constants for `print(model)`."""
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def _constants(name: str, value: float | Sequence[float], channels: int | None) -> Tensor:
    """Return `value` as a tensor [C, 1, 1] that broadcasts over images; [1, 1, 1] when C is not known."""
    numbers = list(value) if isinstance(value, Sequence) else [value] * (channels or 1)
    if channels is not None and len(numbers) != channels:
        raise ValueError(f"{name}={value} needs one number for each of {channels} channels")
    constants = torch.tensor(numbers, dtype=torch.get_default_dtype())
    if not bool(torch.isfinite(constants).all()):
        raise ValueError(f"{name}={value} must be finite")
    return constants.reshape(-1, 1, 1)
