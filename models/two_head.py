"""The two-head network: a shared encoder and global head, and a personal head (FedTHE 4.2; BTFL 4.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedtta.models.arrays import all_finite
from fedtta.models.constants import PERSONAL_PREFIX


class TwoHead(nn.Module):
    """An encoder with a global and a personal classifier.

    Parameters
    ----------
    encoder : nn.Module
        Maps x [B, ...] to features z [B, d]; `nn.Identity()` makes z = x.
    feature_dim : int
        d.
    num_classes : int
        K.
    personal_bias : bool
        Give the personal head a bias (the published code has none).
    rotation_head : bool
        Add `rotation_head`, Linear d → 4, which predicts quarter turns of an image (test-time training); else None.
    features_nonnegative : bool
        Whether z >= 0 is certain, as behind a ReLU. BTFL needs that.

    Attributes
    ----------
    input_shape : tuple of int, or None
        C, S, S of the images, of networks that other libraries made.
    notes : tuple of str
        Which pretrained weights were loaded into such a network, and which were not.

    Raises
    ------
    ValueError
        d or K is below 1.
    """

    def __init__(
        self,
        encoder: nn.Module,
        feature_dim: int,
        num_classes: int,
        personal_bias: bool = False,
        rotation_head: bool = False,
        features_nonnegative: bool = True,
    ) -> None:
        super().__init__()
        if feature_dim < 1 or num_classes < 1:
            raise ValueError(f"feature_dim={feature_dim} and num_classes={num_classes} must be at least 1")
        self.feature_dim = feature_dim
        self.num_classes = num_classes
        self.features_nonnegative = features_nonnegative
        self.input_shape: tuple[int, ...] | None = None
        self.notes: tuple[str, ...] = ()
        self.encoder = encoder
        self.head = nn.Linear(feature_dim, num_classes)
        self.personal_head = nn.Linear(feature_dim, num_classes, bias=personal_bias)
        self.rotation_head = nn.Linear(feature_dim, 4) if rotation_head else None

    def features(self, x: Tensor) -> Tensor:
        """Return z [B, d], the input of both heads."""
        return self.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the global head's logits [B, K]."""
        return self.head(self.features(x))

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Return the shared parameters by name: all but those of the personal head."""
        return {name: value for name, value in self.named_parameters() if not name.startswith(PERSONAL_PREFIX)}

    def global_state(self) -> dict[str, Tensor]:
        """Return the shared state by `state_dict` name: floating-point entries outside the personal head.

        The personal head and counters such as BatchNorm's `num_batches_tracked` are not included.
        """
        return {
            name: value
            for name, value in self.state_dict().items()
            if not name.startswith(PERSONAL_PREFIX) and value.is_floating_point()
        }

    def load_global_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a `global_state()` into this network.

        Raises
        ------
        ValueError
            Names or shapes differ (all are listed), or a value is not finite. Nothing is loaded in this case.
        """
        mine = self.global_state()
        missing, unknown = sorted(set(mine) - set(state)), sorted(set(state) - set(mine))
        if missing or unknown:
            raise ValueError(f"global state does not fit: missing {missing}, unknown {unknown}")
        for name, value in state.items():
            if value.shape != mine[name].shape:
                raise ValueError(f"{name}: shape {tuple(value.shape)} does not fit {tuple(mine[name].shape)}")
        if not all_finite(list(state.values())):
            bad = [name for name, value in state.items() if not all_finite([value])]
            raise ValueError(f"{', '.join(bad)} holds values that are not finite")
        with torch.no_grad():
            for name, value in state.items():
                mine[name].copy_(value)
