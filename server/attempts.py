"""One round, once or twice: send, collect, refuse what is bad, and do it again when too few good replies came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from server.errors import NoReplies, QuorumMissed
from server.nodes import Answer, gather, grouped
from server.protection import most_examples, needed_replies
from server.validation import Expectation, Limits

if TYPE_CHECKING:
    from server.rounds import Federation

#: Good replies with the partitions that they are of, by partition.
Replies = list[tuple[int, Message]]


@dataclass(frozen=True)
class Question:
    """What a round asks.

    Parameters
    ----------
    federation : Federation
    expected : Expectation
        What the replies must look like.
    training : str
    round : int
    phase : str
        What it is called in messages to people.
    strategy : Strategy, optional
        Whose round it is; see `Members.rejoin`.
    """

    federation: Federation
    expected: Expectation
    training: str
    round: int
    phase: str
    strategy: Strategy | None = None

    def ask(self, make: Callable[[], list[Message]]) -> tuple[list[Message], Replies]:
        """Do the round, if need be twice, and return the messages that counted and the good replies.

        With fewer good replies than `needed_replies` says, wait at most `node-timeout` seconds until enough of the
        nodes are there, and do it again, once.

        Parameters
        ----------
        make : callable
            Makes the messages, for the nodes that hold the partitions at that moment.

        Raises
        ------
        NoReplies
            Not one reply is good.
        QuorumMissed
            Too few are, or fewer clients are asked than replies are needed.
        """
        place, patience = self.federation, self.federation.settings.node_timeout
        self._look()
        messages = make()
        asked = place.partitions_of(messages)
        needed = needed_replies(place.settings, _kind(messages), len(asked))
        if len(asked) < needed:
            raise QuorumMissed(f"{self._name}: {len(asked)} clients are asked, {needed} replies are needed")
        good, lost = self._once(messages)
        if len(good) < needed:
            there = place.members.wait_for(asked, needed, patience, self._look)
            if there < needed:
                lost.append(f"after {patience:g} s {there} of the {len(asked)} clients are there")
                raise self._missed(good, needed, lost)
            place.events("note", text=f"{self._problem(good, needed)}; it is done again")
            messages = make()
            good, lost = self._once(messages)
        if len(good) < needed:
            raise self._missed(good, needed, lost)
        return messages, good

    @property
    def _name(self) -> str:
        return f"{self.phase}, round {self.round}"

    @property
    def _about(self) -> dict[str, Any]:
        return {"training": self.training, "round": self.round}

    def _problem(self, good: Replies, needed: int) -> str:
        return f"{self._name}: {len(good) or 'no'} usable repl{'y' if len(good) < 2 else 'ies'}, {needed} needed"

    def _missed(self, good: Replies, needed: int, lost: Sequence[str]) -> QuorumMissed:
        kind = QuorumMissed if good else NoReplies
        return kind("; ".join((self._problem(good, needed), *lost)))

    def _look(self) -> None:
        """Let clients that came back as other nodes take their places."""
        place = self.federation
        config = place.config(self.training)
        place.members.rejoin(config, place.settings.node_timeout, place.events, self._about, self.strategy)

    def _once(self, messages: Sequence[Message]) -> tuple[Replies, list[str]]:
        """Send messages and return the good replies, and a line for each reason why others are missing."""
        place, settings, kind = self.federation, self.federation.settings, _kind(messages)
        partitions = {node: partition for partition, node in place.nodes.items()}
        ordered = sorted(messages, key=lambda message: partitions[message.metadata.dst_node_id])
        answers = gather(
            place.grid, ordered, partitions, settings.round_timeout, place.events, self.phase, place.clock, place.sleep
        )
        came = [(answer, answer.reply) for answer in answers if answer.reply is not None]
        most = [most_examples(settings, kind, place.identities.get(answer.partition)) for answer, _ in came]
        limits = Limits(settings.update_norm_bound, most)
        refusals = self.expected.refusals([reply for _, reply in came], limits)
        good: Replies = []
        lost: dict[str, dict[int, str]] = {"late": {}, "failed": {}, "refused": {}}
        reasons = {answer.partition: why for (answer, _), why in zip(came, refusals, strict=True)}
        for answer in answers:
            reason = reasons.get(answer.partition)
            if answer.reply is not None and not reason:
                good.append((answer.partition, answer.reply))
                continue
            event = answer.kind or "refused"
            lost[event][answer.partition] = reason or answer.reason
            self._report(event, answer, reason or answer.reason)
        return good, [line for event, who in lost.items() for line in grouped(f"{event} client", who)]

    def _report(self, event: str, answer: Answer, reason: str) -> None:
        where: Mapping[str, Any] = {**self._about, "phase": self.phase}
        self.federation.events(event, **where, partition=answer.partition, node_id=answer.node_id, reason=reason)


def _kind(messages: Sequence[Message]) -> str:
    """Return the type of a round's messages; empty when there are none."""
    return str(messages[0].metadata.message_type) if messages else ""
