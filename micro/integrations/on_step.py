"""The step summaries of which a logger takes the numbers."""

from collections.abc import Callable

from micro.summary import StepSummary

Log = Callable[[StepSummary], None]


def one_of(every: int, log: Log, target: object, method: str) -> Log:
    """Return an ``on_step`` that calls ``log`` for one step of so many.

    Raises:
        ValueError: ``target`` does not have the method that ``log`` calls, or every is below 1.
    """
    if not callable(getattr(target, method, None)):
        raise ValueError(f"log_to needs what has a method {method}, got {type(target).__name__}")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a number of steps, at least 1, got {every!r}")
    return lambda step: log(step) if step.step % every == 0 else None
