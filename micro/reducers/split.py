"""Split: some parameters reduced densely, the others by any method; and a dense start."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.names import as_patterns, check_matched, listed, matches
from micro.reducers.base import BucketState, Reducer, saved_layout
from micro.reducers.dense import DenseReducer
from micro.reducers.outcome import Outcome
from micro.reducers.shares import Share, share_of, together
from micro.reducers.wrapping import WrappingReducer, innermost
from micro.requests import Reduction
from micro.sparse import SparseValues
from micro.traffic import Bucket, Volume


@dataclass(slots=True)
class SplitState(BucketState):
    """The state of a bucket: memory is that of its sparse share, whose parameters alone keep something.

    Attributes:
        sparse, dense: the shares of the bucket; None where no parameter is in them.
        sparse_state: of the reducer, for the sparse share.
    """

    sparse: Share | None = None
    dense: Share | None = None
    sparse_state: BucketState | None = None

    def vector(self, key: str) -> Tensor:
        """Return a copy of what is kept under ``key`` (numel,) in the layout's order, zero where nothing is kept."""
        kept = self.memory[key] if self.sparse_state is None else self.sparse_state.vector(key)
        if not kept.numel() or self.sparse is None or self.dense is None:
            return kept
        whole = kept.new_zeros(self.layout.numel)
        self.sparse.put_back_(whole, kept)
        return whole

    def pieces(self, names: AbstractSet[str] | None = None) -> dict[str, dict[str, Tensor]]:
        """Return views of what is kept for the sparse parameters; see BucketState."""
        return {} if self.sparse_state is None else self.sparse_state.pieces(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(WrappingReducer):
    """Reduce some parameters by one dense all-reduce, and the others with ``reducer``, as a vector of their own.

    Biases, norms and embeddings are few elements, or too sensitive, to be worth sparsifying. In each bucket the dense
    parameters are sent first, whole; the others are gathered to one vector, of which the reducer selects. A bucket that
    holds parameters of one kind alone is not copied. The density and the residuals are those of the sparse parameters;
    the statistics count all elements, the dense ones as chosen by every rank (see StepStats.dense_numel). Where a
    gradient of either kind is not finite, nothing of the bucket is updated: what is finite of the sparse parameters
    waits in the residuals, the dense ones drop the step as dense training does.

    Args:
        reducer: of the parameters that are not dense.
        dense: patterns of the names of parameters to reduce densely: ``*`` is any text, ``?`` one character, ``[ab]`` a
            or b. Upper and lower case differ.
        only: patterns of the names of parameters that are not: all others are dense.
        min_dims: parameters of fewer dimensions are dense too; 2 takes biases and the weights of norms.
        start_step: up to this step every parameter is reduced densely: a dense start, without indices or residuals.
        nonfinite: as in SparseReducer; None takes the reducer's.

    Raises:
        ValueError: nothing is dense by these settings, a reducer that has nothing sparse, or keeps the optimizer's
            momentum, which dense parameters would lack; from check_parameters: a pattern that matches no parameter, a
            parameter matched by dense and by only, no parameter left to sparsify.
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

    def shares(self, layout: Layout) -> tuple[Share | None, Share | None]:
        """Return the dense share of ``layout`` and the other one; None where there is none."""
        return share_of(layout, self.is_dense), share_of(layout, lambda name, shape: not self.is_dense(name, shape))

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
        dense, sparse = self.shares(bucket.layout)
        num_dense = 0 if dense is None else dense.layout.numel
        whole = bucket.volume((("all_reduce", num_dense * bucket.element_bytes),) if num_dense else (), num_dense)
        if sparse is None:
            return whole
        rest = self.reducer.volume(replace(bucket, numel=sparse.layout.numel, layout=sparse.layout))
        return replace(rest, calls=(*whole.calls, *rest.calls), num_updated=num_dense + rest.num_updated)

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> SplitState:
        """Return a state with nothing kept."""
        state = self._empty(layout, dtype, device)
        if state.sparse is not None:
            _fill(state, self.reducer.start(state.sparse.layout, dtype, device))
        return state

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        assert isinstance(state, SplitState)
        if self._is_mixed(state):
            return (yield from self._reduction_of_both(state, grad, comm))
        reducer, inner = self._begin(state)
        return _counted(reducer, (yield from reducer.reduction(inner, grad, comm)))

    def _is_mixed(self, state: SplitState) -> bool:
        """Whether the bucket's next step has a dense and a sparse share."""
        return state.step >= self.start_step and state.sparse is not None and state.dense is not None

    def _begin(self, state: SplitState) -> tuple[Reducer, BucketState]:
        """Count a step of a bucket that is reduced as one vector; return the reducer that it needs, and its state."""
        step = state.step
        state.step += 1
        if step < self.start_step or state.sparse_state is None:
            return DenseReducer(self.policy), BucketState(state.layout, step, {})
        state.sparse_state.step = step
        return self.reducer, state.sparse_state

    def _reduction_of_both(self, state: SplitState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        assert state.sparse is not None
        assert state.dense is not None
        assert state.sparse_state is not None
        whole, rest = state.dense.take(grad), state.sparse.take(grad)
        dense_state = BucketState(state.dense.layout, state.step, {})
        state.sparse_state.step = state.step
        state.step += 1
        dense = yield from DenseReducer(self.policy).mean(dense_state, whole, comm, is_last=False)
        sparse = yield from self.reducer.reduction(state.sparse_state, rest, comm)
        state.dense.put_back_(grad, whole)
        state.sparse.put_back_(grad, rest)
        stats = together(dense.stats, sparse.stats, grad.numel(), comm)
        findings = (*dense.findings, *sparse.findings)
        return Outcome(stats=stats, grad=grad, findings=findings, on_deliver=sparse.deliver, on_drop=sparse.drop)

    def keep_(self, state: BucketState, unsent: SparseValues) -> None:
        """Keep what an update lost that was rounded after it was reduced; of dense parameters nothing is kept."""
        assert isinstance(state, SplitState)
        if state.sparse is not None and state.sparse_state is not None:
            self.reducer.keep_(state.sparse_state, state.sparse.part_of(unsent))

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors: the reducer's, and the shapes of all parameters."""
        assert isinstance(state, SplitState)
        outer, inner = self._save_both(state, state.sparse_state)
        return outer | {"sparse": inner}

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> SplitState:
        """Return the state that ``save`` described.

        Raises:
            ValueError: it is of another method, or other parameters were dense.
        """
        self.check_method(saved)
        state = self._empty(saved_layout(saved), dtype, device)
        before, now = set(saved["sparse"].get("shapes", ())), set(state.sparse.layout.names if state.sparse else ())
        if changed := sorted(before ^ now):
            was = "sparsely" if changed[0] in before else "densely"
            raise ValueError(
                f"state is of a run that reduced '{changed[0]}' {was}, this one does not: "
                "use the same dense, only and min_dims"
            )
        if state.sparse is not None:
            inner = {**saved["sparse"], "memory": saved["memory"]}
            _fill(state, self.reducer.load(inner, dtype, device))
        state.step = saved["step"]
        return state

    def rebuild(
        self, layout: Layout, old: Sequence[BucketState], dtype: torch.dtype, device: torch.device
    ) -> SplitState:
        """Return the state of a new bucket; see Reducer."""
        state = self._empty(layout, dtype, device)
        if state.sparse is not None:
            parts = [b.sparse_state for b in old if isinstance(b, SplitState) and b.sparse_state is not None]
            _fill(state, self.reducer.rebuild(state.sparse.layout, parts, dtype, device))
        state.step = max((bucket.step for bucket in old), default=0)
        return state

    def rescale_(self, state: BucketState, factor: float) -> None:
        """Multiply what is kept of the sparse share; see Reducer."""
        assert isinstance(state, SplitState)
        if state.sparse_state is not None:
            self.reducer.rescale_(state.sparse_state, factor)

    def _empty(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> SplitState:
        """Return a state whose sparse share, if it has one, has no state yet."""
        dense, sparse = self.shares(layout)
        nothing = {"residual": torch.zeros(0, dtype=dtype, device=device)}
        return SplitState(layout, 0, nothing, sparse=sparse, dense=dense)


def _fill(state: SplitState, inner: BucketState) -> None:
    """Give the sparse share its state; the memory of both is one."""
    state.sparse_state, state.memory = inner, inner.memory


def _counted(reducer: Reducer, outcome: Outcome) -> Outcome:
    if not isinstance(reducer, DenseReducer):
        return outcome
    return replace(outcome, stats=replace(outcome.stats, dense_numel=outcome.stats.numel))
