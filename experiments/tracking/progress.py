"""Follow a run during training, in rank 0: progress on the terminal, and the W&B mirror."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TextIO

from tqdm import tqdm

from experiments.config.method_names import method_of
from experiments.config.schema import TrackingConfig, TrainConfig
from experiments.launching.rank_environment import TERMINAL
from experiments.reports.measures import in_words
from experiments.runs.run_folder import RunFolder

Show = Callable[[str, Mapping[str, Any]], None]  # called with the name of a record, and each of its rows


@contextmanager
def followed(config: TrainConfig, folder: RunFolder, *, done: int, total: int) -> Iterator[Show]:
    """Follow a run of ``total`` steps, ``done`` of them finished; yields a function for each row of rank 0.

    The run's configuration, manifest and earlier rows are in its folder.
    """
    label = f"{config.model.name} on {config.dataset.name}, {method_of(config)}, seed {config.seed}"
    with _mirror(folder, config.tracking) as mirrored, bar(label, done, total) as drawn:

        def show(kind: str, row: Mapping[str, Any]) -> None:
            for each in filter(None, (drawn, mirrored)):
                each(kind, row)

        yield show


def _mirror(folder: RunFolder, tracking: TrackingConfig) -> AbstractContextManager[Show | None]:
    """Return the context of the configured mirror, which yields None without one."""
    if tracking.name == "none":
        return nullcontext()
    from experiments.tracking.wandb_mirror import live_mirror

    return live_mirror(folder, tracking)


@contextmanager
def bar(label: str, done: int, total: int) -> Iterator[Show | None]:
    """Draw steps, the last loss and the last measure inside the context; None without a terminal."""
    with _terminal() as terminal:
        if terminal is None:
            yield None
            return
        drawn, measured = tqdm(desc=label, initial=done, total=total, file=terminal, dynamic_ncols=True), ""

        def show(kind: str, row: Mapping[str, Any]) -> None:
            nonlocal measured
            measured = in_words(row) or measured
            loss = f"loss {row['loss']:.4g}" if kind == "steps" else ""
            with suppress(OSError):  # the terminal was closed
                drawn.set_postfix_str(", ".join(filter(None, (loss, measured))), refresh=kind == "epochs")
                if kind == "steps":
                    drawn.update(row["step"] + 1 - drawn.n)

        try:
            yield show
        finally:
            with suppress(OSError):
                drawn.close()


@contextmanager
def _terminal() -> Iterator[TextIO | None]:
    """Open the terminal named by the launcher, since a rank's output is a file; otherwise stderr if it is one."""
    path = os.environ.get(TERMINAL)
    if not path:
        yield sys.stderr if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else None
        return
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w")
    except OSError:  # it was closed meanwhile
        yield None
        return
    with suppress(OSError), file:
        yield file
