"""Where the gradients of a stream come from: drawn or recorded, beside the trials on the stream before it."""

from functools import partial
from pathlib import Path

from experiments.studies.gradient_sources import RECORDED, Gradients, synthetic
from experiments.studies.method_comparison.processes import Call, Failed, Processes, put_on_file
from experiments.studies.method_comparison.settings import ComparisonSettings
from experiments.studies.method_comparison.trial import one_thread
from experiments.studies.recorded_gradients import record


class StreamSource:
    """The gradients of one stream, made once until they are given up.

    Args:
        stream: a key of TITLES.
        processes: what runs the trials; where they are several, all of them read the gradients from one file.
    """

    def __init__(self, stream: str, settings: ComparisonSettings, processes: Processes) -> None:
        self._stream, self._settings, self._processes = stream, settings, processes
        self._made: Gradients | None = None

    def making(self) -> Call | None:
        """Return the call that makes the gradients in another process; None where there is no other."""
        if not self._processes.are_several:
            return None
        return partial(_make_file, self._stream, self._settings, self._processes.file(self._stream))

    def take(self, made: Gradients | Failed) -> None:
        """Take what that call returned; where it failed, the gradients are made here, which tells why."""
        if not isinstance(made, Failed):
            self._made = made

    def gradients(self) -> Gradients:
        """Return the gradients.

        Raises:
            UserError: they cannot be recorded.
        """
        if self._made is None:
            making = self.making()
            self._made = _make(self._stream, self._settings) if making is None else making()
        return self._made

    def give_up(self) -> None:
        """Drop the gradients, which would have to be made again, and their file."""
        self._made = None
        if self._processes.are_several:
            self._processes.file(self._stream).unlink(missing_ok=True)


def _make_file(stream: str, settings: ComparisonSettings, path: Path) -> Gradients:
    return put_on_file(_make(stream, settings), path)


def _make(stream: str, settings: ComparisonSettings) -> Gradients:
    """Draw or record gradients, with one thread: its number changes a training's sums, and vectors are short."""
    world_size = max(settings.world_sizes)
    with one_thread():
        if stream == RECORDED:
            overrides = list(settings.recorded_training)
            return record(overrides, num_steps=settings.num_steps, world_size=world_size, max_gb=settings.max_gb)
        return synthetic(
            stream,
            numel=settings.numel,
            num_steps=settings.num_steps,
            world_size=world_size,
            density=settings.density,
            seed=settings.seed,
            max_gb=settings.max_gb,
        )
