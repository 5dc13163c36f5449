"""Progress of a run in the terminal: a listener on its events."""

from __future__ import annotations

from typing import Any

from rich import markup
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedtta.messages.record import PROSE_LENGTH, printable
from fedtta.server.events import Event

#: Up to so many clients in a line are named.
NAMED = 5


def escape(text: str) -> str:
    """Return a text that a node may have chosen without control characters and without markup."""
    return markup.escape(printable(str(text), PROSE_LENGTH))


class TerminalProgress:
    """Shows rounds, the clients of the current phase, images/s and the time left.

    A terminal gets bars, a file one line a round.

    Parameters
    ----------
    console : Console
    """

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self.whole = self.progress.add_task("run", total=None, note="")
        self.phase = self.progress.add_task("starting", total=None, note="")
        self.sizes: dict[int, int] = {}  # partition → training samples
        self.names: dict[int, str] = {}
        self.epochs = 1
        self.correct = self.samples = 0  # of the current test-time round
        self.limited: list[Event] = []  # in a row, of one round

    def __enter__(self) -> TerminalProgress:
        """Start drawing."""
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._tell_limited()
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event["event"] != "limited":
            self._tell_limited()
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _on_run(self, event: Event) -> None:
        self.epochs = int(event["settings"]["local-epochs"])

    def _on_clients(self, event: Event) -> None:
        self.sizes = {partition: sizes[0] for partition, sizes in enumerate(event["sizes"])}
        self.names = dict(enumerate(event.get("names", [])))

    def _on_plan(self, event: Event) -> None:
        self.progress.update(self.whole, total=event["steps"])

    def _on_phase(self, event: Event) -> None:
        self.progress.update(self.phase, description=event["name"], total=event["total"], completed=0, note="clients")

    def _on_answered(self, event: Event) -> None:
        self.progress.advance(self.phase)

    def _on_round(self, event: Event) -> None:
        images = sum(self.sizes.get(partition, 0) for partition in event["replied"]) * self.epochs
        loss = "loss hidden" if event["train_loss"] is None else f"loss {event['train_loss']:.3f}"
        note = f"{loss}  {images / event['wall_seconds']:,.0f} images/s"
        if event["validation_accuracy"] is not None:
            note += f"  val {100 * event['validation_accuracy']:.1f} %"
        if "bytes_up_float32" in event:
            note += f"  up {event['bytes_up'] / max(event['bytes_up_float32'], 1):.0%}"
        trained, decoded = event.get("trained_accuracy"), event.get("decoded_accuracy")
        if trained is not None and decoded is not None:
            note += f" at {100 * (decoded - trained):+.1f} points"
        name = f"{event['training']} round {event['round']}"
        self.progress.update(self.whole, description=name, note=note)
        self._step(f"{name}  {note}")

    def _on_rates_round(self, event: Event) -> None:
        note = "loss hidden"
        if event["loss"] is not None:
            note = f"loss {event['loss']:.3f}  accuracy {100 * event['accuracy']:.1f} %"
        name = f"rates {event['training']} ({event['variant']}) round {event['round']}"
        self.progress.update(self.whole, description=name, note=note)
        self._step(f"{name}  {note}")

    def _on_adapted(self, event: Event) -> None:
        self.correct += sum(event["correct"])
        self.samples += sum(event["total"])

    def _on_adapt_round(self, event: Event) -> None:
        note = f"{100 * self.correct / max(self.samples, 1):.1f} % of {self.samples:,} images"
        note += f"  {self.samples / event['wall_seconds']:,.0f} images/s"
        name = f"{event['method']} @ {event['collaboration']} round {event['round']}"
        self.correct = self.samples = 0
        self.progress.update(self.whole, description=name, note=note)
        self._step(f"{name}  {note}")

    def _on_statistics(self, event: Event) -> None:
        self._step(f"{event['training']} statistics of {len(event['replied'])} clients")

    def _on_leak_check(self, event: Event) -> None:
        self._step(f"{event['training']} evaluated: {event['leaked']} of {event['checked']} test samples trained on")

    def _step(self, line: str) -> None:
        """Advance the run by one step; in a file, print the step and the time left."""
        self.progress.advance(self.whole)
        if not self.progress.console.is_terminal:
            task = self.progress.tasks[self.whole]
            remaining = task.time_remaining
            left = f"  {remaining:.0f} s left" if remaining else ""
            total = "?" if task.total is None else f"{task.total:.0f}"
            text = f"[{task.completed:.0f}/{total}] {line}{left}"
            self.progress.console.print(text, markup=False, soft_wrap=True)

    def _on_failed(self, event: Event) -> None:
        self._warn(event)

    def _on_late(self, event: Event) -> None:
        self._warn(event)

    def _on_joined(self, event: Event) -> None:
        self.sizes[event["partition"]] = event["sizes"][0]
        self.names[event["partition"]] = event["name"]
        train, validation, test = event["sizes"]
        self._tell(event, f"{train} samples to train, {validation} to validate, {test} to test, role {event['role']}")

    def _on_left(self, event: Event) -> None:
        self._tell(event, f"node {event['node_id']} is no longer connected")

    def _on_rejoined(self, event: Event) -> None:
        self._tell(event, f"as node {event['node_id']}")

    def _on_left_alone(self, event: Event) -> None:
        self.progress.console.print(
            f"[yellow]left alone[/] node {event['node_id']}: {escape(event['reason'])}", highlight=False
        )

    def _on_served(self, event: Event) -> None:
        self.progress.console.print(
            f"[yellow]agent[/] of client {self._name(event['partition'])}: {escape(event['served'])}", highlight=False
        )

    def _tell(self, event: Event, text: str) -> None:
        who = f"client {self._name(event['partition'])}"
        self.progress.console.print(f"[yellow]{event['event']}[/] {who}: {escape(text)}", highlight=False)

    def _name(self, partition: int) -> str:
        return escape(self.names.get(partition, str(partition)))

    def _on_refused(self, event: Event) -> None:
        self._warn(event)

    def _on_limited(self, event: Event) -> None:
        self.limited.append(event)

    def _tell_limited(self) -> None:
        """Print the replies of a round that were limited: the reason for a single one, otherwise only the clients."""
        found, self.limited = self.limited, []
        if not found:
            return
        first, names = found[0], [self._name(event["partition"]) for event in found]
        clients = f"clients {', '.join(names)}" if len(names) <= NAMED else f"{len(names)} clients"
        what = f"client {names[0]}: {escape(first['reason'])}" if len(found) == 1 else clients
        where = f"{first['phase']}, round {first['round']}"
        self.progress.console.print(f"[yellow]limited[/] {where}, {what}", highlight=False)

    def _on_note(self, event: Event) -> None:
        self.progress.console.print(f"[yellow]note:[/] {escape(event['text'])}")

    def _warn(self, event: dict[str, Any]) -> None:
        where = f"{event['phase']}, round {event['round']}, client {self._name(event['partition'])}"
        self.progress.console.print(f"[red]{event['event']}[/] {where}: {escape(event['reason'])}", highlight=False)
