"""Create a process group with the ranks and backend of another one, and destroy it."""

import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAMES_ARE_COUNTED = "2.14"  # the torch in which the name of a group follows from the number of those made so far

abandoned: list[dist.ProcessGroup] = []
"""The groups of those that were never closed, and that nothing refers to any more."""


def destroy_abandoned() -> None:
    """Destroy groups on gloo that nobody can close any more: when the next one is made, in the thread of the user.

    A garbage collector runs at another time on each rank and in any thread, where nothing should be destroyed. On NCCL
    ranks destroy groups in one order, which is not known here. Before torch 2.14 the names of groups of some ranks
    follow from the number of groups that there are, which must be the same on all ranks.
    """
    if torch.__version__ < NAMES_ARE_COUNTED:
        return
    for group in [group for group in abandoned if group.name() == "gloo"]:
        abandoned.remove(group)
        destroy(group)


def abort(group: dist.ProcessGroup) -> None:
    """Abort a group and destroy it: NCCL's kernels end, gloo's sockets are closed when nothing refers to it."""
    with suppress(RuntimeError):  # a backend that has no abort
        group.abort()
    destroy(group)


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group, unless that was done."""
    with suppress(ValueError):  # destroyed already, with the default group
        dist.destroy_process_group(group)


def new_group_like(group: dist.ProcessGroup, device: torch.device, ranks: list[int]) -> dist.ProcessGroup:
    """Return a new group of these ranks, with the backend, the timeout and the options that ``group`` has there."""
    names = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    backend = group._get_backend(device)
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # wrapped where torch debugs
    is_part = len(ranks) < dist.get_world_size()
    with ExitStack() as around:
        if is_part:
            around.enter_context(_own_name())
            around.enter_context(_without_split())
        created = dist.new_group(
            ranks,
            timeout=getattr(options, "_timeout", None),
            backend=names[device.type],
            pg_options=_copied(options) if names[device.type] == "nccl" else None,
            use_local_synchronization=is_part,
            device_id=device if is_part and device.type == "cuda" else None,
        )
    assert isinstance(created, dist.ProcessGroup)
    return created


_num_made = weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]]()
"""Groups made so far over some of the ranks, by these ranks, since the default group was made."""


@contextmanager
def _own_name() -> Iterator[None]:
    """Give a group of some ranks a name that they alone count.

    Torch counts groups for the names of later ones, which have to be the same on all ranks: one that some ranks make
    must not be counted, or all ranks wait for ever in the next group of all. Before torch 2.14 a name follows from the
    number of groups that there are: once a group is destroyed its name is used again, and ranks find the old group's
    addresses under it.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _num_made.setdefault(world, Counter())

    def name(ranks: Sequence[int]) -> str:
        made[tuple(ranks)] += 1
        return f"micro_{'_'.join(map(str, ranks))}_made_{made[tuple(ranks)]}"

    before, count = c10d._hash_ranks_to_str, c10d._world.group_count
    c10d._hash_ranks_to_str = name  # torch has no argument for it
    try:
        yield
    finally:
        c10d._hash_ranks_to_str, c10d._world.group_count = before, count


@contextmanager
def _without_split() -> Iterator[None]:
    """Let NCCL make a group of some ranks from nothing: these alone call it.

    Where the default group is bound to a device, torch would split its communicator, for which NCCL waits until all
    ranks of the world have called.
    """
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _copied(options: object) -> object:
    """Return new options of NCCL with these settings; torch writes the name and the ranks of a group into its own."""
    copied = type(options)()
    for name in ("is_high_priority_stream", "config", "_timeout"):
        setattr(copied, name, getattr(options, name))
    return copied


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of an error's frames: they refer to the group. The lines of the traceback stay."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
