"""What sparse methods compute and send for the model's own gradients, measured on the hosts.

Closed forms know the bytes of gradients drawn at random. How far ranks choose alike, and how unequal their messages
are, follows from the gradients of the model; a collective lasts as long as on the rank with the largest message.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import micro
from experiments.benchmarks.network_training import CPU, FP16, config_of
from experiments.profiles import link
from experiments.ranks.measures import Row, slowest
from experiments.studies.gradient_sources import layered
from experiments.studies.methods import build_methods
from experiments.training.tasks import load_task
from micro import kernels
from micro.comm import Comm, GroupComm, Kind
from micro.flat import Layout
from micro.operations import Op
from micro.planning.tables import LinkTable

NUM_GRADIENTS = 3  # taken in turn
SETTLING_STEPS = 8


@dataclass(frozen=True, slots=True)
class MethodProfile:
    """One method over the length of the vector.

    Attributes:
        lengths: of vectors, rising.
        seconds: beside the collectives, for each length.
        calls: the collectives in turn, each with its bytes at each length, as `LinkTable` counts them; of the rank
            with the largest message, those of a scatter in whichever direction is more.
    """

    lengths: Sequence[int]
    seconds: Sequence[float]
    calls: Sequence[tuple[Op, Sequence[float]]]

    def select_s(self, numel: float) -> float:
        """Return the seconds beside the collectives."""
        return self._at(numel, self.seconds)

    def exchange_s(self, numel: float, network: LinkTable) -> float:
        """Return the seconds of the collectives on a link."""
        return sum(network.seconds(op, self._at(numel, sizes)) for op, sizes in self.calls)

    def messages(self, numel: float, network: LinkTable) -> tuple[tuple[float, float], ...]:
        """Return the latency and the transfer of each collective, in seconds."""
        costs = [(network.seconds(op, 0.0), network.seconds(op, self._at(numel, sizes))) for op, sizes in self.calls]
        return tuple((latency, max(0.0, seconds - latency)) for latency, seconds in costs)

    def slowed(self, factor: float) -> "MethodProfile":
        """Return the same with longer computation."""
        return replace(self, seconds=[factor * seconds for seconds in self.seconds])

    def _at(self, numel: float, values: Sequence[float]) -> float:
        return float(np.interp(numel, self.lengths, values))


class BothWays(GroupComm):
    """Counts a scatter by what this rank sends or receives, whichever is more: a link carries both at once."""

    def __init__(self) -> None:
        super().__init__()
        self._received_bytes = 0

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        numel = sum(received_sizes) - received_sizes[self.rank]
        self._received_bytes = numel * received.element_size()
        super()._exchange(received, sent, received_sizes, sent_sizes)

    def _count(self, kind: Kind, op: Op, size: int) -> None:
        super()._count(kind, op, max(size, self._received_bytes) if op == "scatter" else size)


class HalfMean:
    """What torch's fp16_compress_hook does with a bucket: the mean of half-precision gradients."""

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """Return no state."""

    def reduce_(self, state: None, grad: Tensor, comm: Comm) -> None:
        """Replace ``grad`` (numel,) by the mean over ranks."""
        half = grad.to(torch.float16).div_(comm.world_size)
        comm.all_reduce_(half)
        grad.copy_(half)


def profile_methods(methods: Mapping[str, bool], density: float, overrides: list[str], steps: int) -> dict[str, Row]:
    """Return the fields of each method's profile; every rank calls this.

    Args:
        methods: by name, whether it is used on buckets, so that its profile must know of lengths below the whole.
    """
    kernels.prepare()
    gradients, whole = own_gradients(overrides)
    numel = gradients[0].numel()
    parts = sorted({min(numel, 1024), max(1, numel // 16), numel})
    own = [method for method in methods if method != FP16]
    reducers: dict[str, micro.Reducer | HalfMean] = {**build_methods(own, density)} if own else {}
    if FP16 in methods:
        reducers[FP16] = HalfMean()
    profiles = {}
    for method, reducer in reducers.items():
        lengths = parts if methods[method] else [numel]
        layouts = [whole if length == numel else layered(length) for length in lengths]
        profiles[method] = joined(lengths, [measure(reducer, gradients, layout, steps) for layout in layouts])
    return profiles


def own_gradients(overrides: list[str]) -> tuple[list[Tensor], Layout]:
    """Return this rank's gradients (numel,) of its first batches, at the weights that the training begins with.

    The layout is that of the model's parameters in the order of backward.
    """
    task = load_task(config_of("dense", overrides, dist.get_world_size()), CPU)
    batches = itertools.chain.from_iterable(task.batches(dist.get_rank()).epoch(epoch) for epoch in itertools.count())
    named = [(name, p) for name, p in task.model.named_parameters() if p.requires_grad][::-1]  # as backward finds them
    found = []
    for batch in itertools.islice(batches, NUM_GRADIENTS):
        parts = torch.autograd.grad(task.loss(task.model, batch)[0], [parameter for _, parameter in named])
        found.append(torch.cat([part.reshape(-1) for part in parts]))
    return found, Layout.of(named)


def measure(
    reducer: micro.Reducer | HalfMean, gradients: Sequence[Tensor], layout: Layout, steps: int
) -> tuple[float, list[tuple[Op, float]]]:
    """Return the seconds beside the collectives, and the collectives of a step, of as many elements as the layout has.

    Ranks wait for each other in every collective, so what a step takes beside them is more than any rank computes: it
    is the time of a step less that of the same collectives, called one after the other.
    """
    comm = BothWays()
    state: Any = reducer.start(layout, torch.float32, CPU)
    seconds: list[float] = []
    calls: list[list[tuple[Op, float]]] = []
    for step in range(SETTLING_STEPS + steps):
        grad = gradients[step % len(gradients)][: layout.numel].clone()
        dist.barrier()
        comm.begin_step()
        seconds.append(slowest(_timed(partial(reducer.reduce_, state, grad, comm)), CPU))
        calls.append(list(comm.traffic.calls))
    sent = largest(calls[SETTLING_STEPS:])
    alone_s = seconds_of(sent, steps) if sent else 0.0
    return max(0.0, statistics.median(seconds[SETTLING_STEPS:]) - alone_s), sent


def seconds_of(sent: Sequence[tuple[Op, float]], steps: int) -> float:
    """Return the median seconds of the slowest rank in these collectives."""
    comm = GroupComm(timed=False)
    calls = [link.calls(op, max(link.ELEMENT_BYTES, round(size)), comm, CPU) for op, size in sent]
    found = []
    for _ in range(1 + steps):  # connections are made in the first
        dist.barrier()
        found.append(slowest(_timed(lambda: [call() for call in calls]), CPU))
    return statistics.median(found[1:])


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def largest(steps: Sequence[Sequence[tuple[Op, float]]]) -> list[tuple[Op, float]]:
    """Return the collectives of the last step, each with the bytes of the rank that sends most, as a mean over steps.

    Steps that call others than the last one, such as a search for a threshold, do not count.
    """
    ops = [op for op, _ in steps[-1]]
    alike = [[size for _, size in step] for step in steps if [op for op, _ in step] == ops]
    mine = torch.tensor(alike, dtype=torch.float64).reshape(len(alike), len(ops))
    if not ops:
        return []
    everyone = GroupComm(timed=False).gather_rows(mine.reshape(-1)).reshape(-1, *mine.shape)
    return list(zip(ops, everyone.amax(0).mean(0).tolist(), strict=True))


def joined(lengths: Sequence[int], found: Sequence[tuple[float, list[tuple[Op, float]]]]) -> Row:
    """Return the fields of a profile; at a length with other collectives than the longest, sizes are in proportion."""
    longest = found[-1][1]
    sizes = [
        [size for _, size in calls]
        if [op for op, _ in calls] == [op for op, _ in longest]
        else [size * length / lengths[-1] for _, size in longest]
        for length, (_, calls) in zip(lengths, found, strict=True)
    ]
    calls = [(op, [row[place] for row in sizes]) for place, (op, _) in enumerate(longest)]
    return {"lengths": lengths, "seconds": [seconds for seconds, _ in found], "calls": calls}
