"""What a step would take on slower links, from what a run measured and sent."""

import pandas as pd
import pytest

from experiments.reports.times import FRAME, LATENCY_S, stage_times

STEP = {
    "run": "run", "skipped": False, "fragment": None, "bytes_sent": 1e6, "num_collectives": 3, "world_size": 4,
    "cluster": "local", "compute_s": 0.010, "forward_s": 0.004, "select_s": 0.001, "exchange_s": 0.008, "rest_s": 0.002,
}  # fmt: skip


def times(**facts: object) -> pd.Series:
    return stage_times(pd.DataFrame([{**STEP, "step": step, **facts} for step in range(4)])).loc["run"]


def test_a_step_on_a_slower_link_is_its_computation_and_its_messages_there() -> None:
    found, latency_ms = times(), 1e3 * 3 * 6 * LATENCY_S  # three rings of four ranks, each 2 (n - 1) messages
    assert found["total_ms"] == pytest.approx(21)
    assert found["at_1gbit_ms"] == pytest.approx(13 + latency_ms + 8 * FRAME)
    assert found["at_100mbit_ms"] == pytest.approx(13 + latency_ms + 80 * FRAME)


@pytest.mark.parametrize("unknown", [{"cluster": "simulated"}, {"world_size": 1}, {"num_collectives": float("nan")}])
def test_without_messages_of_real_workers_there_is_no_time(unknown: dict[str, object]) -> None:
    assert pd.isna(times(**unknown)["at_1gbit_ms"])
