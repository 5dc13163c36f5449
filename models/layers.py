"""Parts that all networks share: input normalization, and the grouping of layers into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Normalise(nn.Module):
    """Input normalization (x - mean) / std per channel, the first layer of every encoder.

    Images are therefore in [0, 1] everywhere outside the network. The constants are non-persistent buffers: they follow
    the network's device and dtype but are not part of `state_dict`, so they are neither sent nor averaged.

    Parameters
    ----------
    mean, std : float or sequence of C floats
        Per-channel constants in units of the image range [0, 1]; 0.5 and 0.5 map it onto [-1, 1].
    channels : int, optional
        C; needed to reject images with another number of channels if both constants are single numbers.

    Raises
    ------
    ValueError
        A constant is not finite, `std` is not positive, or a sequence does not have one number per channel.
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
        """Normalize images [..., C, H, W].

        Raises
        ------
        ValueError
            `x` has another number of channels; broadcasting would silently turn grayscale images into colour images.
        """
        if self.channels is not None and (x.ndim < 3 or x.shape[-3] != self.channels):
            raise ValueError(f"expected images [B, {self.channels}, H, W], got shape {tuple(x.shape)}")
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Return the constants for `print(model)`."""
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def _constants(name: str, value: float | Sequence[float], channels: int | None) -> Tensor:
    """Return `value` as a tensor [C, 1, 1] that broadcasts over images; [1, 1, 1] if C is unknown."""
    numbers = list(value) if isinstance(value, Sequence) else [value] * (channels or 1)
    if channels is not None and len(numbers) != channels:
        raise ValueError(f"{name}={value} needs one number for each of {channels} channels")
    constants = torch.tensor(numbers, dtype=torch.get_default_dtype())
    if not bool(torch.isfinite(constants).all()):
        raise ValueError(f"{name}={value} must be finite")
    return constants.reshape(-1, 1, 1)


#: A normalization layer belongs to the block of the layer before it.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def by_block(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Group tensor names by block: a layer with the normalization that follows it.

    Parameters
    ----------
    model : nn.Module
    names : iterable of str
        "<layer>.<tensor>", in order of definition.

    Returns
    -------
    dict
        Name of a block's first layer → names of the block's tensors.
    """
    found: dict[str, list[str]] = {}
    current = ""
    for name in names:
        owner = name.rpartition(".")[0]
        if not found or (owner != current and not isinstance(model.get_submodule(owner), NORMALISATIONS)):
            current = owner
        found.setdefault(current, []).append(name)
    return found
