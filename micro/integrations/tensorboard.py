"""The numbers of each step for TensorBoard."""

from typing import Any

from micro.integrations.on_step import Log, one_of
from micro.summary import StepSummary


def log_to(writer: Any, *, prefix: str = "micro/", every: int = 1) -> Log:
    """Return an ``on_step`` for ``micro.attach`` that adds the numbers of a step to ``writer``, a SummaryWriter.

    Give it on one rank, and nothing on the others: ``on_step=log_to(writer) if rank == 0 else None``.

    Args:
        prefix: before each name; see StepSummary.numbers.
        every: add those of one step of so many.

    Raises:
        ValueError: no such writer, or every below 1.
    """

    def log(step: StepSummary) -> None:
        for name, value in step.numbers().items():
            writer.add_scalar(f"{prefix}{name}", value, global_step=step.step)

    return one_of(every, log, writer, "add_scalar")
