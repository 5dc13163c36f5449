"""One client's part in training: its data, its two-head network, its private state."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from client.identity import identity
from client.local_data import labelled, training_set, validate
from client.objectives import objective as find_objective
from client.pooled import pooled_statistics
from client.private import carried_entries, head_entries, load_network, network_entries, own_tensors, receive
from client.randomness import generator
from client.refinement import refine_rates
from client.rules import Local, rule
from client.state import Arrays, PrivateState
from client.summary import own_statistics, summarise
from client.task import Task
from client.training import TrainingSet, mean_loss, train_personal_head
from data import Federation, Images, Role
from models import TwoHead
from settings import Settings
from tta.atp import Adapt, zero_rates

Metrics = dict[str, Any]


@dataclass
class Turn:
    """One client's round of training, from `Learner.begin` to `Learner.end`.

    Parameters
    ----------
    round, task
        What was asked for.
    private : dict
        What the client had kept.
    data : TrainingSet
    metrics : dict
        What was measured on the way.
    loss : float
        Mean loss of the last epoch.
    seconds : float
        Of training alone.
    """

    round: int
    task: Task
    private: Arrays
    data: TrainingSet
    metrics: Metrics = field(default_factory=dict)
    loss: float = float("nan")
    seconds: float = 0.0


@dataclass(frozen=True)
class Learner:
    """A client that learns with others; knows nothing of messages.

    Parameters
    ----------
    federation : Federation
        Images and the splits of all clients, drawn from the seed; what holds in a round is its `in_round`.
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

    def train(self, round: int, task: Task, arrays: Arrays, lend: bool = False) -> tuple[Arrays, Metrics]:
        """Do one round: personal head on the received encoder where the rule has one, then the rule.

        Parameters
        ----------
        round : int
            Training round, from 1.
        task : Task
            What to train, and what of it is joined.
        arrays : dict
            The received `global_state`, or the part of it that this client has not kept.
        lend : bool
            Return the network's own memory, which the next call changes, instead of copies.

        Returns
        -------
        arrays, metrics
            The trained arrays that are joined, and `num-examples`, `train-loss`, `seconds` (of the two training phases
            alone), and correct predictions on the validation split of the *received* global head and, where the rule
            has one, of the new personal head.

        Raises
        ------
        ValueError
            The arrays do not fit, rule or objective are unknown, or this client is a target.
        FloatingPointError
            Training diverged.
        """
        turn, what = self.begin(round, task, arrays), rule(task.rule)
        start = time.perf_counter()
        if what.uses_personal_head:
            self._train_head(turn.data, "personal", round)
        turn.seconds += time.perf_counter() - start
        self.measure(turn)
        local = self._local(turn.data, task, turn.private, "local", round)
        start = time.perf_counter()
        turn.loss = what.train(local)
        turn.seconds += time.perf_counter() - start
        return self.end(turn, local.own, lend)

    def begin(self, round: int, task: Task, arrays: Arrays) -> Turn:
        """Load the network for a round and return what the round is about; raises as `train`."""
        find_objective(task.objective), rule(task.rule)  # refused before anything is done
        self._require_source()
        private = self._receive(arrays, task, round - 1)
        data = training_set(self.federation.in_round(round), self.partition, self.settings, self.device)
        return Turn(round, task, private, data)

    def measure(self, turn: Turn) -> None:
        """Note how good the received network is on the validation split, and the new personal head where it has one."""
        dealt, size = self.federation.in_round(turn.round), self.settings.eval_batch_size
        personal = rule(turn.task.rule).uses_personal_head
        turn.metrics |= validate(self.model, dealt, self.partition, size, self.device, personal)
        if self.settings.aggregation == "qffl":  # its server weighs clients by the loss of what they received
            objective = find_objective(turn.task.objective)
            turn.metrics["global-loss"] = mean_loss(self.model, turn.data, objective, size)

    def end(self, turn: Turn, own: Mapping[str, torch.Tensor], lend: bool = False) -> tuple[Arrays, Metrics]:
        """Keep what is private of the trained network and the rule's `own` tensors; return what `train` returns."""
        task, private = turn.task, turn.private
        state = self.model.global_state()
        joined = state if task.joined is None else task.joined
        kept = {**head_entries(self.model, private, turn.data.index), **network_entries(state, joined, own)}
        self.state.save(task.training, turn.round, kept)  # last: a failed round leaves no trace
        sent = {name: value.cpu().numpy() for name, value in state.items() if name in joined}
        if not lend:  # in the network's own memory order ("K"): to transpose takes longer than to copy
            sent = {name: value.copy(order="K") for name, value in sent.items()}
        measured = {"num-examples": len(turn.data), "train-loss": turn.loss, "seconds": turn.seconds}
        return sent, {**turn.metrics, **measured}

    def statistics(
        self, round: int, task: Task, arrays: Arrays, wanted: Collection[str] = ()
    ) -> tuple[Arrays, Metrics]:
        """Train the personal head on the final model and return the client's statistics under it.

        `round` is the tag of the private state that this writes: one after the last training round. Statistics are
        float64: `descriptor` [d], `dle` [d], `entropy_local`, `entropy_global` [1] (ALGORITHMS, section 0), and those
        of `tta.statistics.ON_REQUEST` that are `wanted`.
        """
        start = time.perf_counter()
        self._require_source()
        before = self._receive(arrays, task, round - 1)
        dealt = self.federation.in_round(round)
        data = training_set(dealt, self.partition, self.settings, self.device)
        personal = rule(task.rule).uses_personal_head
        if personal:
            self._train_head(data, "final", round)
        size = self.settings.eval_batch_size
        local = summarise(self.model, data.pixels, size)
        private = {**carried_entries(before), **head_entries(self.model, before, data.index)}
        self.state.save(task.training, round, {**private, **own_statistics(local, round)})
        held_out = labelled(dealt, dealt.splits[self.partition].validation, self.device)
        local |= pooled_statistics(self.model, data.counts, *held_out, wanted, self.settings)
        return local, {
            **validate(self.model, dealt, self.partition, size, self.device, personal),
            "num-examples": len(data),
            "seconds": time.perf_counter() - start,
        }

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
        load_network(self.model, arrays)
        start = time.perf_counter()
        dealt = self.federation.in_round(round)
        x, y = labelled(dealt, dealt.splits[self.partition].validation, self.device)
        draw = generator(self.settings.seed, "rates", round, self.partition)
        refined = refine_rates(self.model, x, y, rates or zero_rates(self.model), variant, self.settings, draw)
        return refined.rates, {
            "num-examples": refined.total,
            "loss": refined.loss,
            "correct": refined.correct,
            "seconds": time.perf_counter() - start,
        }

    def _require_source(self) -> None:
        if self.role == "target":
            raise ValueError(f"client {self.partition} is a target: it has no labels to train on")

    def _receive(self, arrays: Arrays, task: Task, round: int) -> Arrays:
        """Load the network from what came and from the private state up to `round`, which is returned."""
        private = self.state.load(task.training, round) or {}
        receive(self.model, arrays, private, self.settings.seed, task.joined)
        return private

    def _local(self, data: TrainingSet, task: Task, private: Arrays, purpose: str, round: int) -> Local:
        """Return what a rule works with."""
        return Local(
            self.model,
            data,
            find_objective(task.objective),
            self.settings,
            generator(self.settings.seed, purpose, round, self.partition),
            own_tensors(private, self.device),
        )

    def _train_head(self, data: TrainingSet, purpose: str, round: int) -> None:
        draw = generator(self.settings.seed, purpose, round, self.partition)
        train_personal_head(self.model, data, self.settings, draw)
