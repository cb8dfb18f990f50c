"""DeAR: the second half of each all-reduce waits for the next forward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule, Timeline, groups_of, timeline
from micro.planning.schedules.by_size import MIB, check_cap
from micro.planning.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Dear(Schedule):
    """Reduce-scatter gradients during backward, and gather their sums during the next forward, as it needs them.

    Each group's all-reduce is split at no cost: backward hides the one half, forward the other. DDP cannot carry this
    out, so it can be planned and simulated.

    Args:
        cap_mb: groups are filled in FORWARD order while they stay below so many MiB.

    Source: Zhang et al., DeAR, ICDCS 2023, arXiv 2302.12445, and its public code; the tuning of the cap is left out.
    Differences: gathers follow each other without a pause, where the code starts one only when forward has come to the
    group before; parameters are grouped, where the code groups modules; the code's waits for the host are left out.

    Raises:
        ValueError: a cap that is not positive.
    """

    cap_mb: float = 25.0
    name: ClassVar[str] = "dear"
    runs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_cap(self.cap_mb)

    def cut(self, problem: Problem) -> Ends:
        """Return groups below the cap, or of one gradient, filled from the layer that forward needs first."""
        num_layers = len(problem.trace.layers)
        ends = [num_layers]
        for start in reversed(range(num_layers - 1)):  # the open group, in backward order, goes from here to ends[-1]
            if problem.num_bytes(start, ends[-1]) >= self.cap_mb * MIB:
                ends.append(start + 1)
        return tuple(reversed(ends))

    def timeline(self, problem: Problem, ends: Sequence[int]) -> Timeline:
        """Return a step from backward to the end of the next forward.

        The transfers are the reduce-scatters. ``end_s`` counts as exposed what neither backward nor forward hid. The
        update of a layer comes before its forward; ``update_s`` is shared out by bytes.
        """
        scattered = timeline(
            replace(problem, exchange=lambda size: problem.exchange(size) - problem.gather(size)), ends
        )
        end = scattered.end_s + _lateness(problem, ends)
        return replace(scattered, end_s=end, step_s=problem.trace.forward_s + end + problem.trace.update_s)


def _lateness(problem: Problem, ends: Sequence[int]) -> float:
    """Return by how many seconds the gathers delay the forward that starts together with the first of them.

    A layer starts at max(end of the layer before, end of its group's gather).
    """
    lane, gathered = 0.0, {}  # of each layer, when its group is gathered
    for start, stop in reversed(list(groups_of(ends))):
        lane += problem.gather(problem.num_bytes(start, stop))
        gathered.update(dict.fromkeys(range(start, stop), lane))
    trace, used = problem.trace, used_s(problem.trace)
    late = updates = 0.0
    for place in sorted(range(len(used)), key=lambda place: (used[place], -place)):  # forward order
        late = max(late, gathered[place] - used[place] - updates)
        updates += trace.update_s * trace.layers[place].num_bytes / trace.num_bytes
    return late


def used_s(trace: Trace) -> tuple[float, ...]:
    """Return when forward first needs each layer, in seconds from its start.

    Where that was not measured, forward is taken to be backward in reverse, shorter or longer as a whole.
    """
    measured = [layer.used_s for layer in trace.layers if layer.used_s is not None]
    if len(measured) == len(trace.layers):
        return tuple(measured)
    last = trace.layers[-1].ready_s
    share = trace.forward_s / last if last else 0.0
    return tuple((last - layer.ready_s) * share for layer in trace.layers)
