"""A step of every method on GPUs, beside dense.

With one GPU nothing travels: what is measured is all but the wire. The same code runs on CPUs over gloo, which is how
it is tested.
"""

import statistics
from collections.abc import Iterator, Sequence

from experiments.benchmarks.gpu import timing
from experiments.benchmarks.tables import Column, Columns
from experiments.profiles import method_steps
from experiments.ranks.group import RankGroup
from experiments.ranks.measures import Row, own_device

DENSITY = 0.01
ROUNDS, WARMUP = 20, 5  # after which thresholds and kernels have settled
COLUMNS: Columns = {
    "method": Column("method"),
    "ms": Column("step_s", "{:.3f}", 1e3),
    "of dense": Column("share", "{:.2f}"),
    "MB sent": Column("sent", "{:.3f}", 1e-6),
    "operations that make the host wait": Column("waits", "{:.0f}"),
    "problem": Column("problem"),
}


def rows(ranks: RankGroup, methods: Sequence[str], numel: int) -> Iterator[Row]:
    """Yield a row for each method, dense first; a step lasts as long as on its slowest rank."""
    dense_s = float("nan")
    for method in ["dense", *(method for method in methods if method != "dense")]:
        answers = ranks.call(work, method, numel)
        row = max(answers, key=lambda answer: answer.get("step_s", 0.0))
        step_s = row.get("step_s", float("nan"))
        dense_s = step_s if method == "dense" else dense_s
        yield {**row, "share": step_s / dense_s}


def work(method: str, numel: int) -> Row:
    """Return the median seconds of a method's step on this rank, what it sent, and how often the host waited."""
    try:
        method_steps.begin(method, numel, DENSITY)
        method_steps.turn(WARMUP)
        taken = method_steps.turn(ROUNDS)
        steps = method_steps.current
        assert steps
        grad = steps.next_gradient()
        waits = {"waits": timing.waits(lambda: steps.step(grad))} if own_device().type == "cuda" else {}
    except (RuntimeError, ValueError) as error:  # of one method, on all ranks alike: the others are measured
        return {"method": method, "problem": str(error).splitlines()[0]}
    step_s = statistics.median(step["total_s"] for step in taken)
    return {"method": method, "step_s": step_s, "sent": taken[-1]["bytes_sent"], "problem": "", **waits}
