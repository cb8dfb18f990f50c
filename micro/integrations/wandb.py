"""The numbers of each step for Weights & Biases."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from micro.integrations.checks import check_every, check_has
from micro.summary import StepSummary


class Run(Protocol):
    """What ``wandb.init`` returns, as far as it is used here."""

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> None:
        """Add ``data`` to the current step of the run; ``commit`` ends that step."""


def log_to(run: Run, *, prefix: str = "micro/", every: int = 1, commit: bool = False) -> Callable[[StepSummary], None]:
    """Return an ``on_step`` for ``micro.attach`` that logs the numbers of a step to ``run``.

    Give it on the rank that holds the run, and nothing on the others:
    ``on_step=log_to(run) if rank == 0 else None``.

    Args:
        prefix: before each name; see StepSummary.numbers.
        every: log one step of so many.
        commit: end W&B's step with each call. By default the numbers join what the training loop itself logs next;
            set it where the loop logs nothing.

    Raises:
        ValueError: no such run, or every below 1.
    """
    check_has(run, "log", "a run of W&B, as wandb.init() returns it")
    check_every(every)

    def log(step: StepSummary) -> None:
        if step.step % every == 0:
            numbers: Mapping[str, float] = {"step": step.step, **step.numbers()}
            run.log({f"{prefix}{name}": value for name, value in numbers.items()}, commit=commit)

    return log
