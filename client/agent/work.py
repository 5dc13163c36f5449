"""A federated request under the owner's policy: checked, bounded in time, its counts rounded, and recorded.

    message ─ kind, size ─ rules on what it says ─ rules on the samples behind it ─ work ─ rounding ─ audit ─ reply

A reply that the audit log cannot record does not leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedtta.client.agent.audit import DAY, DONE, HOUR, Audit, sent
from fedtta.client.agent.policy import MIB, RESERVED, SETTINGS_BYTES, Policy, PolicyError, phase_of
from fedtta.client.device import Device
from fedtta.client.node import Node, settings_of
from fedtta.messages.arrays import array_bytes
from fedtta.messages.replies import Adapted, Evaluated, RefinedRates, Reply, Validated
from fedtta.messages.requests import Request, Summarize, Train
from fedtta.models.deadline import Deadline, Stopped


class Work:
    """What stands between a federation's messages and a device.

    Parameters
    ----------
    policy : Policy
    node : Node
    private : Path
        Folder of the private state of all runs.
    audit : Audit
    """

    def __init__(self, policy: Policy, node: Node, private: Path, audit: Audit) -> None:
        self.policy, self.audit = policy, audit
        self._node, self._private = node, private

    def perform(self, request: Request, answer: Callable[[Request], Reply], deadline: Deadline | None = None) -> Reply:
        """Answer a request if the policy allows it.

        Parameters
        ----------
        answer : callable
            Does the work, and calls `admit` when the device's samples are known.
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
        start, deadline = time.monotonic(), deadline or Deadline()
        record = request.to_record()
        received = sum(array_bytes(arrays) for arrays in record.arrays.values()) + len(request.settings)
        about = {
            "run": request.run[:80],
            "round": getattr(request, "round", None),
            "training": _training(request),
            "received": received,
        }
        try:
            reply = self._answered(request, answer, received, deadline)
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
                return rounded(answer(request), self.policy.count_step)
            except Stopped as error:
                if ours and not deadline.gone:
                    raise PolicyError("most-seconds", str(error), f"{self.policy.most_seconds:g}") from error
                raise

    def _check(self, request: Request, received: int) -> None:
        """Refuse a request before anything of it is done."""
        self.policy.check_kind(request.kind, received)
        if len(request.settings) > SETTINGS_BYTES:
            raise PolicyError("most-message-mb", f"settings of {len(request.settings)} bytes", f"{SETTINGS_BYTES}")
        self.policy.check_request(request, settings_of(request, self._node), bool(self._node.source))
        self._check_rate(phase_of(request.kind))
        self._check_state(request.run)

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

    def admit(self, request: Request, device: Device) -> None:
        """Refuse what too few samples of a device would stand behind."""
        federation = device.federation.in_round(int(getattr(request, "round", 1)))
        split = federation.splits[device.partition]
        training = 0 if device.role == "target" else len(split.train)
        self.policy.check_samples(request, training, len(split.validation))
        if isinstance(request, Train | Summarize) and training and self.policy.weighs_samples:
            self.policy.check_effective(request, *device.effective_samples(request))


def rounded(reply: Reply, step: int) -> Reply:
    """Return a reply whose counts of right predictions are multiples of `step`, and at most what they are out of.

    Exact counts of models that predict one class each would be the label counts of a split. Counts by class, which a
    test-time round tells, are left as they are.
    """
    if step == 1 or isinstance(reply, Adapted):
        return reply
    if isinstance(reply, Validated):
        total, personal = reply.validation_total, reply.personal_validation_correct
        return replace(
            reply,
            validation_correct=_rounded(reply.validation_correct, total, step),
            personal_validation_correct=None if personal is None else _rounded(personal, total, step),
        )
    if isinstance(reply, RefinedRates):
        return replace(reply, correct=_rounded(reply.correct, reply.num_examples, step))
    if isinstance(reply, Evaluated):
        results = [replace(one, correct=_rounded(one.correct, one.total, step)) for one in reply.results]
        return replace(reply, results=results)
    return reply


def _rounded(count: int, total: int, step: int) -> int:
    return min(total, (2 * count + step) // (2 * step) * step)


def _training(request: Request) -> str:
    task = getattr(request, "task", None)
    return str(task.training)[:80] if task is not None else ""
