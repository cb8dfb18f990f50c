"""Steps of whole methods on a GPU: their time against a dense step's, reads by the host, capture in a CUDA graph.

One process is one rank, so nothing travels: what is measured is all but the wire. It says nothing about NCCL.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

import micro
from experiments.studies.methods import build_methods
from micro.flat import Layout
from micro.randomness import generator

DENSITY = 0.01
DENSE = "dense"
CAPTURED = ("micro_fixed",)  # steps in which the host reads nothing
WARMUP = 5  # steps in which thresholds and kernels settle


@dataclass(frozen=True, slots=True)
class Meters:
    """What measures work on a device: the seconds that it takes, how often the host waits, whether a graph holds it."""

    seconds: Callable[[Callable[[], object]], float]
    waits: Callable[[Callable[[], object]], int]
    capture: Callable[[Callable[[], object]], str]


def table(methods: Sequence[str], numel: int, device: torch.device, meters: Meters) -> Iterator[str]:
    """Return a row for each method, the dense step first, as Markdown."""
    yield "| method | ms | of a dense step | operations that make the host wait | captured in a graph |"
    yield "|---|---:|---:|---:|---|"
    dense = 0.0
    names = dict.fromkeys([DENSE, *methods])
    for name, reducer in build_methods(list(names), DENSITY).items():
        try:
            step = step_of(reducer, numel, device)
            seconds = meters.seconds(step)
        except (RuntimeError, ValueError) as error:  # of one method: the others are measured all the same
            yield f"| `{name}` | - | - | - | {str(error).splitlines()[0]} |"
            continue
        dense = dense or seconds
        captured = meters.capture(step) if name in CAPTURED else "not tried"
        yield f"| `{name}` | {1e3 * seconds:.3f} | {seconds / dense:.2f} | {meters.waits(step)} | {captured} |"


def step_of(
    reducer: micro.Reducer, numel: int, device: torch.device, comm: micro.Comm | None = None
) -> Callable[[], object]:
    """Return a step, the same gradient each time, after its first steps; of a group of one rank unless one is given."""
    comm, layout = comm or micro.SoloComm(timed=False), Layout(("matrix", "rest"), ((numel // 64, 64), (numel % 64,)))
    source = torch.randn(numel, generator=generator(comm.rank)).to(device)
    grad, state = torch.empty_like(source), reducer.start(layout, source.dtype, device)

    @torch.no_grad()
    def step() -> None:
        grad.copy_(source)
        comm.begin_step()
        reducer.reduce_(state, grad, comm)

    reducer.prepare(comm, device)
    for _ in range(WARMUP):
        step()
    return step
