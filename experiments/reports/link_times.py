"""What a step would take on slower links: computed from what its run measured and sent, nothing is timed."""

import pandas as pd

RATES = {"at_1gbit_ms": 1e9, "at_100mbit_ms": 1e8}  # columns of a summary: bits per second
LATENCY_S = 50e-6  # of a message
FRAME = 1514 / 1448  # bytes on the wire for those of a full segment: Ethernet, IP and TCP headers with time stamps


def exchange_s(sent: pd.Series, calls: pd.Series, world_size: "int | pd.Series", rate: float) -> pd.Series:
    """Return the seconds that messages take over a link of ``rate`` bits a second, see `link_times`.

    Args:
        sent: bytes of one worker.
        calls: collectives that these are of.
    """
    return LATENCY_S * (2 * (world_size - 1) * calls) + 8 * FRAME * sent / rate


def link_times(steps: pd.DataFrame, stages_ms: pd.DataFrame) -> pd.DataFrame:
    """Return milliseconds of a step per run, by the columns of RATES: its computation, and its messages over a link.

    Each collective counts as an all-reduce by ring, 2 (n - 1) messages one after the other: at most as many. NaN where
    workers were simulated, whose computation was that of all of them in turn, where there was one worker alone, or
    where the number of collectives was not recorded.

    Args:
        steps: rows of applied steps, as Frames has them.
        stages_ms: of the same runs, the median of each stage and their sum; see `stage_times`.
    """
    known = steps.reindex(columns=[*steps.columns, *({"num_collectives"} - set(steps.columns))])
    calls = pd.to_numeric(known["num_collectives"]).groupby(known["run"]).mean()
    sent = known.groupby("run")["bytes_sent"].mean()
    facts = known.groupby("run")[["world_size", "cluster"]].first()
    computed_ms = stages_ms["total_ms"] - stages_ms["exchange_ms"]
    is_known = (facts["world_size"] > 1) & (facts["cluster"] != "simulated")
    return pd.DataFrame(
        {
            column: (computed_ms + 1e3 * exchange_s(sent, calls, facts["world_size"], rate)).where(is_known)
            for column, rate in RATES.items()
        }
    )
