"""A reducer at work between the replicas of a model that is sharded by fully_shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from micro.bucket_states import BucketStates
from micro.checks import check_reducer
from micro.comm import GroupComm, gather_objects
from micro.description import describe
from micro.fsdp.groups import ShardGroup, shard_groups
from micro.fsdp.replicas import check_alike, replica_group
from micro.nonfinite import REMEDY, Finding, NonFiniteGradient
from micro.private_comm import PrivateComm
from micro.reducers.attempt import Attempt
from micro.reducers.base import Reducer, prepare
from micro.saved_state import check_header, header, plain_buckets
from micro.scope import scoped
from micro.stats import StepStats


def attach_fsdp(
    model: nn.Module,
    reducer: Reducer,
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    scope: str = "bucket",
    timed: bool = False,
) -> "ShardedAttachment":
    """Let ``reducer`` average the gradients of a model of ``fully_shard`` between nodes; FSDP does it within them.

        mesh = init_device_mesh("cuda", (num_nodes, ranks_per_node), mesh_dim_names=("node", "local"))
        fully_shard(model, mesh=mesh["local"])
        micro.attach_fsdp(model, reducer, replicas=mesh["node"])

    Each node holds the whole model, a shard on each of its ranks. FSDP gathers weights and reduce-scatters gradients
    within the node; then each rank exchanges its shard of the gradient with the ranks of other nodes that hold the same
    one. So a reducer's world size is the number of nodes, the vector in which it selects is the shard of one FSDP
    module, and the update is the mean over nodes of the means within them, also with ``set_gradient_divide_factor``.
    Call it once on all ranks, after fully_shard and before the first backward. Every replica uses the same modules in
    each backward, as with FSDP's own replicas. Micro-batches whose gradients wait need
    ``set_requires_gradient_sync(False)``.

    Args:
        replicas: the ranks that hold the same shard as this one, as a process group or a mesh of one dimension.
        scope: the vector in which indices are selected: 'bucket', the shard of an FSDP module, or 'tensor', the shard
            of each parameter.
        timed: as in micro.attach.

    Raises:
        ValueError: on all ranks, with nothing left behind: the model is not one of fully_shard, has no replicas or such
            as FSDP averages by itself, has a hook already; replicas start with different weights, or have different
            reducers.
        NonFiniteGradient: out of backward(), on all ranks, if the policy is to stop. The gradients of this backward are
            zero then and the model can be trained on.
    """
    if scope == "model":
        raise ValueError(
            "scope=model needs the whole gradient at once, FSDP reduces one module at a time: use scope=bucket"
        )
    reducer = scoped(check_reducer(reducer), scope)
    groups = shard_groups(model)
    reducer.check_parameters({name: tuple(p.shape) for group in groups for name, p in group.parameters().items()})
    if any(group.hook is not None and not isinstance(group.hook, _DenseMean) for group in groups):
        raise ValueError(
            "model already has an all-reduce hook, and FSDP takes one: close the attachment, or shard again"
        )
    chosen = replica_group(replicas, groups)
    comm = PrivateComm(chosen, groups[0].device, timed=timed)
    try:
        check_alike(groups, reducer, comm, chosen)
    except ValueError:
        comm.close()
        raise
    prepare(reducer, comm, groups[0].device)
    return ShardedAttachment(groups, reducer, comm, chosen)


@dataclass(frozen=True, slots=True)
class _Reduced:
    """One group's part of a backward: what came of it, and the gradients that its parameters had before."""

    group: ShardGroup
    attempt: Attempt
    before: Mapping[nn.Parameter, Tensor]


class ShardedAttachment:
    """A reducer at work between the replicas of a sharded model. Build it with ``attach_fsdp``.

    FSDP calls the hook after each reduce-scatter, in the same order on all ranks, on the thread that runs backward;
    there the shard is reduced at once. Whether the step counts is decided at the end of backward, by all ranks of a
    node together: one shard that is not finite takes back those of all modules.
    """

    def __init__(
        self, groups: list[ShardGroup], reducer: Reducer, comm: PrivateComm, replicas: dist.ProcessGroup
    ) -> None:
        self.reducer = reducer
        self.comm = comm
        self._groups = groups
        self._replicas = replicas
        self._node = groups[0].process_group
        self._states = BucketStates(
            reducer, {name: shard for group in groups for name, shard in group.shards().items()}
        )
        self._backward: int | None = None
        self._reduced: list[_Reduced] = []
        self._stats: tuple[StepStats, ...] = ()
        for group in groups:
            group.set_hook(_Hook(self, group))

    @property
    def rank(self) -> int:
        """This rank among those of all nodes."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return self.comm.world_size * (1 if self._node is None else dist.get_world_size(self._node))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks: the default one."""
        return None

    @property
    def stats(self) -> tuple[StepStats, ...]:
        """The statistics of the last step, one per FSDP module, of this rank's shards, in the order of backward."""
        return self._stats

    @property
    def skipped(self) -> bool:
        """Whether the last step was not finite, so that the update of all shards is zero; the same on all ranks."""
        return any(stats.skipped for stats in self._stats)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one vector per FSDP module, not copied; empty where the reducer keeps none."""
        return self._states.residuals()

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept of this rank's shards, by parameter name, and the parts' states; save one per rank."""
        return {**header(step=self._states.step, **self._identity()), "buckets": self._states.save()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank.

        Raises:
            ValueError: it is of another rank, world size or method, or names parameters that the model does not have,
                or shards of another shape.
        """
        check_header(saved, **self._identity())
        self._states.load(plain_buckets(saved["buckets"]))

    def _identity(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "scope": "shard",
            "method": describe(self.reducer),
        }

    def close(self) -> None:
        """Give the model back. From now on gradients are averaged densely over the replicas, as FSDP's own would be.

        Statistics and state can still be read, and the model can be attached to again. All ranks close at the same
        step, between two steps. It may be called again.
        """
        for group in self._groups:
            if isinstance(group.hook, _Hook) and group.hook.attachment is self:
                group.set_hook(_DenseMean(self._replicas))
        self.comm.close()

    def __enter__(self) -> "ShardedAttachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reduce(self, group: ShardGroup, grad: Tensor) -> None:
        """Replace one module's shard of the gradient (numel,), the node's mean, by the mean update over replicas."""
        self._begin_backward()
        if not group.reduces_all:
            raise ValueError(
                "set_requires_all_reduce(False) leaves gradients of one node alone: for micro-batches whose gradients "
                "wait use set_requires_gradient_sync(False)"
            )
        layout = group.layout(grad)
        state = self._states.of(layout, grad.dtype, grad.device)
        before = {parameter: local.clone() for parameter, local in group.gradients() if local is not None}
        self.comm.begin_step()
        self._reduced.append(_Reduced(group, self.reducer.attempt_(state, grad, self.comm), before))

    def _begin_backward(self) -> None:
        """At the first shard of a backward, forget one that broke off, and have ``_end_backward`` called after it."""
        current = torch._C._current_graph_task_id()
        if current < 0:
            raise ValueError("gradients must be reduced inside backward(): leave out set_manual_backward_finalization")
        if current != self._backward:
            self._backward = current
            self._reduced.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # behind FSDP's own

    def _end_backward(self) -> None:
        """Let the step count, or take it back on all ranks."""
        reduced, self._reduced = self._reduced, []
        self._backward = None
        findings = [finding for each in reduced for finding in each.attempt.findings]
        if not self._any_in_node(bool(findings), reduced[0].attempt.grad.device):
            self._stats = tuple(each.attempt.stats for each in reduced)
            return
        self._stats = tuple(each.attempt.take_back() for each in reduced)
        for each in reduced:
            for parameter, local in each.group.gradients():
                if local is not None:
                    before = each.before.get(parameter)
                    local.zero_() if before is None else local.copy_(before)
        if self.reducer.policy == "stop":
            raise self._error(findings)

    def _any_in_node(self, is_bad: bool, device: torch.device) -> bool:
        """Return whether any rank of this node has a bad shard; those of other nodes know of the same shards."""
        if self._node is None or dist.get_world_size(self._node) == 1:
            return is_bad
        flag = torch.tensor([is_bad], dtype=torch.int32, device=device)
        return bool(GroupComm(self._node, timed=False).all_reduce_(flag, "counts").item())  # host sync: acted on here

    def _error(self, findings: Sequence[Finding]) -> NonFiniteGradient:
        """Return the error that names the bad parameters of all nodes and shards, the same on all ranks."""
        gradients = [f.layout.name_at(f.in_gradient) for f in findings if f.in_gradient is not None]
        means = [f.layout.name_at(f.in_update) for f in findings if f.in_update is not None]
        mine = [f"'{name}' on node {self.comm.rank}" for name in gradients] or [
            f"'{name}' in the mean" for name in means
        ]
        in_node = gather_objects(mine[:1], self._node)
        found = [place for node in gather_objects(in_node, self.comm.group) for places in node for place in places]  # type: ignore[attr-defined]
        return NonFiniteGradient(
            f"gradient of {', '.join(dict.fromkeys(found))} is not finite at step {self._stats[0].step}; nothing of it "
            f"was kept. {REMEDY}"
        )


class _Hook:
    """What FSDP calls with the shard of one module."""

    def __init__(self, attachment: ShardedAttachment, group: ShardGroup) -> None:
        self.attachment, self._group = attachment, group

    def __call__(self, grad: Tensor) -> None:
        self.attachment.reduce(self._group, grad)


class _DenseMean:
    """The dense mean over the replicas: what is left when an attachment is closed."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._comm = GroupComm(replicas, timed=False)

    def __call__(self, grad: Tensor) -> None:
        self._comm.all_reduce_(grad).div_(self._comm.world_size)
