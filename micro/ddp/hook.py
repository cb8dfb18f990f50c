"""DDP's communication hook, which passes buckets to the model's attachment."""

from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from micro.comm.group import count_of, mean_async


class Attached(Protocol):
    """What a hook passes buckets to."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket in place; return the future of it."""

    def close(self) -> None:
        """Leave the hook."""


class Hook:
    """Passes DDP's buckets to the model's attachment; without one, to an all-reduce like DDP's.

    DDP accepts one hook and cannot remove it, so this one stays after an attachment is closed and serves the next.

    A copy of the model has no hook and trains as plain DDP. So a copy of this object is empty: an attachment's process
    group, thread and running work can be neither copied nor pickled.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.attached: Attached | None = None
        self.group = None if model is None else model.process_group
        self._model = None if model is None else ref(model)

    def mean(self, vector: Tensor) -> torch.futures.Future[Tensor]:
        """Average ``vector`` as DDP does: over all ranks, or in some join contexts over those that have inputs."""
        model = None if self._model is None else self._model()
        num_summands = dist.get_world_size(self.group)
        if not getattr(model, "_divide_by_initial_world_size", True):
            num_summands = count_of(torch._C._current_graph_task_id() >= 0, self.group, vector.device)
        return mean_async(vector, self.group, num_summands)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


def _reduce_bucket(hook: Hook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    if hook.attached is not None:
        return hook.attached.reduce(bucket)
    return hook.mean(bucket.buffer())


_hooks: WeakKeyDictionary[DistributedDataParallel, Hook] = WeakKeyDictionary()


def hook_of(model: DistributedDataParallel) -> Hook:
    """Return the model's hook, registering it at the first call.

    Raises:
        ValueError: the model has a hook that is not from here.
    """
    if model not in _hooks:
        hook = Hook(model)
        try:
            model.register_comm_hook(hook, _reduce_bucket)
        except RuntimeError as error:  # DDP's message names neither the model nor the remedy
            raise ValueError("model already has a communication hook, and DDP takes one: wrap it again") from error
        _hooks[model] = hook
    return _hooks[model]


def attached_to(model: DistributedDataParallel) -> Attached | None:
    """Return the model's attachment, or None."""
    return _hooks[model].attached if model in _hooks else None
