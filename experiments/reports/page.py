"""A page: which runs, which tables and figures, what to say, as a yaml of conf/page has them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import pandas as pd

from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError, check_choice
from experiments.config.paths import CONF
from experiments.reports import tables
from experiments.reports.columns import COLUMNS
from experiments.reports.forms import ordered
from experiments.reports.measures import metric_of
from experiments.reports.names import human
from experiments.reports.provenance import described, unlike
from experiments.reports.table import TRAINING, origins
from experiments.reports.tables import Cells

PAGES = CONF / "page"
SUMMARY = "summary"  # of any runs: what `figures` writes of a folder
NOTE = "\\* {} of {} rows are means of runs whose records are gone{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of each section.

    Attributes:
        show: a key of ``tables.KINDS``.
        columns: keys of COLUMNS.
        sort: columns of ``forms``, ``-`` before those of which the largest comes first.
        words: what stands before it.
    """

    show: str
    columns: Sequence[str]
    sort: Sequence[str] = ("-to_dense",)
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One figure.

    Attributes:
        file: its name, without an end.
        show: a key of ``page_figures.KINDS``.
        of: the values of some columns that its rows have.
        title: in place of what the training is.
    """

    file: str
    show: str
    of: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page has.

    Attributes:
        name: of its yaml and its files.
        title: its first line.
        studies: patterns of the studies of conf/sweep whose runs are on it; none: a page of any runs.
        metric: the measure of its runs, empty for whatever they have.
        section: columns; rows that agree in them stand in the same tables, under a heading.
        how: how its runs are carried out.
        words: what its columns mean.
        tables: of each section.
        figures: of the whole page.
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
    found = read_yaml(PAGES / f"{name}.yaml")
    try:
        drawings = [Drawing(**given) for given in found.pop("figures", [])]
        page = Page(name=name, **found | {"tables": [Table(**given) for given in found["tables"]]}, figures=drawings)
    except (KeyError, TypeError) as error:
        raise UserError(f"{PAGES / name}.yaml is no page: {error}") from None
    for table in page.tables:
        check_choice(f"{name}: show", tables.KINDS, table.show)
        for column in table.columns:
            check_choice(f"{name}: columns", COLUMNS, column)
    return page


def markdown(page: Page, rows: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return the text of a page.

    Args:
        rows: of ``forms``.
        runs: rows of the table of runs that these are made of.
    """
    blocks = [f"# {page.title}", page.how.strip(), page.words.strip()]
    for title, found in filled_in(page, rows):
        blocks.append(f"## {title}" if title else "")
        for table, cells in found:
            blocks += [table.words.strip(), cells.markdown()]
    return "\n\n".join(filter(None, [*blocks, *_notes(rows, runs)])) + "\n"


def filled_in(page: Page, rows: pd.DataFrame) -> Iterator[tuple[str, list[tuple[Table, Cells]]]]:
    """Yield the heading of each section of a page, empty where it has one alone, and its tables that have lines."""
    for title, own in sections(page.section, rows):
        made = [(table, tables.KINDS[table.show](ordered(own, table.sort), table.columns)) for table in page.tables]
        yield title, [(table, cells) for table, cells in made if cells.lines]


def sections(columns: Sequence[str], rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield a heading and its rows for each section; one without heading where there are no columns."""
    if not columns:
        yield "", rows
        return
    for _, own in rows.groupby(list(columns)):
        better = "" if metric_of(own["metric"]).higher_is_better else " (less is better)"
        yield f"{in_words(own)}{better}", own


def in_words(rows: pd.DataFrame) -> str:
    """Return what the trainings of some rows have in common: ``NeuMF on MovieLens-100K, 4 workers, 8 epochs``."""
    first = rows.iloc[0]
    words = [f"{human(str(first['model']))} on {human(str(first['dataset']))}"]
    for column, unit in (("world_size", "worker"), ("epochs", "epoch")):
        if rows[column].nunique() == 1:
            words.append(f"1 {unit}" if first[column] == 1 else f"{first[column]} {unit}s")
    return ", ".join(words)


def _notes(rows: pd.DataFrame, runs: pd.DataFrame) -> list[str]:
    gone = rows[rows["is_mean"]]
    codes = ", ".join(sorted({code for text in gone["code"] for code in text.split(", ") if code}))
    notes = [NOTE.format(len(gone), len(rows), f" (code revisions {codes})" if codes else "")] if len(gone) else []
    known = origins(runs)
    if known:
        notes.append(f"Runs, with {described(known, known)}.")
    studies = {in_words(own): list(own["run"]) for _, own in runs.groupby(TRAINING[:3])}
    return [*notes, *unlike(studies, known)]
