"""Streams of the pretended GPU, which notice a race: a tensor used in one stream while another is to write it.

Operations are executed at once, one after another; what is checked is whether anything would order them on a GPU: one
stream, `wait_stream`, an event, or the host that has waited. Not noticed: memory that is freed while it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Moment = dict["Stream", int]  # stream → how many of its operations have been done


class Stream:
    """A queue of operations.

    Parameters
    ----------
    streams : Streams
        Those of its GPU.
    priority : int
    """

    def __init__(self, streams: Streams, priority: int = 0) -> None:
        self._streams, self.priority = streams, priority
        self.given = 0  # operations so far
        self.after: Moment = {}  # what its next operation comes after
        streams.made.append(self)

    def wait_stream(self, other: Stream) -> None:
        """Let the next operation come after what `other` has been given."""
        self.wait(other.moment())

    def wait(self, moment: Moment) -> None:
        """Let the next operation come after a moment."""
        self.after = later(self.after, moment)

    def moment(self) -> Moment:
        """Return when all that it has been given is done."""
        return later(self.after, {self: self.given})

    def synchronize(self) -> None:
        """Let the host wait."""
        self._streams.host_waits(self)


class Event:
    """A moment of a stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream, self._moment = streams.current, streams.current.moment()

    def record(self, stream: Stream | None = None) -> None:
        """Take the present moment of a stream, by default the current one."""
        self._stream = stream or self._streams.current
        self._moment = self._stream.moment()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait, by default the current one."""
        (stream or self._streams.current).wait(self._moment)

    def synchronize(self) -> None:
        """Let the host wait."""
        self._streams.host_waits(self._stream, self._moment)


def later(*moments: Moment) -> Moment:
    """Return the moment after several."""
    found: Moment = {}
    for moment in moments:
        for stream, count in moment.items():
            found[stream] = max(count, found.get(stream, 0))
    return found


class Streams:
    """All streams of a GPU, and which operation last wrote and read each piece of memory.

    Parameters
    ----------
    on_wait : callable
        Called when the host waits.

    Attributes
    ----------
    made : list of Stream
        In order; the first is the default stream.
    used : list of Stream
        The stream of each operation while there are several.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait, self._thread = on_wait, threading.local()
        self.made: list[Stream] = []
        self.used: list[Stream] = []
        self.default = Stream(self)
        self._done: Moment = {}  # what the host has waited for
        self._untracked = self.default, 0  # the last operation before there was a second stream
        self._written: dict[int, tuple[Stream, int]] = {}
        self._read: dict[int, Moment] = {}

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        found: Stream = getattr(self._thread, "current", self.default)
        return found

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one of this thread."""
        before, self._thread.current = self.current, stream
        try:
            yield
        finally:
            self._thread.current = before

    def host_waits(self, stream: Stream | None = None, moment: Moment | None = None) -> None:
        """Let the host wait for a stream, or a moment of it; by default for all."""
        chosen = [stream] if stream else self.made
        self._done = later(self._done, *([one.moment() for one in chosen] if moment is None else [moment]))
        self._on_wait()

    def note(self, reads: Iterable[int], writes: Iterable[int], fresh: Iterable[int]) -> str:
        """Note an operation of the current stream; return what is wrong with it, or nothing.

        Parameters
        ----------
        reads, writes, fresh : int
            Addresses of memory that is read, written in place, and new.
        """
        stream = self.current
        stream.given += 1
        if len(self.made) == 1:
            self._untracked = self.default, self.default.given
            return ""
        self.used.append(stream)
        known, wrong = later(self._done, stream.after), ""
        for address in {*reads, *writes}:
            owner, count = self._written.get(address, self._untracked)
            if owner is not stream and count > known.get(owner, 0):
                wrong = "a tensor is used that another stream may not have written yet"
        for address in writes:
            others = {one: count for one, count in self._read.get(address, {}).items() if one is not stream}
            if any(count > known.get(one, 0) for one, count in others.items()):
                wrong = "a tensor is changed that another stream may not have read yet"
        for address in reads:
            self._read.setdefault(address, {})[stream] = stream.given
        for address in (*writes, *fresh):
            self._written[address], self._read[address] = (stream, stream.given), {}
        return wrong

    def module(self) -> dict[str, Any]:
        """Return what `torch.cuda` has of streams."""
        return {
            "Stream": lambda device=None, priority=0: Stream(self, priority),
            "Event": lambda **_: Event(self),
            "stream": self.within,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "synchronize": lambda device=None: self.host_waits(),
        }
