"""The rounds that learn adaptation rates: only D numbers travel (ATP: Bao et al. 2023, section 4.1)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from models import load_arrays, save_arrays
from server.checkpoints import Checkpoints, Place
from server.events import Events
from server.protection import joining_rule
from server.rounds import Federation, metrics_of, to_numpy, to_record
from server.validation import Expected
from settings import SettingsError
from strategies import ATPRates
from strategies.broadcast import Broadcast, array_bytes

#: Metrics that the server counts with.
NUMBERS = ("loss", "correct", "seconds", "context-bytes")
SHARES = (("correct", "num-examples"),)

Rates = dict[str, float]


def learn_rates(
    federation: Federation, network: Broadcast, training: str, variant: str, checkpoints: Checkpoints
) -> Rates:
    """Run all rounds of one variant and return the rates, in the network's order of definition.

    It goes on after the last round that `checkpoints` know of, and does nothing for a variant that is done.

    Parameters
    ----------
    network : Broadcast
        w_G, which each client gets once for all variants. Its names are the modules: a `TwoHead.global_state` holds the
        trainable tensors and the running statistics, in order.
    variant : "all", "params" or "stats"
        Which modules learn a rate other than zero.

    Raises
    ------
    NoReplies
        A round brought no usable reply.
    SettingsError
        The file `rates-init` does not fit the network.
    """
    settings, record = federation.settings, f"rates.{variant}"
    known, done = checkpoints.records.get(record), checkpoints.done("rates", variant)
    if known is not None and not done:
        return to_rates(known)
    aggregator = joining_rule(settings)
    strategy = ATPRates(network, cohort=settings.rates_clients, seed=settings.seed, aggregator=aggregator)
    sizes = {name: int(np.prod(array.shape)) for name, array in network.arrays.items()}
    rates = to_rates(known) if known else initial_rates(settings.rates_init, list(sizes), variant)
    for round in range(done + 1, settings.rates_rounds + 1):
        rates = _round(federation, strategy, rates, training, variant, round)
        if checkpoints.due(round, settings.rates_rounds):
            checkpoints.save(Place(training, "rates", variant, round), {record: to_numpy(as_record(rates))})
    federation.events("rates", training=training, variant=variant, rates=rates, sizes=sizes)
    return rates


def initial_rates(path: str, names: list[str], variant: str) -> Rates:
    """Return zeros, or what a file `rates*.safetensors` of an earlier run holds.

    Raises
    ------
    SettingsError
        There is no such file, it is damaged, or it belongs to another network or variant.
    """
    if not path:
        return dict.fromkeys(names, 0.0)
    try:
        arrays, notes = load_arrays(path)
    except (ValueError, OSError) as error:
        raise SettingsError(f"rates-init = {path!r}: {error}") from error
    if set(arrays) != set(names):
        odd = sorted(set(arrays) ^ set(names))[:4]
        raise SettingsError(
            f"rates-init = {path!r}: rates of another network; {', '.join(odd)} are in one of them only"
        )
    if notes.get("variant") != variant:
        raise SettingsError(f"rates-init = {path!r}: rates of variant {notes.get('variant')!r}, wanted is {variant!r}")
    return {name: float(arrays[name]) for name in names}


def save_rates(path: Any, rates: Mapping[str, float], training: str, variant: str) -> None:
    """Write learned rates, one number a module."""
    arrays = {name: np.float64(value) for name, value in rates.items()}
    save_arrays(path, arrays, {"training": training, "variant": variant})


def to_rates(arrays: Mapping[str, NDArray[Any]]) -> Rates:
    """Return rates from arrays of one number each."""
    return {name: float(value) for name, value in arrays.items()}


def as_record(rates: Mapping[str, float]) -> ArrayRecord:
    """Return rates as they travel: one float64 number a module."""
    return to_record({name: np.asarray(value, np.float64) for name, value in rates.items()})


def _round(federation: Federation, strategy: ATPRates, rates: Rates, training: str, variant: str, round: int) -> Rates:
    """Run one round; the strategy samples the cohort and sends the network to those who lack it."""
    start = time.perf_counter()
    phase = f"rates {training}" + ("" if variant == "all" else f" ({variant})")
    record = as_record(rates)
    config = federation.config(training, variant=variant)
    expected = Expected.like("rates", to_numpy(record), numbers=NUMBERS, shares=SHARES)
    messages, replies = federation.ask(strategy, round, record, config, federation.sources, expected, training, phase)
    mean, _ = strategy.aggregate_train(round, [reply for _, reply in replies])
    assert mean is not None, "collect returns at least one reply"
    report(
        federation.events,
        [metrics_of(reply) for _, reply in replies],
        training=training,
        variant=variant,
        round=round,
        sampled=federation.partitions_of(messages),
        replied=[partition for partition, _ in replies],
        wall_seconds=time.perf_counter() - start,
        bytes_down=strategy.sent_bytes,
        bytes_up=sum(array_bytes(reply.content.array_records["rates"]) for _, reply in replies),
    )
    means = to_rates(to_numpy(mean))
    return {name: means[name] for name in rates}


def report(events: Events, metrics: list[dict[str, Any]], **known: Any) -> None:
    """Send the event of a round: mean loss and accuracy over the cohort's samples, and what travelled."""
    samples = np.array([m["num-examples"] for m in metrics], np.float64)
    losses = np.array([m["loss"] for m in metrics], np.float64)
    events(
        "rates_round",
        **known,
        loss=float((losses * samples).sum() / samples.sum()),
        accuracy=float(sum(m["correct"] for m in metrics) / samples.sum()),
        context_bytes=int(sum(m["context-bytes"] for m in metrics)),
    )
