"""The place of this process among the ranks of a run, and what a rank owes those that started it.

``python -m experiments.launching.rank_process MODULE RUN_DIR`` is how the launcher starts a worker: it ties the process
to the launcher before the first slow import, and then does what ``python -m MODULE RUN_DIR`` would.
"""

import ctypes
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from experiments.config.errors import UserError
from experiments.runs.records import RecordError, RunFolder, write_atomic, write_json

LAUNCHER_PID = "MICRO_LAUNCHER_PID"
LAUNCH = "MICRO_LAUNCH"  # "node" in a job script: each task that srun starts is to start the workers of its node

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # slurm.h numbers the batch script, the interactive shell and others from here
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket timeout", re.I)


@dataclass(frozen=True)
class RankEnvironment:
    """The ranks that this process is part of.

    Attributes:
        rank: In [0, world_size).
        world_size: Number of ranks of the run.
        local_rank: Number of this rank on its node, which is the number of its GPU.
        master_addr: Host of rank 0.
        master_port: Port on that host where the ranks meet.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    def export(self) -> None:
        """Set the environment variables that torch.distributed's ``env://`` reads."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )


def joined(environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Return the ranks this process was started into by torchrun or srun; None if it is to start workers itself.

    A batch script is not a rank, nor is a single srun task: both start their workers. So does one task on each of
    several nodes where MICRO_LAUNCH is ``node``.

    Raises:
        UserError: A variable of torchrun or SLURM is missing beside others, or is no number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if _is_srun_task(environ):
        return _from_srun(environ)
    return None


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: ``node01`` for ``node[01-03,7],gpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else "")


def die_with_parent(parent: int | None = None, *, how: int = signal.SIGTERM) -> None:
    """Ask Linux to end this process when its parent dies, even by SIGKILL; elsewhere do nothing.

    Args:
        how: The signal that ends it. A rank takes SIGKILL: it may hang in a collective, where it heeds nothing else,
            and another attempt may be under way.
        parent: Process id that the parent had when it started this process, to notice a parent that died before
            this call; by default the parent of this moment.
    """
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != expected:
        signal.raise_signal(how)


class StopSignals:
    """Signals that ask a run to save all that it needs to go on, and to end: SIGTERM, and SLURM's SIGUSR1.

    They are noted, not answered: the loop asks ``number`` before each step.
    """

    def __init__(self) -> None:
        self.number = 0
        self._depth = 0

    @contextmanager
    def heeded(self, *numbers: int) -> Iterator[None]:
        """Note these signals, or all that ask to stop, in this context; in a thread, where none can be had, do nothing.

        A context inside another keeps what was noted before it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._depth:
            self.number = 0
        self._depth += 1
        before = {number: signal.signal(number, self._note) for number in numbers or STOP_SIGNALS}
        try:
            yield
        finally:
            self._depth -= 1
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_SAVED = 75  # sysexits.h: try again later; the run was stopped by SIGUSR1 and can go on
stop_signals = StopSignals()


@contextmanager
def recorded_errors(run_dir: Path, rank: int) -> Iterator[None]:
    """Report an error of this rank in ``errors/rank<r>.json`` before it goes on its way.

    The first error of a run makes all other ranks fail in their next collective; the report says which kind this is,
    so that whoever reads it can tell the cause from the consequences.
    """
    try:
        yield
    except Exception as error:
        with suppress(RecordError, OSError):  # the error itself matters more than its report
            folder = RunFolder(run_dir).errors_path
            folder.mkdir(exist_ok=True)
            write_json(folder / f"rank{rank}.json", _report(error, rank))
        raise


def pid_path(run_dir: Path, rank: int) -> Path:
    """Return the file in which a rank leaves its process id, for the launcher to pass signals on."""
    return RunFolder(run_dir).ranks_path / f"rank{rank}" / "pid"


def is_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` says that another rank went away, rather than that this one did something wrong."""
    if isinstance(error, ConnectionError) or any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and tells_of_lost_peer(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def tells_of_lost_peer(message: str) -> bool:
    """Return whether ``message`` is one that collectives fail with when another rank went away."""
    return _LOST_PEER.search(message) is not None


def _report(error: Exception, rank: int) -> dict[str, object]:
    return {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "collective": is_lost_peer(error),
        "time": time.time(),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise UserError(f"RANK and WORLD_SIZE are set but {name} is not; start with torchrun, or unset RANK")
    return RankEnvironment(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
    )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    if environ.get(LAUNCH) == "node":
        return False
    needed = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environ for name in needed):
        return False
    return _number(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP and _num_tasks(environ) > 1


def _num_tasks(environ: Mapping[str, str]) -> int:
    names = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
    return _number(environ, names[0]) if names else 1


def _from_srun(environ: Mapping[str, str]) -> RankEnvironment:
    # All tasks of a step compute the same port; two steps of a job, or two jobs on a host, rarely do.
    key = 16 * _number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID")
    defaults = {
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_FIRST_PORT + key % _NUM_PORTS),
    }
    merged = {**defaults, **environ}  # a site whose node names do not resolve sets MASTER_ADDR itself
    return RankEnvironment(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=_num_tasks(environ),
        local_rank=_number(environ, "SLURM_LOCALID"),
        master_addr=merged["MASTER_ADDR"],
        master_port=_number(merged, "MASTER_PORT"),
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise UserError(f"environment variable {name} must be a whole number, got {environ[name]!r}")
    return int(environ[name])


def _run_worker(module: str, run_dir: str) -> None:
    """Run ``python -m module run_dir`` as the program of this process, which the launcher started."""
    launcher = os.environ.pop(LAUNCHER_PID, None)  # not for the processes that the worker starts
    die_with_parent(int(launcher) if launcher else None, how=signal.SIGKILL)
    # Python's own answer to SIGINT waits for the end of a collective, which may never come.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = [module, run_dir]
    rank = _number(os.environ, "RANK")
    write_atomic(pid_path(Path(run_dir), rank), f"{os.getpid()}\n")
    try:
        # SIGTERM ends a worker that is not training; SIGUSR1 may come before it trains
        # an import may fail before main's own does
        with stop_signals.heeded(signal.SIGUSR1), recorded_errors(Path(run_dir), rank):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
        leave(1)  # a thread that waits for a peer would keep a normal exit waiting too
    leave(0)  # gloo's threads can abort an interpreter that takes itself apart, after all work is done


def leave(code: int) -> NoReturn:
    """End this process without waiting for threads that may wait for a peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    from experiments.launching import rank_process  # the imported module, whose signals the loop reads, not __main__

    rank_process._run_worker(*sys.argv[1:])
