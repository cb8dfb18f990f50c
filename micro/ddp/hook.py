"""The one communication hook that a DDP model takes, for as long as it lives."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from micro.comm.group import count_of, mean_async

if TYPE_CHECKING:
    from micro.ddp.attachment import Attachment


class Hook:
    """Gives DDP's buckets to what is attached to the model; where nothing is, to an all-reduce as DDP's own.

    DDP takes one hook and never gives it back, so this one stays when an attachment is closed and serves the next.

    A copy of the model has a reducer of its own without any hook: it trains as plain DDP. So a copy of this object is
    empty: the process group, the thread and the work in flight of an attachment can neither be copied nor pickled.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.attached: Attachment | None = None
        self.group = None if model is None else model.process_group
        self._model = None if model is None else ref(model)

    def num_summands(self, device: torch.device) -> int:
        """Return of how many ranks DDP takes the mean: of those that have inputs in a join context that says so."""
        model = None if self._model is None else self._model()
        if getattr(model, "_divide_by_initial_world_size", True):
            return dist.get_world_size(self.group)
        return count_of(torch._C._current_graph_task_id() >= 0, self.group, device)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


_hooks: WeakKeyDictionary[DistributedDataParallel, Hook] = WeakKeyDictionary()


def hook_of(model: DistributedDataParallel) -> Hook:
    """Return the model's hook, which is registered at the first call.

    Raises:
        ValueError: the model has a hook that is not from here.
    """
    if model not in _hooks:
        hook = Hook(model)
        try:
            model.register_comm_hook(hook, _micro_hook)
        except RuntimeError as error:  # DDP's own words name neither the model nor the remedy
            raise ValueError("model already has a communication hook, and DDP takes one: wrap it again") from error
        _hooks[model] = hook
    return _hooks[model]


def attached_to(model: DistributedDataParallel) -> "Attachment | None":
    """Return what is attached to the model, if anything is."""
    return _hooks[model].attached if model in _hooks else None


def _micro_hook(hook: Hook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if hook.attached is not None:
        return hook.attached.reduce(bucket)
    return mean_async(bucket.buffer(), hook.group, hook.num_summands(bucket.buffer().device))
