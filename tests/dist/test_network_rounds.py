"""Forms of local steps on hosts with links of a known rate: what is chosen, simulated, written and measured."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.bench import main
from experiments.benchmarks.network import rounds
from experiments.config.errors import UserError
from experiments.ranks.hosts import unavailable
from experiments.reports.forms import seconds_on_link

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
SMALL = ["model.settings.hidden=16", "model.settings.num_layers=1", "dataset.settings.num_train=20000"]


def options(*ways: str, overrides: tuple[str, ...] = (), rounds: int = 3, batches: int = 30) -> argparse.Namespace:
    given = {"rates": ["100mbit", "1gbit"], "hosts": 2, "ways": list(ways), "rounds": rounds, "batches": batches}
    return argparse.Namespace(**given, overrides=[*SMALL, *overrides])


def test_forms_are_chosen_by_their_names() -> None:
    given = options("dense", "dense+5", "dense:30:nesterov", "micro:5", overrides=("epochs=4",), rounds=1, batches=10)
    ways = rounds.ways_of(given)
    assert [(way.title, way.interval, way.round_steps) for way in ways] == [
        ("Dense, gradients", 1, 1),
        ("Dense, gradients of 5 steps", 5, 1),
        ("Dense, H=30, Nesterov 0.7/0.9", 30, 30),
        ("MiCRO, H=5", 5, 5),
    ]
    assert [way.warm_rounds * way.interval for way in ways] == [4, 5, 30, 5]
    assert [way.num_rounds(given) * way.interval for way in ways] == [10, 10, 30, 10]
    assert all(way.config.world_size == 2 and not way.config.cluster.simulated for way in ways)


@pytest.mark.parametrize(
    ("way", "overrides", "words"),
    [
        ("dense;7", (), ("--ways", "dense;7")),
        ("dense", ("rounds.every=5",), ("rounds.every=5", "--ways")),
        ("dense:30", (), ("dense:30", "240 steps", "epochs=7")),
    ],
)
def test_a_mistake_is_one_line(way: str, overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        rounds.ways_of(options(way, overrides=overrides))
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def steps_of(sent: int) -> list[dict[str, Any]]:
    """Five steps, of which the last exchanges in three collectives."""
    quiet: dict[str, Any] = {"compute_s": 0.04, "bytes_sent": 0, "num_collectives": 0}
    return [quiet] * 4 + [quiet | {"bytes_sent": sent, "num_collectives": 3}]


@pytest.mark.parametrize(("way", "batches"), [("dense:5", 1), ("dense+5", 5)])
def test_the_simulated_seconds_are_those_of_the_page_on_equal_tokens(way: str, batches: int) -> None:
    steps, num_batches = steps_of(10**6), 5 * batches
    found = rounds.of_steps([steps, steps_of(2 * 10**6)], num_batches, batches, 1e8)
    assert found["counted_bytes"] == 1.5 * 10**6 / num_batches
    sent = pd.DataFrame(steps)[["bytes_sent", "num_collectives"]].sum().to_frame().T
    run = {"step": len(steps), "batches": batches, "batch_size": 4, "world_size": 2, "compute_s": found["compute_s"]}
    whole_s = seconds_on_link(sent.rename(columns={"bytes_sent": "total_bytes"}).assign(**run), 1e8).iloc[0]
    table = rounds.compared(pd.DataFrame([row("100mbit", way, 0.1) | found]))
    assert table["predicted_s"][0] == pytest.approx(whole_s / num_batches)


def row(rate: str, way: str, step_s: float) -> dict[str, Any]:
    texts = {"rate": rate, "way": way, "title": f"form {way}", "label": "Dense", "exchanged": "gradients"}
    numbers = {"step_s": step_s, "least_s": 0.9 * step_s, "most_s": 2 * step_s, "num_rounds": 3}
    return {**texts, **numbers, "link_bytes": 1010.0, "counted_bytes": 1000.0} | simulated(0.03)


def simulated(compute_s: float) -> dict[str, float]:
    return {"compute_s": compute_s, "simulated_exchange_s": 0.02}


def test_rows_are_sorted_by_rate_and_compared_with_the_computation_of_all_forms_at_it() -> None:
    rows = [
        row("100mbit", "dense", 0.4),
        row("1gbit", "dense", 0.1),
        row("100mbit", "micro:5", 0.1) | simulated(0.05),
        row("1gbit", "micro:5", 0.05),
    ]
    found = rounds.compared(pd.DataFrame(rows))
    assert found["rate"].tolist() == ["100mbit", "100mbit", "1gbit", "1gbit"]
    assert found["predicted_s"].tolist() == pytest.approx([0.06, 0.06, 0.05, 0.05])  # medians 0.04 and 0.03
    assert found["times_dense"].tolist() == pytest.approx([1, 4, 1, 2])
    assert rounds.compared(pd.DataFrame(rows[2:]))["times_dense"].isna().all()


def test_a_run_that_is_stopped_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> Iterator[dict[str, Any]]:
        yield row("1gbit", "dense", 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "_measured", measured)
    with pytest.raises(SystemExit, match="130"):
        main(["network_rounds", "--out", str(tmp_path), "--ways", "dense"])
    assert pd.read_csv(tmp_path / "network_rounds.csv")["measured_share"].tolist() == pytest.approx([2.0])
    assert "2.00 to 2.00" in (tmp_path / "network_rounds.md").read_text()


@pytest.mark.net
@pytest.mark.xdist_group("hosts")
def test_rounds_on_hosts_send_what_they_count(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    words = ["--rates", "1gbit", "--hosts", "2", "--rounds", "1", "--batches", "1", "--out", str(tmp_path)]
    main(["network_rounds", *words, "--ways", "dense,dense+5,dense:5,micro:5", *SMALL])
    table = pd.read_csv(tmp_path / "network_rounds.csv").set_index("way")
    assert table.loc["dense", "counted_bytes"] == pytest.approx(5 * table.loc["dense:5", "counted_bytes"], rel=0.01)
    # A sparse round of so small a model sends fewer bytes than the barrier does.
    assert table["link_share"][:3].between(0.95, 1.3).all(), table["link_share"].to_dict()
    assert (table[["step_s", "compute_s", "predicted_s"]] > 0).all(axis=None)
