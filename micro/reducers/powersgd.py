"""The reducer powersgd (PowerSGD): sends each matrix of the gradient as two thin factors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.feedback.residual import ErrorFeedback
from micro.predicted_traffic import Bucket, Calls, Volume
from micro.reducers.base import BucketState, Reducer
from micro.reducers.outcome import Outcome, checked, rounded, rounding, write_
from micro.reducers.stats import Start, stats_of
from micro.values.finite import Policy, check_policy, flag_of, is_finite_by, is_zero, negated
from micro.values.flat import Layout
from micro.values.randomness import generator

FEEDBACK = ErrorFeedback()


@dataclass(frozen=True, slots=True)
class Batch:
    """The parameters that are matrices of one shape: their names, their places, and rows x columns at this rank."""

    names: tuple[str, ...]
    places: tuple[slice, ...]
    rows: int
    columns: int
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements of all its matrices."""
        return len(self.names) * self.rows * self.columns

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return each matrix (rows, columns) of ``vector`` (numel,)."""
        return [vector[place].view(self.rows, self.columns) for place in self.places]


def batches_of(
    layout: Layout, rank: int, min_compression: float, device: torch.device
) -> tuple[tuple[Batch, ...], Tensor]:
    """Return what is approximated, matrices of one shape together, and the (m,) indices of all that travels whole."""
    by_shape: dict[tuple[int, int], list[tuple[str, slice]]] = {}
    whole = [torch.arange(0)]
    for (name, place), shape in zip(layout.slices(), layout.shapes, strict=True):
        rows = shape[0] if len(shape) > 1 else 0
        columns = (place.stop - place.start) // max(rows, 1)
        if rows * columns >= min_compression * min(rank, rows, columns) * (rows + columns) > 0:
            by_shape.setdefault((rows, columns), []).append((name, place))
        else:
            whole.append(torch.arange(place.start, place.stop))
    batches = []
    for shape, group in by_shape.items():
        names, places = zip(*group, strict=True)
        batches.append(Batch(names, places, *shape, min(rank, *shape)))
    return tuple(batches), torch.cat(whole).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(Reducer):
    """Approximate every matrix of the gradient by one step of power iteration, P Q^T with ``rank`` columns each.

    A parameter with several dimensions is viewed as a matrix, its first dimension by the rest. P = M Q is averaged over
    the ranks and orthonormalised, Q = M^T P is averaged; the update is P Q^T, and Q starts the next step. A rank's
    approximation error of its own matrix stays in its residual, so mass is conserved. Parameters with one dimension,
    and matrices that would hardly shrink, are sent whole. Bytes sent per rank: two all-reduces, of rank * rows + the
    whole parameters + 1, and of rank * columns.

    Args:
        rank: columns of P and Q.
        min_compression: least factor by which an approximation must shrink a matrix.
        nonfinite: as in SparseReducer.
        seed: from which the first Q is drawn, the same on all ranks.

    Source: Vogels et al., PowerSGD, NeurIPS 2019, arXiv 1905.13727. Differences: the residual is the local error (the
    paper's code keeps the gradient minus the averaged approximation, which conserves no mass); approximated from the
    first step on (torch's hook starts after 1,000 steps).

    Raises:
        ValueError: rank below 1, min_compression not above 1.
    """

    rank: int = 4
    min_compression: float = 2.0
    nonfinite: Policy = "stop"
    seed: int = 0
    name: ClassVar[str] = "powersgd"
    depends_on_threads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_policy(self.nonfinite)
        if self.rank < 1:
            raise ValueError(f"rank of powersgd must be at least 1, got {self.rank}")
        if not self.min_compression > 1:
            raise ValueError(f"min_compression of powersgd must be above 1, got {self.min_compression}")

    def volume(self, bucket: Bucket) -> Volume:
        """Return the two all-reduces; where no matrix is approximated, the second is not called. See Reducer.

        Raises:
            ValueError: more than one rank, and no layout.
        """
        if bucket.world_size == 1:
            return bucket.volume((), bucket.numel)
        if bucket.layout is None:
            raise ValueError("what powersgd sends depends on the parameters' shapes: give a layout")
        batches, rest = self._batches(bucket.layout, torch.device("cpu"))
        left = rest.numel() + 1 + sum(len(batch.names) * batch.rank * batch.rows for batch in batches)
        right = sum(len(batch.names) * batch.rank * batch.columns for batch in batches)
        width = bucket.dtype.itemsize
        calls: Calls = (("all_reduce", left * width), ("all_reduce", right * width))
        return bucket.volume(calls if right else calls[:1], bucket.numel)

    def _batches(self, layout: Layout, device: torch.device) -> tuple[tuple[Batch, ...], Tensor]:
        return layout.kept(batches_of, self.rank, self.min_compression, device)

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state with nothing kept, and factors drawn by the parameters' names."""
        memory = FEEDBACK.start(layout.numel, dtype, device)
        wide, drawn = memory["residual"].dtype, {}
        for batch in self._batches(layout, device)[0]:
            for name in batch.names:
                randomness = generator(self.seed, *name.encode())
                factor = torch.randn(batch.columns, batch.rank, generator=randomness, dtype=torch.float64)
                drawn[name] = factor.to(device, wide)
        return BucketState(layout, 0, memory, factors=drawn)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        start = Start.of(comm, grad.device)
        batches, rest = self._batches(state.layout, grad.device)
        acc, bad = FEEDBACK.accumulate_(state.memory, grad, world_size=comm.world_size)
        matrices = _copied(batches, acc, state)
        factors = [torch.stack([state.factors[name] for name in batch.names]) for batch in batches]
        left = [matrix @ factor for matrix, factor in zip(matrices, factors, strict=True)]
        flag = flag_of(negated(is_finite_by(bad, grad.numel())), acc.dtype, acc.device)
        *left, whole, flag = yield from _mean([*left, acc[rest], flag], comm)
        left = [torch.linalg.qr(factor).Q for factor in left]
        own = [matrix.mT @ factor for matrix, factor in zip(matrices, left, strict=True)]
        right = (yield from _mean(own, comm)) if own else []
        state.step += 1
        is_finite = is_zero(flag.view(()))
        products = list(zip(batches, left, own, right, strict=True))
        if is_finite is not False:
            for batch, p, _, mean in products:
                _write_products_(p, mean, batch.views(grad))
            grad[rest] = rounded(whole, grad.dtype)
        made = yield from checked(grad, is_finite=is_finite, num_updated=grad.numel())
        if made.bad_update is not None:  # cut where products would overflow
            largest = torch.finfo(acc.dtype).max ** 0.5 / acc.numel()
            acc.clamp_(-largest, largest)

        def on_deliver() -> None:
            """Take the own products out of the residual; keep the factors, and what rounding took of the mean."""
            for batch, p, mine, mean in products:
                state.factors.update(zip(batch.names, _near_one(mean).unbind(), strict=True))
                for i, (kept, update) in enumerate(zip(batch.views(state.residual), batch.views(grad), strict=True)):
                    kept.addmm_(p[i], mine[i].T, alpha=-1)
                    if grad.dtype != kept.dtype:
                        kept += rounding(p[i] @ mean[i].T, update)
            acc[rest] = 0.0 if grad.dtype == acc.dtype else rounding(whole, grad[rest])

        stats = stats_of(start, comm, grad.device, step=state.step - 1, numel=grad.numel())
        findings = made.findings(state.layout, bad)
        return Outcome(stats=stats, grad=grad, findings=findings, on_deliver=on_deliver)


def _write_products_(left: Tensor, right: Tensor, updates: Sequence[Tensor]) -> None:
    """Write the products of the factors (m, rows, rank) and (m, columns, rank) into m updates (rows, columns)."""
    for update, one, other in zip(updates, left, right, strict=True):
        if update.dtype == one.dtype:
            torch.mm(one, other.T, out=update)
        else:
            write_(one @ other.T, update)


def _copied(batches: Sequence[Batch], acc: Tensor, state: BucketState) -> list[Tensor]:
    """Return the matrices (m, rows, columns) of each batch, copied out of ``acc`` into memory that the state keeps."""
    if state.spare is None or state.spare.dtype != acc.dtype:
        state.spare = torch.empty_like(acc)
    sizes = [batch.numel for batch in batches]
    pieces = zip(batches, state.spare[: sum(sizes)].split(sizes), strict=True)
    return [torch.stack(batch.views(acc), out=piece.view(-1, batch.rows, batch.columns)) for batch, piece in pieces]


def _near_one(factors: Tensor) -> Tensor:
    """Return the factors (m, columns, rank), each times a power of two, by which its largest number is near 1.

    What follows from a factor does not depend on its scale, but products with it would overflow or vanish.
    """
    exponents = torch.frexp(factors.abs().amax((1, 2), keepdim=True)).exponent.clamp_(-126, 126)
    return torch.ldexp(factors, -exponents)


def _mean(parts: list[Tensor], comm: Comm) -> Reduction[list[Tensor]]:
    """Return the means over the ranks of ``parts``, by one all-reduce."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    mean = (yield AllReduce(mine=flat)) / comm.world_size
    pieces = mean.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
