"""Times of the parts of a step: numbers of the host's clock, or events of a device that are read when asked for.

An event is recorded on the stream on which the work is, and the host goes on. What lies between two events is known
once the device has passed both; to read it waits for these two, and not for what was queued after them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class DeviceSeconds:
    """A sum of times of a device, each with a factor, and of seconds of the host: one time, or a span between some.

    Times are added and subtracted as numbers are, and with numbers. Where the factors add up to zero it is a span,
    which ``float`` reads; it waits for the device then, and not again.

    Args:
        times: a factor for each event that was recorded.
        rest_s: seconds of the host.
    """

    __slots__ = ("_rest_s", "_times")

    def __init__(self, times: "Mapping[torch.cuda.Event, float]", rest_s: float = 0.0) -> None:
        self._times, self._rest_s = dict(times), rest_s

    def __add__(self, other: "Seconds") -> "DeviceSeconds":
        if not isinstance(other, DeviceSeconds):
            return DeviceSeconds(self._times, self._rest_s + other)
        sums = {
            event: self._times.get(event, 0.0) + other._times.get(event, 0.0) for event in self._times | other._times
        }
        times = {event: factor for event, factor in sums.items() if factor}
        return DeviceSeconds(times, self._rest_s + other._rest_s)

    __radd__ = __add__

    def __sub__(self, other: "Seconds") -> "DeviceSeconds":
        return self + -1 * other

    def __rsub__(self, other: float) -> "DeviceSeconds":
        return -1 * self + other

    def __mul__(self, factor: float) -> "DeviceSeconds":
        return DeviceSeconds({event: factor * old for event, old in self._times.items()}, factor * self._rest_s)

    __rmul__ = __mul__

    def __float__(self) -> float:
        if self._times:
            self._rest_s += _span_s(self._times)
            self._times = {}
        return self._rest_s


Seconds = float | DeviceSeconds
"""A time or a span. A time is told apart by its clock, and means something where another is subtracted from it."""


def _span_s(times: "Mapping[torch.cuda.Event, float]") -> float:
    """Return the seconds that a span of events adds up to."""
    assert abs(sum(times.values())) < 1e-6, "a time has no length: subtract another"
    for event in times:
        event.synchronize()  # host sync: whoever asks for the length of a step's parts
    first = next(iter(times))
    milliseconds: dict[torch.cuda.Event, float] = {event: first.elapsed_time(event) for event in times}
    return sum(factor * milliseconds[event] for event, factor in times.items()) / 1e3


def event_on(device: torch.device) -> DeviceSeconds:
    """Return the time of an accelerator's current stream, by an event; the host does not wait."""
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return DeviceSeconds({event: 1.0})


@dataclass(slots=True)
class Clock:
    """The clock of a reduction, which stands still while others run.

    Attributes:
        ran: what it showed at the time ``since``, from which it goes on.
        device: whose time it showed last.
    """

    ran: Seconds = 0.0
    since: Seconds = 0.0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it never changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the time of a reduction went: choosing, inside collectives (waiting included), and in all else."""

    select: Seconds = 0.0
    exchange: Seconds = 0.0
    rest: Seconds = 0.0
