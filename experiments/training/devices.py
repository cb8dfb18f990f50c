"""Choose the device on which a process of a run computes."""

import os
from collections import Counter

import torch
import torch.distributed as dist

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig

_CPU = torch.device("cpu")


class NoOwnGpu(UserError):
    """A rank of a run on GPUs has no GPU of its own."""


def choose_device(config: TrainConfig, store: dist.Store | None = None) -> torch.device:
    """Return this process's device: a GPU of its own, or the CPU.

    Args:
        store: of the ranks, where this process is one of several; None for a simulated run.

    Raises:
        NoOwnGpu: as ``device_of_rank``.
    """
    cluster = config.cluster
    if store is not None and not cluster.simulated:
        return device_of_rank(cluster.device, store, option="cluster.device=cuda")
    return _CPU if cluster.device == "cpu" else torch.device("cuda", _own_index())


def device_of_rank(device: str, store: dist.Store, *, option: str) -> torch.device:
    """Return this rank's GPU if each rank has one of its own, else the CPU; all ranks call this.

    A rank takes the GPU of the number LOCAL_RANK among those that it sees. Where a scheduler shows each task its own
    GPU alone, that is number 0 of each.

    Args:
        device: auto, cpu or cuda.
        option: the words of the command that chose cuda, for the error.

    Raises:
        NoOwnGpu: ``device`` is cuda, and a rank sees no GPU, or two have the same; on all ranks alike.
    """
    gpus = _gpus_of_ranks(store, is_used=device != "cpu")  # auto is cpu already on a rank that sees no GPU
    if device == "cpu":
        return _CPU
    problem = _problem(gpus)
    if not problem:
        return torch.device("cuda", _own_index())
    if device == "auto":
        return _CPU
    raise NoOwnGpu(
        f"{option} needs a GPU for each rank, {problem}: start as many ranks on a host as it has GPUs, "
        "or have the scheduler give each its own (srun --gpus-per-task=1)"
    )


def note_of_idle_gpus(config: TrainConfig) -> str:
    """Return a line for the user where the workers train on the CPU although there are GPUs, empty elsewhere."""
    count = torch.cuda.device_count()
    if not count or config.cluster.device != "cpu":
        return ""
    return (
        f"note: the workers train on the CPU, and there are GPUs ({count} here): cluster.device=auto takes them where "
        "each worker can have one of its own"
    )


def _gpus_of_ranks(store: dist.Store, *, is_used: bool) -> list[str]:
    """Return an id of each rank's GPU, empty where a rank sees none or uses none.

    A rank that uses none, since it sees none, does not wait for the others.
    """
    rank, ranks = os.environ["RANK"], range(int(os.environ["WORLD_SIZE"]))
    has_one = is_used and torch.cuda.device_count()
    store.set(f"gpu {rank}", str(torch.cuda.get_device_properties(_own_index()).uuid) if has_one else "")
    found = store.multi_get([f"gpu {other}" for other in ranks]) if is_used else []
    store.set(f"knows {rank}", "")
    if is_used and rank == "0":  # it may serve the store, and end at once where no GPU can be had
        store.wait([f"knows {other}" for other in ranks])
    return [gpu.decode() for gpu in found]


def _problem(gpus: list[str]) -> str:
    gpu, num_ranks = Counter(gpus).most_common(1)[0]
    if "" in gpus:
        return f"rank {gpus.index('')} sees none"
    return f"{num_ranks} ranks have the same, {gpu}" if num_ranks > 1 else ""


def _own_index() -> int:
    return int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count())
