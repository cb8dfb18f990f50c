"""The failures of ranks, and which of several failures caused the others."""

import re
import signal
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from experiments.config import errors

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket timeout", re.I)
ENDED_WITH_RUN = "ended by the launcher, after another rank had failed"
_ABORT = re.compile(r"terminate called after throwing.*?what\(\):\s*(.*)", re.S)  # what an uncaught C++ error prints
_MAX_MESSAGE = 300  # characters of an error message in one line
_NOTED_S = 1  # torch's agent notes the end of a process in whole seconds
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
    The first three are consequences where another rank's error came before them: see ``with_consequences``.
    """
    return min(with_consequences(failures), key=lambda failure: (failure.kind, failure.time))


def with_consequences(failures: list[Failure]) -> list[Failure]:
    """Return the failures, where what followed the error of another rank is of the kinds LOST_PEER and STOPPED.

    A rank stands still, or gloo or NCCL ends its process by a signal, because a peer is gone. The launcher kills those
    that do not end when they should.
    """
    first = min((failure.time for failure in failures), default=float("inf"))

    def as_consequence(failure: Failure) -> Failure:
        if failure.kind > Kind.KILLED:
            return failure
        if failure.kind == Kind.KILLED and failure.time > first + 0.9 * _SHUTDOWN_S:
            return replace(failure, kind=Kind.STOPPED, message=ENDED_WITH_RUN)
        aborted = failure.exit_code == -signal.SIGABRT  # no other signal follows a peer's exit without an error
        causes = (Kind.ERROR, Kind.EXIT) if aborted else (Kind.ERROR,)
        if any(one.kind in causes and one.time <= failure.time + _NOTED_S for one in failures):
            return replace(failure, kind=Kind.LOST_PEER)
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
    before = error.__cause__ or error.__context__
    return before is not None and is_lost_peer(before)


def kind_of_exit(exit_code: int, log: Path) -> Kind:
    """Return the kind of failure of a process that ended with a code other than 0.

    The agent ends the other ranks with SIGTERM after one has failed. NCCL aborts a process whose collective timed out.
    """
    if exit_code >= 0:
        return Kind.EXIT
    if -exit_code == signal.SIGTERM:
        return Kind.STOPPED
    return Kind.LOST_PEER if _LOST_PEER.search(_words_of_abort(exit_code, log)) else Kind.KILLED


def describe_exit(exit_code: int, log: Path) -> str:
    """Return one line on how a process ended: its signal, or its exit code and the last line of its log."""
    if exit_code < 0:
        return short_line(_describe_signal(-exit_code) + _words_of_abort(exit_code, log))
    last = next((line for line in reversed(_text(log).split("\n")) if line.strip()), "")
    return short_line(f"exit code {exit_code}" + (f", last line of its log: {last}" if last else ""))


def short_line(text: str) -> str:
    """Return text as one line of bounded length."""
    line = errors.one_line(text)
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


def _describe_signal(number: int) -> str:
    known = {int(item): item.name for item in signal.Signals}
    hint = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by {known.get(number, f'signal {number}')}{hint}"


def _words_of_abort(exit_code: int, log: Path) -> str:
    """Return what an uncaught C++ error wrote that ended a process by SIGABRT, empty if it was something else."""
    found = _ABORT.search(_text(log)) if exit_code == -signal.SIGABRT else None
    return f": {found[1]}" if found else ""


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
