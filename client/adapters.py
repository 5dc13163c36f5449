"""The adapter of a row: made from the run's settings and what the training gave; without torch where it needs none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fedtta.messages.requests import AdapterRow
from fedtta.settings import Settings
from fedtta.tta import Adapter, Statistics
from fedtta.tta.auto import Candidates, Gains
from fedtta.tta.registry import create, info

if TYPE_CHECKING:
    from fedtta.tta.knn_per import Datastore, KNNPer

Network = TypeVar("Network")


class Memorized(Protocol):
    """A client's memorized samples (`fedtta.client.evaluation.Neighbours`)."""

    @property
    def store(self) -> Datastore:
        """Return features and labels of the training split."""

    def best_weight(self, adapter: KNNPer, batch_size: int) -> float:
        """Return the weight of the vote with the most correct validation predictions."""


@dataclass(frozen=True)
class AdapterContext(Generic[Network]):
    """What a client's adapters are made from, whatever the row: its network and the results of training.

    Parameters
    ----------
    model : TwoHead or ExportedNetwork
    settings : Settings
        Of the run.
    statistics : Statistics, optional
        The client's own, and the means over clients.
    rates : mapping, optional
        Learned adaptation rates: what ATP adapts → layer → rate.
    neighbours : Memorized, optional
        For adapters that need the client's memorized samples.
    """

    model: Network
    settings: Settings
    statistics: Statistics | None = None
    rates: Mapping[str, Mapping[str, float]] | None = None
    neighbours: Memorized | None = None


def make_adapter(row: AdapterRow, context: AdapterContext[Any], gains: Gains | None = None, **given: Any) -> Adapter:
    """Make a row's adapter, with options that follow from the settings where neither row nor `given` says otherwise.

    `gains` are those of the candidates of an adapter that chooses among others (`fedtta.tta.auto.calibrate_gains`).
    `given` are options of the round, such as FedProx's; an adapter without such an option ignores them.

    Raises
    ------
    ValueError
        As `fedtta.tta.create`.
    """
    settings, statistics, neighbours = context.settings, context.statistics, context.neighbours
    variant_rates = (context.rates or {}).get(str(row.options.get("adapt", "all")))
    declared_options = info(row.adapter).options
    applied = {name: value for name, value in given.items() if name in declared_options}
    over = None if statistics is None else statistics.clients
    clients = settings.clients if over is None else int(over)
    follow = _defaults(row, settings, clients)
    options = {**follow, **applied, **row.options}
    if options.get("augment", "") is None:  # a row's "none": the usual views, here the data set's
        options["augment"] = follow["augment"]
    store = neighbours.store if neighbours else None

    def maker(name: str) -> Callable[[Any], Adapter]:
        return lambda network: make_adapter(candidate_row(name), replace(context, model=network))

    candidates = None if gains is None else Candidates({name: maker(name) for name in gains.of}, gains)
    adapter = create(row.adapter, context.model, statistics, variant_rates, store, candidates, clients, **options)
    if neighbours is not None and "weight" not in row.options:
        from fedtta.tta.knn_per import KNNPer

        if isinstance(adapter, KNNPer):
            adapter.weight = neighbours.best_weight(adapter, settings.eval_batch_size)
    if isinstance(options.get("augment"), str):  # names the network that sees the views, not the views
        from fedtta.tta.bbn import BBN

        if isinstance(adapter, BBN):
            adapter.augment = follow["augment"]
    return adapter


def chooses(row: AdapterRow) -> bool:
    """Return whether a row's adapter chooses among others, which are calibrated on labelled samples."""
    return "candidates" in info(row.adapter).needs


def candidate_row(name: str) -> AdapterRow:
    """Return the row of a candidate: the adapter with default options."""
    return AdapterRow(name, name, {"record": False})


def _defaults(row: AdapterRow, settings: Settings, clients: int) -> dict[str, Any]:
    """Return the options of a row's adapter that follow from the run's settings, where the row does not set them.

    `clients`: how many the means of statistics are over; 0: this one is none of them.
    """
    follow: dict[str, Any] = {"seed": settings.seed}
    adapter = info(row.adapter)
    if views := adapter.views:
        from fedtta.data import DATASETS  # imports torch, as the views do

        dataset_info = DATASETS[settings.dataset]
        follow["augment"] = views.for_data(flip=dataset_info.flip, crop=dataset_info.crop)
    if settings.leave_one_out:
        follow["leave_one_out"] = clients
    return {name: value for name, value in follow.items() if name in adapter.options}
