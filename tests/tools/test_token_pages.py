"""Pages of studies of language models: forms, seeds, what was sent, seconds on links, and what is not finished."""

import math
from pathlib import Path

import pandas as pd
import pytest

from experiments.config.errors import UserError
from experiments.reports.frames import Frames
from experiments.reports.rounds_in_words import exchanged, short
from experiments.reports.tokens import joined, points, read, write_page
from experiments.reports.tokens.curves import curves, drawn
from experiments.reports.tokens.pairs import gains
from experiments.reports.tokens.rows import rows
from experiments.sweeps.study import planned_runs

STUDY = "gpt_under_adam"
DILOCO = {"rounds.every": 5, "rounds.lr": 0.7, "rounds.momentum": 0.9, "rounds.nesterov": True}


def frames(plan: dict[str, dict[str, object]], left_out: str) -> Frames:
    """Return runs of four steps; those on steps end half a bit lower, and each seed a tenth higher than the last."""
    runs, steps, epochs = [], [], []
    for run, config in plan.items():
        if run == left_out:
            continue
        own = {"run": run, "sparsifier": config["sparsifier.name"], "seed": config["seed"]}
        runs.append(own)
        bits = 3.0 - 0.5 * (config["rounds.every"] == 1) + 0.1 * float(str(config["seed"]))
        epochs.append({**own, "step": 4, "bits_per_byte": bits, "test_loss": bits * math.log(2)})
        step = {**own, "skipped": False, "loss": bits, "density": 0.01, "bytes_sent": 1e6, "num_collectives": 2}
        steps += [{**step, "step": number, "compute_s": 0.4} for number in range(4)]
    return Frames(runs=pd.DataFrame(runs), steps=pd.DataFrame(steps), epochs=pd.DataFrame(epochs))


def test_a_page_has_forms_pairs_and_what_is_missing(tmp_path: Path) -> None:
    plan = planned_runs(STUDY)
    lost = next(run for run in plan if "-micro-d0.01-" in run and "-s0-" in run and plan[run]["rounds.every"] == 0)
    found = points(frames(plan, lost), plan)
    table = rows(found, plan).set_index(["method", "exchanged", "density"])
    row = table.loc[("micro", "gradients", 0.01)]
    assert (row["num_seeds"], row["num_planned"], row["batch_bytes"]) == (2, 3, 1e6)
    assert row["bits_per_byte"] == pytest.approx(3.15)
    assert row["bits_per_byte_half_range"] == pytest.approx(0.05)
    assert row["to_dense"] == pytest.approx(0.05)
    messages = 4 * 2 * 2 * 3 * 50e-6  # four steps, two collectives of 2 (n - 1) messages
    assert row["at_100mbit_ms"] == pytest.approx(4 * 0.1 + messages + 4 * 8e6 * 1514 / 1448 / 1e8)
    pairs = gains(found, plan).set_index(["method", "density"])
    assert pairs["gain"].round(9).eq(0.5).all()
    assert pairs.loc[("micro", 0.01), "num_pairs"] == 2
    text = write_page(STUDY, found, plan, tmp_path)[0].read_text()
    assert "68 of the study's 69 runs are finished." in text
    assert "2 of 3 seeds: MiCRO, gradients at 0.01, 4 workers." in text
    assert (tmp_path / "under_adam.png").is_file()
    with pytest.raises(UserError, match="none of the 1 runs of this study is finished"):
        rows(points(frames(plan, lost), {lost: plan[lost]}), {lost: plan[lost]})


def test_rates_have_a_column_each_and_a_form_the_best_of_them(tmp_path: Path) -> None:
    plan = planned_runs("gpt_rates")
    found = frames(plan, "")
    best = next(run for run in plan if plan[run]["sparsifier.name"] == "topk" and plan[run]["lr"] == 0.008)
    found.epochs.loc[found.epochs["run"] == best, "bits_per_byte"] = 2.25
    text = write_page("gpt_rates", points(found, plan), plan, tmp_path)[0].read_text()
    row = next(line for line in text.splitlines() if line.startswith("| Top-k") and plan[best]["rounds.every"] == 0)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert [cells[0], cells[1], cells[3], cells[4], cells[5]] == ["Top-k", "gradients", "0.008", "2.250", "-0.750"]
    assert cells[-4:] == ["3.000", "3.000", "3.000", "2.250"]
    assert "at 0.001 |" in text
    assert (tmp_path / "rates.png").is_file()


def test_longer_trainings_are_set_beside_dense_ones_of_their_length(tmp_path: Path) -> None:
    plan = planned_runs("gpt_tuned")
    found = frames(plan, "")
    longer = {run for run, config in plan.items() if config["epochs"] == 4}
    found.epochs.loc[found.epochs["run"].isin(longer), "bits_per_byte"] -= 1
    known = points(found, plan)
    table = rows(known, plan)
    dense = table[(table["method"] == "dense") & (table["exchanged"] == "gradients")]
    assert set(dense["passes"]) == {1, 4}
    assert (dense["to_dense"] == 0).all()
    pairs = gains(known, plan)
    assert set(pairs["passes"]) == {1, 4}
    assert pairs["gain"].round(9).eq(0.5).all()
    assert " passes |" in write_page("gpt_tuned", known, plan, tmp_path)[0].read_text().split("By how many")[1]


def test_rounds_and_outer_optimizers_have_short_names() -> None:
    assert short(DILOCO) == "H=5, Nesterov 0.7/0.9"
    assert short({"rounds.every": 5, "rounds.delay": 2}) == "H=5, delay=2"
    assert short({}) == ""
    assert exchanged({"accumulate": 5}) == "gradients of 5 steps"


def test_runs_that_are_gone_stay_in_a_table_of_runs(tmp_path: Path) -> None:
    plan = planned_runs("gpt_tuned")
    whole = points(frames(plan, ""), plan)
    first, second, third, *_ = plan
    (page, table) = write_page("gpt_tuned", whole[whole["run"] != third], plan, tmp_path)[:2]
    at_hand = points(frames(plan, ""), {first: plan[first], third: plan[third]}).assign(bits_per_byte=1.5)
    found = joined(read(table), at_hand, plan)
    pd.testing.assert_frame_equal(
        found.sort_values("run", ignore_index=True),
        whole.assign(bits_per_byte=whole["bits_per_byte"].mask(whole["run"].isin([first, third]), 1.5)).sort_values(
            "run", ignore_index=True
        ),
        check_dtype=False,
    )
    assert joined(read(table), at_hand, {second: plan[second], first: plan[first]})["run"].nunique() == 3
    with pytest.raises(UserError, match=r"is no table of a study's runs: .*give a \*_runs.csv of its page"):
        read(page)


def test_curves_have_losses_within_epochs_and_each_with_what_was_sent_until_then() -> None:
    plan = planned_runs("gpt_tuned")
    found = frames(plan, "")
    often = next(run for run in plan if plan[run]["sparsifier.name"] == "micro" and plan[run]["rounds.every"] == 5)
    is_second = (found.steps["run"] == often) & (found.steps["step"] == 1)
    found.steps.loc[is_second, ["test_loss", "bits_per_byte"]] = [2.5, 3.6]
    known = points(found, plan)
    assert (known["run"] == often).sum() == 2
    own = curves(known, plan)
    assert list(own["name"].unique()) == ["MiCRO, differences of 5 steps"]
    assert list(own["step"]) == [2, 4]
    assert list(own["tokens"]) == [2 * 1024, 4 * 1024]
    assert list(own["bytes"]) == [2e6, 4e6]
    assert own["test_loss"].iloc[0] == 2.5
    assert own["test_loss"].iloc[1] < 2.5
    messages = 2 * 2 * 2 * 3 * 50e-6
    # the least of all forms: four workers in turn, and one form whose steps have five batches
    assert own["at_1gbit_ms"].iloc[0] == pytest.approx(2 * 0.4 / 4 / 5 + messages + 2 * 8e6 * 1514 / 1448 / 1e9)
    assert list(drawn(rows(known, plan), own)["name"]) == ["MiCRO, differences of 5 steps"]
