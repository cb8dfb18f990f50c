"""Write pages from a yaml of conf/page: its runs, tables, figures and text. The summary is such a page."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as TerminalTable

from experiments.config import CONF
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError, check_choice
from experiments.reports import tables
from experiments.reports.forms import ends, forms, forms_of, in_words, ordered
from experiments.reports.frames import Frames
from experiments.reports.measures import metric_of
from experiments.reports.provenance import described, differences
from experiments.reports.table import TRAINING, of_known_origin
from experiments.reports.times import stage_times
from experiments.runs.files import write_atomic, write_csv

PAGES = CONF / "page"
SUMMARY = "summary"  # of any runs: what `figures` writes of a folder
NOTE = "\\* {} of {} rows are means of runs whose records are gone{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of each section: a kind and columns of tables.py, in the order of some columns of ``forms``."""

    show: str
    columns: Sequence[str]
    sort: Sequence[str] = ("-to_dense",)
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One figure: a kind of form_figures.py, of the rows that have some values in some columns."""

    file: str
    show: str
    of: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page has.

    Attributes:
        studies: patterns of the studies of conf/sweep whose runs are on it; none: a page of any runs.
        metric: the measure of its runs, empty for whatever they have.
        section: columns; rows that agree in them stand in the same tables, under a heading.
        how: how its runs are carried out.
        words: what its columns mean.
    """

    name: str
    title: str
    studies: Sequence[str]
    metric: str = ""
    section: Sequence[str] = ()
    how: str = ""
    words: str
    tables: Sequence[Table]
    figures: Sequence[Drawing] = ()

    def has(self, study: str) -> bool:
        """Tell whether a study is on the page."""
        return any(fnmatch(study, pattern) for pattern in self.studies)

    def runs(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return its rows of the table of runs. Raises: UserError: it has none."""
        own = table[[any(map(self.has, names.split())) for names in table["studies"]]]
        own = own[own["metric"] == self.metric] if self.metric else own
        if own.empty:
            raise UserError(f"the table of runs has none of {', '.join(self.studies)}, for page {self.name}")
        return own


def page_names() -> list[str]:
    """Return the names of the pages of published studies."""
    return sorted(path.stem for path in PAGES.glob("*.yaml") if path.stem != SUMMARY)


def load_page(name: str) -> Page:
    """Read a page of conf/page. Raises: UserError: no such page, or one that is not of this form."""
    check_choice("page", [*page_names(), SUMMARY], name)
    found = dict(read_yaml(PAGES / f"{name}.yaml"))
    if "like" in found:  # what it does not say itself it has from that page
        found = read_yaml(PAGES / f"{found.pop('like')}.yaml") | found
    try:
        drawings = [Drawing(**given) for given in found.pop("figures", [])]
        page = Page(name=name, **found | {"tables": [Table(**given) for given in found["tables"]]}, figures=drawings)
    except (KeyError, TypeError) as error:
        raise UserError(f"{PAGES / name}.yaml is not a page: {error}") from None
    for table in page.tables:
        check_choice(f"{name}: show", tables.KINDS, table.show)
        for column in table.columns:
            check_choice(f"{name}: columns", tables.COLUMNS, column)
    return page


def page_text(page: Page, rows: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return the text of a page in Markdown.

    Args:
        rows: of ``forms``.
        runs: rows of the table of runs that these are made of.
    """
    blocks = [f"# {page.title}", page.how.strip(), page.words.strip()]
    for title, found in _sections(page, rows):
        blocks.append(f"## {title}" if title else "")
        for table, cells in found:
            aligned = ["left", *["right"] * (len(cells.columns) - 1)]
            blocks.append(table.words.strip())
            blocks.append(cells.to_markdown(index=False, disable_numparse=True, colalign=aligned))
    return "\n\n".join(filter(None, [*blocks, *_notes(rows, runs)])) + "\n"


def write_page(page: Page, table: pd.DataFrame, out: Path, figures: Path) -> list[Path]:
    """Write the text of a page to ``out`` and its figures, each with its numbers, to ``figures``; return the paths."""
    from experiments.reports import form_figures  # matplotlib takes a second, which a table need not wait for
    from experiments.reports.figure_parts import save

    runs = page.runs(table)
    rows = forms(runs)
    written = [write_atomic(out / f"{page.name}.md", page_text(page, rows, runs))]
    for each in page.figures:
        check_choice(f"{page.name}: show", [*form_figures.KINDS, "curves"], each.show)
        own, of_these = (table[(table[list(each.of)] == list(each.of.values())).all(axis=1)] for table in (rows, runs))
        figure, numbers = form_figures.drawn(each.show, own, of_these, each.title or in_words(own))
        known = of_known_origin(of_these)
        written += save(figure, numbers, figures / each.file, known["run"], notes=differences(known))
    return written


def write_summary(frames: Frames, out: Path) -> list[Path]:
    """Write summary.csv, ends.csv with a row for each run, and summary.md; return the paths."""
    runs, numbers = forms_of(frames)
    last = ends(runs).merge(stage_times(frames.steps)[["forward_ms"]], on="run", how="left")
    tables = [write_csv(numbers, out / "summary.csv"), write_csv(last, out / "ends.csv")]
    return [*tables, write_atomic(out / "summary.md", summary_text(frames))]


def summary_text(frames: Frames) -> str:
    """Return the summary in Markdown."""
    runs, rows = forms_of(frames)
    lines = [f"\n{line}\n" for line in frames.skipped()]
    return page_text(load_page(SUMMARY), rows, runs) + "".join(lines)


def print_summary(frames: Frames, console: Console) -> None:
    """Print what each form reached, and the times of its steps, in tables of at most 80 characters."""
    runs, rows = forms_of(frames)
    for title, found in _sections(load_page(SUMMARY), rows):
        for table, cells in found[:2]:
            shown = TerminalTable(
                title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
            )
            shown.padding = (0, 1, 0, 0)
            for place, name in enumerate(cells.columns):
                short = re.sub(", ms| a step|(?<=[GM])bit/s| (?=[GM]bit)|,", "", name)
                shown.add_column(short, justify="right" if place else "left", no_wrap=bool(place))
            for line in cells.itertuples(index=False, name=None):
                shown.add_row(*line)
            console.print(shown)
            if table.words:
                console.print(" ".join(table.words.split()).replace("*", ""), style="dim", highlight=False)
    for note in [*frames.skipped(), *unlike(runs)]:
        console.print(note, style="dim", highlight=False)


def _sections(page: Page, rows: pd.DataFrame) -> Iterator[tuple[str, list[tuple[Table, pd.DataFrame]]]]:
    """Yield the heading of each section of a page, empty where it has one alone, and its tables that have lines."""
    for own in (own for _, own in rows.groupby(list(page.section))) if page.section else [rows]:
        made = [(table, tables.KINDS[table.show](ordered(own, table.sort), table.columns)) for table in page.tables]
        better = "" if metric_of(own["metric"]).higher_is_better else " (less is better)"
        yield f"{in_words(own)}{better}" if page.section else "", [each for each in made if len(each[1])]


def _notes(rows: pd.DataFrame, runs: pd.DataFrame) -> list[str]:
    gone = rows[rows["is_mean"]]
    codes = ", ".join(sorted({code for text in gone["code"] for code in text.split(", ") if code}))
    notes = [NOTE.format(len(gone), len(rows), f" (code revisions {codes})" if codes else "")] if len(gone) else []
    known = of_known_origin(runs)
    if len(known):
        notes.append(f"Runs, with {described(known)}.")
    return [*notes, *unlike(known)]


def unlike(runs: pd.DataFrame) -> list[str]:
    """Return a line for each thing in which runs of the same model, data and number of workers differ."""
    return [f"{in_words(own)}: {line}" for _, own in runs.groupby(TRAINING[:3]) for line in differences(own)]
