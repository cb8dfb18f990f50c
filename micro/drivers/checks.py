"""What every driver refuses."""


def check_on_step(on_step: object) -> None:
    """Raise ValueError unless ``on_step`` can be called, or is None."""
    if on_step is not None and not callable(on_step):
        raise ValueError(f"on_step must be callable, got {type(on_step).__name__}: give a function of one StepSummary")
