"""How far a long job has come, told on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (done, total) of what is counted; total is None while nobody knows it
Report = Callable[[int, int | None], None]


def silent(done: int, total: int | None) -> None:
    """Tell nothing."""


@contextmanager
def progress(label: str, *, as_bytes: bool = False) -> Iterator[Report]:
    """Yield a function to report to: a bar on a terminal that has rich, otherwise a line at every tenth.

    Args:
        label: what is being done.
        as_bytes: what is counted are bytes.
    """
    if not sys.stderr.isatty():
        yield _Lines(label, as_bytes)
        return
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        yield _Lines(label, as_bytes)
        return
    count = [bars.DownloadColumn(), bars.TransferSpeedColumn()] if as_bytes else [bars.MofNCompleteColumn()]
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *count, bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """One line whenever another tenth, or another 100 MB of an unknown total, is done."""

    def __init__(self, label: str, as_bytes: bool) -> None:
        self._label, self._as_bytes, self._told = label, as_bytes, -1

    def __call__(self, done: int, total: int | None) -> None:
        part = 10 * done // total if total else done // 100_000_000
        if part <= self._told:
            return
        self._told = part
        of = f" of {self._amount(total)}" if total else ""
        print(f"{self._label}: {self._amount(done)}{of}", file=sys.stderr, flush=True)

    def _amount(self, count: int) -> str:
        return f"{count / 1e6:.1f} MB" if self._as_bytes else str(count)
