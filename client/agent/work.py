"""A federated request under the owner's policy: checked, bounded in time, its counts rounded, and recorded.

    message ─ kind, size ─ rules on what it says ─ rules on the samples behind it ─ work ─ rounding ─ audit ─ reply

A reply that the audit log cannot record does not leave.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtta.client.agent.audit import DAY, DONE, HOUR, Audit, sent
from fedtta.client.policy import MIB, RESERVED, SETTINGS_BYTES, Policy, PolicyError, phase_of
from fedtta.messages.arrays import array_bytes
from fedtta.messages.replies import Adapted, Evaluated, RefinedRates, Reply, Telemetry, Validated
from fedtta.messages.requests import Observe, Request
from fedtta.models.deadline import Deadline, Stopped

#: Counts of right predictions on the validation split, of which a reply has some.
VALIDATED = ("validation_correct", "personal_validation_correct", "trained_correct", "decoded_correct")
#: A number, or the name of a class as `repr` writes it: one with an apostrophe has other quotes.
FIGURE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\d+(\.\d+)?%?""")


class Work:
    """What stands between a federation's messages and a device.

    Parameters
    ----------
    policy : Policy
    check : callable
        Refuses a request by what it says (`Policy.check_request`).
    private : Path
        Folder of the private state of all runs.
    audit : Audit
    """

    def __init__(self, policy: Policy, check: Callable[[Request], None], private: Path, audit: Audit) -> None:
        self.policy, self.audit = policy, audit
        self._check_request, self._private = check, private

    def perform(self, request: Request, answer: Callable[[Request], Reply], deadline: Deadline | None = None) -> Reply:
        """Answer a request if the policy allows it.

        Parameters
        ----------
        answer : callable
            Does the work, and refuses it when the device's samples are known and too few.
        deadline : Deadline, optional
            The caller's.

        Raises
        ------
        PolicyError
            The request is beyond a rule.
        Stopped
            The time is over, or the caller has gone.
        OSError
            The audit log cannot be written.
        Exception
            As `answer`.
        """
        received = _bytes(request)
        return self._recorded(
            request, received, lambda: self._answered(request, answer, received, deadline or Deadline())
        )

    def observe(self, request: Observe, answer: Callable[[], Reply]) -> Reply:
        """Answer a question for telemetry if the policy allows it; unlike `perform`, any thread may call it.

        It is answered without data, network and deadline: of the rules, those about them do not apply.

        Raises
        ------
        PolicyError, OSError, Exception
            As `perform`.
        """
        received = _bytes(request)

        def answered() -> Reply:
            self._check_message(request, received)
            self.policy.check_names(request)
            self._check_rate(phase_of(request.kind))
            return coarse(answer(), self.policy)

        return self._recorded(request, received, answered)

    def _recorded(self, request: Request, received: int, answer: Callable[[], Reply]) -> Reply:
        """Return an answer that the audit log has recorded."""
        start = time.monotonic()
        about = {
            "run": request.run[:80],
            "round": getattr(request, "round", None),
            "training": _training(request),
            "received": received,
        }
        try:
            reply = answer()
            left = sent(reply.to_record())
        except BaseException as error:
            self.audit.failed(request.kind, error, **about, seconds=round(time.monotonic() - start, 3))
            raise
        self.audit.write(phase_of(request.kind), DONE, **about, seconds=round(time.monotonic() - start, 3), sent=left)
        return reply

    def _answered(
        self, request: Request, answer: Callable[[Request], Reply], received: int, deadline: Deadline
    ) -> Reply:
        ours = self.policy.most_seconds < deadline.left
        deadline.limit(self.policy.most_seconds)
        with deadline.enforced():
            self._check(request, received)
            try:
                return coarse(answer(request), self.policy)
            except Stopped as error:
                if ours and not deadline.gone:
                    raise PolicyError("most-seconds", str(error), f"{self.policy.most_seconds:g}") from error
                raise

    def _check(self, request: Request, received: int) -> None:
        """Refuse a request before anything of it is done."""
        self._check_message(request, received)
        self._check_request(request)
        self._check_rate(phase_of(request.kind))
        self._check_state(request.run)

    def _check_message(self, request: Request, received: int) -> None:
        self.policy.check_kind(request.kind, received)
        if len(request.settings) > SETTINGS_BYTES:
            raise PolicyError("most-message-mb", f"settings of {len(request.settings)} bytes", f"{SETTINGS_BYTES}")

    def _check_rate(self, phase: str) -> None:
        policy = self.policy
        if (count := self.audit.count(HOUR)) >= policy.messages_per_hour:
            raise PolicyError("messages-per-hour", f"{count} in the last hour", f"{policy.messages_per_hour}")
        if phase == "evaluate" and (count := self.audit.count(DAY, phase)) >= policy.evaluations_per_day:
            raise PolicyError("evaluations-per-day", f"{count} in 24 hours", f"{policy.evaluations_per_day}")

    def _check_state(self, run: str) -> None:
        """Refuse a run for whose private state there is no room; that of others is not removed for it."""
        found = self._private.iterdir() if self._private.is_dir() else ()
        runs = [path.name for path in found if path.is_dir() and path.name not in RESERVED]
        if run not in runs and len(runs) >= self.policy.most_runs:
            raise PolicyError("most-runs", f"private state of {len(runs)} runs is kept", f"{self.policy.most_runs}")
        size = sum(path.stat().st_size for path in self._private.rglob("*") if path.is_file()) / MIB
        if size > self.policy.most_state_mb:
            raise PolicyError("most-state-mb", f"{size:.0f} MiB", f"{self.policy.most_state_mb}")


def coarse(reply: Reply, policy: Policy) -> Reply:
    """Return a reply whose counts of right predictions are as they may leave (`Policy.rounded`).

    Exact counts of models that predict one class each would be the label counts of a split; so would the figures in the
    reason for which such a model was refused, and the estimated accuracy of a network that is equally sure of
    everything: both are left out. Counts by class, which a test-time round tells, are left as they are.
    """
    if policy.count_step == 1 or isinstance(reply, Adapted):
        return reply
    if isinstance(reply, Validated):
        counts = {name: getattr(reply, name, None) for name in VALIDATED}
        known = {name: count for name, count in counts.items() if count is not None}
        rounded: dict[str, Any] = {name: policy.rounded(one, reply.validation_total) for name, one in known.items()}
        return replace(reply, **rounded)
    if isinstance(reply, RefinedRates):
        return replace(reply, correct=policy.rounded(reply.correct, reply.num_examples))
    if isinstance(reply, Evaluated):
        results = [replace(one, correct=policy.rounded(one.correct, one.total), estimates={}) for one in reply.results]
        return replace(reply, results=results, served=without_figures(reply.served))
    if isinstance(reply, Telemetry):
        return replace(reply, refused=without_figures(reply.refused))
    return reply


def without_figures(text: str) -> str:
    """Return "<what>: <reason>" with an ellipsis for each number and quoted name in the reason."""
    what, colon, reason = text.partition(": ")
    return what + colon + FIGURE.sub("…", reason)


def _bytes(request: Request) -> int:
    """Return the bytes of a request's arrays and settings."""
    return sum(array_bytes(arrays) for arrays in request.to_record().arrays.values()) + len(request.settings)


def _training(request: Request) -> str:
    task = getattr(request, "task", None)
    return str(task.training)[:80] if task is not None else ""
