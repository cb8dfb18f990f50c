"""The one communication hook that a DDP model takes, for as long as it lives."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from micro.messages import mean_async

if TYPE_CHECKING:
    from micro.ddp.attachment import Attachment


class Hook:
    """Gives DDP's buckets to what is attached to the model; where nothing is, to an all-reduce as DDP's own.

    DDP takes one hook and never gives it back, so this one stays when an attachment is closed and serves the next.

    A copy of the model has a reducer of its own without any hook: it trains as plain DDP. So a copy of this object is
    empty: the process group, the thread and the work in flight of an attachment can neither be copied nor pickled.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.attached: Attachment | None = None
        self.group = group

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


_hooks: WeakKeyDictionary[DistributedDataParallel, Hook] = WeakKeyDictionary()


def hook_of(model: DistributedDataParallel) -> Hook:
    """Return the model's hook, which is registered at the first call.

    Raises:
        ValueError: the model has a hook that is not from here.
    """
    if model not in _hooks:
        hook = Hook(model.process_group)
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
    return hook.attached.reduce(bucket) if hook.attached is not None else mean_async(bucket.buffer(), hook.group)
