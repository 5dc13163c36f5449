"""Federated learning of adaptation rates: only D numbers travel (ATP: Bao et al., NeurIPS 2023, section 4.1)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.messages.arrays import Arrays
from fedtta.messages.flower import read_arrays, strategy_reply
from fedtta.messages.replies import RefinedRates
from fedtta.messages.requests import RefineRates, Variant
from fedtta.models import load_arrays, save_arrays
from fedtta.privacy.gaussian import Privacy
from fedtta.server.aggregation import robust_aggregator
from fedtta.server.checkpoints import Checkpoints, Position
from fedtta.server.limits import RatesLimits
from fedtta.server.rounds import Federation, Outcome, Round
from fedtta.server.validation import RatesCheck
from fedtta.settings import SettingsError
from fedtta.strategies import ATPRates
from fedtta.strategies.broadcast import Broadcast

#: Module → rate.
Rates = dict[str, float]


def learn_rates(
    federation: Federation,
    network: Broadcast,
    names: Sequence[str],
    training: str,
    variant: Variant,
    checkpoints: Checkpoints,
) -> Rates:
    """Run all rounds of one variant and return the rates, in the network's order of definition.

    Learning continues after the last round that `checkpoints` hold; a variant that is complete is not repeated.

    Parameters
    ----------
    network : Broadcast
        w_G, which each client gets once for all variants.
    names : sequence of str
        Its modules, in order of definition (`fedtta.tta.atp.modules`).
    variant : "all", "params" or "stats"
        Which modules learn a rate other than zero.

    Raises
    ------
    NoReplies, QuorumMissed
        As `Round.ask`.
    SettingsError
        The file `rates-init` does not fit the network.
    """
    settings, record = federation.settings, f"rates.{variant}"
    saved, done = checkpoints.records.get(record), checkpoints.done("rates", variant)
    if saved is not None and not done:
        return to_rates(saved)
    strategy = ATPRates(
        network, cohort=settings.rates_clients, seed=settings.seed, aggregator=robust_aggregator(settings)
    )
    sizes = {name: int(np.prod(network.arrays[name].shape)) for name in names}
    rates = to_rates(saved) if saved else initial_rates(settings.rates_init, names, variant)
    for round in range(done + 1, settings.rates_rounds + 1):
        rates = _round(federation, strategy, rates, training, variant, round)
        if checkpoints.due(round, settings.rates_rounds):
            checkpoints.save(Position(training, "rates", variant, round), {record: rate_arrays(rates)})
    federation.events("rates", training=training, variant=variant, rates=rates, sizes=sizes)
    return rates


def initial_rates(path: str, names: Sequence[str], variant: str) -> Rates:
    """Return zeros, or the rates in a file `rates*.safetensors` of an earlier run.

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


def save_rates(path: Path, rates: Mapping[str, float], training: str, variant: str) -> None:
    """Write learned rates, one number a module."""
    arrays = {name: np.float64(value) for name, value in rates.items()}
    save_arrays(path, arrays, {"training": training, "variant": variant})


def to_rates(arrays: Arrays) -> Rates:
    """Return rates from arrays of one number each."""
    return {name: float(value) for name, value in arrays.items()}


def rate_arrays(rates: Mapping[str, float]) -> Arrays:
    """Return rates as they travel: one float64 number a module."""
    return {name: np.asarray(value, np.float64) for name, value in rates.items()}


def _round(
    federation: Federation, strategy: ATPRates, rates: Rates, training: str, variant: Variant, round: int
) -> Rates:
    """Run one round; the strategy samples the cohort and sends the network to clients that lack it."""
    start = time.perf_counter()
    phase = f"rates {training}" + ("" if variant == "all" else f" ({variant})")
    sent = rate_arrays(rates)
    federation.update(training, round, strategy, join=False)  # who joins now has no statistics to be evaluated with
    clients = federation.sources
    template = RefineRates(**federation.common(training), round=round, variant=variant, network="")
    limits = RatesLimits.of(federation.settings)
    outcome = Round(federation, RatesCheck(sent), training, round, phase, strategy, limits).ask(
        lambda: federation.configured(strategy, round, sent, template, clients)
    )
    messages = [
        strategy_reply(one.node, {"rates": one.reply.rates}, {"num-examples": one.reply.num_examples})
        for one in outcome.replies
    ]
    mean, _ = strategy.aggregate_train(round, messages)
    assert mean is not None, "a round has at least one usable reply"
    federation.events(
        "rates_round",
        training=training,
        variant=variant,
        round=round,
        sampled=outcome.asked,
        replied=outcome.replied,
        wall_seconds=time.perf_counter() - start,
        bytes_down=outcome.bytes_down,
        bytes_up=outcome.bytes_up,
        **_summary(outcome, "rates" in Privacy.parse(federation.settings.differential_privacy).mechanisms),
    )
    means = to_rates(read_arrays(mean))
    return {name: means[name] for name in rates}


def _summary(outcome: Outcome, hidden: bool) -> dict[str, Any]:
    """Return mean loss and accuracy over the cohort's samples, and the bytes of Flower's contexts.

    Clients that add noise to their rates send zeros as loss and counts: `hidden`, they are None.
    """
    replies: list[RefinedRates] = [one.reply for one in outcome.replies]
    context = {"context_bytes": sum(reply.context_bytes for reply in replies)}
    if hidden:
        return {"loss": None, "accuracy": None, **context}
    samples = np.array([reply.num_examples for reply in replies], np.float64)
    losses = np.array([reply.loss for reply in replies], np.float64)
    return {
        "loss": float((losses * samples).sum() / samples.sum()),
        "accuracy": float(sum(reply.correct for reply in replies) / samples.sum()),
        **context,
    }
