"""What each method of some finished runs reached beside dense training, and the bytes and epochs until then."""

import dataclasses
from pathlib import Path

import pandas as pd

from experiments.reports.csv_files import write_csv
from experiments.reports.frames import Frames
from experiments.reports.output import write_file
from experiments.reports.pages.forms import forms
from experiments.reports.pages.page import load_page, markdown
from experiments.reports.pages.table import rows_of


def run_rows(frames: Frames) -> pd.DataFrame:
    """Return finished runs as rows of the table of runs; a form is what a run's variant says beside its length."""
    variants = frames.epochs.drop_duplicates("run").set_index("run")["variant"]
    parts = {
        run: [part for part in text.split(", ") if not part.startswith("epochs=")] for run, text in variants.items()
    }
    return rows_of(frames, {run: ", ".join(parts[run]) for run in frames.runs["run"] if run in parts})


def reached(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``forms`` that have dense training beside them."""
    if runs.empty:
        return runs
    rows = forms(runs)
    return rows[rows["to_dense"].notna()].reset_index(drop=True)


def write_reached(frames: Frames, out: Path) -> list[Path]:
    """Write reached.csv and reached.md, where there is a dense row beside others; return the paths."""
    runs = run_rows(frames)
    rows = reached(runs)
    if rows.empty or (rows["sparsifier"] == "dense").all():
        return []
    page = dataclasses.replace(load_page("long"), how="")
    text = markdown(page, rows, runs).rstrip() + "\n"
    return [write_csv(rows, out / "reached.csv"), write_file(out / "reached.md", text)]
