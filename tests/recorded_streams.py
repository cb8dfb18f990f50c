"""Streams and events of CUDA for tests without a GPU: they note what is asked of them, in order."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

MAIN = "main"  # the stream that a thread works on before it is given another


@dataclass(slots=True)
class Record:
    """What happened: ``(what, stream, event)`` in the order of the calls; events are named by their numbers."""

    calls: list[tuple[str, str, int | None]] = field(default_factory=list)
    names: Iterator[int] = field(default_factory=itertools.count)
    current: threading.local = field(default_factory=threading.local)

    def note(self, what: str, stream: str, event: int | None = None) -> None:
        self.calls.append((what, stream, event))


class RecordedEvent:
    """An event: it is recorded on a stream, and waited for."""

    def __init__(self, record: Record) -> None:
        self._record, self.number = record, next(record.names)
        self._stream = ""

    def record(self, stream: "RecordedStream | None" = None) -> None:
        self._stream = stream.name if stream else getattr(self._record.current, "name", MAIN)
        self._record.note("record", self._stream, self.number)

    def synchronize(self) -> None:
        self._record.note("host waits", self._stream, self.number)


class RecordedStream:
    """A stream that does nothing."""

    def __init__(self, record: Record, name: str) -> None:
        self._record, self.name = record, name

    def record_event(self, event: object = None) -> RecordedEvent:
        made = RecordedEvent(self._record)
        made.record(self)
        return made

    def wait_event(self, event: RecordedEvent) -> None:
        self._record.note("wait", self.name, event.number)

    def synchronize(self) -> None:
        self._record.note("host waits", self.name)


@contextmanager
def recorded_streams() -> Iterator[Record]:
    """Put the stand-ins in the place of torch's streams; yields what they note."""
    record = Record()
    sides = (f"side {number}" for number in itertools.count(1))

    def current(device: object = None) -> RecordedStream:
        return RecordedStream(record, getattr(record.current, "name", MAIN))

    def set_stream(stream: RecordedStream) -> None:
        record.current.name = stream.name

    @contextmanager
    def on(stream: RecordedStream | None) -> Iterator[None]:
        if stream is None:  # as in torch: no change
            yield
            return
        before = getattr(record.current, "name", MAIN)
        set_stream(stream)
        try:
            yield
        finally:
            record.current.name = before

    with (
        patch.object(torch.cuda, "Stream", lambda *_, **__: RecordedStream(record, next(sides))),
        patch.object(torch.cuda, "Event", lambda **_: RecordedEvent(record)),
        patch.object(torch.cuda, "current_stream", current),
        patch.object(torch.cuda, "set_stream", set_stream),
        patch.object(torch.cuda, "stream", on),
        patch.object(torch.cuda, "set_device", lambda device: None),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.object(torch.cuda, "is_initialized", lambda: True),
    ):
        yield record
