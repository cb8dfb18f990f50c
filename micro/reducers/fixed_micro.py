"""MiCRO in messages of fixed size: all that decides stays on the device, and its host waits for nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.density.base import Density
from micro.density.constant import Constant
from micro.feedback import ErrorFeedback
from micro.flat import Layout
from micro.kernels import places
from micro.kernels.candidates import NUM_BINS, Candidates
from micro.nonfinite import Policy, check_policy
from micro.partition import equal_slices
from micro.reducers.attempt import Attempt
from micro.reducers.base import BucketState, Reducer
from micro.reducers.fixed_cut import cut_at, first_place, next_place
from micro.reducers.late_attempt import LateAttempt, LateFindings, Verdict, raise_late_findings
from micro.reducers.rounding import rounded
from micro.selectors.histogram import magnitude_bins
from micro.stats import Start, traffic_fields

FEEDBACK = ErrorFeedback()
LOCAL = 2  # candidates that a rank looks at, per candidate in its message
SPARE = 2.0  # roots of the expected count, beside the slack


@dataclass(slots=True)
class FixedState:
    """What a bucket remembers, on its device, so that a captured CUDA graph goes on from step to step.

    Attributes:
        step: (1,) int64, steps done.
        place: (2,) int32, where candidates begin, as bits of a float32, and the bits within a bin of their counts.
        is_placed: whether that is known.
        found: buffers for the candidates of a step.
        ends: (2, world_size) int64, starts and stops of the slices.
        late_findings: of the last step, where the host has yet to learn of it and must stop if it was bad.
    """

    step: Tensor
    place: Tensor
    is_placed: bool = False
    found: Candidates | None = None
    ends: Tensor | None = None
    late_findings: LateFindings | None = None

    @classmethod
    def new(cls, device: torch.device, step: int = 0) -> "FixedState":
        """Return the state before step ``step``."""
        place = torch.zeros(2, dtype=torch.int32, device=device)
        return cls(torch.full((1,), step, dtype=torch.int64, device=device), place)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a step sent: at ``indices`` (m,), those beyond the vector being empty places.

    Attributes:
        own, mean: (m,) of this rank's accumulator, and of the gradient's dtype; zero in empty places and in bad steps.
        unsent: (m,) what the mean lost on being rounded, None where it lost nothing.
        is_bad: () bool, whether any rank's gradient was not finite.
    """

    indices: Tensor
    own: Tensor
    mean: Tensor
    unsent: Tensor | None
    is_bad: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMicro(Reducer):
    """Select k by one threshold inside rotating, exclusive slices, by messages whose sizes are known beforehand.

    A step takes two collectives. In the first a rank sends the counts of its candidates by magnitude, and the indices
    of its largest, as many as there is room for. All ranks find the same cut in the counts; what each keeps is at the
    beginning of its message. The second is an all-reduce of k values at these indices. Threshold, counts and cut are
    whole numbers on the device. No rank gives more than its message holds: what the slice of one lacks the others give,
    and what was left out waits in the residual. Where the scale of the gradients falls, fewer than k are sent for a few
    steps.

    A step in which a gradient was not finite changes nothing but the residual's finite part. On a CPU it raises at
    once where the policy is to stop. On a GPU the host learns of it at the next step of the bucket, which then raises:
    it has not waited. `StepStats` waits when it is first asked for a count. In a captured CUDA graph nothing raises.

    Source: slices, rotation and the threshold are those of Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967.
    Differences: as `Micro`; and a rank sends at most its message's room.

    Args:
        density: share of the vector to select, in (0, 1], or a policy of it.
        slack: the room of a message beyond k / world_size, as a share of that. Slices that hold more of the largest
            elements than others, as layers of another scale do, want more room.
        nonfinite, seed: as in SparseReducer; nothing is random.

    Raises:
        ValueError: a density outside (0, 1] or one that differs by layer, a slack that is negative.
    """

    density: Density[Any] | float
    slack: float = 1.0
    nonfinite: Policy = "stop"
    seed: int = 0
    name: ClassVar[str] = "micro_fixed"

    def __post_init__(self) -> None:
        check_policy(self.nonfinite)
        if not 0 <= self.slack < math.inf:
            raise ValueError(f"slack of {self.name} must be at least 0, got {self.slack}")
        if self.density_policy.by_layer:
            raise ValueError(f"density {self.density_policy.name} differs by layer, {self.name} does not: use topk")

    @property
    def rule_name(self) -> str | None:
        """Which published behaviour the density follows, or None where there is only one."""
        return self.density_policy.rule_name

    @property
    def density_policy(self) -> Density[Any]:
        """The density as a policy."""
        return self.density if isinstance(self.density, Density) else Constant(self.density)

    def room(self, k: int, numel: int, world_size: int) -> int:
        """Return how many candidates a rank's message holds."""
        expected = k / world_size
        wanted = math.ceil((1 + self.slack) * expected + SPARE * math.sqrt(expected))
        return min(wanted, -(-numel // world_size))

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state with nothing kept."""
        memory = FEEDBACK.start(layout.numel, dtype, device)
        return BucketState(layout, 0, memory, selector=FixedState.new(device), density=self.density_policy.start())

    def attempt_(self, state: BucketState, grad: Tensor, comm: Comm) -> Attempt:
        """Replace ``grad`` (numel,) by the mean update; what undoes it are the values at what was sent."""
        start = Start.of(comm, grad.device)
        own: FixedState = state.selector
        late_findings, own.late_findings = own.late_findings, None
        raise_late_findings(late_findings, comm, grad.device)
        target = self.density_policy.target(state.density, grad, state.step, state.layout, comm)
        k, step = target.count, state.step
        capacity = self.room(k, grad.numel(), comm.world_size)
        found = self._collected(own, state.residual, grad, k, capacity, comm)
        rows = comm.gather_rows(_message(found, state.residual.numel(), capacity), "indices")
        cut = cut_at(rows[:, :NUM_BINS], k, capacity, own.place)
        own.place.copy_(next_place(own.place, cut, k))
        own.step += 1
        state.step += 1
        is_bad = rows[:, NUM_BINS].any()
        indices = _kept(rows[:, NUM_BINS + 1 :], cut.taken, min(k, capacity * comm.world_size), grad.numel())
        sent = _exchanged(state.residual, grad, indices, is_bad, comm)
        verdict = Verdict(
            layout=state.layout,
            facts={
                "step": step,
                "numel": grad.numel(),
                "rule": self.rule_name,
                "target_density": target.density,
                "target_count": k,
                "spans": start.spans(comm, grad.device),
                **traffic_fields(comm.traffic),
            },
            rank=comm.rank,
            is_bad=sent.is_bad,
            first_bad=found.first_bad,
            numbers=torch.cat([cut.is_overfull, cut.bits, cut.taken]),
            take_back_where_=partial(_take_back_where_, state.residual, grad, sent),
            await_=partial(setattr, own, "late_findings"),
        )
        return LateAttempt(grad, verdict)

    def _collected(
        self, own: FixedState, residual: Tensor, grad: Tensor, k: int, capacity: int, comm: Comm
    ) -> Candidates:
        """Add the gradient to the residual, and return the candidates of this rank's slice."""
        longest = -(-grad.numel() // comm.world_size)
        size = min(LOCAL * capacity + NUM_BINS, longest)
        if own.ends is None or own.ends.shape[1] != comm.world_size:
            slices = equal_slices(grad.numel(), comm.world_size)
            own.ends = torch.tensor(slices, dtype=torch.int64).T.contiguous().to(grad.device)
        if own.found is None or own.found.indices.numel() != size:
            own.found = Candidates.empty(size, residual)
        span = own.ends.index_select(1, (own.step + comm.rank) % comm.world_size).view(-1).to(torch.int32)
        plan = torch.cat([span, own.place])
        if own.is_placed:
            kernels.absorb_and_collect_(residual, grad, plan, own.found)
            return own.found
        nothing = torch.cat([span[:1], span[:1], own.place])
        kernels.absorb_and_collect_(residual, grad, nothing, own.found)
        start, stop = equal_slices(grad.numel(), comm.world_size)[(self._step_of(own) + comm.rank) % comm.world_size]
        own.place.copy_(first_place(comm.all_reduce_(magnitude_bins(residual[start:stop]), "counts"), k))
        kernels.collect_(residual, torch.cat([span, own.place]), own.found)
        own.is_placed = True
        return own.found

    @staticmethod
    def _step_of(own: FixedState) -> int:
        return int(own.step)  # host sync: once, in the first step

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors."""
        own: FixedState = state.selector
        state.step = self._step_of(own)  # replays of a CUDA graph are counted on the device
        selector = {"place": own.place.tolist() if own.is_placed else None}
        return Reducer.save(self, state) | {"selector": selector, "density": self.density_policy.save(state.density)}

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state that ``save`` described."""
        state = Reducer.load(self, saved, dtype, device)
        own = state.selector = FixedState.new(device, state.step)
        if "selector" in saved:
            state.density = self.density_policy.load(saved["density"])
            if (place := saved["selector"]["place"]) is not None:
                own.place, own.is_placed = torch.tensor(place, dtype=torch.int32).to(device), True
        return state

    def rebuild(
        self, layout: Layout, old: Sequence[BucketState], dtype: torch.dtype, device: torch.device
    ) -> BucketState:
        """Return the state of a new bucket; see Reducer."""
        state = Reducer.rebuild(self, layout, old, dtype, device)
        state.selector.step.fill_(state.step)
        return state


def _message(found: Candidates, numel: int, capacity: int) -> Tensor:
    """Return a rank's row (NUM_BINS + 1 + capacity,) int32: counts, whether it is bad, its largest from above."""
    indices = found.indices.index_select(0, kernels.largest_first(found.values, capacity))
    padded = torch.nn.functional.pad(indices, (0, capacity - indices.numel()), value=numel)
    return torch.cat([found.bins, (found.first_bad < numel).to(torch.int32), padded])


def _kept(candidates: Tensor, taken: Tensor, room: int, numel: int) -> Tensor:
    """Return the indices (room,) int32 that all ranks keep, in rank order, then ``numel`` in places that are empty.

    Args:
        candidates: (world_size, capacity) from the messages, of each of which ``taken`` are kept.
    """
    if candidates.device.type == "cpu":
        kept = torch.cat([row[:count] for row, count in zip(candidates, taken.tolist(), strict=True)])[:room]
        return torch.nn.functional.pad(kept, (0, room - kept.numel()), value=numel)
    is_kept = torch.arange(candidates.shape[1], device=candidates.device) < taken[:, None]
    place = (is_kept.view(-1).cumsum(0) - 1).where(is_kept.view(-1), room)
    indices = candidates.new_full((room + 1,), numel)
    indices.scatter_(0, place, candidates.reshape(-1))  # what is not kept falls into the place beyond the end
    return indices[:room]


def _exchanged(residual: Tensor, grad: Tensor, indices: Tensor, is_bad: Tensor, comm: Comm) -> _Sent:
    """Average the residuals at ``indices``, make ``grad`` the mean, and take out of the residual what was sent."""
    is_used = (indices < grad.numel()) & ~is_bad
    nothing = residual.new_zeros(())
    own = places.gather(residual, indices.clamp_max(grad.numel() - 1)).where(is_used, nothing)
    mean = comm.all_reduce_(own.clone()) / comm.world_size
    lower = mean if grad.dtype == mean.dtype else rounded(mean, grad.dtype)
    unsent = None if lower is mean else mean - lower
    sent = _Sent(indices, own, lower, unsent, is_bad)
    kernels.scatter_add_(residual, indices, -own)
    if unsent is not None:
        kernels.scatter_add_(residual, indices, unsent)
    kernels.scatter_add_(grad, indices, lower)
    return sent


def _take_back_where_(residual: Tensor, grad: Tensor, sent: _Sent, is_bad: Tensor) -> None:
    """Make the residual what it would be had nothing been sent, bit for bit, and the update zero, where ``is_bad``."""

    def masked(values: Tensor) -> Tensor:
        return values.where(is_bad, values.new_zeros(()))

    if sent.unsent is not None:
        kernels.scatter_add_(residual, sent.indices, masked(-sent.unsent))
    kernels.scatter_add_(residual, sent.indices, masked(sent.own))
    kernels.scatter_add_(grad, sent.indices, masked(-sent.mean))
