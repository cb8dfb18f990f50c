"""The progress of a run, drawn by rank 0 on the terminal of whoever started it; nothing is drawn without one."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from tqdm import tqdm

from experiments.launching.process_lifetime import TERMINAL
from experiments.reports.measures import in_words

Show = Callable[[str, Mapping[str, Any]], None]  # is given the name of a record, and each of its rows


@contextmanager
def bar(label: str, done: int, total: int) -> Iterator[Show | None]:
    """Draw steps, the last loss and the last measure while the context lasts; None where there is no terminal.

    Args:
        label: the name of the run for the user.
        done: steps that were taken before.
        total: steps of the run.
    """
    with _terminal() as terminal:
        if terminal is None:
            yield None
            return
        drawn, measured = tqdm(desc=label, initial=done, total=total, file=terminal, dynamic_ncols=True), ""

        def show(kind: str, row: Mapping[str, Any]) -> None:
            nonlocal measured
            measured = in_words(row) or measured
            with suppress(OSError):  # the terminal is gone
                if kind == "steps":
                    numbers = filter(None, [f"loss {row['loss']:.4g}", measured])
                    drawn.set_postfix_str(", ".join(numbers), refresh=False)
                    drawn.update(row["step"] + 1 - drawn.n)
                else:
                    drawn.set_postfix_str(measured)

        try:
            yield show
        finally:
            with suppress(OSError):
                drawn.close()


@contextmanager
def _terminal() -> Iterator[TextIO | None]:
    """Open the terminal that the launcher names, since a rank's output is a file; else use stderr where it is one."""
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
