"""Every notebook runs from its first cell to its last, shows something, and is kept without what it showed."""

import os
from pathlib import Path

import pytest

from experiments.studies.paper_reproduction.papers import known_papers

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
names = [path.stem for path in NOTEBOOKS]


def test_every_paper_has_a_notebook() -> None:
    assert names == known_papers()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_notebook_is_stripped(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(path.parent)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert any("text/html" in output.get("data", {}) for output in shown)
    assert not any(output.output_type in ("stream", "error") for output in shown), shown
