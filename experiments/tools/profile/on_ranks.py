"""Join the ranks started by torchrun or srun, and choose the devices of ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from experiments.config.errors import UserError, check_choice
from experiments.launching.rank_environment import RankEnvironment, die_with_parent, is_rank
from experiments.runs.manifest import cpu_model
from experiments.tools.ranks.measures import Row, Settings
from experiments.training.group import device_of_rank

Work = Callable[[Settings], list[Row]]  # called on every rank; rank 0's rows are used
DEVICES = ("auto", "cpu", "cuda")


def join(work: Work, settings: Settings, ranks: RankEnvironment, *, device: str) -> list[Row] | None:
    """Join the ranks started by torchrun or srun and run ``work``; only rank 0 returns rows."""
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
    """Raise UserError if ``device`` is not a choice, or needs GPUs that are missing."""
    check_choice("--device", DEVICES, device)
    if device == "cuda" and torch.cuda.device_count() < nproc and not is_rank():  # ranks compare their own counts
        raise UserError(f"--device cuda needs {nproc} GPUs here, there are {torch.cuda.device_count()}")


def device_name(device: torch.device) -> str:
    """Return a description of the device for readers of the file."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, threads per rank: {torch.get_num_threads()}"
