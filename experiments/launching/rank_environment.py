"""Read which rank this process is from the environment variables of torchrun or srun."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from experiments.config.errors import UserError
from experiments.config.ranges import LAST_PORT
from experiments.config.schema import LAUNCH

_FIRST_SPECIAL_STEP = (
    0xFFFF_FFF0  # in slurm.h the batch script, the interactive shell and others have numbers from here
)
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_MAX_DIGITS = 20  # more digits are cut off: the number is too large either way
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_REMEDY = "start with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK"
_SHAPE = re.compile(r"\+{0,2}cluster\.(nproc_per_node|nnodes)=(\d{1,9})")


@dataclass(frozen=True)
class RankEnvironment:
    """The rank of this process in a run, and where the ranks meet.

    Attributes:
        rank: In [0, world_size).
        world_size: Number of ranks of the run.
        local_rank: Number of this rank on its node.
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
        UserError: A variable of torchrun or SLURM is missing while others are set, is not a number, is out of its
            range, or contradicts another.
    """
    is_task = _is_srun_task(environ)
    if any(environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        return _from_torchrun(environ)
    if is_task:
        return _from_srun(environ)
    if environ.get("LOCAL_RANK"):
        raise UserError(f"{_given(environ)} set but RANK is not; {_REMEDY}")
    return None


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether something else started this process as a rank, without a check of what it set."""
    return bool(environ.get("RANK")) or _is_srun_task(environ)


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: ``node01`` for ``node[01-03,7],gpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else "")


def whole_number(environ: Mapping[str, str], name: str, *, lowest: int = 0, highest: int | None = None) -> int:
    """Return the value of an environment variable.

    Raises:
        UserError: It is not a whole number from ``lowest`` to ``highest``, which is None where there is no limit.
    """
    given = environ[name]
    if not given.isdecimal() or not given.isascii():
        raise UserError(f"environment variable {name} must be a whole number, got {given!r}")
    value = int(given[:_MAX_DIGITS])
    if value < lowest or (highest is not None and value > highest):
        allowed = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise UserError(f"environment variable {name} must be {allowed}, got {given[:_MAX_DIGITS]}")
    return value


def check_shape(words: Iterable[str], ranks: RankEnvironment, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the words of a command line ask for no other workers than those that torchrun or srun started.

    Raises:
        UserError: ``cluster.nproc_per_node`` or ``cluster.nnodes`` is given and contradicts the ranks.
    """
    given = {found[1]: found[2] for word in words if (found := _SHAPE.fullmatch(word))}
    here, nodes = int(given.get("nproc_per_node", 0)), int(given.get("nnodes", 0))
    started = f"torchrun or srun started {ranks.world_size} ranks"
    num_here = whole_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    if here and num_here not in (None, here):
        started += f", {num_here} of them on this node"
    fits = (not here or num_here in (None, here)) and ranks.world_size % ((here or 1) * (nodes or 1)) == 0
    if not fits or (here and nodes and here * nodes != ranks.world_size):
        asked = " ".join(f"cluster.{key}={value}" for key, value in given.items())
        raise UserError(f"{asked} was given, but {started}: leave it out or make them equal")


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    for name in _TORCHRUN:
        if not environ.get(name):
            raise UserError(f"{_given(environ)} set but {name} is not; {_REMEDY}")
    world_size = whole_number(environ, "WORLD_SIZE", lowest=1)
    num_here = world_size
    if "LOCAL_WORLD_SIZE" in environ:
        num_here = whole_number(environ, "LOCAL_WORLD_SIZE", lowest=1, highest=world_size)
    ranks = RankEnvironment(
        rank=_number_below(environ, "RANK", world_size, "WORLD_SIZE"),
        world_size=world_size,
        local_rank=_number_below(environ, "LOCAL_RANK", num_here, "the number of ranks on this node"),
        master_addr=environ["MASTER_ADDR"],
        master_port=_port(environ),
    )
    if _is_srun_task(environ) and not any(name.startswith("TORCHELASTIC_") for name in environ):
        _check_task(ranks, environ)
    return ranks


def _check_task(ranks: RankEnvironment, environ: Mapping[str, str]) -> None:
    """Check ranks that no torchrun started inside an srun task: variables may be left from elsewhere.

    Raises:
        UserError: the variables cannot belong to the tasks of this job step.
    """
    tasks, task = _num_tasks(environ), whole_number(environ, "SLURM_PROCID")
    if ranks.world_size % tasks or (ranks.world_size == tasks and ranks.rank != task):
        raise UserError(
            f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size} contradict SLURM_PROCID={task} of {tasks} tasks; "
            "unset RANK and WORLD_SIZE, which srun replaces, or make them equal"
        )


def _given(environ: Mapping[str, str]) -> str:
    names = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)] or ["LOCAL_RANK"]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _number_below(environ: Mapping[str, str], name: str, limit: int, limit_name: str) -> int:
    value = whole_number(environ, name)
    if value >= limit:
        raise UserError(f"{name} must be from 0 to {limit - 1}, got {value}: {limit_name} is {limit}; {_REMEDY}")
    return value


def _port(environ: Mapping[str, str]) -> int:
    return whole_number(environ, "MASTER_PORT", lowest=1, highest=LAST_PORT)


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
    tasks = _num_tasks(environ)
    rank = _number_below(environ, "SLURM_PROCID", tasks, "the number of tasks")
    local_rank = _number_below(environ, "SLURM_LOCALID", tasks, "the number of tasks")
    if environ.get("LOCAL_RANK") not in (None, "", str(local_rank)):
        raise UserError(f"LOCAL_RANK={environ['LOCAL_RANK']} contradicts SLURM_LOCALID={local_rank}; unset LOCAL_RANK")
    return RankEnvironment(
        rank=rank,
        world_size=tasks,
        local_rank=local_rank,
        master_addr=merged["MASTER_ADDR"],
        master_port=_port(merged),
    )
