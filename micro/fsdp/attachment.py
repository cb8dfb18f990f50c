"""The attachment of a reducer to a model sharded by fully_shard."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micro.comm.group import GroupComm, PrivateComm
from micro.comm.objects import gather_objects
from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.drivers.attachment import BaseAttachment
from micro.drivers.settings import Settings
from micro.drivers.wrappers import plain_parameters
from micro.fsdp.backward_end import BackwardEnd
from micro.fsdp.exchange import Exchange
from micro.fsdp.groups import ShardGroup, call_after_backward
from micro.fsdp.step_guard import StepGuard
from micro.reducers.base import Reducer
from micro.values.clipping import clip_
from micro.values.nonfinite import Finding, NonFiniteGradient, error_at


class ShardedAttachment(BaseAttachment):
    """Averages gradients between the replicas of a sharded model. Build it with ``attach_fsdp``; a context manager.

    FSDP's hook only records which modules a backward used. When FSDP has finished the backward, the replicas exchange
    the gradients of these modules, and the ranks of each node decide together whether the step counts.

    If the reducer raises on one rank, that rank aborts the replicas' process group: its backward raises the error, and
    the backward of every other rank raises too, on gloo within seconds. All gradients are then zero, and the attachment
    can only be closed.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[ShardGroup],
        reducer: Reducer,
        comm: PrivateComm,
        replicas: dist.ProcessGroup,
        settings: Settings,
    ) -> None:
        self._groups, self._replicas, self._model = groups, replicas, ref(model)
        self._scope = "model shard" if settings.whole_model else "shard"
        self._has_begun = False
        shared = groups[0].process_group
        has_peers = shared is not None and dist.get_world_size(shared) > 1
        self._node = node = GroupComm(shared) if has_peers else Comm()
        among, device = comm if settings.clip_norm == "global" else None, groups[0].device

        def clip(vectors: Sequence[Tensor], limit: float) -> Reduction[None]:
            return clip_(vectors, limit, within=node, among=among, device=device)

        kept = {name: shard for group in groups for name, shard in group.shards().items()}
        trained = {name: p for group in groups for name, p in group.parameters().items() if p.requires_grad}
        self._start(reducer, comm, settings, kept=kept, reduced=trained, compares=False, clip_=clip)
        self._exchange = Exchange(groups, self.steps, node)
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards; see BaseAttachment."""
        return {**super().state_dict(), "shard": self._shard}

    def check_state(self, saved: Any) -> None:
        """Raise ValueError if ``saved`` is of another shard or does not fit; see Driver."""
        super().check_state(saved)
        if saved.get("shard", self._shard) != self._shard:
            place, count = saved["shard"]
            raise ValueError(
                f"state is of shard {place} of {count}, this rank has shard {self._shard[0]} of {self._shard[1]}: "
                "start as many nodes and ranks per node, with the same mesh"
            )

    @property
    def _shard(self) -> list[int]:
        return [self._node.rank, self._node.world_size]

    def close(self) -> None:
        """Detach from the model. From now on gradients are averaged densely over the replicas, as FSDP would.

        Waiting gradients of a paused backward are removed. Statistics and state can still be read, and the model can be
        attached again. All ranks must close between the same two steps. Closing twice is allowed.
        """
        for group in self._groups:
            if isinstance(group.hook, _Hook) and group.hook.attachment is self:
                group.set_hook(DenseMean(self._replicas))
                group.drop_waiting()
        self._leave_fsdp()
        self._guard.stop_listening()
        self._stop_watching()
        self.comm.close()

    def note(self, group: ShardGroup, dtype: torch.dtype) -> None:
        """Record that backward reached a group, whose gradients FSDP has reduced in ``dtype``."""
        if torch._C._current_graph_task_id() < 0:
            raise ValueError("gradients must be reduced inside backward(): leave out set_manual_backward_finalization")
        group.check()
        if not self._has_begun:
            self._has_begun = True
            self._watch.look_at_shards()
        group.waiting_dtype = dtype

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Exchange the gradients, unless the backward is paused, and raise any error."""
        self._has_begun = False
        if self._is_paused or not any(group.is_exchanged for group in self._groups):
            return
        started = self._now()
        with torch.autocast(self._device.type, enabled=False):  # backward may run under autocast
            self._exchange.run()
        self.steps.end_backward(self._now() - started, self._watch, self._on_step)

    def averages(self, parameter: Tensor) -> bool:
        """Return whether an FSDP module holds ``parameter``."""
        return any(parameter is each for group in self._groups for each in group.parameters().values())

    def present_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the model as it is now, by name."""
        model = self._model()
        return {} if model is None else plain_parameters(model)

    def _error_of(self, findings: Sequence[Finding]) -> NonFiniteGradient:
        """Return an error with the non-finite parameters of all nodes and shards, equal on all ranks."""
        gradients = [f.layout.name_at(f.in_gradient) for f in findings if f.in_gradient is not None]
        means = [f.layout.name_at(f.in_update) for f in findings if f.in_update is not None]
        places = [f"'{name}' on node {self.comm.rank}" for name in gradients] or [f"'{n}' in the mean" for n in means]
        own = (self._states.step - 1, places[:1])
        in_node = gather_objects(own, self._node.group) if isinstance(self._node, GroupComm) else [own]
        found: Any = [each for node in gather_objects(in_node, self.comm.group) for each in node]  # type: ignore[attr-defined]
        named = list(dict.fromkeys(place for _, places in found for place in places))
        return error_at(named, max(step for step, _ in found))


class _Hook:
    """The all-reduce hook that FSDP calls with a module's shard."""

    def __init__(self, attachment: ShardedAttachment, group: ShardGroup) -> None:
        self.attachment, self._group = attachment, group

    def __call__(self, grad: Tensor) -> None:
        self.attachment.note(self._group, grad.dtype)


class DenseMean:
    """The hook of a closed attachment: the dense mean over the replicas."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._comm = GroupComm(replicas)

    def __call__(self, grad: Tensor) -> None:
        """Replace ``grad`` (numel,) by its mean."""
        self._comm.answer(AllReduce(mine=grad)).div_(self._comm.world_size)
