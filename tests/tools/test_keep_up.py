"""The smallest density that keeps up: from means beside dense, with what fails below and above it."""

from pathlib import Path

import pandas as pd

from experiments.reports.csv_files import write_csv
from experiments.reports.earlier_rows import read
from experiments.reports.frames import Frames
from experiments.reports.keep_up import TABLE, markdown, smallest, with_goal, write_keep_up


def rows(metric: str, dense: float, values: dict[tuple[str, float], float]) -> pd.DataFrame:
    sign = 1 if metric == "hit_rate" else -1
    found = [
        {
            "model": "neumf",
            "dataset": "movielens100k",
            "world_size": 4,
            "epochs": 30,
            "sparsifier": name,
            "variant": "",
            "density": target,
            "num_seeds": 2,
            "metric": metric,
            "value": value,
            "half_range": 0.001,
            "to_dense": sign * (value - dense),
            "measured_density": target,
            "total_bytes": 1000 * target,
        }
        for (name, target), value in {("dense", 1.0): dense, **values}.items()
    ]
    return pd.DataFrame(found)


def test_the_smallest_target_within_a_point_is_named_with_what_fails_around_it() -> None:
    values = {
        ("micro", 0.01): 0.5,
        ("micro", 0.1): 0.595,
        ("micro", 0.2): 0.58,
        ("cltk", 0.1): 0.58,
        ("cltk", 0.2): 0.55,
    }
    table = with_goal(rows("hit_rate", 0.6, values | {("topk", 0.1): 0.6}))
    assert "topk" not in set(table["sparsifier"]), "one target says nothing of the smallest"
    micro, cltk = (smallest(table).set_index("sparsifier").loc[name] for name in ("micro", "cltk"))
    assert (micro["keeps"], micro["fails"], micro["also_fails"]) == (0.1, 0.01, [0.2])
    assert (pd.isna(cltk["keeps"]), cltk["fails"]) == (True, 0.1)
    lines = markdown(table).splitlines()
    (line,) = (line for line in lines if line.startswith("| MiCRO") and "not at" in line)
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells == ["0.1 (not at 0.2)", "2", "59.50 ± 0.10", "0.1", "100 B", "10 %", "0.01: -10.00 (n = 2)"]


def test_perplexity_may_be_two_percent_above() -> None:
    table = with_goal(rows("perplexity", 10.0, {("micro", 0.1): 10.25, ("micro", 0.3): 10.19}))
    assert smallest(table)["keeps"].tolist() == [0.3]


def test_runs_without_dense_have_nothing_to_keep_up_with() -> None:
    table = rows("hit_rate", 0.6, {("micro", 0.1): 0.6, ("micro", 0.2): 0.6})
    assert with_goal(table[table["sparsifier"] != "dense"]).empty


def test_rows_of_runs_that_are_gone_stay(tmp_path: Path) -> None:
    write_csv(
        rows("hit_rate", 0.6, {("micro", 0.1): 0.6, ("micro", 0.01): 0.5}).assign(manifests=""), tmp_path / "a.csv"
    )
    earlier = read(tmp_path / "a.csv", None, TABLE)
    write_keep_up(frames(), tmp_path, earlier=earlier)
    found = pd.read_csv(tmp_path / "keep_up.csv").set_index(["sparsifier", "density"])
    assert found["is_earlier"].to_dict() == {
        ("dense", 1.0): True,
        ("micro", 0.01): True,
        ("micro", 0.1): True,
        ("topk", 0.1): False,
        ("topk", 0.2): False,
    }
    assert found.loc[("topk", 0.2), "to_dense"].round(9) == 0.1, "beside the dense row that stays"
    text = (tmp_path / "keep_up.md").read_text()
    assert "3 of 5 rows are from an earlier table" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| MiCRO") and line.endswith("(n = 2) |"))
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["0.1", "2*"]
    again = read(tmp_path / "keep_up.csv", tmp_path / "keep_up_runs.csv", TABLE)
    assert set(again.runs["run"]) == {"topk-0.1", "topk-0.2"}


def frames() -> Frames:
    """Return two runs of one epoch of top-k in the study of ``rows``."""
    runs, steps, epochs = [], [], []
    for target in (0.1, 0.2):
        own = {"run": f"topk-{target}", "sparsifier": "topk", "variant": ""}
        study = {"model": "neumf", "dataset": "movielens100k", "world_size": 4, "epochs": 30}
        runs.append({**own, **study, "density": target, "seed": 0})
        steps.append({**own, "step": 0, "bytes_sent": 9, "density": target, "skipped": False})
        epochs.append({**own, "epoch": 29, "step": 1.0, "hit_rate": 0.5 + target, "metric": "hit_rate"})
    return Frames(runs=pd.DataFrame(runs), steps=pd.DataFrame(steps), epochs=pd.DataFrame(epochs))


def test_a_method_of_one_target_stays_in_the_numbers_until_it_has_another(tmp_path: Path) -> None:
    known = {("micro", 0.1): 0.6, ("micro", 0.01): 0.5, ("cltk", 0.1): 0.6}
    write_csv(rows("hit_rate", 0.6, known).assign(manifests=""), tmp_path / "a.csv")
    write_keep_up(frames(), tmp_path, earlier=read(tmp_path / "a.csv", None, TABLE))
    assert "CLT-k" not in (tmp_path / "keep_up.md").read_text()
    assert "cltk" in set(read(tmp_path / "keep_up.csv", None, TABLE).means["sparsifier"])
