"""`bench network`: ways to train on hosts with links of a known rate, measured and predicted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.bench import main
from experiments.tools.bench.network import command
from experiments.tools.bench.network.ways import ways_of
from experiments.tools.ranks.hosts import unavailable
from tests.refusals import refused

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
MLP = ["model=mlp", "dataset=synthetic", "batch_size=4"]
ROW = {"rate": "1gbit", "num_steps": 3, "samples_per_s": 9.0, "compute_s": 0.03, "wire_s": 0.05, "least_s": 0.09}
ROW |= {"most_s": 0.2, "link_bytes": 1010.0, "counted_bytes": 1000.0}


def test_ways_are_chosen_by_their_names() -> None:
    names = ["ddp", "dense+5", "dense:30:nesterov", "micro:5", "micro:sparse_exact", "topk"]
    ways = ways_of(names, MLP, 2)
    assert [(way.title, way.interval, way.is_plain) for way in ways] == [
        ("DDP", 1, True),
        ("Dense, gradients of 5 steps", 5, False),
        ("Dense, H=30, Nesterov 0.7/0.9", 30, False),
        ("MiCRO, H=5", 5, False),
        ("MiCRO, sparse_exact", 1, True),
        ("Top-k", 1, True),
    ]
    assert all(way.config.world_size == 2 and not way.config.cluster.simulated for way in ways)


def test_a_mistake_names_what_was_given() -> None:
    for name, part in (("dense;7", "dense;7"), ("ddp:mgwfbp", "mgwfbp"), ("topk:nope", "nope")):
        refused(lambda name=name: ways_of([name], MLP, 2), part)  # type: ignore[misc]


def test_a_run_that_is_stopped_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> Iterator[dict[str, Any]]:
        yield {**ROW, "method": "ddp", "title": "DDP", "step_s": 0.1, "predicted_s": 0.1}
        yield {**ROW, "method": "topk", "title": "Top-k", "step_s": 0.05, "predicted_s": 0.1}
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_measured", measured)
    with pytest.raises(SystemExit, match="130"):
        main(["network", "--out", str(tmp_path), "--methods", "ddp,topk", *MLP])
    table = pd.read_csv(tmp_path / "network.csv").set_index("method")
    assert table["times_ddp"].to_dict() == {"ddp": 1, "topk": 2}
    assert table["over_bound"].to_dict() == pytest.approx({"ddp": 2, "topk": 1})
    assert "Predictions off by more than 10%: Top-k 2.00" in (tmp_path / "network.md").read_text()


@pytest.mark.net
@pytest.mark.xdist_group("hosts")
def test_hosts_send_what_methods_count(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    words = ["--rates", "1gbit", "--hosts", "2", "--steps", "1", "--link-seconds", "1", "--out", str(tmp_path)]
    main(["network", *words, "--methods", "ddp,dense:mgwfbp,micro,dense+5,dense:5,micro:5", *MLP])
    table = pd.read_csv(tmp_path / "network.csv").set_index("method")
    assert table.loc["ddp", "counted_bytes"] == pytest.approx(5 * table.loc["dense:5", "counted_bytes"], rel=0.05)
    # A sparse step of so small a model sends fewer bytes than the barriers do.
    dense = table.loc[["ddp", "dense:mgwfbp", "dense+5", "dense:5"], "link_share"]
    assert dense.between(0.95, 1.3).all(), dense.to_dict()
    assert (table[["step_s", "compute_s", "predicted_s"]] > 0).all(axis=None)
    assert (tmp_path / "network.pdf").exists()
