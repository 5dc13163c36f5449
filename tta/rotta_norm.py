"""RoTTA's BatchNorm: running statistics that move a little with every update and normalise then.

Robust Test-Time Adaptation in Dynamic Scenarios (Yuan, Xie, Li, CVPR 2023), section 3.2:

    μ ← (1 - α) μ + α μ_batch,    σ² ← (1 - α) σ² + α σ²_batch,    from the source's running statistics on

σ²_batch is the biased variance, and the gradient passes through μ_batch and σ²_batch, as in the published code. A
channel with one value in the batch has σ²_batch = 0: only the share α of a variance is lost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tta.collaborator import replace_batchnorms


class RobustNorm(nn.Module):
    """A BatchNorm layer whose running statistics, where it is `updating`, move a little and normalise then.

    Parameters
    ----------
    layer : BatchNorm
        Whose weight, bias, ε and running statistics it has, uncopied.
    alpha : float
        α, the share of a batch in the statistics.

    Attributes
    ----------
    updating : bool
        Update the running statistics, in place, from what is given; the gradient passes through them.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, alpha: float) -> None:
        super().__init__()
        self.eps, self.alpha, self.updating = layer.eps, alpha, False
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        assert layer.running_mean is not None  # `batchnorm_layers` refuses others
        assert layer.running_var is not None
        self.running_mean, self.running_var = nn.Buffer(layer.running_mean), nn.Buffer(layer.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, C, ...] normalised."""
        if not self.updating:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
        mean = torch.lerp(self.running_mean, mean, self.alpha)
        variance = torch.lerp(self.running_var, variance, self.alpha)
        with torch.no_grad():
            self.running_mean.copy_(mean)
            self.running_var.copy_(variance)
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        channels = (1, -1) + (1,) * (x.ndim - 2)
        return torch.addcmul(shift.view(channels), x, scale.view(channels))


def with_robust_norm(network: nn.Module, alpha: float) -> tuple[nn.Module, dict[str, RobustNorm]]:
    """Replace every BatchNorm of a network by `RobustNorm`, as `replace_batchnorms`; names of its arrays stay."""
    return replace_batchnorms(network, lambda layer: RobustNorm(layer, alpha))
