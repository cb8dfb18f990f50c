"""Candidates of a step in buffers of a fixed size: their number stays on the device, so that no host waits for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from micro.kernels import reference

NUM_BINS = 32  # counts by magnitude


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a step collected, all of it on the device of the vectors.

    Attributes:
        indices: (capacity,) int32, ascending, then ``numel`` of the vector where nothing is.
        values: (capacity,) what stands at the indices; 0 where nothing is.
        found: (1,) int32 number of elements that passed. Where it exceeds the capacity, those of the lowest indices
            are there.
        first_bad: (1,) int32 index of the first sum that is not finite or too large, ``numel`` where there is none.
        bins: (NUM_BINS,) int32 counts of all that passed, by ranges of magnitude.
    """

    indices: Tensor
    values: Tensor
    found: Tensor
    first_bad: Tensor
    bins: Tensor

    @classmethod
    def empty(cls, capacity: int, residual: Tensor) -> "Candidates":
        """Return buffers for ``capacity`` candidates from ``residual`` (numel,)."""
        counts = torch.zeros(NUM_BINS + 2, dtype=torch.int32, device=residual.device)
        indices = torch.full((capacity,), residual.numel(), dtype=torch.int32, device=residual.device)
        return cls(indices, residual.new_zeros(capacity), counts[:1], counts[1:2], counts[2:])

    def clear_(self, numel: int) -> None:
        """Set everything to what holds where nothing was found in a vector of ``numel``."""
        self.indices.fill_(numel)
        self.first_bad.fill_(numel)
        for counted in (self.values, self.found, self.bins):
            counted.zero_()


def plan(start: int, stop: int, lowest_bits: int, shift: int, device: torch.device) -> Tensor:
    """Return (4,) int32 what is to be collected: everything in [start, stop) with at least a certain magnitude.

    Args:
        lowest_bits: the magnitude, as the bits of a float32; it is at least 1.
        shift: 2**shift bit patterns share a bin; the highest bin takes what lies above it too.
    """
    return torch.tensor([start, stop, lowest_bits, shift], dtype=torch.int32).to(device)


def absorb_and_collect_(residual: Tensor, grad: Tensor, plan: Tensor, candidates: Candidates) -> None:
    """Do what `micro.kernels.absorb_and_collect_` does, in plain torch and without a read by the host."""
    candidates.clear_(grad.numel())
    candidates.first_bad.copy_(reference.absorb_flagged_(residual, grad))
    collect_(residual, plan, candidates)


def collect_(residual: Tensor, plan: Tensor, candidates: Candidates) -> None:
    """Collect what ``plan`` describes of ``residual`` (numel,) into cleared ``candidates``."""
    start, stop, lowest_bits, shift = plan.unbind()
    places = torch.arange(residual.numel(), dtype=torch.int32, device=residual.device)
    magnitudes = residual.abs()
    chosen = (places >= start) & (places < stop) & (magnitudes >= lowest_bits.view(torch.float32))
    ends, capacity = chosen.cumsum(0, dtype=torch.int32), candidates.indices.numel()
    target = (ends - 1).where(chosen & (ends <= capacity), capacity).long()
    for out, source in ((candidates.indices, places), (candidates.values, residual)):
        with_rest = torch.cat([out, out.new_empty(1)])  # what is not chosen falls into the place beyond the end
        out.copy_(with_rest.scatter_(0, target, source)[:capacity])
    candidates.found.copy_(chosen.sum(dtype=torch.int32))
    bins = (magnitudes.to(torch.float32).view(torch.int32) - lowest_bits >> shift).clamp_(0, NUM_BINS - 1)
    counts = torch.zeros(NUM_BINS, dtype=torch.int32, device=residual.device)
    candidates.bins.copy_(counts.scatter_add_(0, bins.long(), chosen.to(torch.int32)))


def absorb_and_collect_on_host_(residual: Tensor, grad: Tensor, plan: Tensor, candidates: Candidates) -> None:
    """Do the same by the loops of a CPU, whose host may read what it likes."""
    from micro import kernels

    candidates.clear_(grad.numel())
    first_bad = kernels.absorb_(residual, grad)
    if first_bad is not None:
        candidates.first_bad.fill_(first_bad)
    collect_on_host_(residual, plan, candidates)


def collect_on_host_(residual: Tensor, plan: Tensor, candidates: Candidates) -> None:
    """Do what `collect_` does by the loops of a CPU."""
    from micro import kernels
    from micro.kernels import places

    start, stop, lowest_bits, shift = plan.tolist()
    searched = residual[start:stop]
    indices, _, counts = kernels.cuts_for(searched).collect(searched, start, lowest_bits, shift)
    kept = indices[: candidates.indices.numel()]
    candidates.indices[: kept.numel()] = kept
    candidates.values[: kept.numel()] = places.gather(residual, kept)
    candidates.found.fill_(indices.numel())
    candidates.bins.copy_(counts)
