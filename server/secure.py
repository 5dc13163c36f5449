"""Secure aggregation on the server: it learns the sum over clients, and of no client what it sent.

"Practical secure aggregation for privacy-preserving machine learning", Bonawitz et al., CCS 2017; with
`secure-neighbours` each client shares masks with that many others only (SecAgg+: Bell et al., CCS 2020). Three
exchanges: clients deal shares of their secrets, reply under masks, and reveal the shares with which the masks of the
sum can be removed, also if clients are lost on the way, up to the threshold. Every survivor's reply is then replaced by
the mean over the survivors, so that strategies, which take means, need not know of it.

Threat: a server that follows the protocol, or one who reads all that it stores, wants a single client's reply. What a
client sends is not seen, so it cannot be checked: what it can spoil are rounds, and the mean within its weight.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedtta.messages.replies import Reply, SharedKeys, Unmasked
from fedtta.messages.requests import Masking, RefineRates, Request, ShareKeys, Summarize, Train, Unmask
from fedtta.messages.transport import Addressed
from fedtta.privacy import masking
from fedtta.privacy.sharing import combine, fingerprint
from fedtta.privacy.sums import Shapes, common_part, length, to_mean
from fedtta.server.events import Events
from fedtta.server.nodes import Nodes
from fedtta.server.privacy import feasible, least_replies, threshold
from fedtta.server.rounds import Replied
from fedtta.server.validation import Check, RatesCheck, SummarizeCheck, TrainCheck, shapes_of
from fedtta.settings import Settings, name_order

Exchanged = tuple[list[Replied], list[str]]
#: Sends requests and checks the replies: usable ones, and a line for each reason why others are missing.
Send = Callable[[Sequence[Addressed], Check], Exchanged]


@dataclass(frozen=True)
class SharedCheck(Check):
    """Checks keys and shares; `members` of them are dealt."""

    reply = SharedKeys

    members: int

    def why_refused(self, reply: SharedKeys, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`."""
        sizes = {len(reply.shares), len(reply.key_digests), len(reply.seed_digests)}
        if sizes != {self.members}:
            return f"shares for {sorted(sizes)} members, expected {self.members}"
        return None if masking.is_key(bytes.fromhex(reply.key)) else "a key that is none"


@dataclass(frozen=True)
class MaskedCheck(Check):
    """Checks masked replies of a kind; of `size` numbers."""

    kind: type[Reply]
    size: int

    @property
    def reply(self) -> type[Reply]:  # type: ignore[override]  # of the class there
        """Return the kind of reply that is expected."""
        return self.kind

    def why_refused(self, reply: Any, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`; the values are those of the masks."""
        expected = {"sum": ((self.size,), "uint64")}
        found = shapes_of(reply.masked or {})
        return None if found == expected else f"masked arrays {found}, expected {expected}"


@dataclass(frozen=True)
class UnmaskedCheck(Check):
    """Checks revealed shares, one for each of the `members`."""

    reply = Unmasked

    members: int

    def why_refused(self, reply: Unmasked, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`."""
        return None if len(reply.shares) == self.members else f"{len(reply.shares)} shares, expected {self.members}"


@dataclass
class Sum:
    """One secure sum in progress; clients go by numbers, their partitions plus one.

    Parameters
    ----------
    members : dict
        Number → numbers of those that it shares masks with, itself among them; all have as many.
    threshold : int
        Shares that give a secret back.
    about : str
        What the masks of pairs are for (`fedtta.privacy.sums.common_part`).
    """

    members: dict[int, list[int]]
    threshold: int
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    shared: dict[int, SharedKeys] = field(default_factory=dict)
    about: str = ""
    masked: dict[int, Any] = field(default_factory=dict)
    revealed: dict[int, Unmasked] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Return how many members each client has."""
        return len(next(iter(self.members.values())))

    def present(self, number: int) -> list[int]:
        """Return a client's members that have dealt shares."""
        return [one for one in self.members[number] if one in self.shared]

    def dealt_to(self, number: int) -> list[str]:
        """Return what each member has dealt to a client; empty: nothing."""
        dealers = self.members[number]
        return [
            self.shared[one].shares[self.members[one].index(number)] if one in self.shared else "" for one in dealers
        ]

    def shares_of(self, dealer: int) -> tuple[dict[int, bytes], list[int]]:
        """Return a client's shares by holder, and who revealed another share than the one dealt."""
        dealt, shares, wrong = self.shared[dealer], dict[int, bytes](), list[int]()
        digests = dealt.seed_digests if dealer in self.masked else dealt.key_digests
        for holder, digest in zip(self.members[dealer], digests, strict=True):
            if holder in self.revealed:
                share = bytes.fromhex(self.revealed[holder].shares[self.members[holder].index(dealer)])
                if fingerprint(share) == digest:
                    shares[holder] = share
                else:
                    wrong.append(holder)
        return shares, wrong

    def secret(self, dealer: int) -> bytes:
        """Return a client's seed if it replied, else its masking key; ValueError if it cannot be put together.

        A share counts only if it is the one that was dealt, so that none who lies about shares can spoil the sum.
        """
        dealt, lost = self.shared[dealer], dealer not in self.masked
        found, _ = self.shares_of(dealer)
        if len(found) < self.threshold:
            raise ValueError(f"{len(found)} of its shares were revealed, {self.threshold} are needed")
        secret = combine(dict(list(found.items())[: self.threshold]))
        if (masking.public_key(secret).hex() != dealt.key) if lost else (fingerprint(secret) != dealt.seed_digest):
            raise ValueError("its shares are not those of its secret")
        return secret

    def suspects(self, failed: Collection[int]) -> set[int]:
        """Return the clients that kept these secrets from being put together; none, if too many clients were lost.

        A client whose shares are those it dealt and give no secret back has dealt wrongly. Of a dealer and a holder
        whose share is another one, either may have lied: it is the one in most such pairs, both if that is equal.
        """
        found = {dealer for dealer in failed if len(self.shares_of(dealer)[0]) >= self.threshold}
        pairs = [{dealer, holder} for dealer in self.shared for holder in self.shares_of(dealer)[1]]
        unexplained = [{dealer, holder} for dealer in failed for holder in self.shares_of(dealer)[1]]
        while unexplained := [pair for pair in unexplained if not found & pair]:
            count = Counter(one for pair in pairs if not found & pair for one in pair)
            most = max(count[one] for pair in unexplained for one in pair)
            found |= {one for pair in unexplained for one in pair if count[one] == most}
        return found

    def total(self, found: Mapping[int, bytes], size: int) -> masking.Words:
        """Return the sum of the replies without masks, given the clients' secrets; integers, so exact in any order."""
        total = np.zeros(size, np.uint64)
        for number, reply in self.masked.items():
            total += reply.masked["sum"]
            total -= masking.mask(found[number], size)
        for lost in set(self.shared) - set(self.masked):
            pairs = [(one, bytes.fromhex(self.shared[one].key)) for one in self.members[lost] if one in self.masked]
            total += masking.pair_masks(found[lost], lost, pairs, self.about, size)
        return total


class SecureAggregation:
    """Replaces an exchange of requests whose replies are aggregated by a secure sum.

    Parameters
    ----------
    settings : Settings
    nodes : Nodes
    events : Events
        Get a `secure_aggregation` event for each sum: what it took beside the replies, and who spoilt it.
    suspects : collection of str
        Names of the clients that had spoilt a sum when the run was resumed (`fedtta.server.privacy.spoilers`).
    """

    def __init__(self, settings: Settings, nodes: Nodes, events: Events, suspects: Collection[str] = ()) -> None:
        self.settings, self.nodes, self.events = settings, nodes, events
        self._suspects = set(suspects)  # left out from then on
        self._told: set[str] = set()

    def least(self, asked: int) -> int:
        """Return how many replies a sum over `asked` clients needs."""
        return least_replies(self.settings, asked)

    def __call__(self, requests: Sequence[Addressed], check: Check, send: Send, needed: int) -> Exchanged:
        """Return the survivors, each with the mean reply, or none; and a line for each reason why others are missing.

        With fewer of them than `needed` no sum is unmasked: the round is repeated, clients reply the same again, and
        the difference of a sum without one client and a sum with it would be what this client sent.

        Parameters
        ----------
        requests : sequence of Addressed
            Of one kind, whose replies are aggregated.
        check : Check
            Of its replies, which the mean must pass, too.
        needed : int
            Replies that the round needs, if these are more than a sum does.
        """
        start, least = time.perf_counter(), max(self.least(len(requests)), needed)
        by_number = {1 + self._partition(one.node): one for one in requests}
        asked, lost = self._able(by_number)
        if len(asked) < least:
            return [], [*lost, f"{len(asked)} clients can take part in secure aggregation, {least} are needed"]
        members = neighbourhoods(list(asked), self.settings.secure_neighbours)
        summing = Sum(members, threshold(self.settings, len(next(iter(members.values())))))
        lost += self._share(summing, asked, send)
        if len(summing.shared) < least:
            return [], [*lost, f"{len(summing.shared)} clients have dealt shares, {least} are needed"]
        replied, reasons = self._collect(summing, asked, check, send)
        lost += reasons
        if len(summing.masked) < least:
            return [], [*lost, f"{len(summing.masked)} clients have replied, {least} are needed"]
        lost += self._reveal(summing, asked, send)
        known = set(self._suspects)
        mean = self._mean(summing, check, lost)
        self.events(
            "secure_aggregation",
            kind=requests[0].request.kind,
            clients=len(requests),
            survivors=len(summing.masked),
            unmasked=mean is not None,
            suspects=sorted(self._suspects - known, key=name_order),
            seconds=time.perf_counter() - start,
        )
        if mean is None:
            return [], lost
        return [_with_mean(one, mean) for one in replied], lost

    def _partition(self, node: int) -> int:
        return next(partition for partition, one in self.nodes.by_partition.items() if one == node)

    def _able(self, by_number: Mapping[int, Addressed]) -> tuple[dict[int, Addressed], list[str]]:
        """Return the requests to clients that have a key and have not spoilt a sum, and lines about the others.

        One client with a key that is none, or with another's key, would keep all others from replying; so would one
        with more samples than can be summed.
        """
        able, lost, keys = {}, [], set[str]()
        for number, one in sorted(by_number.items()):
            key = self._key(number)
            if one.node < 0:  # not back since the run was resumed (`Nodes.begin`), so its key is not known yet
                lost.append(f"client {self.nodes.name(number - 1)}: the node is not there")
            elif not key or key in keys or not masking.is_key(bytes.fromhex(key)):
                lost.append(self._left_out(number, "it has no key of its own for secure aggregation"))
            elif (samples := self._most([number])) > self.settings.max_examples:
                most = self.settings.max_examples
                lost.append(self._left_out(number, f"{samples} samples, allowed are at most {most} (max-examples)"))
            elif self.nodes.name(number - 1) in self._suspects:
                lost.append(self._left_out(number, "shares of it, or that it revealed, spoilt a sum"))
            else:
                keys.add(key)
                able[number] = one
        return able, lost

    def _left_out(self, number: int, reason: str) -> str:
        """Return a line about a client that is left out; a note of the run says it once."""
        line = f"client {self.nodes.name(number - 1)}: {reason}"
        if line not in self._told:
            self.events("note", text=f"secure aggregation leaves out {line}")
        self._told.add(line)
        return line

    def _key(self, number: int) -> str:
        identity = self.nodes.identities.get(number - 1)
        return "" if identity is None else identity.mask_key or ""

    def _share(self, summing: Sum, asked: Mapping[int, Addressed], send: Send) -> list[str]:
        """Let clients deal shares of their secrets."""

        def request(number: int, one: Request) -> ShareKeys:
            members = summing.members[number]
            keys = [self._key(member) for member in members]
            return ShareKeys(
                **_common(one),
                session=summing.session,
                own=number,
                members=members,
                keys=keys,
                threshold=summing.threshold,
            )

        addressed = [Addressed(one.node, request(number, one.request)) for number, one in asked.items()]
        replied, lost = send(addressed, SharedCheck(summing.size))
        for one in replied:
            if one.reply.key in {other.key for other in summing.shared.values()}:
                lost.append(self._left_out(1 + one.partition, "it repeats another client's masking key"))
            else:
                summing.shared[1 + one.partition] = one.reply
        return lost

    def _collect(self, summing: Sum, asked: Mapping[int, Addressed], check: Check, send: Send) -> Exchanged:
        """Let the clients that have dealt shares reply under masks."""
        most = self._most(asked)

        def masked(number: int, request: Any) -> Any:
            present = summing.present(number)
            keys = [summing.shared[one].key for one in present]
            how = weighting(request, self.settings)
            told = Masking(summing.session, number, present, keys, len(summing.shared), most, how)
            return replace(request, masking=told)

        addressed = [Addressed(asked[n].node, masked(n, asked[n].request)) for n in summing.shared]
        (summing.about,) = {common_part(one.request) for one in addressed}  # type: ignore[arg-type]  # of one kind
        kind = type(addressed[0].request).reply
        replied, lost = send(addressed, MaskedCheck(kind, length(kind, shapes_in(check))))
        summing.masked = {1 + one.partition: one.reply for one in replied}
        return replied, lost

    def _most(self, numbers: Collection[int]) -> int:
        """Return the largest weight of clients: their samples for training or validation, as identified."""
        sizes = [self.nodes.identities[number - 1].sizes for number in numbers]
        return max(1, *(max(one[:2]) for one in sizes))

    def _reveal(self, summing: Sum, asked: Mapping[int, Addressed], send: Send) -> list[str]:
        """Let the survivors reveal the shares that unmask the sum."""

        def request(number: int) -> Unmask:
            survivors = [one for one in summing.members[number] if one in summing.masked]
            shares = summing.dealt_to(number)
            common = _common(asked[number].request)
            return Unmask(**common, session=summing.session, survivors=survivors, shares=shares)

        addressed = [Addressed(asked[number].node, request(number)) for number in summing.masked]
        replied, lost = send(addressed, UnmaskedCheck(summing.size))
        summing.revealed = {1 + one.partition: one.reply for one in replied}
        return lost

    def _mean(self, summing: Sum, check: Check, lost: list[str]) -> Reply | None:
        """Return the mean reply; None if the sum cannot be unmasked or is none of replies, with a line in `lost`."""
        found: dict[int, bytes] = {}
        for number in summing.shared:
            try:
                found[number] = summing.secret(number)
            except ValueError as error:
                lost.append(f"client {self.nodes.name(number - 1)}: {error}")
        if failed := set(summing.shared) - set(found):
            self._suspects |= {self.nodes.name(number - 1) for number in summing.suspects(failed)}
            return None
        sent, shapes = next(iter(summing.masked.values())), shapes_in(check)
        size = length(type(sent), shapes)
        bits = masking.fraction_bits(len(summing.shared), self._most(summing.members))
        total = masking.decode(summing.total(found, size), bits)
        try:
            mean = feasible(to_mean(sent, total, shapes))
        except ValueError as error:
            lost.append(f"secure aggregation: {error}")
            return None
        if reason := check.why_refused(mean):
            lost.append(f"secure aggregation: the mean of the replies: {reason}")
            return None
        return mean


def neighbourhoods(numbers: Sequence[int], neighbours: int) -> dict[int, list[int]]:
    """Return with whom each client shares masks, itself among them: all, or its neighbours in a random ring.

    Parameters
    ----------
    neighbours : int
        How many others, rounded down to an even number; 0: all.
    """
    half = neighbours // 2
    if not half or 2 * half + 1 >= len(numbers):
        return {number: sorted(numbers) for number in numbers}
    ring = sorted(numbers)
    random.SystemRandom().shuffle(ring)
    count = len(ring)
    return {
        number: sorted(ring[(i + step) % count] for step in range(-half, half + 1)) for i, number in enumerate(ring)
    }


def weighting(request: Train | Summarize | RefineRates, settings: Settings) -> Literal["uniform", "examples"]:
    """Return how a mean of replies is weighted: as without secure aggregation."""
    if isinstance(request, Train):
        return "examples"
    uniform = isinstance(request, RefineRates) or settings.statistics_weighting == "uniform"
    return "uniform" if uniform else "examples"


def shapes_in(check: Check) -> Shapes:
    """Return names, shapes and dtypes of the arrays that a check expects."""
    if isinstance(check, TrainCheck | RatesCheck):
        return {name: (value.shape, str(value.dtype)) for name, value in check.sent.items()}
    assert isinstance(check, SummarizeCheck), "replies of other kinds are not aggregated"
    return check.shapes


def _with_mean(replied: Replied, mean: Any) -> Replied:
    """Return a survivor with the mean reply; its own are the time that it took and the bytes that it sent."""
    return replace(replied, reply=replace(mean, seconds=replied.reply.seconds))


def _common(request: Request) -> dict[str, Any]:
    return {"settings": request.settings, "run": request.run, "checkpoint_rounds": request.checkpoint_rounds}
