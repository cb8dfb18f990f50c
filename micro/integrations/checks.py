"""Refuse, before training, what a logger cannot log to."""


def check_has(target: object, method: str, expected: str) -> None:
    """Raise ValueError unless ``target`` has this method."""
    if not callable(getattr(target, method, None)):
        raise ValueError(f"log_to needs {expected}, got {type(target).__name__}")


def check_every(every: int) -> None:
    """Raise ValueError unless ``every`` is a number of at least 1."""
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a number of steps, at least 1, got {every!r}")
