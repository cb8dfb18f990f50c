"""The failures of ranks, and which of several failures caused the others."""

import re
import signal
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from experiments.config import errors

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket timeout", re.I)
ENDED_WITH_RUN = "ended by the launcher, after another rank had failed"
_MAX_MESSAGE = 300  # characters of an error message in one line
_SETTLE_S = 2  # a process killed this long after a rank's error was killed because of it: by NCCL, or at shutdown
_SHUTDOWN_S = 30  # torch's agent leaves the other ranks so long to end, after one has failed; then it kills them


class Kind(IntEnum):
    """The ways a rank can fail, the likeliest to have caused the failure of the others first."""

    LOST_HOST = 0
    STALLED = 1
    KILLED = 2
    ERROR = 3
    EXIT = 4
    LOST_PEER = 5
    STOPPED = 6


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: Global rank.
        kind: What kind of failure it is.
        message: One line, for the user.
        time: Seconds since the epoch.
        exit_code: Of the process; negative for a signal, None for a rank of another node.
        log: Path of the rank's standard error.
        traceback: Of the error, None if the rank reported none.
        of_disk: Whether the disk of the run is full, read-only or broken.
    """

    rank: int
    kind: Kind
    message: str
    time: float
    exit_code: int | None
    log: str
    traceback: str | None = None
    of_disk: bool = False


class RankFailure(RuntimeError):
    """A rank failed and made the run fail; the message is one line.

    Attributes:
        failure: Of the rank that caused the others to fail.
        rank, message, exit_code, log: The same as in ``failure``.
    """

    def __init__(self, failure: Failure) -> None:
        who = "" if failure.kind == Kind.LOST_HOST else f"rank {failure.rank} failed: "
        super().__init__(f"{who}{failure.message} (log: {failure.log})")
        self.failure = failure
        self.rank = failure.rank
        self.message = failure.message
        self.exit_code = failure.exit_code
        self.log = Path(failure.log)


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others.

    The order is: a host or a rank that stands still, a process killed by a signal, a Python error, an exit code without
    an error, an error of a collective (which only says that a peer is gone). Within a kind the earliest comes first.
    Times alone are not enough, because the ranks fail within milliseconds of each other.
    """
    return min(with_consequences(failures), key=lambda failure: (failure.kind, failure.time))


def with_consequences(failures: list[Failure]) -> list[Failure]:
    """Return the failures; one that was killed because another rank had failed is reported as ended with the run.

    NCCL kills processes soon after the error of a rank, and the launcher kills those that do not end when they should.
    """
    first_error = min((failure.time for failure in failures if failure.kind == Kind.ERROR), default=float("inf"))
    first = min((failure.time for failure in failures), default=float("inf"))

    def as_consequence(failure: Failure) -> Failure:
        late = failure.time > first_error + _SETTLE_S or failure.time > first + 0.9 * _SHUTDOWN_S
        if failure.kind == Kind.KILLED and late:
            return replace(failure, kind=Kind.STOPPED, message=ENDED_WITH_RUN)
        return failure

    return [as_consequence(failure) for failure in failures]


def is_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` says that another rank is gone, and is no error of this rank."""
    if isinstance(error, ConnectionError) or any(
        kind.__name__ in ("DistError", "PeerError") for kind in type(error).__mro__
    ):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def kind_of_exit(exit_code: int) -> Kind:
    """Return the kind of failure of a process that ended with a code other than 0.

    The agent ends the other ranks with SIGTERM after one has failed.
    """
    if exit_code >= 0:
        return Kind.EXIT
    return Kind.STOPPED if -exit_code == signal.SIGTERM else Kind.KILLED


def describe_exit(exit_code: int, log: Path) -> str:
    """Return one line on how a process ended: its signal, or its exit code and the last line of its log."""
    if exit_code < 0:
        return _describe_signal(-exit_code)
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    return short_line(f"exit code {exit_code}" + (f", last line of its log: {last}" if last else ""))


def short_line(text: str) -> str:
    """Return text as one line of bounded length."""
    line = errors.one_line(text)
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


def _describe_signal(number: int) -> str:
    known = {int(item): item.name for item in signal.Signals}
    hint = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by {known.get(number, f'signal {number}')}{hint}"
