"""Measure on several ranks: those that the command starts, or those that torchrun or srun started it as."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from experiments.config.errors import UserError
from experiments.launching.process_lifetime import die_with_parent
from experiments.launching.rank_environment import RankEnvironment, is_rank
from experiments.ranks.group import measuring_ranks
from experiments.ranks.measures import Row, Settings
from experiments.runs.manifest import cpu_model
from experiments.training.group import device_of_rank

Work = Callable[[Settings], list[Row]]  # what every rank calls; rank 0's rows count
DEVICES = ("auto", "cpu", "cuda")


def start(work: Work, settings: Settings, *, nproc: int, device: str) -> list[Row]:
    """Start ranks, let them work and return the rows of their rank 0.

    Args:
        work: a function of a module.
        device: auto or cuda: GPUs where each rank can have one; cpu.

    Raises:
        RankFailure: a rank failed.
    """
    with measuring_ranks(nproc, device=device) as ranks:
        rows: list[Row] = ranks.call(work, settings)[0]
    return rows


def join(work: Work, settings: Settings, ranks: RankEnvironment, *, device: str) -> list[Row] | None:
    """Be one of the ranks that torchrun or srun started; only rank 0 returns rows."""
    ranks.export()
    die_with_parent()
    store, rank, world_size = next(dist.rendezvous("env://"))
    own = device_of_rank(device, store, option="--device cuda")
    if own.type == "cuda":
        torch.cuda.set_device(own)
    backend = "nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    rows = work(settings)
    dist.destroy_process_group()
    return rows if ranks.rank == 0 else None


def check_device(device: str, nproc: int) -> None:
    """Raise UserError where ``device`` is no choice, or asks for GPUs that are not here."""
    if device not in DEVICES:
        raise UserError(f"--device must be one of {', '.join(DEVICES)}, got '{device}'")
    if device == "cuda" and torch.cuda.device_count() < nproc and not is_rank():  # ranks compare what each of them sees
        raise UserError(f"--device cuda needs {nproc} GPUs here, there are {torch.cuda.device_count()}")


def device_name(device: torch.device) -> str:
    """Return what was measured on, for people who read the file."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, threads per rank: {torch.get_num_threads()}"
