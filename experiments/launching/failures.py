"""Record failures of ranks, and find the one that caused the others.

A rank writes its error into the file from torch's agent, and into ``failure.json`` of the run folder.
"""

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from signal import SIGABRT, SIGKILL, SIGTERM, Signals

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import micro
from experiments.config.errors import CannotWrite, UserError, one_line, one_line_with_type
from experiments.config.stopping import stop_signals
from experiments.runs.files import cannot_write, is_of_disk, load_json, try_to_write, write_json
from experiments.runs.run_folder import FolderInUse, FolderLost, RunFolder

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket timeout", re.I)
_TIMED_OUT = re.compile(r"tim(ed|e)[- ]?out", re.I)
_MAX_MESSAGE = 300  # characters of an error message in one line
_AGENT_KILLS_S = 25  # torch's agent kills ranks that have not ended 30 s after the first failure


class Kind(IntEnum):
    """The ways a rank can fail, the likeliest to have caused the failure of the others first."""

    STALLED = 0  # others have waited for it in vain
    ERROR = 1  # an exception ended it
    EXIT = 2  # it ended with an exit code, and reported no exception
    KILLED = 3  # a signal ended it: NCCL so ends ranks that have lost a peer
    LOST_PEER = 4  # a collective failed
    STOPPED = 5  # the launcher ended it


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: of the run.
        message: one line, for the user.
        time: seconds since the epoch.
        exit_code: of the process; negative for a signal, None where it is not known.
        log: path of the rank's standard error; empty where it has none of its own.
        traceback: of the error, None if the rank reported none.
    """

    rank: int
    kind: Kind
    message: str
    time: float
    exit_code: int | None = None
    log: str = ""
    traceback: str | None = None


class RankFailure(RuntimeError):
    """A rank failed and made the run fail, or others waited for it in vain; the message is one line."""

    def __init__(self, failure: Failure) -> None:
        log = f" (log: {failure.log})" if failure.log else ""
        super().__init__(f"rank {failure.rank} failed: {failure.message}{log}")
        self.failure = failure


@contextmanager
def recorded_errors(folder: RunFolder, rank: int) -> Iterator[None]:
    """Write an error of this rank for its launcher and into the run folder, then raise it.

    The first error of a run makes all other ranks fail in their next collective: such an error is for the launcher
    alone. So is that of a folder which is another process's, or a finished run's.
    """
    try:
        yield
    except Exception as error:
        failure = _failure_of(error, rank)
        with stop_signals.recorded():  # the agent ends a rank by SIGTERM as soon as another has failed
            _report(failure)
            is_own = not isinstance(error, FolderInUse | FolderLost) and not folder.is_done()
            if is_own and failure.kind != Kind.LOST_PEER:
                write_failure(folder, failure)
        raise


_KILLED = "killed by {signal}"
_ANY = re.compile("")
_ABORT = r"terminate called after throwing.*?what\(\):\s*"  # what an uncaught C++ error prints, before its message
CAUSES: Sequence[tuple[Callable[[int], bool], re.Pattern[str], Kind, str]] = (
    (lambda code: code == -SIGTERM, _ANY, Kind.STOPPED, "ended by the launcher, after another rank had failed"),
    (lambda code: code == -SIGKILL, _ANY, Kind.KILLED, f"{_KILLED}, as the kernel does when memory runs out"),
    (
        lambda code: code == -SIGABRT,
        re.compile(f"{_ABORT}(.*(?:{_LOST_PEER.pattern}).*)", re.S | re.I),
        Kind.LOST_PEER,
        f"{_KILLED}: {{0}}",
    ),
    (lambda code: code == -SIGABRT, re.compile(f"{_ABORT}(.*)", re.S), Kind.KILLED, f"{_KILLED}: {{0}}"),
    (lambda code: code < 0, _ANY, Kind.KILLED, _KILLED),
    (
        lambda code: True,
        re.compile(r"^Timeout \((\S+?)\)!$", re.M),  # of faulthandler, where a step did not end: see stalls.py
        Kind.EXIT,
        "no step ended within {0}: its log says where it stood",
    ),
    (lambda code: True, re.compile(r"\S"), Kind.EXIT, "exit code {code}, last line of its log: {last}"),
    (lambda code: True, _ANY, Kind.EXIT, "exit code {code}"),
)
"""What ended a process that reported no error; the first row counts.

Whether its exit code fits, what its log has, how the rank so has failed, and the message: of groups of the log.
"""


def failure_of_process(rank: int, process: ProcessFailure, log: str) -> Failure:
    """Return how a rank failed, by its report, or by its exit code and ``log``, its standard error."""
    code = process.exitcode
    if given := process.error_file_data.get("failure"):
        return Failure(**{**given, "kind": Kind(given["kind"]), "exit_code": code, "log": log})
    text = Path(log).read_text(errors="replace") if Path(log).is_file() else ""
    fitting = ((pattern.search(text), kind, words) for fits, pattern, kind, words in CAUSES if fits(code))
    found, kind, words = next((found, kind, words) for found, kind, words in fitting if found)
    known = {-number: number.name for number in Signals}
    last = next((line for line in reversed(text.split("\n")) if line.strip()), "")
    message = words.format(*found.groups(), code=code, signal=known.get(code, f"signal {-code}"), last=last)
    return Failure(rank=rank, kind=kind, message=short_line(message), time=process.timestamp, exit_code=code, log=log)


def cause_of(folder: RunFolder, failures: list[Failure], *, since: float, behind: tuple[int, str] | None) -> Failure:
    """Return the failure that made a run fail.

    Args:
        failures: of the ranks of this node.
        since: when they were started: another node may have recorded a failure from then on.
        behind: the rank for which others may have waited, and where it stood.
    """
    cause = root_cause(failures)
    if cause.kind == Kind.LOST_PEER:
        written = read_failure(folder)
        if cause.exit_code == -SIGABRT and behind and is_timeout(cause.message):  # NCCL ends ranks that wait
            words = f"did not reach the collective of the others, it was in {behind[1]}"
            message = short_line(f"{words}; rank {cause.rank} waited: {cause.message}")
            return replace(cause, rank=behind[0], kind=Kind.STALLED, message=message, exit_code=None)
        return written if written and written.time >= since else cause
    if cause.kind == Kind.EXIT:  # it could report nothing: the disk may be why
        try:
            try_to_write(folder.path)
        except OSError as error:
            if is_of_disk(error):
                return replace(cause, message=str(cannot_write(folder.path, error)))
    return cause


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others: the first of the likeliest kind.

    A process that was killed long after the first failure was ended by torch's agent, whose patience had ended.
    """
    first = min(failure.time for failure in failures)

    def order(failure: Failure) -> tuple[Kind, float]:
        is_late = failure.kind == Kind.KILLED and failure.time > first + _AGENT_KILLS_S
        return (Kind.STOPPED if is_late else failure.kind), failure.time

    return min(failures, key=order)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` says that another rank is gone, and is no error of this rank."""
    if isinstance(error, UserError):
        return False
    if isinstance(error, ConnectionError | dist.DistError | micro.PeerError):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_lost_peer(before)


def is_timeout(text: str) -> bool:
    """Return whether the words of a lost peer say that it was waited for in vain, rather than that it has ended."""
    return _TIMED_OUT.search(text) is not None


def short_line(text: str) -> str:
    """Return text as one line of bounded length."""
    line = one_line(text)
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


def write_failure(folder: RunFolder, failure: Failure) -> None:
    """Write why a run failed into its folder; a full disk takes nothing, and may be the reason."""
    with suppress(CannotWrite, OSError):
        write_json(folder.failure_path, {**asdict(failure), "kind": failure.kind.name.lower()})


def read_failure(folder: RunFolder) -> Failure | None:
    """Return why a run failed, as a rank or another node has written it; None where nobody has."""
    row = load_json(folder.failure_path)
    with suppress(KeyError, TypeError, AttributeError):
        return Failure(**{**row, "kind": Kind[row["kind"].upper()]})
    return None


def _failure_of(error: Exception, rank: int) -> Failure:
    """Return the failure of a rank that an exception ends; one that names another rank is that rank's."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RankFailure):
        return replace(error.failure, traceback=text)
    kind = Kind.LOST_PEER if is_lost_peer(error) else Kind.ERROR
    message = one_line(error) if isinstance(error, UserError) else short_line(one_line_with_type(error))
    return Failure(rank=rank, kind=kind, message=message, time=time.time(), traceback=text)


def _report(failure: Failure) -> None:
    """Write the first error of this rank as torch's agent reads it, whole or not at all."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if path.name and not path.exists():
        with suppress(CannotWrite, OSError):  # the error itself matters more than its report
            write_json(path, {"message": failure.message, "timestamp": int(failure.time), "failure": asdict(failure)})
