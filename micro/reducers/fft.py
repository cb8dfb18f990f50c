"""FFT sparsification: the strongest frequencies of the gradient, in few bits."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.codecs.base import Codec
from micro.codecs.range_float import RangeFloat
from micro.codecs.raw import Raw
from micro.comm import Comm
from micro.density.base import Density, target_count
from micro.feedback import Feedback, NoFeedback
from micro.health import Finite, flag_of, is_finite_by, soonest
from micro.index_codecs import Bitmap, IndexCodec
from micro.nonfinite import Policy, check_policy
from micro.parts import as_part
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome, checked, cut_
from micro.reducers.rounding import write_
from micro.reducers.spectrum import Bins, complex_bins, real_parts, strongest, vector_of
from micro.reducers.with_density import WithDensity
from micro.requests import AllGatherLists, Once, Reduction
from micro.stats import Start, stats_of
from micro.traffic import Bucket, Volume
from micro.transforms import num_bins, to_spectrum


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What all ranks sent.

    Attributes:
        parts: in rank order.
        are_finite: () bool, whether all gradients were.
        num_chosen: () int64, the bins that any rank chose.
    """

    parts: list[Bins]
    are_finite: Tensor
    num_chosen: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FFTReducer(WithDensity):
    """Send the strongest bins of the gradient's spectrum, quantised: a share ``density`` = 1 - theta of them.

    Every rank transforms its accumulator, keeps the bins that hold most of its energy, and sends which they are and
    their real and imaginary parts. The spectra are added up and transformed back once. The update is dense: counts and
    densities of the statistics are of bins, and ``relative_error`` is exact but for rounding, by Parseval: what the
    dropped bins and the quantiser lost, an upper bound where the vector was padded.

    Bytes sent per rank, for k of F bins: (n-1) (F/8 + 2 bits k / 8 + 1), each term rounded up to whole bytes, and the
    header of the quantiser. Two collectives. Replicas are equal bit for bit where all ranks run the same library on the
    same kind of processor: every rank transforms back on its own.

    Args:
        density: share of the bins kept, in (0, 1], or a schedule of it. Convergence is proven for a theta that
            diminishes, which is a density that rises: WarmUp with start_density below density.
        bits: of a real or imaginary part, in the range-based float; 32 sends them as they are.
        feedback: 'none' drops what was not sent, as published; 'residual' keeps it, for one more transform.
        indices: the form in which the kept bins are named; a bit for each bin by default, which 'shortest' undercuts at
            densities below a few percent. A part, its name, or a mapping.
        nonfinite: 'stop' raises on all ranks when a gradient holds NaN or Inf, 'skip' makes that update zero.
        seed: for a quantiser that is random.

    Source: Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC
    2020, doi 10.1145/3369583.3392681; arXiv 1811.08596. Differences: the vector is padded to a length that is fast to
    transform; the first and the last bin stand for one frequency, the others for two, and are selected by that energy;
    the range of the quantiser is each message's own; the residual is an addition. No public code of the compressor is
    known.

    Raises:
        ValueError: a density outside (0, 1], bits that the quantiser does not have, or another feedback.
    """

    density: Density[Any] | float
    bits: int = 10
    feedback: Feedback = field(default_factory=NoFeedback)
    indices: IndexCodec = field(default_factory=Bitmap)
    nonfinite: Policy = "stop"
    seed: int = 0
    name: ClassVar[str] = "fft"

    def __post_init__(self) -> None:
        object.__setattr__(self, "feedback", as_part(Feedback, self.feedback))
        object.__setattr__(self, "indices", as_part(IndexCodec, self.indices))
        check_policy(self.nonfinite)
        if self.density_policy.by_layer:
            raise ValueError(
                f"density {self.density_policy.name} differs by layer, fft sees frequencies of all: use another"
            )
        if self.feedback.name not in ("none", "residual"):
            raise ValueError(f"feedback of fft must be one of none, residual, got '{self.feedback.name}'")
        _ = self.codec

    @property
    def rule_name(self) -> str | None:
        """Which published behaviour the density follows, or None where there is only one."""
        return self.density_policy.rule_name

    @property
    def codec(self) -> Codec:
        """The form of real and imaginary parts on the wire."""
        return Raw() if self.bits == 32 else RangeFloat(bits=self.bits)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        start = Start.of(comm, grad.device)
        step, numel = state.step, grad.numel()
        target = yield from self.density_policy.target(state.density, grad, step, state.layout, comm)
        forgotten = self.feedback.forgotten(state.memory)
        acc, bad = self.feedback.accumulate_(state.memory, grad, world_size=comm.world_size)
        before = comm.now(grad.device)
        spectrum = to_spectrum(acc)
        kept, dropped = strongest(spectrum, target_count(target.density, spectrum.numel()))
        select = comm.now(grad.device) - before
        gathered = yield from self._gather(
            kept, spectrum.numel(), (self.seed, step, comm.rank), comm, is_finite=is_finite_by(bad, numel)
        )
        state.step += 1
        keeps = self.feedback.name == "residual"
        own = vector_of(gathered.parts[comm.rank : comm.rank + 1], spectrum, numel) if keeps else None
        is_finite, unsent = soonest(gathered.are_finite), None
        if is_finite is not False:
            mean = yield Once(work=lambda: vector_of(gathered.parts, spectrum, numel).div_(comm.world_size))
            unsent = write_(mean, grad)
        norms = _norms(gathered.parts[comm.rank], kept, dropped)
        made = checked(grad, *norms, forgotten, is_finite=is_finite, num_updated=gathered.num_chosen)
        if made.bad_update is not None:
            cut_(acc, slice(None), comm.world_size * numel)
        *known, lost = made.records
        count = kept.indices.numel()
        stats = stats_of(
            start,
            comm,
            grad.device,
            step=step,
            numel=numel,
            rule=self.rule_name,
            target_density=target.density,
            target_count=count,
            counts=(count,) * comm.world_size,
            global_count=made.num_updated,
            select=select,
            forgotten=lost,
            relative_error=_relative_error(*known),
            num_bins=spectrum.numel(),
        )

        def on_deliver() -> None:
            for vector, sign in ((own, -1), (unsent, 1)):
                if vector is not None and keeps:
                    acc.add_(vector, alpha=sign)

        findings = made.findings(state.layout, bad)
        return Outcome(stats=stats, grad=grad, findings=findings, on_deliver=on_deliver)

    def volume(self, bucket: Bucket) -> Volume:
        """Return the gathering of places, and of values with the finite flag; see Reducer."""
        bins = num_bins(bucket.numel)
        count = target_count(self.density_policy.density, bins)
        places, values = self.indices.num_bytes(count, bins), self.codec.num_bytes(2 * count, bucket.dtype)
        return bucket.volume((("gather_lists", places), ("gather_lists", values + 1)), bucket.numel)

    def _gather(
        self, kept: Bins, span: int, key: tuple[int, ...], comm: Comm, *, is_finite: Finite
    ) -> Reduction[_Gathered]:
        """Return every rank's bins as decoded; all ranks send equally many, so that the sizes are known."""
        n, count, parts, codec = comm.world_size, kept.indices.numel(), real_parts(kept.values), self.codec
        flag = flag_of(is_finite, torch.uint8, parts.device)
        places = self.indices.encode(kept.indices, span)
        wire = torch.cat([codec.encode(parts, key), flag])
        maps = (yield AllGatherLists(mine=places, counts=[places.numel()] * n, kind="indices")).view(n, -1)
        wires = (yield AllGatherLists(mine=wire, counts=[wire.numel()] * n, kind="values")).view(n, -1)
        gathered: _Gathered = yield Once(work=lambda: self._decoded(maps, wires, count, span, parts.dtype))
        return gathered

    def _decoded(self, maps: Tensor, wires: Tensor, count: int, span: int, dtype: torch.dtype) -> _Gathered:
        """Return the bins of all ranks, ``count`` of ``span`` each, from their messages (world_size, bytes)."""
        indices = [self.indices.decode(blob, count, span) for blob in maps]
        values = [self.codec.decode(blob[:-1], 2 * count, dtype) for blob in wires]
        bins = [Bins(i, complex_bins(v)) for i, v in zip(indices, values, strict=True)]
        chosen = torch.zeros(span, dtype=torch.bool, device=maps.device)
        for part in bins:
            chosen.index_fill_(0, part.indices.long(), True)
        return _Gathered(bins, wires[:, -1].bool().all(), chosen.sum())


def _norms(sent: Bins, kept: Bins, dropped: Tensor) -> list[Tensor]:
    """Return the norms () of what was kept, what was dropped, and what rounding lost of what was sent."""
    rounding = real_parts(kept.values - sent.values)
    return [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (real_parts(kept.values), dropped, rounding)]


def _relative_error(kept: float, dropped: float, rounding: float) -> float:
    """Return what was lost, by Parseval."""
    whole = math.hypot(kept, dropped)
    return math.hypot(dropped, rounding) / whole if whole else 0.0
