"""Pages of long studies are what their committed tables give: they can be redrawn where no run is at hand."""

from pathlib import Path

import pytest

from experiments import figures
from experiments.reports.ablation_figure import draw_forms

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
ABLATION = ["--ablation", "--plan"]


def redrawn(page: str, options: list[str], out: Path) -> int:
    """Draw what is known of a page from its tables alone, and return the command's exit code."""
    tables = ["--earlier", str(PUBLISHED / f"{page}.csv"), "--earlier-runs", str(PUBLISHED / f"{page}_runs.csv")]
    return figures.main(["--runs", str(out / "none"), "--out", str(out), *tables, *options])


@pytest.mark.parametrize(
    ("page", "options", "written"),
    [
        ("long", ["--table"], "reached.md"),
        ("ablation_long", [*ABLATION, "ablation_long_movielens100k"], "ablation.md"),
        ("ablation_fresh", [*ABLATION, "ablation_fresh_movielens100k"], "ablation.md"),
    ],
)
def test_a_page_is_written_again_from_its_tables(
    page: str, options: list[str], written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert redrawn(page, options, tmp_path) == 0
    assert f"no finished run in {tmp_path / 'none'}: drawn from all of " in capsys.readouterr().out
    _, _, text = (tmp_path / written).read_text().partition("\n\n")
    assert (PUBLISHED / f"{page}.md").read_text().endswith(text)


def test_a_figure_of_an_ablation_says_how_long_its_runs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    draw = "experiments.reports.ablation.draw_forms"
    original = draw_forms
    monkeypatch.setattr(draw, lambda rows, metric, title: titles.append(title) or original(rows, metric, title))
    redrawn("ablation_long", [*ABLATION, "ablation_long_movielens100k"], tmp_path)
    assert titles == ["NeuMF on MovieLens-100K, 4 workers, 30 epochs"]


def test_what_is_for_runs_alone_is_refused_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert redrawn("long", ["--table", "--strict"], tmp_path) == 2
    assert "--strict compares runs, and no finished run is at hand: leave it out" in capsys.readouterr().err
    assert redrawn("long", ["--table", "epochs=30"], tmp_path) == 0
    assert "; epochs=30 selects among runs at hand" in capsys.readouterr().out


def test_other_figures_need_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert redrawn("long", ["--only", "convergence"], tmp_path) == 2
    assert "these runs hold nothing to draw for convergence" in capsys.readouterr().err
