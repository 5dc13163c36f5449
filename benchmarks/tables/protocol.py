"""Protocols: the networks, cells and tables of a paper's experiments, as `protocol_file` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtta.benchmarks.papers import Reference
from fedtta.settings import Settings, SettingsError

#: Rows that paired differences are taken to, unless a table names others.
AGAINST = ("fedavg", "fixed_mix")


@dataclass(frozen=True)
class Network:
    """A trained network that cells start from.

    Parameters
    ----------
    train : {"federated", "central", "source"}
        By the rounds of a federated run; in one place on the union of the clients' training splits; in one place on
        one part of the data set.
    epochs : int
        Of training in one place.
    file : str
        Where it is kept below the folder of results. `{seed}` stands for the seed; without it one network, trained
        with its own seed, serves the cells of every seed.
    threads : int
        Processor threads; with 1, equal seeds give equal bits.
    half : bool
        Round the weights of a source model to half precision, in which its file keeps them, before it is measured.
    start : Network, optional
        The source model that this one goes on from, with the learning rate of its first step again (a warm restart).
    """

    name: str
    train: str
    epochs: int
    file: str
    settings: Settings
    threads: int = 1
    half: bool = False
    start: Network | None = None


@dataclass(frozen=True)
class Start:
    """What a cell starts from: a network, by name, and the cell whose learned rates it uses; empty for neither."""

    network: str = ""
    rates: str = ""


@dataclass(frozen=True)
class Realtime:
    """Evaluation under streams with a constant sampling rate, see `fedtta.benchmarks.tables.realtime`.

    Parameters
    ----------
    speeds : tuple of float
        Multiples of the base rate.
    reference : str
        Row whose seconds per single sample define the base rate.
    queue : int
        Samples that can wait.
    repeats : int
        Turns of the timing.
    """

    speeds: tuple[float, ...] = (1.0, 2.0, 5.0)
    reference: str = "fedthe"
    queue: int = 32
    repeats: int = 15


@dataclass(frozen=True)
class Cell:
    """One experiment: settings with all rows in `methods`, and where its numbers belong.

    Parameters
    ----------
    weighting : {"clients", "samples"}
        A mean weighs every client (FedTHE, BTFL) or every sample (ATP) the same.
    columns : tuple of str
        The column that each client counts for; empty: one column per test distribution.
    column : str
        Name in its table of the only test distribution.
    suffix : str
        Distinguishes its rows from those of the other cells of the table.
    """

    name: str
    title: str
    settings: Settings
    references: tuple[Reference, ...] = ()
    weighting: str = "clients"
    start: Start = Start()
    table: str = ""
    column: str = ""
    columns: tuple[str, ...] = ()
    suffix: str = ""
    realtime: Realtime | None = None

    def labelled(self, row: str) -> str:
        """Return what a row is called in the cell's table."""
        return f"{row} ({self.suffix})" if self.suffix else row


@dataclass(frozen=True)
class Table:
    """Cells whose rows are shown together.

    Parameters
    ----------
    baseline : str
        The row over which gains are shown.
    measure : str
        A kept number other than the accuracy.
    against : tuple of str
        Rows that paired differences are taken to, as far as the table has them.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    baseline: str = ""
    measure: str = ""
    against: tuple[str, ...] = AGAINST


@dataclass(frozen=True)
class Protocol:
    """A protocol: its name, the comment at the top of its file, and its networks, cells and tables in file order."""

    name: str
    about: str
    networks: Mapping[str, Network]
    cells: tuple[Cell, ...]
    tables: tuple[Table, ...]

    def cell(self, name: str) -> Cell:
        """Return a cell by name."""
        return next(cell for cell in self.cells if cell.name == name)


def select_cells(protocol: Protocol, names: Sequence[str]) -> list[Cell]:
    """Return the named cells, or all; SettingsError lists the known ones."""
    by_name = {cell.name: cell for cell in protocol.cells}
    if unknown := [name for name in names if name not in by_name]:
        raise SettingsError(f"{protocol.name}: cell {unknown[0]!r}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(protocol.cells)
