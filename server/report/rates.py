"""Names of learned adaptation rates: the type and the block of a module, and the label of a variant (ATP, Figure 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

#: Types of modules in the paper's order, followed by those of other networks.
MODULE_TYPES = (
    "conv weight",
    "linear weight",
    "bias",
    "BN weight",
    "BN bias",
    "BN running mean",
    "BN running var",
    "norm weight",
    "norm bias",
    "other",
)
_LINEAR = ("fc", "head", "linear", "classifier", "qkv", "project", "pool")
_NAMED_BLOCKS = 24  # in a network with more layers, a block is the parent of a layer


def module_type(name: str, sizes: Mapping[str, int]) -> str:
    """Return the type of a module, from its name and the other tensors of its layer.

    A layer with running statistics is a BatchNorm; another layer with a weight as large as its bias is a normalization
    too. Convolutions and linear layers are distinguished by name.
    """
    layer, _, tensor = name.rpartition(".")
    if tensor in ("running_mean", "running_var"):
        return f"BN {tensor.replace('_', ' ')}"
    if tensor not in ("weight", "bias"):
        return "other"
    if f"{layer}.running_mean" in sizes:
        return f"BN {tensor}"
    if sizes.get(f"{layer}.weight") == sizes.get(f"{layer}.bias"):
        return f"norm {tensor}"
    if tensor == "bias":
        return "bias"
    own = layer.rpartition(".")[2]
    return "linear weight" if any(word in own for word in _LINEAR) else "conv weight"


def block_of(names: Sequence[str]) -> dict[str, str]:
    """Return the block of each module: its layer, or the parent of the layer in networks with many layers."""
    short = {name: name.removeprefix("encoder.").removeprefix("body.") for name in names}
    blocks = {name: path.rpartition(".")[0] or path for name, path in short.items()}
    if len(set(blocks.values())) <= _NAMED_BLOCKS:
        return blocks
    return {name: block.rpartition(".")[0] or block for name, block in blocks.items()}


def variant_labels(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Name each (training, variant): the variant alone if there is a single training."""
    pairs = list(dict.fromkeys(pairs))
    several = len({training for training, _ in pairs}) > 1
    return {pair: f"{pair[1]} ({pair[0]})" if several else pair[1] for pair in pairs}
