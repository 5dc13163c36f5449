"""CCT-4/3x2: "Escaping the Big Data Paradigm with Compact Transformers" (Hassani et al. 2021).

    2 x (Conv 3x3, no bias - ReLU - MaxPool 3, stride 2, padding 1), 64 then 128 maps  → [B, T, 128]
    + learnable positional embedding [T, 128], 4 encoder layers of 2 heads, MLP ratio 1    → [B, T, 128]
    LayerNorm, sequence pooling, ReLU                                                      → [B, 128]

T = ceil(ceil(S/2)/2)^2: 64 tokens for 32x32 images. "We use the exact same architecture as in Hassani et al.
for CCT-4/3x2 with a learnable positional embedding" (FedTHE, appendix C.1); the ReLU before the heads is
BTFL's (appendix B), d = 128.

Details of the original implementation. Layers are pre-norm with a deviation: the sum after the attention residual is
normalized, and the MLP's residual starts from the normalized value: x ← LN(x + attention(LN(x))), x ← x + MLP(x).
Queries, keys and values have no bias. Attention dropout 0.1; stochastic depth grows linearly from 0 in the first layer
to 0.1 in the last; no other dropout. Both act in training mode only. Linear weights start from a normal of standard
deviation 0.02 truncated at ±2, their biases at 0, the positional embedding from one of 0.2, convolutions from He's
normal initialization.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta.models.info import ModelInfo, rate, require_image_size

WIDTH = 128  # d, the embedding
HEADS = 2
LAYERS = 4
MLP_RATIO = 1


class Attention(nn.Module):
    """Multi-head self-attention over tokens [B, T, 128]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return softmax(Q K' / sqrt(64)) V, heads concatenated and projected [B, T, 128]."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, T, 64]
        scores = query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5  # [B, heads, T, T]
        mixed = self.dropout(scores.softmax(-1)) @ value  # [B, heads, T, 64]
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


class DropResidual(nn.Module):
    """Stochastic depth (Huang et al. 2016): drop each sample's residual with probability `share` in training."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, residual: Tensor) -> Tensor:
        """Return `residual` [B, T, 128] with dropped samples at zero and the others scaled to keep the mean."""
        if not self.training or self.share == 0:
            return residual
        keep = 1 - self.share
        kept = torch.empty_like(residual[:, :1, :1]).bernoulli_(keep)  # [B, 1, 1]
        return residual * kept / keep


class EncoderLayer(nn.Module):
    """A CCT layer over tokens [B, T, 128]; the order of its norms is described in the module docstring."""

    def __init__(self, attention_dropout: float, drop: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(attention_dropout)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(WIDTH, MLP_RATIO * WIDTH),
                gelu=nn.GELU(),
                fc2=nn.Linear(MLP_RATIO * WIDTH, WIDTH),
            )
        )
        self.drop = DropResidual(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens [B, T, 128] after this layer."""
        x = self.norm2(x + self.drop(self.attention(self.norm1(x))))
        return x + self.drop(self.mlp(x))


class CompactTransformer(nn.Module):
    """Images [B, C, S, S] → features [B, 128], non-negative."""

    def __init__(self, in_channels: int, image_size: int, attention_dropout: float, stochastic_depth: float) -> None:
        super().__init__()
        self.tokenizer = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(in_channels, WIDTH // 2, 3, padding=1, bias=False),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(3, stride=2, padding=1),
                conv2=nn.Conv2d(WIDTH // 2, WIDTH, 3, padding=1, bias=False),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(3, stride=2, padding=1),
            )
        )
        self.position = nn.Parameter(torch.zeros(token_count(image_size), WIDTH))
        shares = [stochastic_depth * depth / (LAYERS - 1) for depth in range(LAYERS)]
        self.layers = nn.Sequential(*(EncoderLayer(attention_dropout, share) for share in shares))
        self.norm = nn.LayerNorm(WIDTH)
        self.pool = nn.Linear(WIDTH, 1)
        self._initialise()

    def _initialise(self) -> None:
        """Draw the initial weights in the order of the modules."""
        nn.init.trunc_normal_(self.position, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, 128]: the tokens' mean under learned weights, after a ReLU."""
        tokens = self.tokenizer(x).flatten(2).transpose(1, 2)  # [B, T, 128]
        if tokens.shape[1] != len(self.position):
            raise ValueError(
                f"images of shape {tuple(x.shape)} give {tokens.shape[1]} tokens; this network has "
                f"{len(self.position)} positions: build it with their image_size"
            )
        tokens = self.norm(self.layers(tokens + self.position))
        weights = self.pool(tokens).softmax(1)  # [B, T, 1]
        return F.relu((weights * tokens).sum(1))


def token_count(image_size: int) -> int:
    """Return T for square images: each of the two pools halves a side, rounding up."""
    side = -(-image_size // 2)
    side = -(-side // 2)
    return side**2


def encoder(
    in_channels: int, image_size: int, *, attention_dropout: float, stochastic_depth: float
) -> tuple[nn.Module, int]:
    """Return the encoder [B, C, S, S] → [B, 128], and d = 128.

    Raises
    ------
    ValueError
        `image_size` is below 5 (one token would be left).
    """
    require_image_size("model 'cct-4/3x2'", image_size, 5)
    return CompactTransformer(in_channels, image_size, attention_dropout, stochastic_depth), WIDTH


CCT = ModelInfo(
    "compact convolutional transformer, d = 128 (FedTHE, BTFL)",
    encoder,
    {"attention_dropout": rate(0.1), "stochastic_depth": rate(0.1)},
    normalisation="layer",
)
