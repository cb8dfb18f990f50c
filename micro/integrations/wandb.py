"""The numbers of each step for Weights & Biases."""

from typing import Any

from micro.integrations.on_step import Log, one_of
from micro.summary import StepSummary


def log_to(run: Any, *, prefix: str = "micro/", every: int = 1, commit: bool = False) -> Log:
    """Return an ``on_step`` for ``micro.attach`` that logs the numbers of a step to ``run``, of ``wandb.init``.

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

    def log(step: StepSummary) -> None:
        numbers = {"step": step.step, **step.numbers()}
        run.log({f"{prefix}{name}": value for name, value in numbers.items()}, commit=commit)

    return one_of(every, log, run, "log")
