"""One client: its data, its two-head network, its private state, its adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.checks import check_means, check_model
from client.evaluation import Row, evaluate_row
from client.objectives import objective as find_objective
from client.randomness import generator
from client.state import Arrays, PrivateState
from client.summary import summarise
from client.training import TrainingSet, train_network, train_personal_head
from data import DATASETS, Federation, Images, crop_flip, resolve, stream
from models import PERSONAL_PREFIX, TwoHead
from settings import Settings
from tta import Statistics

Metrics = dict[str, Any]
OWN = "statistics."  # before the names of the client's own statistics in its private state
STATISTICS_ROUND = "statistics-round"  # under which round's model they were computed


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
    settings : Settings
    device : torch.device
        Where training, adapters and corruptions run.
    natural : Images or None
        Naturally shifted images (CIFAR-10.1), where they are at hand.
    """

    federation: Federation
    partition: int
    model: TwoHead
    state: PrivateState
    settings: Settings
    device: torch.device
    natural: Images | None = None

    def describe(self) -> dict[str, Any]:
        """Return what the server may know of this client's data: sizes and kinds, no label counts.

        Raises
        ------
        ValueError
            A test distribution that the settings ask for does not exist; the message lists what does.
        """
        split, images = self.federation.splits[self.partition], self.federation.images
        shifts, note = resolve(self.settings.shifts, self.natural is not None)
        channels = int(images.pixels.shape[1])
        mean, std = DATASETS[self.settings.dataset].normalisation(channels)
        return {
            "partition-id": self.partition,
            "num-partitions": self.federation.num_clients,
            "classes": list(images.classes),
            "channels": channels,
            "mean": list(mean),
            "std": list(std),
            "sizes": [len(split.train), len(split.validation), len(split.test)],
            "shifts": list(shifts),
            "note": note or "",
        }

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
            The arrays do not fit, or the objective is unknown.
        FloatingPointError
            Training diverged.
        """
        loss_function = find_objective(objective)
        self._receive(arrays, training, round - 1)
        data = self._training_set()
        start = time.perf_counter()
        self._train_head(data, "personal", round)
        seconds = time.perf_counter() - start
        metrics = self._validate()
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
        self._receive(arrays, training, round - 1)
        data = self._training_set()
        self._train_head(data, "final", round)
        local = summarise(self.model, data.pixels, self.settings.eval_batch_size)
        own = {f"{OWN}{name}": value for name, value in local.items()}
        private = {**self._private(data, training, round), **own, STATISTICS_ROUND: np.array(round)}
        self.state.save(training, round, private)
        return local, {
            **self._validate(),
            "num-examples": len(data),
            "seconds": time.perf_counter() - start,
        }

    def evaluate(
        self,
        round: int,
        training: str,
        arrays: Arrays,
        statistics: Mapping[str, NDArray[Any]],
        rows: Sequence[Row],
        shifts: Sequence[str],
    ) -> tuple[Metrics, list[Metrics]]:
        """Run adapters on test streams, all from the one trained state tagged `round`.

        Parameters
        ----------
        arrays, statistics : dict
            The final `global_state` and the means of all clients' statistics.
        rows : sequence of Row
            Adapters with their options.
        shifts : sequence of str
            Test distributions.

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
        known = self._statistics(private, statistics, round)
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
                results.append(evaluate_row(row, self.model, known, samples, self.settings))
        return {"checked": checked, "leaked": leaked}, results

    def _receive(self, arrays: Arrays, training: str, round: int) -> Arrays:
        """Load the shared part from `arrays` and the personal head from the private state up to `round`."""
        check_model(arrays, self.model)
        self.model.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
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

    def _training_set(self) -> TrainingSet:
        """Return the training split on the device, with the training augmentation of the data set."""
        indices = self.federation.splits[self.partition].train
        images = self.federation.images
        labels = torch.from_numpy(images.labels[indices])
        flip = DATASETS[self.settings.dataset].flip
        return TrainingSet(
            indices,
            torch.from_numpy(images.pixels[indices]).to(self.device),
            labels.to(self.device),
            torch.bincount(labels, minlength=len(images.classes)).to(self.device),
            partial(crop_flip, flip=flip) if self.settings.augment else None,
        )

    def _train_head(self, data: TrainingSet, purpose: str, round: int) -> None:
        draw = generator(self.settings.seed, purpose, round, self.partition)
        train_personal_head(self.model, data, self.settings, draw)

    @torch.no_grad()
    def _validate(self) -> Metrics:
        """Count what the global and the personal head get right on the validation split."""
        indices = self.federation.splits[self.partition].validation
        right = {"global": 0, "personal": 0}
        for chosen in np.array_split(indices, max(1, len(indices) // self.settings.eval_batch_size)):
            labels = torch.from_numpy(self.federation.images.labels[chosen]).to(self.device)
            z = self.model.features(self.federation.images.batch(chosen, self.device))
            right["global"] += int((self.model.head(z).argmax(1) == labels).sum())
            right["personal"] += int((self.model.personal_head(z).argmax(1) == labels).sum())
        return {
            "validation-total": len(indices),
            "validation-correct": right["global"],
            "personal-validation-correct": right["personal"],
        }

    def _private(self, data: TrainingSet, training: str, round: int) -> Arrays:
        """Return the personal head, and the indices of all images trained on, this round's included."""
        earlier = (self.state.load(training, round - 1) or {}).get("trained-indices", np.empty(0, np.int64))
        head = {name: value.cpu().numpy().copy() for name, value in self._personal_head().items()}
        return {**head, "trained-indices": np.union1d(earlier, data.index)}

    def _leaks(self, index: NDArray[np.int64], private: Arrays) -> int:
        """Count the samples of a stream that this device has in fact trained on, or that any client trains on."""
        trained = np.union1d(private["trained-indices"], self.federation.train_indices)
        return int(np.isin(index, trained).sum())

    def _statistics(self, private: Arrays, means: Mapping[str, NDArray[Any]], round: int) -> Statistics:
        """Join the client's own statistics with the means over clients."""
        if int(private.get(STATISTICS_ROUND, np.array(-1))) != round:
            raise ValueError(f"client {self.partition} has no statistics of round {round}")
        own = {name.removeprefix(OWN): value for name, value in private.items() if name.startswith(OWN)}
        check_means(means, own)

        def tensor(value: NDArray[Any]) -> Tensor:
            return torch.tensor(value, device=self.device)

        return Statistics(
            descriptor_local=tensor(own["descriptor"]),
            descriptor_global=tensor(means["descriptor"]),
            dle_local=tensor(own["dle"]),
            dle_global=tensor(means["dle"]),
            entropy_local=float(own["entropy_local"][0]),
            entropy_global=float(own["entropy_global"][0]),
        )
