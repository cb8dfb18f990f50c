"""The page of columns names what a run records."""

import re
from pathlib import Path

import pytest

from experiments.runs.records import read_records
from experiments.runs.run_folder import folder_of
from experiments.training.run import execute
from tests.tools.simulated_runs import IMAGES, configured

PAGE = Path(__file__).parents[2] / "docs/columns.md"


@pytest.mark.parametrize("words", [[], ["rounds.every=2", "optimizer=adam", "measure_residual_every=1"]])
def test_every_column_of_a_run_is_on_the_page(tmp_path: Path, words: list[str]) -> None:
    config = configured(tmp_path, *IMAGES, "sparsifier=micro", "measure_test_every=4", *words)
    execute(config)
    folder = folder_of(config)
    _, steps, epochs = re.split(r"^## .*\.jsonl$", PAGE.read_text(), flags=re.MULTILINE)
    for path, text in ((folder.steps_path, steps), (folder.epochs_path, epochs)):
        columns = {name for row in read_records(path) for name, value in row.items() if value is not None}
        cells = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
        assert columns <= {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
