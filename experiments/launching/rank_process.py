"""Main of a rank's process: it ends with its launcher, and it reports an error in the run folder.

The launcher starts a rank as ``python -m experiments.launching.rank_process MODULE RUN_DIR``. Before the first slow
import the process asks to end with the launcher; then it runs MODULE as ``python -m MODULE RUN_DIR`` would.
"""

import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.start_up import collect_seldom
from experiments.launching.failures import is_lost_peer
from experiments.launching.process_lifetime import die_with_parent, leave
from experiments.launching.rank_environment import whole_number
from experiments.launching.watching.beats import beating
from experiments.runs.atomic_files import DiskError, RecordError, disk_errors, write_atomic, write_json
from experiments.runs.lock import FolderInUse, FolderLost
from experiments.runs.run_folder import RunFolder
from experiments.runs.stop_signals import stop_signals

LAUNCHER_PID = "MICRO_LAUNCHER_PID"
TIMEOUT = "MICRO_TIMEOUT_S"  # time limit of the run's collectives
SPARE_REPORTS = "MICRO_SPARE_REPORTS"  # a folder on another disk, for reports that the run folder cannot take


@contextmanager
def recorded_errors(run_dir: Path, rank: int) -> Iterator[None]:
    """Report an error of this rank in ``errors/rank<r>.json``, then raise it.

    The first error of a run makes all other ranks fail in their next collective. The report says whether the error is
    that of a collective, so that its reader can find the cause.
    """
    try:
        yield
    except (FolderInUse, FolderLost):
        raise  # the folder is another process's
    except Exception as error:
        _write_report(run_dir, rank, _report(error, rank))
        raise


def _write_report(run_dir: Path, rank: int, report: dict[str, object]) -> None:
    """Write a report into the run folder or, where its disk takes none, into the launcher's spare folder."""
    spare = os.environ.get(SPARE_REPORTS)
    for path in (report_path(run_dir, rank), *([Path(spare) / f"rank{rank}.json"] if spare else [])):
        with suppress(RecordError, OSError):  # the error itself matters more than its report
            path.parent.mkdir(exist_ok=True)
            write_json(path, report)
            return


def report_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's error."""
    return RunFolder(run_dir).errors_path / f"rank{rank}.json"


def pid_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's process id."""
    return RunFolder(run_dir).ranks_path / f"rank{rank}" / "pid"


def saves_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank that saves its state at SIGTERM, which ends it before that."""
    return RunFolder(run_dir).ranks_path / f"rank{rank}" / "saves"


def announce_saving(run_dir: Path) -> None:
    """Let the launcher know that this rank saves its state at SIGTERM from now on."""
    write_atomic(saves_path(run_dir, whole_number(os.environ, "RANK")), "")


def _report(error: Exception, rank: int) -> dict[str, object]:
    return {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "collective": is_lost_peer(error),
        "for_user": isinstance(error, UserError),
        "of_disk": isinstance(error, DiskError),
        "time": time.time(),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _run_worker(module: str, run_dir: str) -> None:
    """Run ``python -m module run_dir`` as the program of this process, which the launcher started."""
    launcher = os.environ.pop(LAUNCHER_PID, None)  # the children of this rank must not see it
    die_with_parent(int(launcher) if launcher else None, how=signal.SIGKILL)
    collect_seldom()
    # Python's own handler of SIGINT would wait for the end of a collective, which may hang.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM sends it to all processes of a step; submitit handles it
    sys.argv = [module, run_dir]
    rank = whole_number(os.environ, "RANK")
    timeout_s = float(os.environ.pop(TIMEOUT))
    try:
        # SIGTERM ends a rank that does not train yet; SLURM may send SIGUSR1 before that. Errors are recorded here too,
        # because an import may fail before main records errors.
        with (
            stop_signals.recorded(signal.SIGUSR1),
            recorded_errors(Path(run_dir), rank),
            disk_errors(Path(run_dir)),
            beating(Path(run_dir), rank, timeout_s),
        ):
            write_atomic(pid_path(Path(run_dir), rank), f"{os.getpid()}\n")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        with suppress(OSError):  # its log may be on a full disk
            traceback.print_exc()
        leave(1)  # a normal exit would wait for threads, which may wait for a peer
    leave(0)  # gloo's threads can abort the interpreter during its shutdown


if __name__ == "__main__":
    _run_worker(*sys.argv[1:])
