"""Every notebook runs from its first cell to its last, and its tables are those that are kept with it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.tools.reproduce.papers import known_papers
from tests.waiting import LIMIT_S

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NUMBER = re.compile(r"(?<=>)-?\d[\d.e+-]*(?=<)")  # a number in a cell
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
names = [path.stem for path in NOTEBOOKS]


def test_each_notebook_is_of_a_paper() -> None:
    assert set(names) <= set(known_papers())
    assert max(path.stat().st_size for path in NOTEBOOKS) < 200_000


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """Yield the kernel that all notebooks run in, each without the names of the others: torch is imported once.

    Its compiled loops are ready: the line that says so, on a busy machine, is no output of a notebook.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), resources=in_folder(ROOT / "notebooks"))
        client.create_kernel_manager()
        client.start_new_kernel()
    ready = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("from micro.kernels import preparing\npreparing.prepare()")]
    )
    nbclient.NotebookClient(ready, client.km, timeout=LIMIT_S, resources=in_folder(ROOT)).execute()
    yield client.km
    client._cleanup_kernel()


def in_folder(folder: Path) -> dict[str, Any]:
    return {"metadata": {"path": str(folder)}}


def tables_of(notebook: Any) -> tuple[list[str], list[float]]:
    """Return the tables that a notebook shows without their numbers, and the numbers, which machines round apart."""
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    tables = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    numbers = [float(number) for table in tables for number in NUMBER.findall(table)]
    return [NUMBER.sub("", table) for table in tables], numbers


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_notebook_runs(path: Path, kernel: Any) -> None:
    notebook = nbformat.read(path, as_version=4)
    kept = tables_of(notebook)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    nbclient.NotebookClient(notebook, kernel, timeout=LIMIT_S, resources=in_folder(path.parent)).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
    tables, numbers = tables_of(notebook)
    assert tables
    assert tables == kept[0], "jupyter execute --inplace writes it again"
    assert numbers == pytest.approx(kept[1], rel=1e-3, abs=1e-6)
    assert not any(output.output_type in ("stream", "error") for output in shown), shown
