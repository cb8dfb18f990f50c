"""The reduce-scatter of fully_shard itself, compressed: what a rank sends of its gradient to the owners of shards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micro.comm.group import GroupComm
from micro.comm.objects import gather_objects
from micro.comm.requests import AllReduce, carried_out
from micro.drivers.attachment import Driver
from micro.drivers.meeting import meeting
from micro.fsdp.backward_end import BackwardEnd
from micro.fsdp.groups import ShardGroup, call_after_backward, check_one_mesh, ranks_of, shard_groups
from micro.reducers.base import BucketState, Reducer, saved_layout
from micro.reducers.rounding import write_
from micro.reducers.scattered import check_scatters, reduce_to_shards
from micro.reducers.sparse import SparseReducer
from micro.reducers.stats import StepStats
from micro.values.flat import Layout
from micro.values.nonfinite import SkippedSteps, error_at

UNUSED = "reduce_scatter_unused_params"  # FSDP's: parameters without a gradient count as zero


def attach_within(model: nn.Module, reducer: Reducer) -> "WithinAttachment":
    """Compress the reduce-scatter of a model of ``fully_shard``; every rank keeps a residual of its whole gradient.

        fully_shard(model, mesh=mesh)
        micro.fsdp.attach_within(model, micro.SparseReducer(micro.Micro(), density=0.05))

    Each module's gradient is reduced when its backward ends, as by FSDP alone. It is one vector: the ranks' shards one
    after the other, each with a piece of every parameter. What a rank does not send stays in its residual, which is as
    large as the unsharded gradient, in single precision at least. Call it once on all ranks, before the first backward.

    Micro-batches wait with ``set_requires_gradient_sync(False)``. Parameters of a module that a backward did not use
    count as zero. float16 is refused: its scaler would change the units of the residuals.

    A gradient that is not finite makes the step zero for all modules, and what they had sent goes back into the
    residuals.

    Args:
        reducer: a `SparseReducer` with the exchange `Union` or `Gather`: `TopK`, `Micro`, `Threshold`, `RandomK`,
            `Estimated`, or `Everything` with a codec such as int8 or sign.

    Raises:
        ValueError: on all ranks: torch lacks ``FSDPModule.set_custom_reduce_scatter``, a model that is not one of
            fully_shard, is sharded over one rank or over a mesh of several dimensions, or has another reducer, parts
            that follow the whole update, or ranks have different settings.
        NonFiniteGradient: out of backward(), on all ranks, where the policy is to stop.
    """
    with meeting("micro.fsdp.attach_within", lambda: None) as entry:
        groups = shard_groups(model)
        sparse = check_scatters(reducer)
        _check_groups(groups)
        entry.settings |= {"reducer": reducer}
    return WithinAttachment(model, groups, sparse)


def _check_groups(groups: Sequence[ShardGroup]) -> None:
    """Raise ValueError where the reduce-scatter of FSDP's groups cannot be compressed."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    for group in groups:
        if not all(hasattr(group.module, f"set_{name}") for name in ("custom_reduce_scatter", UNUSED)):
            raise ValueError(f"torch {torch.__version__} has no reduce-scatter of FSDP's to set: use 2.15")
        if group.hook is not None or not isinstance(group.param_group._reduce_scatter_comm, DefaultReduceScatter):
            raise ValueError("model has a reducer or another reduce-scatter already: close that attachment first")
    check_one_mesh(groups, "attach_within")
    if len(ranks_of(groups[0].process_group)) == 1:
        raise ValueError("model is sharded over one rank: there is no reduce-scatter to compress")


class WithinAttachment(Driver):
    """A reducer in the reduce-scatter of a sharded model. Build it with ``attach_within``; a context manager.

    Attributes:
        stats: of the last backward, one per module, in the order in which they were reduced.
        skipped: whether the last step was not finite, so that the whole update is zero; the same on all ranks.
    """

    comm: GroupComm
    reducer: SparseReducer

    def __init__(self, model: nn.Module, groups: Sequence[ShardGroup], reducer: SparseReducer) -> None:
        self.reducer, self._scope = reducer, "shard of FSDP"
        self.comm = GroupComm(groups[0].process_group)
        reducer.prepare(self.comm, groups[0].device)
        self.stats: list[StepStats] = []
        self.skipped, self._skipped_steps = False, SkippedSteps()
        trained = [group for group in groups if any(p.requires_grad for p in group.parameters().values())]
        self._modules = [_Module(group, reducer, self.comm) for group in trained]
        self._leave = call_after_backward(model, BackwardEnd(self._end_backward).wait_for_callbacks)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residual of each module (world_size * shard,), not copied; empty where none is kept."""
        return [module.state.residual for module in self._modules if module.state is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps, one bucket per module; save one per rank. It holds plain data and tensors."""
        saved = [self.reducer.save(module.state) if module.state else module.saved for module in self._modules]
        buckets = [bucket for bucket in saved if bucket is not None]
        return {**self._header(max((bucket["step"] for bucket in buckets), default=0)), "buckets": buckets}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank.

        Raises:
            ValueError: it is of another rank, world size, method or model.
        """
        self.check_state(saved)
        modules = {module.layout: module for module in self._modules}
        for bucket in saved["buckets"]:
            module = modules.get(saved_layout(bucket))
            if module is None:
                raise ValueError(f"state has '{next(iter(bucket['shapes']))}', the model none of that shape")
            module.saved, module.state = bucket, None

    def close(self) -> None:
        """Give the model back: FSDP reduces densely again. Statistics and state can still be read."""
        self._leave()
        for module in self._modules:
            module.close()

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Let the step count for all modules, or for none."""
        done = [module for module in self._modules if module.stats is not None]
        if not done:
            return
        bad = [name for module in done if (name := module.bad_name()) is not None]
        flag = torch.tensor([len(bad)], dtype=torch.int32, device=self._modules[0].group.device)
        num_bad = int(self.comm.answer(AllReduce(mine=flag, kind="counts")))  # host sync: acted on here
        self.skipped = num_bad > 0
        self.stats = [module.end(is_finite=not num_bad) for module in sorted(done, key=lambda module: module.order)]
        if num_bad and self.reducer.policy == "stop":
            found: list[Any] = gather_objects(bad, self.comm.group)
            named = [f"'{name}' on rank {rank}" for rank, names in enumerate(found) for name in names[:1]]
            raise error_at(named, self.stats[0].step)
        error = self._skipped_steps.count(self.stats[0].step, is_finite=not num_bad)
        if error is not None:
            raise error


class _Module:
    """What FSDP calls in place of its reduce-scatter for one module: an object with the methods of its ReduceScatter.

    Attributes:
        name: the module's first parameter.
        state: None before the first backward; ``saved`` is then what to begin with.
        stats: of this backward; None where it has not come to this module.
        order: when it did.
    """

    count = 0

    def __init__(self, group: ShardGroup, reducer: SparseReducer, comm: GroupComm) -> None:
        self.group, self._reducer, self._comm = group, reducer, comm
        self.name = next(iter(group.parameters()))
        self.state: BucketState | None = None
        self.saved: dict[str, Any] | None = None
        self.stats: StepStats | None = None
        self.order = 0
        self._first_bad: int | None = None
        self._applied: Tensor | None = None
        self._counted_unused: bool = getattr(group.param_group, UNUSED)
        group.module.set_custom_reduce_scatter(self)
        group.module.set_reduce_scatter_unused_params(True, recurse=False)

    def close(self) -> None:
        """Have FSDP use its own reduce-scatter again."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        self.group.module.set_custom_reduce_scatter(DefaultReduceScatter())
        self.group.module.set_reduce_scatter_unused_params(self._counted_unused, recurse=False)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's messages."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor`` (world_size * shard,) into ``output_tensor`` (shard,)."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"FSDP divides gradients by {op}: leave out set_gradient_divide_factor")
        if input_tensor.dtype == torch.float16:
            raise ValueError("FSDP reduces in float16, whose scaler attach_within does not follow: use bfloat16")
        state = self._state_of(input_tensor)
        self._comm.begin_step()
        found = carried_out(reduce_to_shards(self._reducer, state, input_tensor, self._comm), self._comm)
        factor = self._comm.world_size if op == dist.ReduceOp.SUM else 1
        lost = write_(found.shard * factor, output_tensor)
        applied = found.shard
        if lost is not None:
            self._keep(state, lost / factor)
            applied = found.shard - lost / factor
        is_first = self.stats is None  # where a module was used in several forwards, FSDP calls this several times
        self._applied = applied if is_first or self._applied is None else self._applied + applied
        self._first_bad = found.first_bad if is_first or self._first_bad is None else self._first_bad
        self.stats = found.stats
        _Module.count += 1
        self.order = _Module.count

    def bad_name(self) -> str | None:
        """Return a parameter whose gradient, or mean, was not finite in this backward."""
        if self._first_bad is not None and self.state is not None:
            return self.state.layout.name_at(self._first_bad).partition(" of shard")[0]
        is_bad = self._applied is not None and not bool(torch.isfinite(self._applied.sum()))  # host sync: once a module
        return self.name if is_bad else None

    def end(self, *, is_finite: bool) -> StepStats:
        """End the step; where it does not count, what was sent goes back into the residual."""
        assert self.stats is not None
        assert self._applied is not None
        assert self.state is not None
        if not is_finite:
            self._keep(self.state, torch.nan_to_num(self._applied, 0.0, 0.0, 0.0))
            for parameter in self.group.parameters().values():
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        stats = self.stats if is_finite else replace(self.stats, skipped=True, global_count=0)
        self.stats = self._applied = None
        return stats

    def _keep(self, state: BucketState, mean: Tensor) -> None:
        """Keep a mean (shard,) of this rank's shard that is not applied: the part of all ranks, in this residual."""
        if state.residual.numel():
            n, size = self._comm.world_size, mean.numel()
            state.residual[self._comm.rank * size :][:size].add_(mean.to(state.residual.dtype), alpha=n)

    def _state_of(self, grad: Tensor) -> BucketState:
        layout = self.layout
        if layout.numel != grad.numel():
            raise ValueError(
                f"parameters beside '{self.name}' were frozen or unfrozen since attach_within: attach anew"
            )
        if self.state is None and self.saved is not None:
            self.state = self._reducer.load(self.saved, grad.dtype, grad.device)
        elif self.state is None:
            self.state = self._reducer.start(layout, grad.dtype, grad.device)
        return self.state

    @property
    def layout(self) -> Layout:
        """The pieces of the vector: in each rank's shard one of every trained parameter, padded."""
        pieces = {
            name: tuple(each.padded_sharded_param_size)
            for name, each in zip(self.group.parameters(), self.group.param_group.fsdp_params, strict=True)
            if each.sharded_param.requires_grad
        }
        ranks = range(self._comm.world_size)
        names = tuple(f"{name} of shard {rank}" for rank in ranks for name in pieces)
        return Layout(names, tuple(pieces.values()) * self._comm.world_size)
