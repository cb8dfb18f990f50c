"""The reducer of DeMo: sends the largest DCT coefficients of each tile, and keeps the rest as momentum."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from micro.codecs.base import Codec
from micro.codecs.raw import Raw
from micro.comm.ranks import Comm
from micro.comm.requests import Fill, Reduction
from micro.density.base import Target, target_count
from micro.exchanges.base import Exchange, Transport, Wire
from micro.exchanges.gather import Gather
from micro.exchanges.predicted_traffic import Choice
from micro.feedback.base import Feedback
from micro.feedback.residual import ErrorFeedback
from micro.parts import as_part
from micro.predicted_traffic import Bucket, Choosing, Volume
from micro.reducers.outcome import write_
from micro.selectors.pieces import largest_of_each
from micro.selectors.topk import shares
from micro.values.norms import norm
from micro.values.sparse import Overlap, Selection, SparseValues, Step
from micro.zoo.tiles import Tiling, tile_pieces, tiling_of
from micro.zoo.transforming import Coefficients, Transforming

Transform = Literal["dct", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DCTReducer(Transforming):
    """Send the largest coefficients of each tile: ``acc = decay * residual + grad``, ``residual = acc - sent``.

    With a decay of 0.999 the residual is DeMo's momentum, from which each rank subtracts what it sends. Every parameter
    is viewed as a matrix, its first dimension by all others, and cut into tiles of ``size`` by ``size``, smaller at the
    edges; a vector into runs of ``size``. Each tile contributes a share of its coefficients, exactly k in all; ties go
    to the first. Mass is conserved. DeMo's steps by the sign of the update are left to the optimizer (micro.SignSGD).

    Args:
        density: share of the coefficients, in (0, 1], or a schedule of it. DeMo's 32 of 64 x 64 are 1/128.
        size: side length of a tile.
        transform: 'dct', or 'none' to compare with untransformed tiles.
        exchange: gather; its rule 'senders' averages over the ranks that sent, as the public code does.
        codec, indices: codecs of coefficients and of their indices.
        feedback: 'residual' with its decay, or 'none'.
        nonfinite, seed: see `Transforming`.

    Source: Peng, Quesnelle & Kingma, DeMo: Decoupled Momentum Optimization, 2024, arXiv 2411.19870, and its public
    code. Differences: tiles whose sides need not divide those of the matrix (the code's tiles are 1 wide if a side is a
    prime above 64, and it sends half of a vector, at 150 % of its dense bytes); convolutions; the mean over all ranks
    instead of those that sent a coefficient; one message for all parameters, with int32 indices; no learning rate in
    the momentum.

    Raises:
        ValueError: a setting out of range, or another exchange than gather.
    """

    size: int = 64
    transform: Transform = "dct"
    exchange: Exchange[Any] = field(default_factory=Gather)
    codec: Codec = field(default_factory=Raw)
    feedback: Feedback = field(default_factory=partial(ErrorFeedback, decay=0.999))
    name: ClassVar[str] = "dct"

    def __post_init__(self) -> None:
        Transforming.__post_init__(self)
        object.__setattr__(self, "exchange", as_part(Exchange, self.exchange))
        object.__setattr__(self, "codec", as_part(Codec, self.codec))
        if self.size < 1:
            raise ValueError(f"size of dct must be at least 1, got {self.size}")
        if self.transform not in get_args(Transform):
            raise ValueError(
                f"transform of dct must be one of {', '.join(get_args(Transform))}, got '{self.transform}'"
            )
        if self.exchange.name != "gather":
            raise ValueError(f"exchange of dct must be gather, got '{self.exchange.name}'")
        self.exchange.check_wire(self.wire)
        if self.codec.diverges_with_feedback and self.keeps:
            raise ValueError(
                f"codec {self.codec.name} as published makes residuals grow: set feedback=none or rule=repaired"
            )

    @property
    def wire(self) -> Wire:
        """The codecs of coefficients and of their indices."""
        return Wire(self.codec, self.indices)

    @property
    def rule_name(self) -> str | None:
        """The rules of the parts, or None if they have none."""
        rules = [part.rule_name for part in (self.exchange, self.density_policy, self.codec)]
        return "+".join(dict.fromkeys(rule for rule in rules if rule)) or None

    def send(self, acc: Tensor, grad: Tensor, target: Target, step: Step, comm: Comm) -> Reduction[Coefficients]:
        """Send the largest coefficients of each tile of ``acc`` and make ``grad`` the mean; see Transforming."""
        before = comm.now(grad.device)
        tiling = step.layout.kept(tiling_of, self.size, self.transform == "dct")
        tiled, pieces = tiling.forward(acc), step.layout.kept(tile_pieces, self.size, acc.device)
        chosen = largest_of_each(tiled, pieces, shares(pieces, target.count))
        select = comm.now(grad.device) - before
        transport = Transport(comm=comm, step=step, overlap=Overlap.ANY, wire=self.wire)
        selection = Selection(chosen, counts=(chosen.numel(),) * comm.world_size)
        exchanged = yield from self.exchange.exchange(self.exchange.start(), tiled, selection, transport)
        error = own = unsent = None
        if exchanged.is_finite is not False:
            error = _relative_error_(tiled, exchanged.sent)
            own = tiling.inverse(_spread_((exchanged.sent,), tiled)) if self.keeps else None
            unsent = yield Fill(into=grad, work=lambda: _write(exchanged.update, tiling, tiled, grad))
        return Coefficients(
            counts=exchanged.counts,
            num_updated=exchanged.num_updated,
            is_finite=exchanged.is_finite,
            select=select,
            error=error,
            own=own,
            unsent=unsent,
        )

    def volume(self, bucket: Bucket) -> Volume:
        """Return the exchange's messages, with equally many coefficients on each rank; see Reducer."""
        k = target_count(self.density_policy.density, bucket.numel)
        choice = Choice.of(bucket, Choosing(knows_counts=True), Overlap.ANY, k, self.wire)
        return bucket.volume(*self.exchange.volume(choice))


def _write(parts: tuple[SparseValues, ...], tiling: Tiling, scratch: Tensor, grad: Tensor) -> Tensor | None:
    """Write the mean into ``grad``; return its rounding error."""
    out = grad if grad.dtype == scratch.dtype else None
    return write_(tiling.inverse(_spread_(parts, scratch), out), grad)


def _spread_(parts: tuple[SparseValues, ...], out: Tensor) -> Tensor:
    """Set ``out`` (numel,) to the sum of ``parts`` and return it."""
    out.zero_()
    for part in parts:
        part.add_to_(out)
    return out


def _relative_error_(tiled: Tensor, sent: SparseValues) -> Tensor:
    """Return () the relative error of what was sent, from norms of coefficients, which the transform preserves.

    What was sent is subtracted from ``tiled``.
    """
    whole = norm(tiled, dtype=torch.float64)
    lost = norm(tiled.index_select(0, sent.indices) - sent.values, dtype=torch.float64)
    tiled.index_fill_(0, sent.indices.long(), 0.0)
    norms = torch.stack([norm(tiled, dtype=torch.float64), lost])
    error: Tensor = norms.norm() / whole.clamp_min(torch.finfo(torch.float64).tiny)
    return error
