"""The same benchmark by an older revision of this code and by the code as it is, in turn: before and after in one run.

The older revision is checked out into a temporary folder and run by the same Python with the same words. Both take
turns (old, new, old, new), and what is compared is the ratio of each pair, so that a machine that changes between
pairs changes no ratio.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from experiments.config.errors import UserError
from experiments.config.option_types import whole_number
from experiments.config.paths import ROOT
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue

_run = partial(subprocess.run, check=False)
OPTIONS = ("--against", "--pairs", "--out")  # of the comparison: each run gets a folder of its own


@dataclass(frozen=True, slots=True)
class Compared:
    """What is compared in the table of a benchmark.

    Attributes:
        keys: columns that say what a row is about.
        values: columns whose ratios are reported.
    """

    keys: tuple[str, ...]
    values: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser, *, pairs: int = 3, turns: str = "runs of each") -> None:
    """Declare the options of a comparison with an older revision."""
    parser.add_argument("--against", metavar="REVISION", help="compare with an older revision of the code, in turn")
    parser.add_argument("--pairs", type=whole_number(), default=pairs, help=f"with --against: {turns} (%(default)s)")


def run(name: str, compared: Compared, words: Sequence[str], options: argparse.Namespace, console: Console) -> None:
    """Run a benchmark by both revisions in turn; print the ratios new / old, and write them.

    Args:
        words: of the command line.

    Raises:
        UserError: there is no such revision, or one of the two cannot do what the words say.
    """
    with checked_out(options.against) as tree, tempfile.TemporaryDirectory(prefix="micro-against-") as folder:
        pairs = []
        for pair in range(options.pairs):
            with console.status(f"pair {pair + 1} of {options.pairs}"):
                old = _table_of(name, words, tree, Path(folder) / f"old{pair}")
                new = _table_of(name, words, ROOT, Path(folder) / f"new{pair}")
            pairs.append(ratios(old, new, compared))
    frame = spread(pairs, compared)
    console.print(_drawn(frame, compared, f"{name}: this code over {options.against}, {options.pairs} pairs"))
    for path in write_or_rescue(lambda out: [write_csv(frame, out / f"{name}-against.csv")], options.out):
        console.print(f"wrote {path}")


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a temporary folder with the code of a revision. Raises: UserError: there is none of that name."""
    commit = commit_of(revision)
    with tempfile.TemporaryDirectory(prefix="micro-revision-") as folder:
        tree = Path(folder) / "code"
        if _git("worktree", "add", "--detach", str(tree), commit) is None:
            raise UserError(f"--against {revision}: git cannot check it out into {tree}")
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def commit_of(revision: str) -> str:
    """Return the commit that a revision names. Raises: UserError: there is none of that name."""
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise UserError(f"--against must be a revision of the repository {ROOT}, got '{revision}'")
    return commit


def _git(*words: str) -> str | None:
    """Return what git prints about this repository; None where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _table_of(name: str, words: Sequence[str], tree: Path, out: Path) -> pd.DataFrame:
    """Run the benchmark by the code in ``tree`` and return its table."""
    command = [sys.executable, "-m", "experiments.bench", *without_own(words), "--out", str(out)]
    done = _run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        side = "this code" if tree == ROOT else "the older revision"
        raise UserError(f"{side} cannot run 'bench {' '.join(without_own(words))}': {last}")
    return pd.read_csv(out / f"{name}.csv")


def without_own(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the options of the comparison, and their values."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in OPTIONS:
            next(rest, None)
        elif word.split("=")[0] not in OPTIONS:
            kept.append(word)
    return kept


def ratios(old: pd.DataFrame, new: pd.DataFrame, compared: Compared) -> pd.DataFrame:
    """Return new over old of one pair of tables, a row for each that both have."""
    keys = list(compared.keys)
    both = old.merge(new, on=keys, suffixes=("_old", "_new"))
    for value in compared.values:
        both[value] = both[f"{value}_new"] / both[f"{value}_old"]
    return both[[*keys, *compared.values]]


def spread(pairs: Sequence[pd.DataFrame], compared: Compared) -> pd.DataFrame:
    """Return the median, the smallest and the largest ratio over pairs, a row for each of the first pair's."""
    grouped = pd.concat(pairs).groupby(list(compared.keys), sort=False)
    columns = {}
    for value in compared.values:
        for suffix, how in (("", "median"), ("_least", "min"), ("_most", "max")):
            columns[value + suffix] = grouped[value].agg(how)
    return pd.DataFrame(columns).reset_index()


def _drawn(frame: pd.DataFrame, compared: Compared, title: str) -> Table:
    table = Table(title=f"{title}: median ratio (least to most)")
    for key in compared.keys:
        table.add_column(key)
    for value in compared.values:
        table.add_column(value, justify="right")
    for row in frame.to_dict("records"):
        numbers = [f"{row[v]:.3f} ({row[f'{v}_least']:.3f} to {row[f'{v}_most']:.3f})" for v in compared.values]
        table.add_row(*(str(row[key]) for key in compared.keys), *numbers)
    return table
