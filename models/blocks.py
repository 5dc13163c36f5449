"""The blocks of a network: each layer with the normalisation that follows it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

#: What normalises belongs to the layer before it.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def by_block(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of a network's tensors: name of a block's first layer → its tensors' names.

    Parameters
    ----------
    names : iterable of str
        "<layer>.<tensor>", in order of definition.
    """
    found: dict[str, list[str]] = {}
    current = ""
    for name in names:
        owner = name.rpartition(".")[0]
        if not found or (owner != current and not isinstance(model.get_submodule(owner), NORMALISATIONS)):
            current = owner
        found.setdefault(current, []).append(name)
    return found
