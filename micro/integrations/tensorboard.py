"""The numbers of each step for TensorBoard."""

from collections.abc import Callable
from typing import Protocol

from micro.integrations.checks import check_every, check_has
from micro.summary import StepSummary


class Writer(Protocol):
    """A ``torch.utils.tensorboard.SummaryWriter``, as far as it is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Add one number."""


def log_to(writer: Writer, *, prefix: str = "micro/", every: int = 1) -> Callable[[StepSummary], None]:
    """Return an ``on_step`` for ``micro.attach`` that adds the numbers of a step to ``writer``.

    Give it on one rank, and nothing on the others: ``on_step=log_to(writer) if rank == 0 else None``.

    Args:
        prefix: before each name; see StepSummary.numbers.
        every: add those of one step of so many.

    Raises:
        ValueError: no such writer, or every below 1.
    """
    check_has(writer, "add_scalar", "a SummaryWriter")
    check_every(every)

    def log(step: StepSummary) -> None:
        if step.step % every == 0:
            for name, value in step.numbers().items():
                writer.add_scalar(f"{prefix}{name}", value, global_step=step.step)

    return log
