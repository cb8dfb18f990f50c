"""The reducer of FFT sparsification: sends the strongest frequencies of the gradient, quantised."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import coding
from micro.codecs.base import Codec
from micro.codecs.indices import Bitmap, IndexCodec
from micro.codecs.raw import Raw
from micro.comm.ranks import Comm
from micro.comm.requests import AllGatherLists, Once, Reduction
from micro.density.base import Target, target_count
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.outcome import write_
from micro.values.finite import flag_of, soonest
from micro.values.sparse import Step
from micro.zoo.range_float import RangeFloat
from micro.zoo.spectrum import Bins, complex_bins, num_bins, real_parts, strongest, to_spectrum, vector_of
from micro.zoo.transforming import Coefficients, Transforming


@dataclass(frozen=True, slots=True, kw_only=True)
class FFTReducer(Transforming):
    """Send the strongest bins of the gradient's spectrum, quantised: a share ``density`` = 1 - theta of them.

    Every rank transforms its accumulator and sends the bins with the most energy: their indices, real and imaginary
    parts. The spectra are summed and transformed back once. Counts and densities in the statistics refer to bins;
    ``relative_error`` is an upper bound if the vector was padded.

    Bytes sent per rank, for k of F bins: (n-1) (F/8 + 2 bits k / 8 + 1), each term rounded up to whole bytes, and the
    header of the quantiser. Two collectives.

    Args:
        density: share of the bins kept, in (0, 1], or a schedule of it. Convergence is proven for a falling theta, that
            is, a rising density: WarmUp with start_density below density.
        bits: of a real or imaginary part, in the range-based float; 32: unencoded.
        feedback: 'none' drops what was not sent, as published; 'residual' keeps it, at the cost of another transform.
        indices: codec of the bins' indices, by default a bitmap; 'shortest' is shorter at densities below a few
            percent. A part, its name, or a mapping.
        nonfinite, seed: see `Transforming`.

    Source: Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC
    2020, doi 10.1145/3369583.3392681; arXiv 1811.08596. Differences: the vector is padded to a length that is fast to
    transform; selection by energy accounts for the first and last bin standing for one frequency, the others for two;
    each message has its own quantiser range; the residual is an addition. No public code of the compressor is known.

    Raises:
        ValueError: a density outside (0, 1], an unsupported number of bits, or another feedback.
    """

    bits: int = 10
    indices: IndexCodec = field(default_factory=Bitmap)
    name: ClassVar[str] = "fft"

    def __post_init__(self) -> None:
        Transforming.__post_init__(self)
        _ = self.codec

    @property
    def rule_name(self) -> str | None:
        """The rule of the density, or None if it has none."""
        return self.density_policy.rule_name

    @property
    def codec(self) -> Codec:
        """The codec of real and imaginary parts."""
        return Raw() if self.bits == 32 else RangeFloat(bits=self.bits)

    def send(self, acc: Tensor, grad: Tensor, target: Target, step: Step, comm: Comm) -> Reduction[Coefficients]:
        """Send the strongest bins of ``acc`` and make ``grad`` the mean; see Transforming."""
        n, numel, before = comm.world_size, acc.numel(), comm.now(grad.device)
        spectrum = to_spectrum(acc)
        kept, dropped = strongest(spectrum, target_count(target.density, spectrum.numel()))
        select = comm.now(grad.device) - before
        parts, are_finite, num_chosen = yield from self._gather(kept, spectrum.numel(), step, comm)
        mine = parts[comm.rank]
        own = vector_of([mine], spectrum, numel) if self.keeps else None
        is_finite, unsent = soonest(are_finite), None
        if is_finite is not False:
            mean = yield Once(work=lambda: vector_of(parts, spectrum, numel).div_(n))
            unsent = write_(mean, grad)
        return Coefficients(
            counts=(kept.indices.numel(),) * n,
            num_updated=num_chosen,
            is_finite=is_finite,
            select=select,
            error=_relative_error(mine, kept, dropped),
            own=own,
            unsent=unsent,
            num_bins=spectrum.numel(),
        )

    def volume(self, bucket: Bucket) -> Volume:
        """Return the all-gathers of indices, and of values with the finite flag; see Reducer."""
        bins = num_bins(bucket.numel)
        count = target_count(self.density_policy.density, bins)
        places, values = self.indices.num_bytes(count, bins), self.codec.num_bytes(2 * count, bucket.dtype)
        return bucket.volume((("gather_lists", places), ("gather_lists", values + 1)), bucket.numel)

    def _gather(self, kept: Bins, span: int, step: Step, comm: Comm) -> Reduction[tuple[list[Bins], Tensor, Tensor]]:
        """Return all ranks' decoded bins, () whether all gradients were finite, () the number of distinct bins.

        All ranks send equally many, so sizes are known.
        """
        n, count, values, codec = comm.world_size, kept.indices.numel(), real_parts(kept.values), self.codec
        flag = flag_of(step.is_finite, torch.uint8, values.device)
        places = self.indices.encode(kept.indices, span)
        wire = torch.cat([coding.encode(codec, values, (step.seed, step.index, comm.rank)), flag])
        maps = (yield AllGatherLists(mine=places, counts=[places.numel()] * n, kind="indices")).view(n, -1)
        wires = (yield AllGatherLists(mine=wire, counts=[wire.numel()] * n, kind="values")).view(n, -1)

        def decoded() -> tuple[list[Bins], Tensor, Tensor]:
            parts, chosen = list[Bins](), torch.zeros(span, dtype=torch.bool, device=maps.device)
            for places, blob in zip(maps, wires, strict=True):
                theirs = coding.decode(codec, blob[:-1], 2 * count, values.dtype)
                parts.append(Bins(self.indices.decode(places, count, span), complex_bins(theirs)))
                chosen.index_fill_(0, parts[-1].indices.long(), True)
            return parts, wires[:, -1].bool().all(), chosen.sum()

        gathered: tuple[list[Bins], Tensor, Tensor] = yield Once(work=decoded)
        return gathered


def _relative_error(sent: Bins, kept: Bins, dropped: Tensor) -> Tensor:
    """Return () the relative error by Parseval, from ``dropped`` bins and the rounding of those sent."""
    rounding = real_parts(kept.values - sent.values)
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (real_parts(kept.values), dropped, rounding)]
    whole, lost = torch.stack(norms[:2]).norm(), torch.stack(norms[1:]).norm()
    share: Tensor = lost / whole.clamp_min(torch.finfo(torch.float64).tiny)
    return share
