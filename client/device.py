"""One client: what it learns with others, and the adapters that run on it at test time.

Each kind of request is one method of `Device`; `fedtta.client.node.perform` makes the device and calls the method.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtta.client.adaptation import adapt, batch_of, rates_of, refine_rates, score, streams_of
from fedtta.client.adapters import AdapterContext, chooses, make_adapter
from fedtta.client.algorithms import LocalAlgorithm, LocalContext, find_algorithm
from fedtta.client.algorithms.training import (
    TrainingSet,
    find_objective,
    generator,
    labelled,
    mean_loss,
    process_draws_by,
    train_personal_head,
    validate,
)
from fedtta.client.evaluation import (
    Calibrated,
    Labelled,
    Neighbours,
    calibrate_row,
    evaluate_row,
    gains_of,
    memorize,
    memorizes,
)
from fedtta.client.network import (
    carried_entries,
    head_entries,
    load_network,
    network_entries,
    own_tensors,
    receive,
    trained_indices,
)
from fedtta.client.own import PINNED, Own
from fedtta.client.resources import has_bfloat16, network_spec, normalization_of
from fedtta.client.serving import Served, baseline_predictions, missing_heads, serve
from fedtta.client.state import NetworkStore, PrivateState
from fedtta.client.statistics import (
    Samples,
    effective_samples,
    join_statistics,
    own_statistics,
    requested_statistics,
    summarise,
)
from fedtta.data import CORRUPTIONS, UNCORRUPTED, Federation, Images, Role, Stream, client_number, resolve, stream
from fedtta.messages.arrays import Arrays
from fedtta.messages.arrays import digest as digest_of
from fedtta.messages.replies import Adapted, Evaluated, Identity, RefinedRates, Summarized, Trained
from fedtta.messages.requests import (
    Adapt,
    AdapterRow,
    Evaluate,
    Identify,
    RefineRates,
    Summarize,
    Train,
    TrainingTask,
)
from fedtta.models import TwoHead
from fedtta.models.accelerator import clock
from fedtta.settings import Settings
from fedtta.tta import Statistics
from fedtta.tta.atp import zero_rates
from fedtta.tta.auto import SERVED
from fedtta.tta.collaborator import Collaborator
from fedtta.tta.registry import needs_of
from fedtta.tta.statistics import PERSONALISED

Rates = Mapping[str, Mapping[str, float]]

#: A note of how fast a run is, not of what it computes.
SLOW_BFLOAT16 = "autocast = true on a processor without bfloat16 instructions: float32 trains several times as fast"


@dataclass
class Turn:
    """One client's round of training, from `Device.begin` to `Device.end`.

    Parameters
    ----------
    request : Train
    private : dict
        The private state after the round before.
    data : TrainingSet
    measured : dict
        Fields of the reply that are known already.
    loss : float
        Mean loss of the last epoch.
    seconds : float
        Of training alone.
    """

    request: Train
    private: Arrays
    data: TrainingSet
    measured: dict[str, Any] = field(default_factory=dict)
    loss: float = float("nan")
    seconds: float = 0.0


@dataclass(frozen=True)
class Device:
    """One client in one run.

    Parameters
    ----------
    federation : Federation
        Images and the splits of all clients, drawn from the seed; `in_round` gives those of a round.
    partition : int
        The client's position in the federation.
    model : TwoHead
        The network, on `device`; every method loads what it needs into it.
    state : PrivateState
        Personal head and the client's statistics between requests.
    memory : PrivateState
        The states of adapters between test-time rounds, on disk or in an agent: they may be as large as the network.
    settings : Settings
    device : torch.device
        Where training, adapters and corruptions run.
    role : "both", "source" or "target"
        Whether it trains and tests, only trains, or only tests; a target has no labels.
    natural : Images or None
        Naturally shifted images (CIFAR-10.1), if they are at hand.
    networks : NetworkStore
        Networks that are sent once.
    lends : bool
        See `Node`.
    name : str
        The client's name; seeds and private state go by it.
    own : Own or None
        Its own data, if it has any; `federation` is of this device alone then.
    least_batch : int
        See `Node`.
    """

    federation: Federation
    partition: int
    model: TwoHead
    state: PrivateState
    memory: PrivateState
    settings: Settings
    device: torch.device
    role: Role
    networks: NetworkStore
    natural: Images | None = None
    lends: bool = False
    name: str = "0"
    own: Own | None = None
    least_batch: int = 1

    @property
    def number(self) -> int:
        """The client's number in seeds."""
        return client_number(self.name)

    def identify(self, request: Identify) -> Identity:
        """Return what the server may know of this client: sizes and kinds of its data, no label counts.

        Raises
        ------
        ValueError
            A test distribution that the settings ask for does not exist, or its streams cannot be made.
        """
        federation, settings = self.federation, self.settings
        split, images = federation.splits[self.partition], federation.images
        shifts, note = self._shifts()
        if "unseen_domain" in shifts and not len(federation.unseen):
            raise ValueError("shifts: unseen_domain is a test distribution with unseen-domain only")
        lacking = federation.divided and " without " in images.name  # some of its domains are not at hand
        channels = images.shape[0]
        mean, std = normalization_of(settings, channels)
        collaborates = bool(settings.collaborations)  # in test-time rounds over streams; shifts play no part then
        about = [] if collaborates else [note, f"images: {images.name}" if lacking else ""]
        if settings.autocast and settings.rounds and self.role != "target" and not has_bfloat16(self.device):
            about.append(SLOW_BFLOAT16)
        tags: dict[str, set[int]] = {}
        for key, found in (*self.state.tags().items(), *self.memory.tags().items()):
            tags.setdefault(key, set()).update(found)
        return Identity(
            name=self.name,
            classes=list(images.classes),
            channels=channels,
            mean=list(mean),
            std=list(std),
            sizes=[len(split.train), len(split.validation), len(split.test)],
            shifts=list(shifts),
            note="; ".join(filter(None, about)),
            role=self.role,
            corruptions=list(self._corruptions) if collaborates else [],
            stream_rounds=streams_of(settings, federation).rounds if collaborates else 0,
            saved={key: sorted(tags[key]) for key in sorted(tags) if key != PINNED},
            images=len(images) if federation.divided else 0,
            pixel_mean=images.pixel_mean if federation.divided else 0.0,
            **(self.own.facts if self.own else {}),
        )

    def _shifts(self) -> tuple[tuple[str, ...], str | None]:
        """Return the test distributions that the settings stand for here, and a note; none without labels."""
        if not self.federation.images.labelled:
            return (), None
        return resolve(self.settings.shifts, self.natural is not None, alone=not self.federation.divided)

    @property
    def _corruptions(self) -> tuple[str, ...]:
        """Return the conditions of the test-time streams."""
        return CORRUPTIONS if self.federation.divided else (UNCORRUPTED,)

    def train(self, request: Train) -> Trained:
        """Do one round: the personal head on the received encoder if the algorithm has one, then the local algorithm.

        Raises
        ------
        ValueError
            The arrays do not fit, algorithm or objective are unknown, or this client is a target.
        FloatingPointError
            Training diverged.
        """
        turn, algorithm = self.begin(request), find_algorithm(request.task.algorithm)
        start = clock(self.device)
        if algorithm.uses_personal_head:
            self._train_head(turn.data, "personal", request.round)
        turn.seconds += clock(self.device) - start
        self.measure(turn)
        context = self._context(turn.data, request.task, turn.private, "local", request.round, request.proximal_mu)
        start = clock(self.device)
        turn.loss = algorithm.train(context)
        turn.seconds += clock(self.device) - start
        return self.end(turn, context.own)

    def begin(self, request: Train) -> Turn:
        """Load the network for a round; raises as `train`."""
        find_objective(request.task.objective)  # refused before anything is done
        find_algorithm(request.task.algorithm)
        self._require_source()
        private = self._receive(request.arrays, request.task, request.round - 1, request.aggregated)
        federation = self.federation.in_round(request.round)
        return Turn(request, private, self._training_set(federation))

    def measure(self, turn: Turn) -> None:
        """Validate the received network, and the new personal head if the local algorithm has one."""
        request, size = turn.request, self.settings.eval_batch_size
        federation, personal = self.federation.in_round(request.round), self._algorithm(request.task).uses_personal_head
        turn.measured |= validate(self.model, federation, self.partition, size, self.device, personal)
        if "global-loss" in request.client_metrics:
            objective = find_objective(request.task.objective)
            turn.measured["global_loss"] = mean_loss(self.model, turn.data, objective, size)

    def end(self, turn: Turn, own: Mapping[str, torch.Tensor]) -> Trained:
        """Save the private part of the trained network and the algorithm's `own` tensors; return the reply."""
        request, state = turn.request, self.model.global_state()
        aggregated = state if request.aggregated is None else request.aggregated
        kept = {**head_entries(self.model, turn.private, turn.data.index), **network_entries(state, aggregated, own)}
        self.state.save(request.task.training, request.round, kept)  # last: a failed round leaves no trace
        sent = {name: value.cpu().numpy() for name, value in state.items() if name in aggregated}
        if not self.lends:  # in the network's own memory order ("K"): a transposition takes longer than a copy
            sent = {name: value.copy(order="K") for name, value in sent.items()}
        return Trained(
            arrays=sent,
            num_examples=len(turn.data),
            train_loss=turn.loss,
            seconds=turn.seconds,
            **turn.measured,
        )

    def correct_after(self, request: Train, arrays: Arrays) -> int:
        """Return how many validation samples the global head classifies correctly after a round that ended with arrays.

        Parameters
        ----------
        arrays : dict
            What is aggregated; the others are those that this client has kept in the round.
        """
        self._receive(arrays, request.task, request.round, request.aggregated)
        federation, size = self.federation.in_round(request.round), self.settings.eval_batch_size
        return validate(self.model, federation, self.partition, size, self.device, False)["validation_correct"]

    def effective_samples(self, request: Train | Summarize) -> tuple[float, float]:
        """Return how many training samples are behind a reply; see `fedtta.client.statistics.effective_samples`."""
        self._receive(request.arrays, request.task, request.round - 1, request.aggregated)
        data = self._training_set(self.federation.in_round(request.round))
        return effective_samples(self.model, data.pixels, data.labels, self.settings.eval_batch_size)

    def summarize(self, request: Summarize) -> Summarized:
        """Train the personal head on the final model and return the client's statistics under it.

        Statistics are float64: `descriptor` [d], `dle` [d], `entropy_local`, `entropy_global` [1] (ALGORITHMS, section
        0), and statistics of labels that are `wanted`. Raises as `train`.
        """
        start = clock(self.device)
        self._require_source()
        before = self._receive(request.arrays, request.task, request.round - 1, request.aggregated)
        federation = self.federation.in_round(request.round)
        data = self._training_set(federation)
        personal = self._algorithm(request.task).uses_personal_head
        if personal:
            self._train_head(data, "final", request.round)
        size = self.settings.eval_batch_size
        local = summarise(self.model, data.pixels, size)
        private = {**carried_entries(before), **head_entries(self.model, before, data.index)}
        self.state.save(request.task.training, request.round, {**private, **own_statistics(local, request.round)})
        held_out = labelled(federation, federation.splits[self.partition].validation, self.device)
        local |= requested_statistics(Samples(self.model, data.counts, *held_out, self.settings), request.wanted)
        counts = validate(self.model, federation, self.partition, size, self.device, personal)
        seconds = clock(self.device) - start
        about: dict[str, Any] = {"num_examples": len(data), "seconds": seconds, **counts}
        return Summarized(statistics=local, **about)

    def refine_rates(self, request: RefineRates) -> RefinedRates:
        """Refine adaptation rates on the validation split (ATP, Algorithm 1: the client's part).

        Rates that are empty stand for zeros, as in the first round.

        Raises
        ------
        ValueError
            The arrays or rates do not fit, or this client is a target or has no validation samples.
        """
        self._require_source()
        rates = rates_of(request.rates)
        load_network(self.model, self._network(request.network, request.arrays))
        start = clock(self.device)
        federation = self.federation.in_round(request.round)
        x, y = labelled(federation, federation.splits[self.partition].validation, self.device)
        draw = generator(self.settings.seed, "rates", request.round, self.number)
        refined = refine_rates(self.model, x, y, rates or zero_rates(self.model), request.variant, self.settings, draw)
        return RefinedRates(
            rates={name: np.asarray(value, np.float64) for name, value in refined.rates.items()},
            num_examples=refined.total,
            loss=refined.loss,
            correct=refined.correct,
            seconds=clock(self.device) - start,
        )

    def adapt(self, request: Adapt) -> Adapted:
        """Do one test-time round: adapt to the stream's next batch and predict it (ALGORITHMS, sections 4 and 6).

        Raises
        ------
        ValueError
            Something does not fit, or the stream has ended. The client's memory is unchanged then.
        """
        load_network(self.model, self._network(request.network, request.arrays))
        streams = streams_of(self.settings, self.federation)
        x, labels, corruption = batch_of(streams, self.partition, request.round, self.device)
        adapter = make_adapter(request.row, AdapterContext(self.model, self.settings), proximal=request.proximal_mu)
        if not isinstance(adapter, Collaborator):
            raise ValueError(f"{request.row.adapter} learns nothing that clients could share")
        state = self.memory.load(request.cell, request.round - 1)
        draw = generator(self.settings.seed, f"adapt {request.cell}", request.round, self.number)
        with process_draws_by(draw, self.device):
            adapted = adapt(adapter, x, request.share, state, request.shared)  # type: ignore[arg-type]
        self.memory.save(request.cell, request.round, adapted.state)
        correct, total = score(adapted.probabilities, labels, self.federation.images.num_classes)
        return Adapted(
            shared=adapted.shared,
            normalization=adapted.normalization if request.send_normalization else None,
            start=adapted.start if request.send_start else None,
            num_examples=len(labels),
            corruption=self._corruptions.index(corruption),
            seconds=adapted.seconds,
            correct=correct,
            total=total,
        )

    def evaluate(self, request: Evaluate) -> Evaluated:
        """Run adapters on test streams, all from the one trained state tagged `request.round`.

        Raises
        ------
        ValueError
            The arrays do not fit, this client has no statistics of that round, or there are shifts and no labels.
        """
        rates = {variant: rates_of(arrays) for variant, arrays in request.rates.items()}
        private, statistics = self._trained(request)
        if not request.shifts:  # the model is only installed
            return Evaluated(num_examples=1, checked=0, leaked=0, results=[])
        if not self.federation.images.labelled:
            raise ValueError(f"client {self.name} has no labels: its predictions cannot be evaluated")
        streams = [self._stream(shift) for shift in request.shifts]
        results = []
        for base in ("global", "personalised"):
            rows = [row for row in request.rows if row.base == base]
            if rows and base == "personalised":
                self._personalize(request, private)
            context = AdapterContext(
                self.model, self.settings, statistics, rates, self._neighbours(rows, request.round)
            )
            calibrated = self._calibrated(rows, context, request)
            results += [
                evaluate_row(row, context, samples, calibrated.get(row.label)) for samples in streams for row in rows
            ]
        used = self._trained_on(request.rows, private, request.round)
        checked = sum(len(samples.y) for samples in streams)
        leaked = sum(int(self.federation.among(samples.index, used).sum()) for samples in streams)
        return Evaluated(num_examples=max(checked, 1), checked=checked, leaked=leaked, results=results)

    def serve(self, request: Evaluate, row: AdapterRow) -> Served:
        """Return a row's adapter as `evaluate` makes it, with a network of its own.

        Raises
        ------
        ValueError
            As `evaluate`, or the training, or a target, does not make what the adapter needs.
        """
        if row.base == "personalised" and self.role == "target":
            raise ValueError(f"base = personalised trains on labels, and {self.name} is a target; use base = global")
        lacking = sorted(needs_of(row.adapter, row.options) & PERSONALISED)
        if lacking and self.role == "target":  # its personal head is as the seed made it
            what = ", ".join(lacking)
            raise ValueError(f"{row.adapter} needs {what}, learned from labels of its own, and {self.name} is a target")
        private, statistics = self._trained(request)
        algorithm = request.task.algorithm
        if missing := missing_heads(row, self._algorithm(request.task)):
            raise ValueError(f"{row.adapter} needs a {missing[0]}, which local algorithm {algorithm!r} does not train")
        if row.base == "personalised":
            self._personalize(request, private)
        federation, size = self.federation.in_round(request.round), self.settings.eval_batch_size
        labelled = self.role != "target"  # a target's labels are for evaluation only
        baseline = baseline_predictions(self.model, federation, self.partition, self.device, size, labelled)
        network, neighbours = copy.deepcopy(self.model), self._neighbours([row], request.round)
        rates = {variant: rates_of(arrays) for variant, arrays in request.rates.items()}
        classes = self.federation.images.classes
        spec = network_spec(self.federation.images, self.settings)
        context = AdapterContext(network, self.settings, statistics, rates, neighbours)
        gains = gains_of(row, context, self._validation(request), SERVED) if chooses(row) else None
        return serve(row, context, gains, spec, classes, baseline)

    def _require_source(self) -> None:
        if self.role == "target":
            raise ValueError(f"client {self.name} is a target: it has no labels to train on")

    def _training_set(self, federation: Federation) -> TrainingSet:
        data = TrainingSet.of_client(federation, self.partition, self.settings, self.device)
        return replace(data, least_batch=self.least_batch)

    def _algorithm(self, task: TrainingTask) -> LocalAlgorithm:
        return find_algorithm(task.algorithm)

    def _receive(
        self, arrays: Arrays, task: TrainingTask, round: int, aggregated: Sequence[str] | None = None
    ) -> Arrays:
        """Load the network from what was received and from the private state up to `round`, which is returned."""
        private = self.state.load(task.training, round) or {}
        receive(self.model, arrays, private, self.settings.seed, aggregated)
        return private

    def _network(self, digest: str, arrays: Arrays | None) -> Arrays:
        """Return the network that a request is about: what it brings, which is kept, or what was kept before.

        Raises
        ------
        ValueError
            The arrays have another digest (other clients and runs would get them under it), or were not kept.
        """
        if arrays is None:
            return self.networks.load(digest)
        if digest_of(arrays) != digest:
            raise ValueError(f"network {digest[:12]!r}: its arrays have another digest")
        self.networks.keep(digest, arrays)
        return arrays

    def _context(
        self, data: TrainingSet, task: TrainingTask, private: Arrays, purpose: str, round: int, proximal_mu: float = 0.0
    ) -> LocalContext:
        draw = generator(self.settings.seed, purpose, round, self.number)
        own, objective = own_tensors(private, self.device), find_objective(task.objective)
        return LocalContext(self.model, data, objective, self.settings, draw, own, proximal_mu)

    def _train_head(self, data: TrainingSet, purpose: str, round: int) -> None:
        draw = generator(self.settings.seed, purpose, round, self.number)
        train_personal_head(self.model, data, self.settings, draw)

    def _trained(self, request: Evaluate) -> tuple[Arrays, Statistics | None]:
        """Load the network as the training left it; return the private state and the statistics."""
        private = self._receive(request.arrays, request.task, request.round)
        if request.statistics is None:
            return private, None
        trains = self.role != "target"
        means, over = request.statistics, request.means_over
        return private, join_statistics(private, means, request.round, self.device, trains, over)

    def _personalize(self, request: Evaluate, private: Arrays) -> None:
        """Personalize the network in place, as the training's local algorithm does."""
        self._require_source()
        federation = self.federation.in_round(request.round)
        data = self._training_set(federation)
        context = self._context(data, request.task, private, "personalise", request.round)
        self._algorithm(request.task).personalize(context)

    def _neighbours(self, rows: Sequence[AdapterRow], round: int) -> Neighbours | None:
        """Return the client's memorized samples under the network as it is, if a row needs them."""
        if not any(memorizes(row) for row in rows):
            return None
        self._require_source()
        return memorize(self.model, self.federation.in_round(round), self.partition, self.settings, self.device)

    def _calibrated(
        self, rows: Sequence[AdapterRow], context: AdapterContext[TwoHead], request: Evaluate
    ) -> dict[str, Calibrated]:
        """Return label → what the validation split says, of rows that need it or whose accuracy is to be estimated.

        A target has no labels for it.

        Raises
        ------
        ValueError
            As `calibrate_row`, or a row needs it and this client is a target.
        """
        asking = [row for row in rows if chooses(row) or (self.settings.estimate_accuracy and self.role != "target")]
        if not asking:
            return {}
        samples = self._validation(request)
        return {row.label: calibrate_row(row, context, samples) for row in asking}

    def _validation(self, request: Evaluate) -> Labelled:
        """Return the validation split, that estimates and candidates are calibrated on; ValueError for a target."""
        if self.role == "target":
            raise ValueError(f"client {self.name} is a target: it has no labels to calibrate on")
        federation = self.federation.in_round(request.round)
        validation = labelled(federation, federation.splits[self.partition].validation, self.device)
        return Labelled(*validation, "personal_head" in self._algorithm(request.task).heads)

    def _trained_on(self, rows: Sequence[AdapterRow], private: Arrays, round: int) -> NDArray[np.int64]:
        """Return the samples that any client trained on, and those that this one uses beside them."""
        used = [self.federation.trained_on(round - 1), trained_indices(private)]
        if any(row.base == "personalised" or memorizes(row) for row in rows):
            used.append(self.federation.in_round(round).splits[self.partition].train)
        return np.unique(np.concatenate(used))

    def _stream(self, shift: str) -> Stream:
        """Return a test stream of this client."""
        conditions: dict[str, Any] = {"seed": self.settings.seed, "severity": self.settings.severity}
        return stream(self.federation, self.partition, shift, device=self.device, natural=self.natural, **conditions)
