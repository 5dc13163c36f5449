"""Features and heads of a network, and the methods that only combine heads: nothing adapts.

FedRoD: "On Bridging Generic and Personalized Federated Learning for Image Classification" (Chen & Chao, ICLR 2022)
predicts softmax(global(z) + personal(z)). Its personal head is trained for that sum (`client.algorithms.fedrod`), so it
is a correction of the global head and no classifier by itself. The global head alone is the FedAvg or source row of
every table; a fixed mixture of both heads is the row that every adaptive mixture has to beat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from fedtta.tta.arrays import from_tensor, namespace, softmax_of, to_host
from fedtta.tta.base import Adapter
from fedtta.tta.checks import Checks, check_choice, check_finite, check_number
from fedtta.tta.collaborator import Collaborator
from fedtta.tta.statistics import Statistics

if TYPE_CHECKING:
    from torch import Tensor, nn

MIXES = ("probabilities", "logits")
HEADS = {"global": "head", "personal": "personal_head"}


def check_two_heads(model: nn.Module, method: str) -> int:
    """Return d, the number of features; raise ValueError if `model` is not built like `fedtta.models.TwoHead`."""
    missing = [name for name in ("features", "head", "personal_head") if not hasattr(model, name)]
    if missing:
        raise ValueError(f"{method} needs a two-head model; {type(model).__name__} has no {', '.join(missing)}")
    heads = cast("nn.Linear", model.head), cast("nn.Linear", model.personal_head)
    if heads[0].weight.shape != heads[1].weight.shape:
        shapes = [tuple(head.weight.shape) for head in heads]
        raise ValueError(f"{method}: head and personal_head differ in shape: {shapes[0]} and {shapes[1]}")
    return heads[0].in_features


def two_heads(model: nn.Module, x: Tensor, checks: Checks | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run the network on `x [B, ...]`; `checks` take over the check that its outputs are finite.

    Returns
    -------
    z : Tensor [B, d]
        Features.
    logits_global, logits_personal : Tensor [B, K]

    Raises
    ------
    ValueError
        An output of the network is not finite; the message names the samples.
    """
    z = cast("Tensor", model.features(x))  # type: ignore[operator]
    logits_global, logits_personal = model.head(z), model.personal_head(z)  # type: ignore[operator]
    _check_outputs(checks, z, logits_global, logits_personal)
    return z, logits_global, logits_personal


def _check_outputs(checks: Checks | None, *outputs: Tensor) -> None:
    """Require that every output [B, ...] of the network be finite; without `checks`, raise ValueError here."""
    check = check_finite if checks is None else checks.finite
    check("the network's output", namespace(outputs[0]).concat(outputs, axis=1))


def feature_head(model: nn.Module, head: str, method: str) -> nn.Linear:
    """Return the linear layer named by `head`, "global" or "personal".

    Raises
    ------
    ValueError
        `head` is unknown, or the network does not consist of features and that head.
    """
    check_choice("head", head, tuple(HEADS))
    missing = [name for name in ("features", HEADS[head]) if not hasattr(model, name)]
    if missing:
        raise ValueError(f"{method} needs a network of features and a head; {type(model).__name__} has no {missing}")
    return cast("nn.Linear", getattr(model, HEADS[head]))


def features_and_logits(model: nn.Module, x: Tensor, head: str, checks: Checks | None = None) -> tuple[Tensor, Tensor]:
    """Run the network on x [B, ...] and return its features [B, d] and one head's logits [B, K].

    `checks` take over the check that they are finite.

    Raises
    ------
    ValueError
        One of them is not finite; the message names the samples.
    """
    z = cast("Tensor", model.features(x))  # type: ignore[operator]
    logits = cast("Tensor", getattr(model, HEADS[head])(z))
    _check_outputs(checks, z, logits)
    return z, logits


def statistic_vector(name: str, value: Tensor | None, features: int) -> np.ndarray:
    """Return the statistic `name` as float64 [d]; raise ValueError naming it unless it holds d finite values."""
    vector = to_host(from_tensor(value if value is not None else np.empty(0)))
    if vector.shape != (features,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}, the model has {features} features")
    if not np.isfinite(vector).all():
        raise ValueError(f"{name} holds values that are not finite")
    return vector


class NoAdaptation(Collaborator):
    """Predict with the network's own output; in test-time rounds there is nothing to share.

    Parameters
    ----------
    model : nn.Module
        Gives logits [B, K]; for a two-head model those of the global head.
    statistics : Statistics or None
        Not used.
    record : bool
        Keep the report: `weight`, 1 for every sample.
    """

    name = "none"
    adapts = "nothing: the global head"
    per = "sample"
    shares = False

    def __init__(self, model: nn.Module, statistics: Statistics | None = None, record: bool = True) -> None:
        super().__init__(model, record=record)

    def trained(self) -> dict[str, Tensor]:
        """Return nothing: no parameter is trained."""
        return {}

    def domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return nothing: no statistics describe the stream."""
        return {}

    def _predict(self, x: Tensor) -> Tensor:
        logits = self.model(x)  # (B, K)
        self._note(weight=np.ones(len(x)))
        return softmax_of(logits)


class Personal(Adapter):
    """Predict with the personal head, trained on the client's own data.

    Parameters
    ----------
    model : nn.Module
        A two-head network.
    statistics : Statistics or None
        Not used.
    record : bool
        Keep the report: `weight`, 0 for every sample.
    """

    name = "personal"
    adapts = "nothing: the personal head"
    needs = frozenset({"personal_head"})

    def __init__(self, model: nn.Module, statistics: Statistics | None = None, record: bool = True) -> None:
        check_two_heads(model, "personal")
        super().__init__(model, record=record)

    def _predict(self, x: Tensor) -> Tensor:
        _, _, logits_personal = two_heads(self.model, x)
        self._note(weight=np.zeros(len(x)))
        return softmax_of(logits_personal)


class FixedMix(Adapter):
    """Mix the two heads with one weight for all samples.

    Parameters
    ----------
    model : nn.Module
        A two-head network.
    statistics : Statistics or None
        Not used.
    e : float
        Weight of the global head, in [0, 1].
    mix : "probabilities" or "logits"
        e p(ŷ^g) + (1-e) p(ŷ^l), or p(e ŷ^g + (1-e) ŷ^l).
    record : bool
        Keep the report: `weight`, e for every sample.
    """

    name = "fixed_mix"
    adapts = "nothing: a fixed mixture of the heads"
    needs = frozenset({"personal_head"})

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        e: float = 0.5,
        mix: Literal["probabilities", "logits"] = "probabilities",
        record: bool = True,
    ) -> None:
        check_two_heads(model, "fixed_mix")
        check_number("e", e, 0, 1)
        check_choice("mix", mix, MIXES)
        super().__init__(model, record=record)
        self.e = e
        self.mix = mix

    def _predict(self, x: Tensor) -> Tensor:
        return self.interpolate(*two_heads(self.model, x))

    def interpolate(self, z: Tensor, logits_global: Tensor, logits_personal: Tensor) -> Tensor:
        """Return what `predict` returns, given the network's outputs z [B, d] and logits [B, K]."""
        if self.mix == "logits":
            probabilities = softmax_of(self.e * logits_global + (1 - self.e) * logits_personal)
        else:
            first, second = softmax_of(logits_global), softmax_of(logits_personal)
            probabilities = self.e * first + (1 - self.e) * second
        self._note(weight=np.full(len(z), self.e, np.float64))
        return probabilities


class FedRoD(Adapter):
    """Predict with the sum of both heads' logits; there is no weight to report.

    Parameters
    ----------
    model : nn.Module
        A two-head network.
    statistics : Statistics or None
        Not used.
    record : bool
        Taken as everywhere; the report is empty.

    Raises
    ------
    ValueError
        The model does not have two heads of one shape.
    """

    name = "fedrod"
    paper = "On Bridging Generic and Personalized Federated Learning for Image Classification (ICLR 2022)"
    adapts = "nothing: the sum of both heads"
    needs = frozenset({"residual_head"})

    def __init__(self, model: nn.Module, statistics: Statistics | None = None, record: bool = True) -> None:
        check_two_heads(model, "fedrod")
        super().__init__(model, record=record)

    def _predict(self, x: Tensor) -> Tensor:
        _, logits_global, logits_personal = two_heads(self.model, x)
        return softmax_of(logits_global + logits_personal)  # (B, K)
