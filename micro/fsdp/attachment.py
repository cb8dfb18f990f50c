"""A reducer at work between the replicas of a model that is sharded by fully_shard."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micro.checkpoints.saved_state import check_header
from micro.comm import Comm
from micro.drivers.attachment import BaseAttachment
from micro.drivers.bucket_states import BucketStates
from micro.drivers.discarded_gradients import DiscardedGradients
from micro.fsdp.backward_end import BackwardEnd
from micro.fsdp.exchange import Exchange, Settings
from micro.fsdp.groups import ShardGroup, call_after_backward
from micro.fsdp.step_guard import StepGuard
from micro.group_comm import GroupComm
from micro.private_comm import PrivateComm
from micro.reducers.base import Reducer
from micro.requests import AllReduce
from micro.summary import StepSummary


class ShardedAttachment(BaseAttachment):
    """A reducer at work between the replicas of a sharded model. Build it with ``attach_fsdp``; a context manager.

    FSDP's hook only says which modules a backward has used. When FSDP has ended the backward, the replicas exchange the
    gradients of all of them, and the ranks of each node decide together whether the step counts.

    Where the reducer raises on one rank, that rank gives up the replicas' process group: its backward raises the error
    as it is, and the backward of every other rank raises too, within seconds on gloo. All gradients are zero then, and
    the attachment can only be closed.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[ShardGroup],
        reducer: Reducer,
        comm: PrivateComm,
        replicas: dist.ProcessGroup,
        *,
        settings: Settings,
        on_step: Callable[[StepSummary], object] | None,
    ) -> None:
        self.reducer = reducer
        self.comm = comm
        self._groups = groups
        self._replicas = replicas
        self._scope = "model shard" if settings.whole_model else "shard"
        self._on_step = on_step
        self._has_begun = False
        node = groups[0].process_group
        is_shared = node is not None and dist.get_world_size(node) > 1
        self._node = GroupComm(node, timed=False) if is_shared else Comm(timed=False)
        self._states = BucketStates(
            reducer, {name: shard for group in groups for name, shard in group.shards().items()}
        )
        self._loss_scale = settings.loss_scale()
        self._exchange = Exchange(
            groups, reducer, self._states, comm=comm, node=self._node, loss_scale=self._loss_scale, settings=settings
        )
        self.steps = self._exchange.steps
        trained = [p for group in groups for p in group.parameters().values() if p.requires_grad]
        self._discarded = DiscardedGradients(trained)
        self._guard = StepGuard(groups)
        self._backward_end = BackwardEnd(self._end_backward)
        for group in groups:
            group.set_hook(_Hook(self, group))
        self._leave_fsdp = call_after_backward(model, self._backward_end.wait_for_callbacks)

    @property
    def rank(self) -> int:
        """This rank among those of all nodes."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return self.comm.world_size * self._node.world_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks: the default one."""
        return None

    @property
    def _clipped(self) -> Exchange:
        return self._exchange

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept of this rank's shards; see BaseAttachment."""
        return {**super().state_dict(), "shard": self._shard}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank of as many nodes and ranks per node.

        Raises:
            ValueError: it is of another shard; see BaseAttachment.
        """
        check_header(saved, **self._identity())
        if saved.get("shard", self._shard) != self._shard:
            place, count = saved["shard"]
            raise ValueError(
                f"state is of shard {place} of {count}, this rank has shard {self._shard[0]} of {self._shard[1]}: "
                "start as many nodes and ranks per node, with the same mesh"
            )
        super().load_state_dict(saved)

    @property
    def _shard(self) -> list[int]:
        return [self._node.rank, self._node.world_size]

    def close(self) -> None:
        """Give the model back. From now on gradients are averaged densely over the replicas, as FSDP's own would be.

        Gradients that wait, of a paused backward, are removed. Statistics and state can still be read, and the model
        can be attached to again. All ranks close at the same step, between two steps. It may be called again.
        """
        for group in self._groups:
            if isinstance(group.hook, _Hook) and group.hook.attachment is self:
                group.set_hook(DenseMean(self._replicas))
                group.drop_waiting()
        self._leave_fsdp()
        self._guard.close()
        self._discarded.close()
        self.comm.close()

    def note(self, group: ShardGroup, dtype: torch.dtype) -> None:
        """Note that backward reached a group: FSDP has reduced its gradients in ``dtype`` and is about to keep them."""
        if torch._C._current_graph_task_id() < 0:
            raise ValueError("gradients must be reduced inside backward(): leave out set_manual_backward_finalization")
        group.check()
        if not self._has_begun:
            self._has_begun = True
            self._discarded.look()
        group.waiting_dtype = dtype

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Exchange the gradients, unless they are to wait, and raise what went wrong."""
        self._has_begun = False
        if self._is_paused or not any(group.is_exchanged for group in self._groups):
            return
        started = self.comm.now(self._groups[0].device)
        error = self._exchange.run()
        self.steps.exposed = self.comm.now(self._groups[0].device) - started
        if error is None:
            self._report()
            return
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, which would hold it

    def _report(self) -> None:
        self._discarded.end_backward(is_applied=not self.skipped)
        if self._on_step is not None and self.stats:
            self._on_step(self.summary)


class _Hook:
    """What FSDP calls with the shard of one module."""

    def __init__(self, attachment: ShardedAttachment, group: ShardGroup) -> None:
        self.attachment, self._group = attachment, group

    def __call__(self, grad: Tensor) -> None:
        self.attachment.note(self._group, grad.dtype)


class DenseMean:
    """The dense mean over the replicas: what is left when an attachment is closed."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._comm = GroupComm(replicas, timed=False)

    def __call__(self, grad: Tensor) -> None:
        """Replace ``grad`` (numel,) by its mean."""
        self._comm.answer(AllReduce(mine=grad)).div_(self._comm.world_size)
