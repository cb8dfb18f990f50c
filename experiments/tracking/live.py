"""What follows a run while it trains, in rank 0: the progress on the terminal, and the mirror at W&B."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from experiments.config.method_names import method_of
from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import RunFolder
from experiments.tracking.progress import Bar, bar
from experiments.tracking.wandb_mirror import LiveMirror


class Live:
    """Passes on each row that rank 0 records."""

    def __init__(self, *shown: Bar | LiveMirror | None) -> None:
        self._shown = [each for each in shown if each]

    def show(self, kind: str, row: Mapping[str, Any]) -> None:
        """Show a row of ``steps`` or ``epochs``."""
        for each in self._shown:
            each.show(kind, row)


@contextmanager
def followed(config: TrainConfig, folder: RunFolder, *, done: int, total: int) -> Iterator[Live]:
    """Follow a run while the context lasts; its configuration, manifest and kept rows are in its folder.

    Args:
        done: steps that were taken before.
        total: steps of the run.
    """
    mirror = LiveMirror(folder, config.tracking) if config.tracking.name == "wandb" else None
    try:
        with bar(label(config), done, total) as progress:
            yield Live(progress, mirror)
    finally:
        if mirror:
            mirror.close()


def label(config: TrainConfig) -> str:
    """Return the name of a run on the terminal."""
    return f"{config.model.name} on {config.dataset.name}, {method_of(config)}, seed {config.seed}"
