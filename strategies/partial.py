"""FedAvg of a part of the network; each client keeps the rest to itself.

One strategy serves the methods that differ in what is shared; the client's algorithm says how it trains:

- FedPer (Arivazhagan et al., 2019) and FedRep (Collins et al., ICML 2021): `exclude=["head.*"]`
- FedBN (Li et al., ICLR 2021): `exclude=["kind:batchnorm"]`
- FedICON's encoder stage (section 3): `include=["encoder.*"]`
- Local training without a federation: `include=[]`

Decisions
- FedBN keeps weight, bias and running statistics of a layer, as its paper does.
- A client gets all arrays until it has replied once: the part that is not shared starts from the same values
  everywhere, even if the first message was lost. A client with values of its own keeps those.
- On the server the part that is not shared keeps its first values. It is no client's model, and no mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedtta.strategies.broadcast import array_bytes
from fedtta.strategies.fedavg import FedAvg

#: Config key with the names that a reply must hold; the list may be empty.
SHARED_NAMES = "shared-names"
#: Pattern for all arrays of every layer that has running statistics.
BATCHNORM = "kind:batchnorm"
#: How many names an error lists.
LISTED = 8


def shared_names(names: Sequence[str], include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[str]:
    """Return the names that match a pattern of `include` and none of `exclude`, in the order given.

    Parameters
    ----------
    names : sequence of str
        Names of arrays, "<layer>.<part>".
    include, exclude : sequence of str
        Patterns as in `fnmatch` (upper and lower case differ), or "kind:batchnorm".

    Raises
    ------
    ValueError
        A pattern matches nothing.
    """
    layers = {_layer(name) for name in names if name.rpartition(".")[2] == "running_mean"}

    def matching(option: str, patterns: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for pattern in patterns:
            if pattern == BATCHNORM:
                matched = {name for name in names if _layer(name) in layers}
            else:
                matched = {name for name in names if fnmatchcase(name, pattern)}
            if not matched:
                raise ValueError(f"{option}: {pattern!r} matches none of the arrays, which are {_some(names)}")
            found |= matched
        return found

    kept = matching("include", include) - matching("exclude", exclude)
    return [name for name in names if name in kept]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


class PartialFedAvg(FedAvg):
    """FedAvg that sends and averages some of the arrays.

    The config of a training message has "shared-names": exactly the names that the reply's array record must hold.
    `aggregate_train` returns all arrays that were sent, with the shared ones replaced by their mean over the clients,
    weighted by "num-examples".

    Parameters
    ----------
    include : sequence of str
        Patterns of the shared arrays; empty: none.
    exclude : sequence of str
        Patterns of included arrays that are not shared.
    **fedavg
        Flower's own parameters.

    Attributes
    ----------
    sent_bytes : int
        Bytes of all arrays in the messages of the last training round.

    Raises
    ------
    ValueError
        `include` or `exclude` is no list of patterns, or a kind is unknown.
    """

    def __init__(self, include: Sequence[str] = ("*",), exclude: Sequence[str] = (), **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.include, self.exclude = _patterns("include", include), _patterns("exclude", exclude)
        self.sent_bytes = 0
        self._sent: ArrayRecord | None = None
        self._met: set[int] = set()

    def shared_names(self, names: Sequence[str]) -> list[str]:
        """Return which of `names` are shared; see the function of this name."""
        return shared_names(names, self.include, self.exclude)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to clients that have replied before, all arrays to the others.

        Raises
        ------
        ValueError
            A pattern matches nothing.
        """
        names = self.shared_names(list(arrays))
        few = ArrayRecord({name: arrays[name] for name in names})
        config = ConfigRecord({**config, SHARED_NAMES: names})
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._sent, self.sent_bytes = arrays, 0
        for message in messages:
            record = few if message.metadata.dst_node_id in self._met else arrays
            message.content = RecordDict({self.arrayrecord_key: record, self.configrecord_key: config})
            self.sent_bytes += array_bytes(record)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return all arrays that were sent, with the means of the shared ones; None without a reply.

        Raises
        ------
        ValueError
            `configure_train` was not called before, or a reply holds other names or shapes than the shared ones.
        """
        replies = list(replies)
        if self._sent is None:
            raise ValueError("PartialFedAvg: configure_train has to come before aggregate_train")
        sent = self._sent
        expected = {name: tuple(sent[name].shape) for name in self.shared_names(list(sent))}
        good = [reply for reply in replies if not reply.has_error()]
        for reply in good:
            _require_shared(reply, expected)
        means, metrics = super().aggregate_train(server_round, replies)
        if means is None:
            return None, metrics
        self._met |= {reply.metadata.src_node_id for reply in good}
        return ArrayRecord({name: means.get(name, array) for name, array in sent.items()}), metrics


def _patterns(option: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return patterns as a tuple, or raise ValueError naming the option."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{option} = {patterns!r}; allowed is a list of patterns")
    for pattern in patterns:
        if pattern.startswith("kind:") and pattern != BATCHNORM:
            raise ValueError(f"{option}: unknown kind {pattern!r}; there is: {BATCHNORM}")
    return tuple(patterns)


def _require_shared(reply: Message, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the arrays of a reply have the expected names and shapes."""
    for record in reply.content.array_records.values():
        held = {name: tuple(array.shape) for name, array in record.items()}
        if held != expected:
            wrong = sorted(n for n in {*held, *expected} if held.get(n) != expected.get(n))
            details = ", ".join(f"{n}: {held.get(n, 'absent')} instead of {expected.get(n, 'absent')}" for n in wrong)
            raise ValueError(f"node {reply.metadata.src_node_id} does not hold what is shared: {details}")
