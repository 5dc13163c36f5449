"""kNN-Per: the network's prediction is mixed with a vote of the nearest training samples of the client.

Personalized Federated Learning through Local Memorization (Marfoq, Neglia, Kameni, Vidal, ICML 2022), section 3:

    p(y|x) = λ p_knn(y|x) + (1-λ) p_head(y|x),    p_knn(y|x) ∝ Σ_{i in N_k(x)} 1[y_i = y] exp(-d(z, z_i)/σ)

over the k samples of the client's datastore with the nearest features, d Euclidean. Nothing adapts at test time.
k = 10 and σ = 1 are the paper's, and FedTHE's (ICLR 2023, appendix C); both choose λ on a grid for each client
(`choose_weight`).

Decisions and deviations:

- The authors' and FedTHE's published codes divide the distance by the number of features too: σ = d does the same here.
  The authors' code uses squared distances, FedTHE's does not.
- FedTHE's published code chooses λ by the accuracy on the test set, and mixes logits with probabilities. Here λ comes
  from validation data, and probabilities are mixed, as in the paper.
- A datastore of fewer than k samples votes as a whole. Which of several samples at the same distance is the k-th is
  up to `torch.topk`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedtta.tta.base import Adapter
from fedtta.tta.checks import check_least, check_number
from fedtta.tta.heads import feature_head, features_and_logits

CHUNK_NUMBERS = 2**22  # distances computed at once


@dataclass(frozen=True)
class Datastore:
    """What a client memorises: its training split as the final encoder sees it, in evaluation mode.

    Parameters
    ----------
    features : Tensor [n, d]
        Floating point, finite, n > 0.
    labels : Tensor [n]
        Integers, 0 or more.

    Raises
    ------
    ValueError
        They do not fit together, or hold something else.
    """

    features: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        shapes = f"features {tuple(self.features.shape)} and labels {tuple(self.labels.shape)}"
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1] or len(self.labels) == 0:
            raise ValueError(f"a datastore needs features [n, d] and labels [n], n > 0: got {shapes}")
        if not self.features.is_floating_point() or not bool(torch.isfinite(self.features).all()):
            raise ValueError("features of a datastore must be finite floating-point numbers")
        kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        if self.labels.dtype not in kinds or bool((self.labels < 0).any()):
            raise ValueError(f"labels of a datastore must be integers, 0 or more: got {self.labels.dtype}")


def knn_probabilities(z: Tensor, store: Datastore, classes: int, neighbours: int, scale: float) -> Tensor:
    """Return p_knn [B, classes] of features z [B, d]; computed in chunks, each row by itself.

    Parameters
    ----------
    z : Tensor [B, d]
        On the device and of the dtype of the datastore's features.
    store : Datastore
        Its labels are below `classes`.
    classes : int
        K.
    neighbours : int
        k, at least 1.
    scale : float
        σ, above 0.
    """
    stored = len(store.features)
    labels, k = store.labels.long(), min(neighbours, stored)
    votes = z.new_zeros(len(z), classes)
    rows = max(1, CHUNK_NUMBERS // stored)
    wide = torch.promote_types(z.dtype, torch.float32)  # torch has no distances of half-precision numbers
    known = store.features.to(wide)
    for part, vote in zip(z.split(rows), votes.split(rows), strict=True):  # a split is a view
        # By differences: the matrix product is faster and loses what is common to both.
        distances = torch.cdist(part.to(wide), known, compute_mode="donot_use_mm_for_euclid_dist")
        nearest, index = distances.topk(k, dim=1, largest=False)  # [b, k]
        vote.scatter_add_(1, labels[index], torch.softmax(-nearest / scale, 1).to(vote.dtype))
    return votes


def choose_weight(p_knn: Tensor, p_head: Tensor, labels: Tensor, step: float = 0.01) -> float:
    """Return the λ in {0, step, ..., 1} whose mixture is right most often; of several the smallest.

    Parameters
    ----------
    p_knn, p_head : Tensor [n, K]
        Probabilities of validation samples, n > 0.
    labels : Tensor [n]
    step : float
        In (0, 1], and 1 is a multiple of it.

    Raises
    ------
    ValueError
        Shapes do not fit, or `step` is out of range.
    """
    check_number("step", step, 0, 1, open_low=True)
    points = round(1 / step)
    if abs(points * step - 1) > 1e-9:
        raise ValueError(f"step={step}: 1 is no multiple of it")
    if p_knn.shape != p_head.shape or p_knn.ndim != 2 or labels.shape != p_knn.shape[:1] or len(labels) == 0:
        shapes = [tuple(value.shape) for value in (p_knn, p_head, labels)]
        raise ValueError(f"choose_weight needs two [n, K] and labels [n], n > 0: got {shapes}")
    grid = [point / points for point in range(points + 1)]
    right = torch.stack([((share * p_knn + (1 - share) * p_head).argmax(1) == labels).sum() for share in grid]).tolist()
    return grid[right.index(max(right))]


class KNNPer(Adapter):
    """Mix a head's prediction with the vote of the nearest memorised samples (see the module); nothing adapts.

    Parameters
    ----------
    model : nn.Module
        A network with `features` and `head` (`fedtta.models.TwoHead`); with `personal_head` where `head` is "personal".
    datastore : Datastore
        Made by the same encoder.
    neighbours : int
        k, at least 1.
    scale : float
        σ, above 0, in units of the features.
    weight : float
        λ, of the vote, in [0, 1]; see `choose_weight`.
    head : "global" or "personal"
        Whose prediction is mixed in.
    record : bool
        Keep the report: `knn_weight`, λ for every sample.

    Raises
    ------
    ValueError
        An option is out of range, the network has no such head, or the datastore has other features or classes.
    """

    name = "knn_per"
    paper = "Personalized Federated Learning through Local Memorization (ICML 2022)"
    adapts = "nothing: the head and the nearest training samples"
    needs = frozenset({"datastore"})

    def __init__(
        self,
        model: nn.Module,
        datastore: Datastore,
        *,
        neighbours: int = 10,
        scale: float = 1.0,
        weight: float = 0.5,
        head: Literal["global", "personal"] = "global",
        record: bool = True,
    ) -> None:
        linear = feature_head(model, head, "kNN-Per")
        check_least(1, neighbours=neighbours)
        check_number("scale", scale, 0, math.inf, open_low=True)
        check_number("weight", weight, 0, 1)
        classes, features = linear.weight.shape
        if datastore.features.shape[1] != features:
            raise ValueError(f"the datastore has {datastore.features.shape[1]} features, the model {features}")
        if int(datastore.labels.max()) >= classes:
            raise ValueError(f"the datastore has label {int(datastore.labels.max())}, the model {classes} classes")
        super().__init__(model, record=record)
        self.datastore = Datastore(
            datastore.features.detach().to(linear.weight), datastore.labels.to(linear.weight.device)
        )
        self.neighbours, self.scale, self.weight, self.head = neighbours, scale, weight, head

    def _predict(self, x: Tensor) -> Tensor:
        p_knn, p_head = self.parts(x)
        self._note(knn_weight=torch.full((len(x),), self.weight, dtype=torch.float64))
        return self.weight * p_knn + (1 - self.weight) * p_head

    @torch.no_grad()
    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_knn and p_head [B, K] of x [B, ...]: what `choose_weight` takes."""
        z, logits = features_and_logits(self.model, x, self.head)
        votes = knn_probabilities(z, self.datastore, logits.shape[1], self.neighbours, self.scale)
        return votes, torch.softmax(logits, 1)
