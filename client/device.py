"""One client: what it learns with others, and the adapters that run on it at test time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.agent.serving import Served, lacking, serve, usual
from client.collaboration import Adapted, adapt, score
from client.evaluation import Row, evaluate_row, make_adapter
from client.learner import Learner, Metrics
from client.local_data import training_set
from client.neighbours import Neighbours, memorise
from client.private import load_network, trained_indices
from client.rules import rule
from client.spec import network_spec
from client.state import Arrays
from client.streams import batch_of, streams_of
from client.summary import join_statistics
from client.task import Task
from data import CORRUPTIONS, Stream, stream
from tta import Statistics
from tta.collaborator import Collaborator, Share
from tta.registry import info


@dataclass(frozen=True)
class Device(Learner):
    """A client that also predicts and adapts at test time; parameters are those of `Learner`."""

    def evaluate(
        self,
        round: int,
        task: Task,
        arrays: Arrays,
        statistics: Mapping[str, NDArray[Any]] | None,
        rows: Sequence[Row],
        shifts: Sequence[str],
        rates: Mapping[str, Mapping[str, float]] | None = None,
    ) -> tuple[Metrics, list[Metrics]]:
        """Run adapters on test streams, all from the one trained state tagged `round`.

        Parameters
        ----------
        arrays, statistics : dict
            The final `global_state` and the means of all clients' statistics; None where no row needs them.
        rows : sequence of Row
            Adapters with their options.
        shifts : sequence of str
            Test distributions.
        rates : mapping, optional
            variant → learned adaptation rates, for rows that need them.

        Returns
        -------
        leak_check, results
            How many stream samples were checked against everything trained on and how many had been (0, unless splits
            are drawn anew); one entry for each row and shift.

        Raises
        ------
        ValueError
            The arrays do not fit, or this client has no statistics of `round`.
        """
        private, known = self._trained(round, task, arrays, statistics)
        streams = [self._stream(shift) for shift in shifts]
        results: list[Metrics] = []
        for base in ("global", "personalised"):
            members = [row for row in rows if row.base == base]
            if members and base == "personalised":
                self._personalise(task, private, round)
            own = self._neighbours(members, round)
            for samples in streams:
                for row in members:
                    results.append(evaluate_row(row, self.model, known, samples, self.settings, rates, own))
        used = self._trained_on(rows, private, round)
        leaked = sum(int(np.isin(samples.index, used).sum()) for samples in streams)
        return {"checked": sum(len(samples.y) for samples in streams), "leaked": leaked}, results

    def serve(
        self,
        round: int,
        task: Task,
        arrays: Arrays,
        statistics: Mapping[str, NDArray[Any]] | None,
        row: Row,
        rates: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Served:
        """Return what makes a row's adapter, as `evaluate` makes it, with a network of its own.

        Parameters are those of `evaluate`.

        Raises
        ------
        ValueError
            As `evaluate`, or the training does not make what the adapter needs.
        """
        private, known = self._trained(round, task, arrays, statistics)
        if lack := lacking(row.adapter, task.rule, rule(task.rule).uses_personal_head):
            raise ValueError(lack)
        if row.base == "personalised":
            self._personalise(task, private, round)
        labelled, size = self.role != "target", self.settings.eval_batch_size
        dealt = self.federation.in_round(round)
        ordinary = usual(self.model, dealt, self.partition, self.device, size, labelled)
        network, neighbours = copy.deepcopy(self.model), self._neighbours([row], round)
        images, chosen = self.federation.images, self.settings
        spec = network_spec(images, chosen.model, chosen.model_options, chosen.dataset, chosen.image_size)
        return serve(row, network, spec, chosen, images.classes, ordinary, known, rates, neighbours)

    def adapt(
        self, round: int, key: str, arrays: Arrays, row: Row, share: Share, received: Arrays | None, proximal: float = 0
    ) -> tuple[Adapted, Metrics]:
        """Do one test-time round: adapt to the stream's next batch and predict it (ALGORITHMS, sections 4 and 6).

        Parameters
        ----------
        round : int
            From 1; also the place in the stream.
        key : str
            Names method and collaboration, so that each has a memory of its own.
        arrays : dict
            The network that everyone starts from.
        received : dict or None
            This client's mixture of what clients shared after the round before.
        proximal : float
            μ of FedProx in the adapter's loss.

        Returns
        -------
        adapted, metrics
            What may be sent, and `num-examples`, `correct` [K], `total` [K] (labels are seen by the scorer alone),
            `corruption` (its number in `data.CORRUPTIONS`) and `seconds`.

        Raises
        ------
        ValueError
            Something does not fit, or the stream has ended. The client's memory is unchanged then.
        """
        load_network(self.model, arrays)
        streams = streams_of(self.settings, self.federation)
        x, labels, corruption = batch_of(streams, self.partition, round, self.device)
        adapter = make_adapter(row, self.model, self.settings, proximal=proximal)
        if not isinstance(adapter, Collaborator):
            raise ValueError(f"{row.adapter} learns nothing that clients could share")
        adapted = adapt(adapter, x, share, self.memory.load(key, round - 1), received)
        self.memory.save(key, round, adapted.state)
        return adapted, {
            **score(adapted.probabilities, labels, self.federation.images.num_classes),
            "num-examples": len(labels),
            "corruption": CORRUPTIONS.index(corruption),
            "seconds": adapted.seconds,
        }

    def _trained(
        self, round: int, task: Task, arrays: Arrays, statistics: Mapping[str, NDArray[Any]] | None
    ) -> tuple[Arrays, Statistics | None]:
        """Load the network as the training left it at `round`; return the private state and what else is known."""
        private = self._receive(arrays, task, round)
        if statistics is None:
            return private, None
        return private, join_statistics(private, statistics, round, self.device, self.role != "target")

    def _personalise(self, task: Task, private: Arrays, round: int) -> None:
        """Turn the network into this client's own, as the training's rule says."""
        self._require_source()
        data = training_set(self.federation.in_round(round), self.partition, self.settings, self.device)
        rule(task.rule).personalise(self._local(data, task, private, "personalise", round))

    def _neighbours(self, rows: Sequence[Row], round: int) -> Neighbours | None:
        """Return what the client memorises under the network as it is, if a row needs it."""
        if not any(_memorises(row) for row in rows):
            return None
        self._require_source()
        return memorise(self.model, self.federation.in_round(round), self.partition, self.settings, self.device)

    def _trained_on(self, rows: Sequence[Row], private: Arrays, round: int) -> NDArray[np.int64]:
        """Return the samples that the training was on, at any client, and what this one trains on beside it."""
        used = [self.federation.trained_on(round - 1), trained_indices(private)]
        if any(row.base == "personalised" or _memorises(row) for row in rows):
            used.append(self.federation.in_round(round).splits[self.partition].train)
        return np.unique(np.concatenate(used))

    def _stream(self, shift: str) -> Stream:
        """Return a test stream of this client."""
        known: dict[str, Any] = {"seed": self.settings.seed, "severity": self.settings.severity}
        return stream(self.federation, self.partition, shift, device=self.device, natural=self.natural, **known)


def _memorises(row: Row) -> bool:
    return "datastore" in info(row.adapter).needs
