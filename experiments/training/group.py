"""Form the process group of a run, and choose each rank's device."""

import os
import socket
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from experiments.config.errors import UserError, one_line_with_type
from experiments.config.schema import TrainConfig

Group = tuple[torch.device, dist.Store | None]  # this rank's device, and the store that the ranks share
_CPU = torch.device("cpu")
_NAME_S = 60.0  # in which the host of rank 0 becomes known, where a cluster starts hosts one by one


class CannotStart(UserError):
    """A run whose ranks cannot start together; nothing is written yet."""


def start_group(config: TrainConfig) -> Group:
    """Join the process group; return this rank's device, and the store. A simulated run has neither group nor store.

    Raises:
        UserError: the ranks could not meet.
        CannotStart: as ``device_of_rank``, before the group is made.
    """
    cluster, limit = config.cluster, timedelta(seconds=config.cluster.timeout_s)
    store, rank, world_size = (None, 0, 1) if cluster.simulated else _meet(limit)
    if store:
        device = device_of_rank(cluster.device, store, option="cluster.device=cuda")
    else:
        device = _CPU if cluster.device == "cpu" else torch.device("cuda", _own_index())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store:
        backend, of_group = "nccl" if device.type == "cuda" else "gloo", dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=of_group, rank=rank, world_size=world_size, timeout=limit)
    return device, store


def leave_group() -> None:
    """Destroy the process group, whose threads could abort this process at its end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of_rank(device: str, store: dist.Store, *, option: str) -> torch.device:
    """Return this rank's GPU if each rank has one of its own, else the CPU; all ranks call this.

    A rank takes the GPU of the number LOCAL_RANK among those that it sees. Where a scheduler shows each task its own
    GPU alone, that is number 0 of each.

    Args:
        device: auto, cpu or cuda.
        option: the words of the command that chose cuda, for the error.

    Raises:
        CannotStart: ``device`` is cuda, and a rank sees no GPU, or two have the same; on all ranks alike.
    """
    rank, ranks = os.environ["RANK"], range(int(os.environ["WORLD_SIZE"]))
    has_one = device != "cpu" and torch.cuda.device_count()  # auto is cpu already on a rank that sees none
    store.set(f"gpu {rank}", str(torch.cuda.get_device_properties(_own_index()).uuid) if has_one else "")
    gpus = [gpu.decode() for gpu in store.multi_get([f"gpu {other}" for other in ranks])]
    store.set(f"knows {rank}", "")
    if rank == "0":  # it may serve the store, and end at once where no GPU can be had
        store.wait([f"knows {other}" for other in ranks])
    gpu, num_ranks = Counter(gpus).most_common(1)[0]
    if device != "cpu" and "" not in gpus and num_ranks == 1:
        return torch.device("cuda", _own_index())
    if device != "cuda":
        return _CPU
    problem = f"rank {gpus.index('')} sees none" if "" in gpus else f"{num_ranks} ranks have the same, {gpu}"
    raise CannotStart(
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


def _meet(limit: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of the ranks, which rank 0 or the launcher serves, this one's number and how many there are.

    After a restart of the ranks the agent's store still has old addresses, so that the keys have a prefix: on one node
    the number of restarts. Several nodes may count differently: there our launcher gives each start a store of its own.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    where = f"MASTER_ADDR={address} MASTER_PORT={port}"
    _wait_for_name(address, where, min(limit.total_seconds(), _NAME_S))
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    except (dist.DistError, ValueError) as error:
        raise UserError(_not_met(where, error, limit.total_seconds())) from None
    is_alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_alone else ""
    return dist.PrefixStore(f"attempt {attempt}", store), rank, world_size


def _wait_for_name(host: str, where: str, limit_s: float) -> None:
    """Return once a host is known: it may be one that a cluster is about to start. Raises: UserError: it is not."""
    end = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                reason = (getattr(error, "strerror", None) or str(error)).lower()
                raise UserError(
                    f"the ranks could not meet at {where}: the host is not known here ({reason}); name a host or its "
                    "address"
                ) from None
        time.sleep(min(1.0, limit_s / 10))


def _not_met(where: str, error: Exception, limit_s: float) -> str:
    """Return in words why the ranks did not meet."""
    reason = one_line_with_type(error)[:200]
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        why = "the port is in use; name a free one"
    elif isinstance(error, dist.DistStoreError | dist.DistNetworkError) and os.environ.get("RANK") == "0":
        why = f"not all ranks joined within {limit_s:.0f} s; start the others"
    else:
        why = f"rank 0 did not answer within {limit_s:.0f} s; start it there, and let this port through"
    return f"the ranks could not meet at {where}: {why} ({reason})"


def _own_index() -> int:
    return int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count())
