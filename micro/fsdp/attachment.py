"""A reducer at work between the replicas of a model that is sharded by fully_shard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micro.checkpoints.description import describe
from micro.checkpoints.saved_state import check_header, header, plain_buckets
from micro.comm import Comm
from micro.drivers.bucket_states import BucketStates
from micro.drivers.copied_attachment import CopiedAttachment
from micro.drivers.discarded_gradients import DiscardedGradients
from micro.drivers.step_readings import StepReadings
from micro.fsdp.backward_end import BackwardEnd
from micro.fsdp.exchange import Exchange, Settings
from micro.fsdp.groups import ShardGroup, call_after_backward
from micro.fsdp.step_guard import StepGuard
from micro.group_comm import GroupComm
from micro.private_comm import PrivateComm
from micro.reducers.base import Reducer
from micro.requests import AllReduce
from micro.summary import StepSummary


class ShardedAttachment(StepReadings):
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
        self._is_paused = False
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
        trained = [p for group in groups for p in group.parameters().values() if p.requires_grad]
        self._discarded = DiscardedGradients(trained)
        self._guard = StepGuard(groups)
        self._backward_end = BackwardEnd(self._end_backward)
        for group in groups:
            group.set_hook(_Hook(self, group))
        self._leave_fsdp = call_after_backward(model, self._backward_end.await_callbacks)

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
    def _stepping(self) -> Exchange:
        return self._exchange

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward exchange nothing in this context: gradients stay the node's own, residuals as they are.

        For a backward whose gradients are not used: a discriminator's while the generator is trained, one for logging.
        All ranks pause the same ones. What was not sent of such a backward would otherwise wait in the residuals
        and be added to later steps. Remove its gradients by zero_grad(): those that are not removed are part of the
        next step, and an optimizer that steps before refuses. (``set_requires_gradient_sync(False)`` is no
        replacement: what FSDP keeps by it, zero_grad() does not remove.)
        """
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one vector per FSDP module, not copied; empty where the reducer keeps none."""
        return self._states.residuals()

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept of this rank's shards, by parameter name, and the parts' states; save one per rank."""
        head = header(step=self._states.step, **self._identity())
        return {**head, "shard": self._shard, "loss_scale": self._loss_scale.value, "buckets": self._states.save()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank of as many nodes and ranks per node.

        Density, start_step, seed, nonfinite and clip may be others than before.

        Raises:
            ValueError: it is of another rank, shard, world size or method, or names parameters that the model does not
                have, or shards of another shape.
        """
        check_header(saved, **self._identity())
        if saved.get("shard", self._shard) != self._shard:
            place, count = saved["shard"]
            raise ValueError(
                f"state is of shard {place} of {count}, this rank has shard {self._shard[0]} of {self._shard[1]}: "
                "start as many nodes and ranks per node, with the same mesh"
            )
        self._states.load(plain_buckets(saved["buckets"]))
        self._loss_scale.value = saved.get("loss_scale", 1.0)

    @property
    def _shard(self) -> list[int]:
        return [self._node.rank, self._node.world_size]

    def _identity(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "scope": self._scope,
            "method": describe(self.reducer),
        }

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

    def __enter__(self) -> "ShardedAttachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[CopiedAttachment], tuple[()]]:
        return CopiedAttachment, ()

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
        self._exchange.last_step.exposed = self.comm.now(self._groups[0].device) - started
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
