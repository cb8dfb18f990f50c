"""The reducer split: some parameters dense, the others with any method; optionally dense first steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.base import BucketState, saved_layout
from micro.reducers.dense import DenseReducer
from micro.reducers.outcome import Arrived, Outcome
from micro.reducers.shares import Share, ShareReducer, ShareState
from micro.reducers.stats import StepStats, traffic_fields
from micro.reducers.wrapping import WrappingReducer, innermost
from micro.values.flat import Layout
from micro.values.names import as_patterns, check_matched, listed, matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(ShareReducer):
    """Reduce some parameters by a dense all-reduce, and the others with ``reducer``, as a separate vector.

    Biases, norms and embeddings are often too small, or too sensitive, to sparsify. In each bucket the dense parameters
    are sent first; the others are copied to one vector for the reducer. A bucket with only one kind of parameters is
    not copied. Density and residuals are those of the sparse parameters; the statistics count all elements, dense ones
    as chosen by every rank (see StepStats.dense_numel). If any gradient is not finite, nothing in the bucket is
    updated: finite sparse gradients stay in the residuals, dense ones are dropped as in dense training.

    Args:
        reducer: for the parameters that are not dense.
        dense: patterns of names of dense parameters: ``*`` is any text, ``?`` one character, ``[ab]`` a or b;
            case-sensitive.
        only: patterns of names of sparse parameters; all others are dense.
        min_dims: parameters with fewer dimensions are dense too; 2: biases and weights of norms.
        start_step: before this step all parameters are reduced densely, without indices or residuals.
        nonfinite: as in SparseReducer; None: the reducer's.

    Raises:
        ValueError: nothing is dense with these settings; the reducer is not sparse, or has momentum correction, which
            dense parameters would lack; from check_parameters: a pattern without a match, a parameter matched by dense
            and by only, no parameter left to sparsify.
    """

    dense: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    min_dims: int = 0
    start_step: int = 0
    name: ClassVar[str] = "split"

    def __post_init__(self) -> None:
        WrappingReducer.__post_init__(self)
        if isinstance(innermost(self.reducer), DenseReducer):
            got = self.reducer.full_name
            raise ValueError(f"split needs a reducer that sparsifies, got {got}: give a SparseReducer, for instance")
        for setting in ("dense", "only"):
            object.__setattr__(self, setting, as_patterns(getattr(self, setting), setting))
        for setting in ("min_dims", "start_step"):
            if not isinstance(getattr(self, setting), int) or getattr(self, setting) < 0:
                raise ValueError(f"{setting} must be a number of at least 0, got {getattr(self, setting)!r}")
        if not (self.dense or self.only or self.min_dims or self.start_step):
            raise ValueError("split reduces nothing densely: set dense, only, min_dims or start_step")
        if getattr(getattr(innermost(self.reducer), "feedback", None), "name", "") == "momentum":
            raise ValueError(
                "feedback momentum holds the optimizer's momentum, which dense parameters and steps would lack: "
                "use feedback residual"
            )

    def is_dense(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether the parameter of this name and shape is reduced densely."""
        if len(shape) < self.min_dims or matches(self.dense, name):
            return True
        return bool(self.only) and not matches(self.only, name)

    def parts(self, layout: Layout, place: int | None = None) -> tuple[Share | None, Share | None]:
        """Return the sparse parameters of ``layout`` and the dense ones; None where there are none."""
        are_dense = map(self.is_dense, layout.names, layout.shapes)
        pairs = [((0, numel), is_dense) for numel, is_dense in zip(layout.numels, are_dense, strict=True)]
        sparse = Share.of(layout, [None if is_dense else whole for whole, is_dense in pairs])
        return sparse, Share.of(layout, [whole if is_dense else None for whole, is_dense in pairs])

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a model that the patterns do not fit; see Reducer."""
        check_matched(self.dense, shapes, "dense")
        check_matched(self.only, shapes, "only")
        both = [name for name in shapes if matches(self.dense, name) and matches(self.only, name)]
        if both:
            raise ValueError(f"{listed(both)} match both dense and only: take them out of one")
        sparse = {name: shape for name, shape in shapes.items() if not self.is_dense(name, shape)}
        if not sparse:
            raise ValueError(
                "dense, only and min_dims leave no parameter to sparsify: use reducer dense, or narrow them"
            )
        self.reducer.check_parameters(sparse)

    def volume(self, bucket: Bucket) -> Volume:
        """Return the sum of the dense parameters, then what the reducer sends of the others; see Reducer.

        Raises:
            ValueError: no layout.
        """
        if bucket.layout is None:
            raise ValueError("what split sends depends on the parameters' names and shapes: give a layout")
        sparse, dense = self.parts(bucket.layout)
        num_dense = 0 if dense is None else dense.layout.numel
        whole = bucket.volume((("all_reduce", num_dense * bucket.element_bytes),) if num_dense else (), num_dense)
        if sparse is None:
            return whole
        rest = self.reducer.volume(replace(bucket, numel=sparse.layout.numel, layout=sparse.layout))
        return replace(rest, calls=(*whole.calls, *rest.calls), num_updated=num_dense + rest.num_updated)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        assert isinstance(state, ShareState)
        step, share, inner = state.step, state.share, state.inner
        state.step += 1
        dense_reducer = DenseReducer(self.policy)
        if step < self.start_step or share is None or inner is None:
            outcome = yield from dense_reducer.reduction(BucketState(state.layout, step, {}), grad, comm)
            return replace(outcome, stats=replace(outcome.stats, dense_numel=grad.numel()))
        inner.step = step
        if state.rest is None:
            return (yield from self.reducer.reduction(inner, grad, comm))
        whole, rest = state.rest.take(grad), share.take(grad)
        dense_state = BucketState(state.rest.layout, step, {})
        dense = yield from dense_reducer.mean(dense_state, whole, comm, is_last=False)
        sparse = yield from self.reducer.reduction(inner, rest, comm)
        state.rest.put_back_(grad, whole)
        share.put_back_(grad, rest)

        return Outcome(
            stats=_together(dense.stats, sparse.stats, comm),
            grad=grad,
            arrived=None if sparse.arrived is None else partial(_arrived, share, sparse.arrived, grad.numel()),
            findings=(*dense.findings, *sparse.findings),
            on_deliver=sparse.deliver,
            on_drop=sparse.drop,
        )

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> ShareState:
        """Return the state that ``save`` described.

        Raises:
            ValueError: it is of another method, or other parameters were dense.
        """
        self.check_method(saved)
        share, _ = self.parts(saved_layout(saved))
        now, before = set(share.layout.names if share else ()), set(saved["share"].get("shapes", ()))
        if changed := sorted(before ^ now):
            was = "sparsely" if changed[0] in before else "densely"
            raise ValueError(
                f"state is of a run that reduced '{changed[0]}' {was}, this one does not: "
                "use the same dense, only and min_dims"
            )
        return ShareReducer.load(self, saved, dtype, device)


def _arrived(share: Share, arrived: Arrived, numel: int) -> Tensor:
    """Return (numel,) bool: what arrived of the share, and all of the rest."""
    inner = arrived()
    mask = torch.ones(numel, dtype=torch.bool, device=inner.device)
    share.put_back_(mask, inner)
    return mask


def _together(dense: StepStats, sparse: StepStats, comm: Comm) -> StepStats:
    """Return the statistics of a step in which both shares were reduced, whose traffic ``comm`` has."""
    numel, count = dense.numel + sparse.numel, dense.numel + sparse.target_count
    one, other = dense.spans, sparse.spans
    spans = replace(other, exchange=one.exchange + other.exchange, rest=one.rest + other.rest)
    return replace(
        sparse,
        numel=numel,
        target_density=count / (dense.numel + sparse.num_choices),
        target_count=count,
        counts=tuple(dense.numel + chosen for chosen in sparse.counts),
        local_count=dense.numel + sparse.local_count,
        global_count=dense.numel + sparse.global_count,
        spans=spans,
        num_bins=dense.numel + sparse.num_bins if sparse.num_bins else None,
        dense_numel=dense.numel,
        **traffic_fields(comm.traffic),
    )
