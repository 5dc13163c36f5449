"""Adapters whose learned arrays can be mixed with those of other clients (collaborative aggregation).

After each batch a client may send `shared(share)` and get back a mixture of all clients' arrays, which it takes over
with `load_shared`. What is mixed is the `share`: "affine" what the method trains (for most of them the BatchNorm
weights and biases), "statistics" what normalises (running or class statistics), "all" both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, get_args

from fedtta.models import PERSONAL_PREFIX, ROTATION_PREFIX
from fedtta.tta.arrays import copied, namespace, untracked
from fedtta.tta.base import Adapter
from fedtta.tta.checks import check_choice

if TYPE_CHECKING:
    from torch import Tensor, nn

#: What a collaborating adapter lets others mix.
Share = Literal["affine", "statistics", "all"]
SHARES: tuple[Share, ...] = get_args(Share)
#: Whose weights and biases are trained: those of all BatchNorm layers, or of BatchNorm2d alone.
AffineLayers = Literal["batchnorm", "batchnorm2d"]
Layer = TypeVar("Layer", bound="nn.Module")
#: Endings of the names of arrays that hold variances.
VARIANCES = ("running_var", "variance")


class Collaborator(Adapter):
    """An adapter whose learned arrays can be mixed with those of other clients.

    A subclass implements `trained`, `domain` and, where it keeps statistics, `normalisation`; all three return the
    adapter's own tensors, not copies. It calls `_anchor_here` at the end of `__init__` and of `_reset`, and adds
    `_pull()` to its loss.

    Parameters
    ----------
    model, record
        See `Adapter`.
    proximal : float
        μ of FedProx: `_pull` is (μ/2)‖θ - θ_received‖² over what the method trains; 0 has no effect.

    Raises
    ------
    ValueError
        `proximal` is negative or not finite.
    """

    per: Literal["sample", "batch"] = "batch"
    collaborates: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    def __init__(self, model: nn.Module, *, record: bool = True, proximal: float = 0.0) -> None:
        super().__init__(model, record=record)
        if not 0 <= proximal < float("inf"):
            raise ValueError(f"proximal={proximal} must be a finite number, 0 or more")
        self.proximal = proximal
        self._anchor: dict[str, Tensor] = {}

    @abstractmethod
    def trained(self) -> dict[str, Tensor]:
        """Return what the method trains, by name."""

    def normalisation(self) -> dict[str, Tensor]:
        """Return the statistics that normalise and outlive a batch, by name; empty where there are none."""
        return {}

    @abstractmethod
    def domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the (mean [C], variance [C]) that each BatchNorm layer last normalised with, by layer.

        They describe the domain that the client is in (pFedBBN, eq. 7). Before the first batch: the source's.
        """

    def shared(self, share: Share) -> dict[str, Tensor]:
        """Return copies of what `share` names: "affine" `trained`, "statistics" `normalisation`, "all" both."""
        return {name: copied(value) for name, value in self._named(share).items()}

    def load_shared(self, arrays: Mapping[str, Tensor]) -> None:
        """Take over a mixture of clients' `shared` arrays, of any share; everything else is kept.

        Raises
        ------
        ValueError
            The names are those of no share, a shape differs, a value is not finite, or a variance is negative; nothing
            is loaded then.
        """
        share = next((share for share in SHARES if set(arrays) == set(self._named(share))), None)
        if share is None:
            raise ValueError(f"{type(self).__name__}: {sorted(arrays)} are the names of no share")
        own = self._named(share)
        for name, value in arrays.items():
            if value.shape != own[name].shape:
                raise ValueError(f"{name}: shape {tuple(value.shape)} does not fit {tuple(own[name].shape)}")
            if not bool(namespace(value).isfinite(value).all()):
                raise ValueError(f"{name} holds values that are not finite")
            if name.endswith(VARIANCES) and bool((value < 0).any()):
                raise ValueError(f"{name} holds negative variances")
        with untracked():
            for name, value in arrays.items():
                own[name].copy_(value)
        self._anchor_here()
        self._received()

    def _named(self, share: Share) -> dict[str, Tensor]:
        """Return the adapter's own tensors of a share."""
        if share not in SHARES:
            raise ValueError(f"unknown share {share!r}; there are: {', '.join(SHARES)}")
        return {
            **(self.trained() if share != "statistics" else {}),
            **(self.normalisation() if share != "affine" else {}),
        }

    def _received(self) -> None:
        """Update what is computed from shared arrays; most methods have nothing of the kind."""

    def _anchor_here(self) -> None:
        """Remember what is trained as θ_received, from which `_pull` measures."""
        if self.proximal:
            with untracked():
                self._anchor = {name: copied(value) for name, value in self.trained().items()}

    def _pull(self) -> Tensor | float:
        """Return (μ/2)‖θ - θ_received‖², to be added to the loss; 0 without `proximal`."""
        if not self.proximal:
            return 0.0
        trained = self.trained()
        return self.proximal / 2 * sum(((trained[name] - old) ** 2).sum() for name, old in self._anchor.items())

    def _anchor_state(self) -> dict[str, Tensor]:
        """Return θ_received for `_state`, which a resumed adapter needs where a batch takes several steps."""
        return {f"received.{name}": value for name, value in self._anchor.items()}


def batchnorm_layers(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return the BatchNorm layers of a network by name, in order of definition.

    Raises
    ------
    ValueError
        There are none, or one keeps no running statistics.
    """
    from torch import nn  # which methods without BatchNorm can do without

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no BatchNorm layer to adapt")
    for name, layer in layers.items():
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(f"{name} keeps no running statistics")
    return layers


def replace_batchnorms(
    network: nn.Module, make: Callable[[nn.modules.batchnorm._BatchNorm], Layer]
) -> tuple[nn.Module, dict[str, Layer]]:
    """Replace every BatchNorm layer of a network by what `make` makes of it, in place.

    Returns
    -------
    (nn.Module, dict)
        The network (a new one where it is itself a BatchNorm), and the new layers by name.

    Raises
    ------
    ValueError
        As `batchnorm_layers`.
    """
    old = batchnorm_layers(network)
    new = {name: make(layer) for name, layer in old.items()}
    replaced: dict[int, nn.Module] = {id(layer): new[name] for name, layer in old.items()}
    for module in list(network.modules()):
        for name, child in list(module._modules.items()):  # one layer may be in several places
            if id(child) in replaced:
                setattr(module, name, replaced[id(child)])
    return replaced.get(id(network), network), new


def shared_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that may be trained and sent: all but frozen ones and those of the other heads."""
    return {
        name: value
        for name, value in model.named_parameters()
        if value.requires_grad and not name.startswith((PERSONAL_PREFIX, ROTATION_PREFIX))
    }


def affine_names(model: nn.Module, *, required: bool = True, layers: AffineLayers = "batchnorm") -> list[str]:
    """Return the names of the BatchNorm weights and biases that may be trained, in order of definition.

    Raises
    ------
    ValueError
        There is no BatchNorm layer, `layers` is unknown or, if `required`, there is nothing that may be trained.
    """
    check_choice("layers", layers, get_args(AffineLayers))
    chosen = [name for name, layer in batchnorm_layers(model).items() if layers == "batchnorm" or _is_2d(layer)]
    affine = {f"{layer}.{part}".lstrip(".") for layer in chosen for part in ("weight", "bias")}
    names = [name for name in shared_parameters(model) if name in affine]
    if required and not names:
        kind = {"batchnorm": "BatchNorm", "batchnorm2d": "BatchNorm2d"}[layers]
        raise ValueError(f"no {kind} layer of {type(model).__name__} has weights that may be trained")
    return names


def _is_2d(layer: nn.Module) -> bool:
    from torch import nn

    return isinstance(layer, nn.BatchNorm2d)
