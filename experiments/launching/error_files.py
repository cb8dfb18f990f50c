"""The error of a rank: in the file that torch's agent gave it, and in ``failure.json`` of the run folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from experiments.launching.failures import Failure, Kind, failure_of, failure_of_exit
from experiments.runs.atomic_files import CannotWrite, load_json, write_json
from experiments.runs.run_folder import FolderInUse, FolderLost, RunFolder
from experiments.runs.stop_signals import stop_signals


@contextmanager
def recorded_errors(folder: RunFolder, rank: int) -> Iterator[None]:
    """Write an error of this rank for its launcher and into the run folder, then raise it.

    The first error of a run makes all other ranks fail in their next collective: such an error is for the launcher
    alone. So is that of a folder which is another process's.
    """
    try:
        yield
    except Exception as error:
        failure = failure_of(error, rank)
        with stop_signals.recorded():  # the agent ends a rank by SIGTERM as soon as another has failed
            _report(failure)
            if failure.kind != Kind.LOST_PEER and not isinstance(error, FolderInUse | FolderLost):
                write_failure(folder, failure)
        raise


def failure_of_process(rank: int, process: ProcessFailure, log: str) -> Failure:
    """Return how a rank failed, from what its agent noted; the log is of its standard error."""
    if given := process.error_file_data.get("failure"):
        return Failure(**{**given, "kind": Kind(given["kind"]), "exit_code": process.exitcode, "log": log})
    return failure_of_exit(rank, process.exitcode, process.timestamp, log)


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


def _report(failure: Failure) -> None:
    """Write the first error of this rank as torch's agent reads it, whole or not at all."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if path.name and not path.exists():
        with suppress(CannotWrite, OSError):  # the error itself matters more than its report
            write_json(path, {"message": failure.message, "timestamp": int(failure.time), "failure": asdict(failure)})
