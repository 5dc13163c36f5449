"""One client: its data, its two-head network, its private state, its adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.checks import check_model
from client.collaboration import Adapted, adapt, score
from client.evaluation import Row, evaluate_row, make_adapter
from client.identity import identity
from client.local_data import training_set, validate
from client.objectives import objective as find_objective
from client.randomness import generator
from client.refinement import refine_rates
from client.state import Arrays, PrivateState
from client.streams import batch_of, streams_of
from client.summary import join_statistics, own_statistics, summarise
from client.training import TrainingSet, mean_loss, train_network, train_personal_head
from data import CORRUPTIONS, Federation, Images, Role, stream
from models import PERSONAL_PREFIX, TwoHead
from settings import Settings
from tta.atp import Adapt, zero_rates
from tta.collaborator import Collaborator
from tta.table import Share

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """One client of the federation; knows nothing of messages.

    Parameters
    ----------
    federation : Federation
        Images and the splits of all clients, drawn once from the seed.
    partition : int
        Which client this is.
    model : TwoHead
        The network, on `device`; every call loads what it needs into it.
    state : PrivateState
        Personal head and local statistics between calls.
    memory : PrivateState
        What adapters have learned at test time; on disk or in an agent, since it may be as large as the network.
    settings : Settings
    device : torch.device
        Where training, adapters and corruptions run.
    role : "both", "source" or "target"
        Whether it trains and tests, only trains, or only tests; a target trains on nothing.
    natural : Images or None
        Naturally shifted images (CIFAR-10.1), where they are at hand.
    """

    federation: Federation
    partition: int
    model: TwoHead
    state: PrivateState
    memory: PrivateState
    settings: Settings
    device: torch.device
    role: Role
    natural: Images | None = None

    def describe(self) -> dict[str, Any]:
        """Return what the server may know of this client's data: sizes and kinds, no label counts.

        Raises
        ------
        ValueError
            A test distribution that the settings ask for does not exist; the message lists what does.
        """
        return identity(self.federation, self.partition, self.role, self.settings, self.natural is not None)

    def train(self, round: int, training: str, objective: str, arrays: Arrays) -> tuple[Arrays, Metrics]:
        """Do one round: personal head on the received encoder, then local training of the shared part.

        Parameters
        ----------
        round : int
            Training round, from 1.
        training : str
            Names the federated training, so that several keep their private states apart.
        objective : str
            Local objective of the shared part.
        arrays : dict
            The received `global_state`.

        Returns
        -------
        arrays, metrics
            The trained `global_state`, and `num-examples`, `train-loss`, `seconds` (of the two training phases alone),
            and correct predictions of the *received* global and of the new personal head on the validation split.

        Raises
        ------
        ValueError
            The arrays do not fit, the objective is unknown, or this client is a target.
        FloatingPointError
            Training diverged.
        """
        loss_function = find_objective(objective)
        self._require_source()
        self._receive(arrays, training, round - 1)
        data = training_set(self.federation, self.partition, self.settings, self.device)
        start = time.perf_counter()
        self._train_head(data, "personal", round)
        seconds = time.perf_counter() - start
        size = self.settings.eval_batch_size
        metrics = validate(self.model, self.federation, self.partition, size, self.device)
        if self.settings.aggregation == "qffl":  # its server weighs clients by the loss of what they received
            metrics["global-loss"] = mean_loss(self.model, data, loss_function, size)
        draw = generator(self.settings.seed, "local", round, self.partition)
        start = time.perf_counter()
        loss = train_network(self.model, data, loss_function, self.settings, draw)
        seconds += time.perf_counter() - start
        self.state.save(training, round, self._private(data, training, round))  # last: a failed round leaves no trace
        sent = {name: value.cpu().numpy().copy() for name, value in self.model.global_state().items()}
        return sent, {**metrics, "num-examples": len(data), "train-loss": loss, "seconds": seconds}

    def statistics(self, round: int, training: str, arrays: Arrays) -> tuple[Arrays, Metrics]:
        """Train the personal head on the final model and return the client's statistics under it.

        `round` is the tag of the private state that this writes: one after the last training round. Statistics are
        float64: `descriptor` [d], `dle` [d], `entropy_local`, `entropy_global` [1] (ALGORITHMS, section 0).
        """
        start = time.perf_counter()
        self._require_source()
        self._receive(arrays, training, round - 1)
        data = training_set(self.federation, self.partition, self.settings, self.device)
        self._train_head(data, "final", round)
        local = summarise(self.model, data.pixels, self.settings.eval_batch_size)
        private = {**self._private(data, training, round), **own_statistics(local, round)}
        self.state.save(training, round, private)
        return local, {
            **validate(self.model, self.federation, self.partition, self.settings.eval_batch_size, self.device),
            "num-examples": len(data),
            "seconds": time.perf_counter() - start,
        }

    def evaluate(
        self,
        round: int,
        training: str,
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
            How many stream samples were checked against everything trained on and how many had been (must be 0);
            one entry for each row and shift.

        Raises
        ------
        ValueError
            The arrays do not fit, or this client has no statistics of `round`.
        """
        private = self._receive(arrays, training, round)
        known = None if statistics is None else join_statistics(private, statistics, round, self.device)
        results: list[Metrics] = []
        checked = leaked = 0
        for shift in shifts:
            samples = stream(
                self.federation,
                self.partition,
                shift,
                seed=self.settings.seed,
                severity=self.settings.severity,
                device=self.device,
                natural=self.natural,
            )
            leaked += self._leaks(samples.index, private)
            checked += len(samples.y)
            for row in rows:
                results.append(evaluate_row(row, self.model, known, samples, self.settings, rates))
        return {"checked": checked, "leaked": leaked}, results

    def refine_rates(
        self, round: int, arrays: Arrays, rates: Mapping[str, float], variant: Adapt
    ) -> tuple[dict[str, float], Metrics]:
        """Refine adaptation rates on the validation split (ATP, Algorithm 1: the client's part).

        Parameters
        ----------
        arrays : dict
            w_G, the `global_state` that all rates belong to; it stays as it is.
        rates : mapping
            α by module, as the server sent them; empty in the first round, when all are zero.
        variant : "all", "params" or "stats"
            Which modules have a rate other than zero (Table 4).

        Returns
        -------
        rates, metrics
            The refined rates, and `num-examples`, `loss` (nats), `correct` and `seconds`.

        Raises
        ------
        ValueError
            The arrays or rates do not fit, or this client is a target or has no validation samples.
        """
        self._require_source()
        self._load_network(arrays)
        indices = self.federation.splits[self.partition].validation
        start = time.perf_counter()
        x = self.federation.images.batch(indices, self.device).contiguous(memory_format=torch.channels_last)
        y = torch.from_numpy(self.federation.images.labels[indices]).to(self.device)
        draw = generator(self.settings.seed, "rates", round, self.partition)
        refined = refine_rates(self.model, x, y, rates or zero_rates(self.model), variant, self.settings, draw)
        return refined.rates, {
            "num-examples": refined.total,
            "loss": refined.loss,
            "correct": refined.correct,
            "seconds": time.perf_counter() - start,
        }

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
        self._load_network(arrays)
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

    def _require_source(self) -> None:
        if self.role == "target":
            raise ValueError(f"client {self.partition} is a target: it has no labels to train on")

    def _load_network(self, arrays: Arrays) -> None:
        check_model(arrays, self.model)
        self.model.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})

    def _receive(self, arrays: Arrays, training: str, round: int) -> Arrays:
        """Load the shared part from `arrays` and the personal head from the private state up to `round`."""
        self._load_network(arrays)
        private = self.state.load(training, round)
        if private is None:
            private = {}
        draw = generator(self.settings.seed, "head")
        for name, value in self._personal_head().items():
            value.copy_(torch.tensor(private[name]) if name in private else self._initial(value, draw))
        return private

    def _initial(self, value: Tensor, draw: torch.Generator) -> Tensor:
        """Return torch's initial value of a linear layer, the same on every client, from the seed."""
        bound = self.model.feature_dim**-0.5
        return torch.empty(value.shape, dtype=value.dtype).uniform_(-bound, bound, generator=draw)

    def _personal_head(self) -> dict[str, Tensor]:
        """Return the personal head's tensors (not copies) by `state_dict` name."""
        return self.model.personal_head.state_dict(prefix=PERSONAL_PREFIX)

    def _train_head(self, data: TrainingSet, purpose: str, round: int) -> None:
        draw = generator(self.settings.seed, purpose, round, self.partition)
        train_personal_head(self.model, data, self.settings, draw)

    def _private(self, data: TrainingSet, training: str, round: int) -> Arrays:
        """Return the personal head, and the indices of all images trained on, this round's included."""
        earlier = (self.state.load(training, round - 1) or {}).get("trained-indices", np.empty(0, np.int64))
        head = {name: value.cpu().numpy().copy() for name, value in self._personal_head().items()}
        return {**head, "trained-indices": np.union1d(earlier, data.index)}

    def _leaks(self, index: NDArray[np.int64], private: Arrays) -> int:
        """Count the samples of a stream that this device has in fact trained on, or that any client trains on."""
        own = private.get("trained-indices", np.empty(0, np.int64))  # a target has trained on nothing
        trained = np.union1d(own, self.federation.train_indices)
        return int(np.isin(index, trained).sum())
