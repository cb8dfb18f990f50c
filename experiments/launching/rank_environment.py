"""What processes learn from their environment and parent: which rank they are, where code is, and when to end."""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.config import ROOT
from experiments.config.errors import UserError
from experiments.config.schema import LAUNCH

LAUNCHER_PID = "MICRO_LAUNCHER_PID"  # what a launcher tells its ranks of itself
TERMINAL = "MICRO_TERMINAL"  # the path of the launcher's terminal, on which rank 0 may draw
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # in slurm.h: the batch script, the interactive shell and others from here
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_TASK = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_SHAPE = re.compile(r"\+{0,2}cluster\.(nproc_per_node|nnodes)=(\d{1,9})")


@dataclass(frozen=True)
class RankEnvironment:
    """The rank of this process in a run and on its node, and the host and port of rank 0, where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    def export(self) -> None:
        """Set the environment variables that torch.distributed's ``env://`` reads."""
        values = (self.rank, self.world_size, self.local_rank, self.master_addr, self.master_port)
        os.environ.update(zip(_RANK, map(str, values), strict=True))


def read_rank_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Return the rank that torchrun or srun gave this process; None if this process starts the ranks itself.

    A batch script and a single srun task are not ranks: they start the ranks. The same holds for the one task per node
    of a job with MICRO_LAUNCH set to ``node``.

    Raises:
        UserError: a variable of torchrun or SLURM is missing while others are set, is not a number, or is out of range.
    """
    if is_srun := _is_srun_task(environ):
        environ = {**_of_task(environ), **environ}  # those of a torchrun inside the task come first
    if not is_srun and not any(environ.get(name) for name in _RANK[:3]):
        return None
    if missing := [name for name in _RANK if not environ.get(name)]:
        raise UserError(
            f"{', '.join(missing)} not set, but other variables of torchrun are: start with torchrun, or unset RANK, "
            "WORLD_SIZE and LOCAL_RANK"
        )
    world_size = _number(environ, "WORLD_SIZE", lowest=1)
    return RankEnvironment(
        rank=_number(environ, "RANK", highest=world_size - 1),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", highest=world_size - 1),
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT", lowest=1, highest=0xFFFF),
    )


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether something else started this process as a rank, without a check of what it set."""
    return bool(environ.get("RANK")) or _is_srun_task(environ)


def check_shape(words: Iterable[str], ranks: RankEnvironment, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the words of a command line ask for no other workers than those that torchrun or srun started.

    Raises:
        UserError: ``cluster.nproc_per_node`` or ``cluster.nnodes`` is given and contradicts the ranks.
    """
    given = {found[1]: int(found[2]) for word in words if (found := _SHAPE.fullmatch(word))}
    here, nodes = given.get("nproc_per_node"), given.get("nnodes")
    there = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else here
    fits = here in (None, there) and ranks.world_size % ((here or 1) * (nodes or 1)) == 0
    if not fits or (here and nodes and here * nodes != ranks.world_size):
        asked = " ".join(f"cluster.{key}={value}" for key, value in given.items())
        on_node = f", {there} of them on this node" if there != here else ""
        raise UserError(
            f"{asked} was given, but torchrun or srun started {ranks.world_size} ranks{on_node}: leave it out or make "
            "them equal"
        )


def shape_of(ranks: RankEnvironment, environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return how many ranks each machine has, and how many machines: one with all where their numbers differ."""
    if "LOCAL_WORLD_SIZE" in environ:
        here = _number(environ, "LOCAL_WORLD_SIZE", lowest=1)
    else:
        num_nodes = _number(environ, "SLURM_STEP_NUM_NODES", lowest=1) if "SLURM_STEP_NUM_NODES" in environ else 1
        here = -(-ranks.world_size // num_nodes)
    return (here, ranks.world_size // here) if ranks.world_size % here == 0 else (ranks.world_size, 1)


def with_python_path(environment: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Return ``environment`` with the repository before its other import paths, whatever the working directory is."""
    paths = [str(root), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def num_cores() -> int:
    """Return the number of cores this process may use, which inside a SLURM job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_parent(parent: int | None = None) -> None:
    """Have Linux kill this process when its parent dies, even by SIGKILL; on other systems do nothing.

    SIGKILL, since a rank may hang in a collective, where Python handles no other signal, while another attempt is
    already running.

    Args:
        parent: Process id of the parent when it started this process, to detect that it died before this call; by
            default the current parent.
    """
    if sys.platform == "linux":
        expected = os.getppid() if parent is None else parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != expected:
            signal.raise_signal(signal.SIGKILL)


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: ``node01`` for ``node[01-03,7],gpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else "")


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    if environ.get(LAUNCH) == "node" or any(name not in environ for name in _TASK):
        return False
    return _number(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP and _num_tasks(environ) > 1


def _of_task(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set for a task of srun.

    All tasks of a step compute the same port; two steps of a job, or two jobs on a host, rarely get the same. A site
    whose node names do not resolve sets MASTER_ADDR itself.
    """
    key = 16 * _number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID")
    host, port = first_host(environ["SLURM_STEP_NODELIST"]), str(_FIRST_PORT + key % _NUM_PORTS)
    rank, local_rank = environ["SLURM_PROCID"], environ["SLURM_LOCALID"]
    return dict(zip(_RANK, (rank, str(_num_tasks(environ)), local_rank, host, port), strict=True))


def _num_tasks(environ: Mapping[str, str]) -> int:
    name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), None)
    return _number(environ, name) if name else 1


def _number(environ: Mapping[str, str], name: str, *, lowest: int = 0, highest: int = 10**18) -> int:
    """Return a variable's whole number. Raises: UserError: it is none, or out of range."""
    given = environ[name][:30]
    if not (given.isdecimal() and given.isascii() and lowest <= int(given) <= highest):
        raise UserError(f"environment variable {name} must be a whole number from {lowest} to {highest}, got {given!r}")
    return int(given)
