"""Shares of a vector (some of its parameters, or a slice of each), and reducers that work on one share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micro.reducers.base import BucketState, saved_layout
from micro.reducers.wrapping import WrappingReducer
from micro.values.finite import on_device
from micro.values.flat import Layout
from micro.values.sparse import SparseValues


@dataclass(frozen=True, slots=True)
class Share:
    """Some of the elements of a flat vector.

    Attributes:
        layout: of these alone.
        runs: where they lie in the whole vector; neighbours are one run.
    """

    layout: Layout
    runs: tuple[slice, ...]

    @classmethod
    def of(cls, layout: Layout, slices: Sequence[tuple[int, int] | None]) -> "Share | None":
        """Return the share that has a slice (start, stop) of each parameter, or nothing of it; None without elements.

        A slice has as many dimensions as its parameter.
        """
        pairs: list[tuple[str, tuple[int, ...]]] = []
        runs: list[slice] = []
        for (name, place), shape, part in zip(layout.slices(), layout.shapes, slices, strict=True):
            if part is None:
                continue
            start, stop = place.start + part[0], place.start + part[1]
            pairs.append((name, shape if slice(start, stop) == place else (stop - start, *(1 for _ in shape[1:]))))
            if runs and runs[-1].stop == start:
                runs[-1] = slice(runs[-1].start, stop)
            elif stop > start:
                runs.append(slice(start, stop))
        return cls(Layout(*zip(*pairs, strict=True)), tuple(runs)) if runs else None

    def take(self, whole: Tensor) -> Tensor:
        """Return the share of ``whole`` (numel,): a view where it is one run, else a copy."""
        pieces = [whole[run] for run in self.runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def put_back_(self, whole: Tensor, vector: Tensor) -> None:
        """Write ``vector``, as ``take`` returned it, to its places in ``whole`` (numel,)."""
        for run, piece in zip(self.runs, vector.split([run.stop - run.start for run in self.runs]), strict=True):
            if whole[run].data_ptr() != piece.data_ptr():
                whole[run].copy_(piece)

    def positions(self, indices: Tensor) -> Tensor:
        """Return the indices of the whole vector, int64, of those (k,) of the share."""
        starts, stops = self._ends(indices.device)
        ends = (stops - starts).cumsum(0)
        runs = torch.searchsorted(ends, indices.long(), right=True)
        return indices.long() + (stops - ends)[runs]

    def part_of(self, values: SparseValues) -> SparseValues:
        """Return those of ``values`` (k,) that lie in the share, at their places in what ``take`` returns."""
        starts, stops = self._ends(values.indices.device)
        runs = torch.searchsorted(starts, values.indices.long(), right=True) - 1  # -1: before the first run
        is_in = (runs >= 0) & (values.indices < stops[runs])
        shifts = ((stops - starts).cumsum(0) - stops)[runs[is_in]]
        return SparseValues((values.indices[is_in] + shifts).to(torch.int32), values.values[is_in])

    def _ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        ends = [*(run.start for run in self.runs), *(run.stop for run in self.runs)]
        starts, stops = on_device(ends, torch.int64, device).view(2, -1)
        return starts, stops


@dataclass(slots=True)
class ShareState(BucketState):
    """The state of a bucket of which another reducer reduces one share; memory is that of the share.

    Attributes:
        share: None where the bucket has no element in it, or as long as it is not known.
        rest: the share that is reduced otherwise, if any.
        inner: the other reducer's state of the share.
        place: which share it is, where that depends on the rank; None before the first step.
        keys: under which something is kept of each parameter, by this rank or by others.
    """

    share: Share | None = None
    rest: Share | None = None
    inner: BucketState | None = None
    place: int | None = None
    keys: tuple[str, ...] = ()

    def vector(self, key: str) -> Tensor:
        """Return what is kept under ``key`` (numel,), zero outside of the share; empty where nothing ever is kept."""
        kept = self.memory.get(key, self.memory["residual"]) if self.inner is None else self.inner.vector(key)
        if kept.numel() == self.layout.numel or not (kept.numel() or key in self.keys):
            return kept
        whole = kept.new_zeros(self.layout.numel)
        if kept.numel() and self.share is not None:
            self.share.put_back_(whole, kept)
        return whole

    def pieces(self, names: AbstractSet[str] | None = None) -> dict[str, dict[str, Tensor]]:
        """Return views of what is kept of each parameter: of what of it is in the share; see BucketState."""
        return {key: {} for key in self.keys} if self.inner is None else self.inner.pieces(names)


Make = Callable[[Layout, torch.dtype, torch.device], BucketState]


class ShareReducer(WrappingReducer):
    """A reducer that leaves one share of every bucket to another one, with all that is kept of it."""

    @abstractmethod
    def parts(self, layout: Layout, place: int | None) -> tuple[Share | None, Share | None]:
        """Return the share of a bucket that the other reducer reduces, and what else there is, if any."""

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> ShareState:
        """Return a state with nothing kept."""
        return self._give_(_empty(layout, dtype, device), None, self.reducer.start)

    def _give_(self, state: ShareState, place: int | None, make: Make) -> ShareState:
        """Give the state the share of this place, and what ``make`` makes of its layout; the memory of both is one."""
        state.place, (state.share, state.rest) = place, self.parts(state.layout, place)
        if place is not None:
            one = self.reducer.start(_smallest(state.layout), torch.float32, torch.device("cpu"))
            state.keys = tuple(one.pieces())
        if state.share is not None:
            like = state.memory["residual"]
            state.inner = make(state.share.layout, like.dtype, like.device)
            state.memory.update(state.inner.memory)  # not replaced: a reducer around this one has it too
            state.inner.memory = state.memory
        return state

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the shapes of all parameters, what is kept, and under 'share' all else of the other reducer's."""
        assert isinstance(state, ShareState)
        state.check_whole()
        inner: dict[str, Any] = {"memory": {}}
        if state.inner is not None:
            state.inner.step = state.step
            inner = self.reducer.save(state.inner)
        shapes = dict(zip(state.layout.names, state.layout.shapes, strict=True))
        memory = inner.pop("memory")
        return {"method": self.method, "step": state.step, "memory": memory, "shapes": shapes, "share": inner}

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> ShareState:
        """Return the state that ``save`` described; see Reducer."""
        self.check_method(saved)
        inner = saved["share"] | {"memory": saved["memory"]}
        state = _empty(saved_layout(saved), dtype, device, saved["step"])
        return self._give_(state, saved.get("place"), lambda _, *of: self.reducer.load(inner, *of))

    def rebuild(
        self, layout: Layout, old: Sequence[BucketState], dtype: torch.dtype, device: torch.device
    ) -> ShareState:
        """Return the state of a new bucket; see Reducer. A rank keeps its place."""
        before = [bucket for bucket in old if isinstance(bucket, ShareState)]
        place = next((bucket.place for bucket in before if bucket.place is not None), None)
        inner = [bucket.inner for bucket in before if bucket.inner is not None]
        state = _empty(layout, dtype, device, max((bucket.step for bucket in old), default=0))
        return self._give_(state, place, lambda of, *more: self.reducer.rebuild(of, inner, *more))

    def rescale_(self, state: BucketState, factor: float) -> None:
        """Multiply what is kept of the share; see Reducer."""
        assert isinstance(state, ShareState)
        if state.inner is not None:
            self.reducer.rescale_(state.inner, factor)

    def keep_(self, state: BucketState, unsent: SparseValues) -> None:
        """Keep what an update lost in the share that was rounded after it was reduced; see Reducer."""
        assert isinstance(state, ShareState)
        if state.share is not None and state.inner is not None:
            self.reducer.keep_(state.inner, state.share.part_of(unsent))


def _empty(layout: Layout, dtype: torch.dtype, device: torch.device, step: int = 0) -> ShareState:
    nothing = torch.zeros(0, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return ShareState(layout, step, {"residual": nothing})


def _smallest(layout: Layout) -> Layout:
    """Return the same parameters with one element each, or none: what a reducer keeps under is the same for both."""
    pairs = zip(layout.numels, layout.shapes, strict=True)
    return Layout(layout.names, tuple(tuple(1 for _ in shape) if numel else shape for numel, shape in pairs))
