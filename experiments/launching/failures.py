"""The failures of ranks, and which of several failures caused the others."""

import re
import signal
import time
import traceback
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from experiments.config import errors
from experiments.config.errors import UserError
from experiments.runs.atomic_files import DiskError

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket timeout", re.I)
_TIMED_OUT = re.compile(r"tim(ed|e)[- ]?out", re.I)
ENDED_WITH_RUN = "ended by the launcher, after another rank had failed"
_ABORT = re.compile(r"terminate called after throwing.*?what\(\):\s*(.*)", re.S)  # what an uncaught C++ error prints
_STEP_LIMIT = re.compile(r"^Timeout \((\S+?)\)!$", re.M)  # of faulthandler, where a step did not end: see stalls.py
_MAX_MESSAGE = 300  # characters of an error message in one line
_NOTED_S = 1  # torch's agent notes the end of a process in whole seconds
_AGENT_KILLS_S = 25  # torch's agent kills ranks that have not ended 30 s after the first failure


class Kind(IntEnum):
    """The ways a rank can fail, the likeliest to have caused the failure of the others first."""

    STALLED = 0
    KILLED = 1
    ERROR = 2
    EXIT = 3
    LOST_PEER = 4
    STOPPED = 5


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: Global rank.
        kind: What kind of failure it is.
        message: One line, for the user.
        time: Seconds since the epoch.
        exit_code: Of the process; negative for a signal, None where it is not known.
        log: Path of the rank's standard error; empty where it has none of its own.
        traceback: Of the error, None if the rank reported none.
        of_disk: Whether the disk of the run is full, read-only or broken.
    """

    rank: int
    kind: Kind
    message: str
    time: float
    exit_code: int | None = None
    log: str = ""
    traceback: str | None = None
    of_disk: bool = False


class StalledRank(RuntimeError):
    """Others have waited for a rank in vain.

    Attributes:
        rank: Of the run.
        what: Where it stands, in one line.
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank, self.what = rank, what


class RankFailure(RuntimeError):
    """A rank failed and made the run fail; the message is one line.

    Attributes:
        failure: Of the rank that caused the others to fail.
        rank, message, exit_code, log: The same as in ``failure``.
    """

    def __init__(self, failure: Failure) -> None:
        log = f" (log: {failure.log})" if failure.log else ""
        super().__init__(f"rank {failure.rank} failed: {failure.message}{log}")
        self.failure = failure
        self.rank = failure.rank
        self.message = failure.message
        self.exit_code = failure.exit_code
        self.log = Path(failure.log)


def failure_of(error: Exception, rank: int) -> Failure:
    """Return the failure of a rank that an exception ends; one that names another rank is that rank's."""
    about = error if isinstance(error, StalledRank) else None
    kind = Kind.STALLED if about else Kind.LOST_PEER if is_lost_peer(error) else Kind.ERROR
    message = (
        about.what if about else str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    )
    return Failure(
        rank=about.rank if about else rank,
        kind=kind,
        message=errors.one_line(message) if isinstance(error, UserError) else short_line(message),
        time=time.time(),
        traceback="".join(traceback.format_exception(error)),
        of_disk=isinstance(error, DiskError),
    )


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others: the first that is not of a collective, nor of the launcher.

    A rank that others waited for in vain comes before a process that a signal ended, an error, and an exit code without
    an error. A SIGABRT beside one of these is a consequence: NCCL so ends ranks that have lost a peer. A process that
    was killed when the agent's patience with the others of a failed rank had ended is one too.
    """
    first = min(failure.time for failure in failures)

    def as_consequence(failure: Failure) -> Failure:
        if failure.kind > Kind.KILLED:
            return failure
        if failure.kind == Kind.KILLED and failure.time > first + _AGENT_KILLS_S:
            return replace(failure, kind=Kind.STOPPED, message=ENDED_WITH_RUN)
        causes = (Kind.ERROR, Kind.EXIT) if failure.exit_code == -signal.SIGABRT else (Kind.ERROR,)
        if any(one.kind in causes and one.time <= failure.time + _NOTED_S for one in failures):
            return replace(failure, kind=Kind.LOST_PEER)
        return failure

    return min(map(as_consequence, failures), key=lambda failure: (failure.kind, failure.time))


def is_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` says that another rank is gone, and is no error of this rank."""
    if isinstance(error, UserError):
        return False
    if isinstance(error, ConnectionError) or any(
        kind.__name__ in ("DistError", "PeerError") for kind in type(error).__mro__
    ):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_lost_peer(before)


def is_timeout(text: str) -> bool:
    """Return whether the words of a lost peer say that it was waited for in vain, rather than that it has ended."""
    return _TIMED_OUT.search(text) is not None


def kind_of_exit(exit_code: int, log: Path) -> Kind:
    """Return the kind of failure of a process that ended with a code other than 0 and reported no error.

    The agent ends the other ranks with SIGTERM after one has failed. NCCL aborts a process whose collective timed out.
    """
    if -exit_code == signal.SIGTERM:
        return Kind.STOPPED
    if exit_code >= 0:
        return Kind.EXIT
    return Kind.LOST_PEER if _LOST_PEER.search(_words_of_abort(exit_code, log)) else Kind.KILLED


def describe_exit(exit_code: int, log: Path) -> str:
    """Return one line on how a process ended: its signal, or its exit code and the last line of its log."""
    if exit_code < 0:
        return short_line(_describe_signal(-exit_code) + _words_of_abort(exit_code, log))
    text = _text(log)
    if limit := _STEP_LIMIT.search(text):
        return f"no step ended within {limit[1]}: its log says where it stood"
    last = next((line for line in reversed(text.split("\n")) if line.strip()), "")
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
    return log.read_text(errors="replace") if log.is_file() else ""
