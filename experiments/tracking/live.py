"""What follows a run while it trains, in rank 0: the progress on the terminal, and the mirror at W&B."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from experiments.config.method_names import method_of
from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import RunFolder
from experiments.tracking.progress import Show, bar
from experiments.tracking.wandb_mirror import live_mirror


@contextmanager
def followed(config: TrainConfig, folder: RunFolder, *, done: int, total: int) -> Iterator[Show]:
    """Follow a run while the context lasts; its configuration, manifest and kept rows are in its folder.

    Args:
        done: steps that were taken before.
        total: steps of the run.

    Yields:
        What is to be given each row that rank 0 records.
    """
    label = f"{config.model.name} on {config.dataset.name}, {method_of(config)}, seed {config.seed}"
    with live_mirror(folder, config.tracking) as mirrored, bar(label, done, total) as drawn:

        def show(kind: str, row: Mapping[str, Any]) -> None:
            for each in filter(None, (drawn, mirrored)):
                each(kind, row)

        yield show
