"""The error of a rank: in the file that torch's agent gave it, and in ``failure.json`` of the run folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from experiments.launching.failures import Failure, Kind, describe_exit, failure_of, kind_of_exit
from experiments.runs.atomic_files import RecordError, load_json, write_atomic, write_json
from experiments.runs.lock import FolderInUse, FolderLost
from experiments.runs.run_folder import RunFolder
from experiments.runs.stop_signals import stop_signals


@contextmanager
def recorded_errors(folder: RunFolder, rank: int) -> Iterator[None]:
    """Write an error of this rank for its launcher and into the run folder, then raise it.

    The first error of a run makes all other ranks fail in their next collective: such an error is for the launcher
    alone. So is that of a folder which is another process's.
    """
    handler = RankErrors(rank)
    try:
        yield
    except Exception as error:
        failure = failure_of(error, rank)
        with stop_signals.recorded():  # the agent ends a rank by SIGTERM as soon as another has failed
            handler.record_exception(error)
            if failure.kind != Kind.LOST_PEER and not isinstance(error, FolderInUse | FolderLost):
                write_failure(folder, failure)
        raise


class RankErrors(ErrorHandler):
    """Write an error as torch's agent reads it, with what ``failure_of`` says of it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def record_exception(self, e: BaseException) -> None:
        """Write an error, the first of this rank, whole or not at all: the agent would fail on half a file."""
        path = self._get_error_file_path()
        if not path or Path(path).exists() or not isinstance(e, Exception):
            return
        failure = failure_of(e, self._rank)
        about = {"py_callstack": failure.traceback, "timestamp": str(int(failure.time)), "failure": asdict(failure)}
        with suppress(RecordError, OSError):  # the error itself matters more than its report
            write_atomic(Path(path), json.dumps({"message": {"message": failure.message, "extraInfo": about}}))


def failure_of_process(rank: int, process: ProcessFailure, log: str) -> Failure:
    """Return how a rank failed, from what its agent noted; the log is of its standard error."""
    message: Any = process.error_file_data.get("message")
    given = message.get("extraInfo", {}).get("failure") if isinstance(message, dict) else None
    if given:
        return Failure(**{**given, "kind": Kind(given["kind"]), "exit_code": process.exitcode, "log": log})
    return Failure(
        rank=rank,
        kind=kind_of_exit(process.exitcode, Path(log)),
        message=describe_exit(process.exitcode, Path(log)),
        time=process.timestamp,
        exit_code=process.exitcode,
        log=log,
    )


def write_failure(folder: RunFolder, failure: Failure) -> None:
    """Write why a run failed into its folder; a full disk takes nothing, and may be the reason."""
    row = {**asdict(failure), "kind": failure.kind.name.lower()}
    with suppress(RecordError, OSError):
        write_json(folder.failure_path, row)


def read_failure(folder: RunFolder) -> Failure | None:
    """Return why a run failed, as a rank or another node has written it; None where nobody has."""
    row = load_json(folder.failure_path)
    with suppress(KeyError, TypeError, AttributeError):
        return Failure(**{**row, "kind": Kind[row["kind"].upper()]})
    return None
