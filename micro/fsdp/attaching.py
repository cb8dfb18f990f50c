"""The function attach_fsdp, which attaches a reducer between the replicas of a model sharded by fully_shard."""

from collections.abc import Callable, Sequence
from typing import get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from micro.comm.group import PrivateComm
from micro.drivers.loss_scale import Scaler
from micro.drivers.meeting import meeting
from micro.drivers.settings import Choice, Settings, check_one_vector
from micro.drivers.summary import StepSummary
from micro.fsdp.attachment import DenseMean, ShardedAttachment
from micro.fsdp.groups import ShardGroup, ranks_of, replica_group, shard_groups
from micro.fsdp.vectors import own
from micro.reducers.base import Reducer, prepare
from micro.reducers.scope import Scope
from micro.reducers.two_level import TwoLevel
from micro.reducers.wrapping import layers
from micro.values import flat
from micro.values.clipping import NodeClipNorm


def attach_fsdp(
    model: nn.Module,
    reducer: Reducer,
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    scope: Scope | str = "bucket",
    only: Choice | None = None,
    dense: Choice | None = None,
    start_step: int = 0,
    clip: float | None = None,
    clip_norm: NodeClipNorm | str = "node",
    timed: bool = False,
    on_step: Callable[[StepSummary], object] | None = None,
    scaler: Scaler | None = None,
) -> ShardedAttachment:
    """Average the gradients of a ``fully_shard`` model between nodes with ``reducer``; FSDP averages within nodes.

        mesh = init_device_mesh("cuda", (num_nodes, ranks_per_node), mesh_dim_names=("node", "local"))
        fully_shard(model, mesh=mesh["local"])
        micro.attach_fsdp(model, reducer, replicas=mesh["node"])

    Each node holds the whole model, a shard on each of its ranks. FSDP gathers weights and reduce-scatters gradients
    within the node as usual. At the end of backward, each rank exchanges its shard of the gradient with its replicas,
    the ranks of other nodes that hold the same shard. So the reducer's world size is the number of nodes. The update is
    the mean over nodes of FSDP's gradient, which is the mean over the node's ranks unless set_gradient_divide_factor
    changes it. Call it once on all ranks, after fully_shard and before the first backward.

    A module or parameter that no replica used in a backward gets no update, and its residual stays. If only some
    replicas used it, the others count as zero. As in DistributedDataParallel, a gradient left from an earlier backward
    is exchanged too: call zero_grad() after each step. To accumulate micro-batches, use
    ``set_requires_gradient_sync(False)``, or ``set_requires_all_reduce(False)``, which accumulates shards.

    All other arguments are those of micro.attach, without its two for the thread and the process group of the exchange:
    here the exchange runs in the thread of backward, in a new group over ``replicas``.

    Args:
        replicas: the ranks that hold the same shard as this one, as a process group or a mesh of one dimension.
        scope: the vector in which indices are selected: 'bucket', the shard of an FSDP module, 'tensor', the shard of
            each parameter, or 'model', that of the whole model.
        clip: largest norm of a node's gradient, over all shards; a larger gradient is first scaled down.
        clip_norm: 'node': each node clips by its own norm. 'global': all nodes clip by the root of the mean over nodes
            of the squared norms.

    Raises:
        ValueError: on all ranks, with nothing attached: an argument that micro.attach refuses; the model is not sharded
            by fully_shard, has no replicas or lets FSDP average them, already has a hook, is sharded over a mesh of
            several dimensions, or is offloaded to the CPU; replicas start with different weights, or ranks have
            different settings.
        PeerError: a rank did not call it.
        NonFiniteGradient: from backward(), on all ranks, if the policy is to stop, or after 100 skipped steps in a row.
            All gradients are then zero, and training can continue.
    """
    settings = Settings(
        scope=scope,
        only=only,
        dense=dense,
        start_step=start_step,
        clip=clip,
        clip_norm=clip_norm,
        timed=timed,
        on_step=on_step,
        scaler=scaler,
    )
    with meeting("micro.attach_fsdp", lambda: None) as entry:
        groups = shard_groups(model)
        chosen = replica_group(replicas, groups)
        trained = {name: p for group in groups for name, p in group.parameters().items() if p.requires_grad}
        reducer = settings.fitted(reducer, trained, get_args(NodeClipNorm))
        if any(isinstance(layer, TwoLevel) for layer in layers(reducer)):
            raise ValueError(
                "reducer two_level averages within nodes, where FSDP reduces already: give attach_fsdp the reducer in "
                "it"
            )
        _check_groups(groups, whole_model=settings.whole_model)
        entry.settings |= settings.described(reducer)
        entry.parameters = {name: shard for group in groups for name, shard in group.local().items()}
        entry.part = f"replicas {ranks_of(chosen)}"
    comm = PrivateComm(chosen, groups[0].device, timed=timed)
    prepare(reducer, comm, groups[0].device)
    return ShardedAttachment(model, groups, reducer, comm, chosen, settings)


def _check_groups(groups: Sequence[ShardGroup], *, whole_model: bool) -> None:
    """Raise ValueError if FSDP's groups cannot be reduced."""
    if any(group.hook is not None and not isinstance(group.hook, DenseMean) for group in groups):
        raise ValueError(
            "model already has an all-reduce hook, and FSDP allows only one: close the attachment, or shard again"
        )
    for group in groups:
        group.check()
        numel = sum(shard.numel() for shard in group.local().values())
        if numel > flat.MAX_NUMEL:
            raise ValueError(
                f"an FSDP module has a shard of {numel} elements, indices (int32) count {flat.MAX_NUMEL}: "
                "call fully_shard on its parts as well"
            )
    if whole_model:
        check_one_vector(own(p) for group in groups for p in group.parameters().values() if p.requires_grad)
