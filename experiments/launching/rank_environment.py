"""Read which rank this process is from the environment variables of torchrun or srun."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.config.errors import UserError

LAUNCH = "MICRO_LAUNCH"  # "node" in a job script: each srun task starts the ranks of its node

_FIRST_SPECIAL_STEP = (
    0xFFFF_FFF0  # in slurm.h the batch script, the interactive shell and others have numbers from here
)
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000


@dataclass(frozen=True)
class RankEnvironment:
    """The rank of this process in a run, and where the ranks meet.

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


def read_rank_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Return the rank that torchrun or srun gave this process; None if this process starts the ranks itself.

    A batch script and a single srun task are not ranks: they start the ranks. The same holds for the one task per node
    of a job with MICRO_LAUNCH set to ``node``.

    Raises:
        UserError: A variable of torchrun or SLURM is missing while others are set, or is not a number.
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


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Return the value of an environment variable.

    Raises:
        UserError: It is not a whole number.
    """
    if not environ[name].isdecimal():
        raise UserError(f"environment variable {name} must be a whole number, got {environ[name]!r}")
    return int(environ[name])


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise UserError(f"RANK and WORLD_SIZE are set but {name} is not; start with torchrun, or unset RANK")
    return RankEnvironment(
        rank=whole_number(environ, "RANK"),
        world_size=whole_number(environ, "WORLD_SIZE"),
        local_rank=whole_number(environ, "LOCAL_RANK"),
        master_addr=environ["MASTER_ADDR"],
        master_port=whole_number(environ, "MASTER_PORT"),
    )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    if environ.get(LAUNCH) == "node":
        return False
    needed = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environ for name in needed):
        return False
    return whole_number(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP and _num_tasks(environ) > 1


def _num_tasks(environ: Mapping[str, str]) -> int:
    names = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
    return whole_number(environ, names[0]) if names else 1


def _from_srun(environ: Mapping[str, str]) -> RankEnvironment:
    # All tasks of a step compute the same port; two steps of a job, or two jobs on a host, rarely get the same.
    key = 16 * whole_number(environ, "SLURM_JOB_ID") + whole_number(environ, "SLURM_STEP_ID")
    defaults = {
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_FIRST_PORT + key % _NUM_PORTS),
    }
    merged = {**defaults, **environ}  # a site whose node names do not resolve sets MASTER_ADDR itself
    return RankEnvironment(
        rank=whole_number(environ, "SLURM_PROCID"),
        world_size=_num_tasks(environ),
        local_rank=whole_number(environ, "SLURM_LOCALID"),
        master_addr=merged["MASTER_ADDR"],
        master_port=whole_number(merged, "MASTER_PORT"),
    )
