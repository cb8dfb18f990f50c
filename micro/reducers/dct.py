"""DeMo: the largest coefficients of each tile's cosine transform, from a momentum that keeps what was not sent."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from micro.codecs.base import Codec
from micro.codecs.raw import Raw
from micro.comm import Comm
from micro.density.base import Density, target_count
from micro.exchanges.base import Exchange, Transport, Wire
from micro.exchanges.gather import Gather
from micro.exchanges.traffic import Choice
from micro.feedback import ErrorFeedback, Feedback
from micro.health import is_finite_by
from micro.index_codecs import IndexCodec, Int32
from micro.nonfinite import Policy, check_policy
from micro.norms import norm
from micro.parts import as_part
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome, checked, cut_
from micro.reducers.rounding import write_
from micro.reducers.tiles import Tiling, tiling_of
from micro.reducers.with_density import WithDensity
from micro.requests import Fill, Reduction
from micro.selectors.pieces import largest_of_each
from micro.selectors.topk import shares
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step
from micro.stats import Start, stats_of
from micro.traffic import Bucket, Choosing, Volume

Transform = Literal["dct", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DCTReducer(WithDensity):
    """Send the largest coefficients of each tile: ``acc = decay * residual + grad``, ``residual = acc - sent``.

    With a decay of 0.999 the residual is DeMo's momentum, from which each rank takes what it sends. Every parameter is
    a matrix, its first dimension by all others, and is cut into tiles of ``size`` by ``size``, smaller at the edges;
    a vector into runs of ``size``. Each tile gives a share of its coefficients, exactly k in all; ties go to the first.
    The transform is orthonormal, so that mass is conserved and ``relative_error`` is exact but for rounding. The update
    is dense: counts and densities are of coefficients.

    DeMo takes steps by the sign of the update, which is the optimizer's to do.

    Replicas are equal bit for bit where all ranks run the same library on the same kind of processor: every rank
    transforms back on its own.

    Args:
        density: share of the coefficients, in (0, 1], or a schedule of it. DeMo's 32 of 64 x 64 are 1/128.
        size: of a tile's sides.
        transform: 'dct', or 'none': the tiles as they are, to see what the transform does.
        exchange: gather; its rule 'senders' takes the mean over those that sent, as the public code does.
        codec, indices: the forms of coefficients and of their places on the wire.
        feedback: 'residual' with its decay, or 'none'.
        nonfinite: 'stop' raises on all ranks when a gradient holds NaN or Inf, 'skip' makes that update zero.
        seed: for a codec that is random.

    Source: Peng, Quesnelle & Kingma, DeMo: Decoupled Momentum Optimization, 2024, arXiv 2411.19870, and its public
    code. Differences: tiles whose sides need not divide those of the matrix (the code's tiles are 1 wide where a side
    is prime above 64, and half of a vector travels, at 150 % of its dense bytes); convolutions; the mean over all ranks
    instead of those that sent a coefficient; one message for all parameters, with int32 indices; the learning rate
    outside of the momentum.

    Raises:
        ValueError: a setting out of range, or an exchange that needs more than each rank's own choice.
    """

    density: Density[Any] | float
    size: int = 64
    transform: Transform = "dct"
    exchange: Exchange[Any] = field(default_factory=Gather)
    codec: Codec = field(default_factory=Raw)
    indices: IndexCodec = field(default_factory=Int32)
    feedback: Feedback = field(default_factory=partial(ErrorFeedback, decay=0.999))
    nonfinite: Policy = "stop"
    seed: int = 0
    name: ClassVar[str] = "dct"

    def __post_init__(self) -> None:
        for key, kind in (("exchange", Exchange), ("codec", Codec), ("indices", IndexCodec), ("feedback", Feedback)):
            object.__setattr__(self, key, as_part(kind, getattr(self, key)))
        check_policy(self.nonfinite)
        if self.size < 1:
            raise ValueError(f"size of dct must be at least 1, got {self.size}")
        if self.transform not in get_args(Transform):
            raise ValueError(
                f"transform of dct must be one of {', '.join(get_args(Transform))}, got '{self.transform}'"
            )
        if self.density_policy.by_layer:
            raise ValueError(f"density {self.density_policy.name} differs by layer, dct takes the same of each tile")
        if self.exchange.name != "gather":
            raise ValueError(f"exchange of dct must be gather, got '{self.exchange.name}'")
        if self.feedback.name not in ("none", "residual"):
            raise ValueError(f"feedback of dct must be one of none, residual, got '{self.feedback.name}'")
        self.exchange.check_wire(Wire(self.codec, self.indices))

    @property
    def rule_name(self) -> str | None:
        """Which published behaviours the parts follow, or None where there is only one."""
        rules = [part.rule_name for part in (self.exchange, self.density_policy, self.codec)]
        return "+".join(dict.fromkeys(rule for rule in rules if rule)) or None

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        start = Start.of(comm, grad.device)
        target = yield from self.density_policy.target(state.density, grad, state.step, state.layout, comm)
        forgotten = self.feedback.forgotten(state.memory)
        acc, bad = self.feedback.accumulate_(state.memory, grad, world_size=comm.world_size)
        before = comm.now(grad.device)
        tiling = tiling_of(state.layout, self.size, has_transform=self.transform == "dct")
        tiled = tiling.forward(acc)
        pieces = tiling.pieces(acc.device)
        chosen = largest_of_each(tiled, pieces, shares(pieces, target.count))
        select = comm.now(grad.device) - before
        is_finite = is_finite_by(bad, grad.numel())
        step = Step(state.step, target.count, self.seed, state.layout, is_finite=is_finite)
        exchanged = yield from self._exchange(tiled, chosen, step, comm)
        state.step += 1
        keeps, is_finite = self.feedback.name == "residual", exchanged.is_finite
        error = own = unsent = None
        if is_finite is not False:
            error = _relative_error_(tiled, exchanged.sent)
            if keeps:
                own = tiling.inverse(_spread_((exchanged.sent,), tiled))
            unsent = yield from self._write(exchanged, tiling, tiled, grad)
        made = checked(grad, error, forgotten, is_finite=is_finite, num_updated=exchanged.num_updated)
        if made.bad_update is not None:
            cut_(acc, slice(None), comm.world_size * grad.numel())
        relative_error, lost = made.records
        stats = stats_of(
            start,
            comm,
            grad.device,
            step=step.index,
            numel=grad.numel(),
            rule=self.rule_name,
            target_density=target.density,
            target_count=target.count,
            counts=exchanged.counts,
            global_count=made.num_updated,
            select=select,
            relative_error=relative_error,
            forgotten=lost,
        )

        def on_deliver() -> None:
            for vector, sign in ((own, -1), (unsent, 1)):
                if vector is not None and keeps:
                    acc.add_(vector, alpha=sign)

        findings = made.findings(state.layout, bad)
        return Outcome(stats=stats, grad=grad, findings=findings, on_deliver=on_deliver)

    def _exchange(self, tiled: Tensor, chosen: Tensor, step: Step, comm: Comm) -> Reduction[Exchanged]:
        transport = Transport(comm=comm, step=step, overlap=Overlap.ANY, wire=Wire(self.codec, self.indices))
        selection = Selection(chosen, counts=(chosen.numel(),) * comm.world_size)
        return self.exchange.exchange(self.exchange.start(), tiled, selection, transport)

    def volume(self, bucket: Bucket) -> Volume:
        """Return what the exchange sends of the coefficients, as many on each rank; see Reducer."""
        k, wire = target_count(self.density_policy.density, bucket.numel), Wire(self.codec, self.indices)
        choice = Choice.of(bucket, Choosing(knows_counts=True), Overlap.ANY, k, wire)
        return bucket.volume(*self.exchange.volume(choice))

    @staticmethod
    def _write(exchanged: Exchanged, tiling: Tiling, scratch: Tensor, grad: Tensor) -> Reduction[Tensor | None]:
        """Write the mean into ``grad``; return what it loses on being rounded."""

        def write() -> Tensor | None:
            out = grad if grad.dtype == scratch.dtype else None
            return write_(tiling.inverse(_spread_(exchanged.update, scratch), out), grad)

        unsent: Tensor | None = yield Fill(into=grad, work=write)
        return unsent


def _spread_(parts: tuple[SparseValues, ...], out: Tensor) -> Tensor:
    """Set ``out`` (numel,) to the sum of ``parts`` and return it."""
    out.zero_()
    for part in parts:
        part.add_to_(out)
    return out


def _relative_error_(tiled: Tensor, sent: SparseValues) -> Tensor:
    """Return () what sending loses of the accumulator, by the norms of coefficients: the transform keeps them.

    ``tiled`` loses what was sent.
    """
    whole = norm(tiled, dtype=torch.float64)
    lost = norm(tiled.index_select(0, sent.indices) - sent.values, dtype=torch.float64)
    tiled.index_fill_(0, sent.indices.long(), 0.0)
    norms = torch.stack([norm(tiled, dtype=torch.float64), lost])
    error: Tensor = norms.norm() / whole.clamp_min(torch.finfo(torch.float64).tiny)
    return error
