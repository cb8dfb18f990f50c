"""The summary of the runs of some folders: a row per form, written as the page ``summary`` has it, or printed."""

from pathlib import Path

import pandas as pd
from rich.console import Console

from experiments.reports.csv_files import write_csv
from experiments.reports.forms import forms
from experiments.reports.frames import Frames
from experiments.reports.output import write_file
from experiments.reports.page import SUMMARY, filled_in, load_page, markdown
from experiments.reports.table import run_rows


def summarise(frames: Frames) -> pd.DataFrame:
    """Return the rows of ``forms`` of some finished runs."""
    return forms(run_rows(frames))


def write_summary(frames: Frames, out: Path) -> list[Path]:
    """Write summary.csv and summary.md; return the paths."""
    return [write_csv(summarise(frames), out / "summary.csv"), write_file(out / "summary.md", summary_text(frames))]


def summary_text(frames: Frames) -> str:
    """Return the summary in Markdown."""
    runs = run_rows(frames)
    lines = [f"\n{line}\n" for line in frames.skipped()]
    return markdown(load_page(SUMMARY), forms(runs), runs) + "".join(lines)


def print_summary(frames: Frames, console: Console) -> None:
    """Print what each form reached, and the times of its steps, in tables of at most 80 characters."""
    for title, found in filled_in(load_page(SUMMARY), summarise(frames)):
        for table, cells in found[:2]:
            console.print(cells.on_terminal(title))
            if table.words:
                console.print(" ".join(table.words.split()).replace("*", ""), style="dim", highlight=False)
    for line in frames.notes():
        console.print(line, style="dim", highlight=False)
