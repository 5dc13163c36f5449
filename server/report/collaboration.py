"""Accuracy of methods that adapt together in rounds: a matrix of methods and collaborations.

The columns are those of "pFedBBN: A Personalized Federated Test-Time Adaptation with Balanced Batch Normalization for
Class-Imbalanced Data": global accuracy (Table 1), over classes (Tables 2 and 3), for each corruption (Table 6) and for
each client (Table 7). Accuracies are in [0, 1] and NaN where nothing occurs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtta.server.report.events import Adapted, AdaptRound
from fedtta.server.report.results import Results
from fedtta.server.report.scores import ACCURACY

_MIDDLE = 8 / 15  # the paper shows round 40 of 75: the end of the middle one of 15 corruptions


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole in float64, NaN where whole is 0."""
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole)
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


@dataclass(frozen=True, eq=False)
class Scores:
    """Correct predictions and samples of N clients under D corruptions in K classes.

    Parameters
    ----------
    correct, total : ndarray [N, D, K]
        int64.
    """

    correct: np.ndarray
    total: np.ndarray

    @cached_property
    def accuracy(self) -> float:
        """Global accuracy: each sample has the same weight."""
        return float(ratio(self.correct.sum(), self.total.sum()))

    @cached_property
    def per_class(self) -> np.ndarray:
        """Accuracy for each class over all clients and corruptions, [K]."""
        return ratio(self.correct.sum(axis=(0, 1)), self.total.sum(axis=(0, 1)))

    @cached_property
    def per_client(self) -> np.ndarray:
        """Accuracy of each client, [N]."""
        return ratio(self.correct.sum(axis=(1, 2)), self.total.sum(axis=(1, 2)))

    @cached_property
    def per_corruption(self) -> np.ndarray:
        """Accuracy under each corruption, [D]."""
        return ratio(self.correct.sum(axis=(0, 2)), self.total.sum(axis=(0, 2)))

    @cached_property
    def mean_class(self) -> float:
        """Mean of `per_class` over the classes that occur.

        The "Avg" of the paper's Tables 2 and 3 counts a class that does not occur as 0 instead.
        """
        mask = ~np.isnan(self.per_class)
        return float(ratio(np.where(mask, self.per_class, 0.0).sum(), mask.sum()))


@dataclass(frozen=True, eq=False)
class Outcome:
    """One cell of the matrix: one method with one collaboration over all its rounds.

    Parameters
    ----------
    rounds : tuple of R int
        Numbers of the rounds, ascending.
    correct, total : ndarray [R, K]
        int64, sums over clients.
    seconds : float
        Time of adaptation and prediction of all clients together.
    missing, fewer : int
        Rounds and samples that the cell has less than the most complete cell of the run.
    """

    method: str
    collaboration: str
    scores: Scores
    rounds: tuple[int, ...]
    correct: np.ndarray
    total: np.ndarray
    seconds: float
    missing: int
    fewer: int

    @property
    def label(self) -> str:
        """Name of the cell."""
        return f"{self.method} · {self.collaboration}"

    @property
    def gap(self) -> str:
        """What the cell has less than others, in words; empty if it is complete."""
        if self.missing:
            return f"after {len(self.rounds)} of {len(self.rounds) + self.missing} rounds"
        return f"{self.fewer:,} sample{'' if self.fewer == 1 else 's'} fewer" if self.fewer else ""


@dataclass(frozen=True)
class Matrix:
    """All outcomes of a run; names are in order of first appearance and `cells` holds those that were run.

    `columns` are the clients with labels: partition → name, in name order.
    """

    methods: tuple[str, ...]
    collaborations: tuple[str, ...]
    corruptions: tuple[str, ...]
    classes: tuple[str, ...]
    cells: dict[tuple[str, str], Outcome]
    columns: dict[int, str]

    @property
    def outcomes(self) -> list[Outcome]:
        """The cells, method by method."""
        pairs = [(method, collaboration) for method in self.methods for collaboration in self.collaborations]
        return [self.cells[pair] for pair in pairs if pair in self.cells]

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.outcomes[0].scores.per_client)

    def tops(self, measure: str) -> dict[str, str | None]:
        """Return the best value of each collaboration as shown; incomplete cells are not compared."""
        complete = [outcome for outcome in self.outcomes if not outcome.gap]
        return {
            name: ACCURACY.top(
                number_or_none(getattr(one.scores, measure)) for one in complete if one.collaboration == name
            )
            for name in self.collaborations
        }


#: The measures of the matrix: a property of `Scores`, and its title.
MEASURES = {"accuracy": "Global accuracy in %", "mean_class": "Mean accuracy over the classes that occur, in %"}


def number_or_none(value: float) -> float | None:
    """Convert NaN to None."""
    return None if np.isnan(value) else float(value)


def matrix(results: Results) -> Matrix | None:
    """Sum up the predictions of each method and collaboration; None if the run has none with samples."""
    groups: dict[tuple[str, str], list[Adapted]] = {}
    for entry in results.adapted:
        groups.setdefault((entry.method, entry.collaboration), []).append(entry)
    groups = {pair: entries for pair, entries in groups.items() if any(any(entry.total) for entry in entries)}
    if not groups:
        return None
    clients = 1 + max(*results.members, -1, *(entry.partition for entry in results.adapted))
    names = results.clients.classes if results.clients and results.clients.classes else []
    # Clients may meet the corruptions in different orders: take the order of the first client.
    in_order = sorted(results.adapted, key=lambda entry: (entry.partition, entry.round))
    corruptions = tuple(dict.fromkeys(entry.corruption for entry in in_order))
    rounds = max(len({entry.round for entry in entries}) for entries in groups.values())
    samples = max(sum(sum(entry.total) for entry in entries) for entries in groups.values())
    return Matrix(
        methods=tuple(dict.fromkeys(method for method, _ in groups)),
        collaborations=tuple(dict.fromkeys(collaboration for _, collaboration in groups)),
        corruptions=corruptions,
        classes=tuple(map(str, names or range(len(results.adapted[0].total)))),
        cells={pair: _outcome(pair, group, clients, corruptions, rounds, samples) for pair, group in groups.items()},
        columns={partition: results.name(partition) for partition in results.columns(clients)},
    )


def _outcome(
    pair: tuple[str, str], entries: list[Adapted], clients: int, corruptions: tuple[str, ...], rounds: int, samples: int
) -> Outcome:
    """Sum up one cell; `rounds` and `samples` are those of the most complete cell."""
    numbers = sorted({entry.round for entry in entries})
    classes = len(entries[0].total)
    by_round = np.zeros((2, len(numbers), classes), np.int64)
    by_client = np.zeros((2, clients, len(corruptions), classes), np.int64)
    for entry in entries:
        counts = np.array([entry.correct, entry.total])
        by_round[:, numbers.index(entry.round)] += counts
        by_client[:, entry.partition, corruptions.index(entry.corruption)] += counts
    correct, total = by_round
    return Outcome(
        method=pair[0],
        collaboration=pair[1],
        scores=Scores(*by_client),
        rounds=tuple(numbers),
        correct=correct,
        total=total,
        seconds=sum(entry.seconds for entry in entries),
        missing=rounds - len(numbers),
        fewer=samples - int(total.sum()),
    )


def mixing_rounds(results: Results) -> dict[tuple[str, str], list[AdaptRound]]:
    """Return the first, a middle and the last round of each cell that recorded W; fewer if it has fewer rounds."""
    groups: dict[tuple[str, str], list[AdaptRound]] = {}
    for entry in sorted(results.adapt_rounds, key=lambda entry: entry.round):
        if entry.weights:
            groups.setdefault((entry.method, entry.collaboration), []).append(entry)
    chosen = {}
    for pair, rounds in groups.items():
        wanted = _MIDDLE * rounds[-1].round
        middle = min(rounds, key=lambda entry: abs(entry.round - wanted))
        chosen[pair] = list({entry.round: entry for entry in (rounds[0], middle, rounds[-1])}.values())
    return chosen


def plain_mixing(rounds: list[AdaptRound]) -> str:
    """Describe a W that needs no plot: equal weights or the identity; empty for any other."""
    if all(np.ptp(np.array(entry.weights)) < 1e-6 for entry in rounds):
        return "all weights are equal"
    if all(np.allclose(entry.weights, np.eye(len(entry.weights)), atol=1e-6) for entry in rounds):
        return "each client uses only its own model"
    return ""
