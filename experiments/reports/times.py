"""Times of a step and its stages, from the records of runs, and estimates of a step on slower links."""

import pandas as pd

from experiments.planning.costs import Link
from experiments.reports.frames import STAGES

WARM_UP_STEPS = 10  # caches, allocators and connections settle; left out of times where a run is long enough
RATES = {"at_1gbit_ms": 1e9, "at_100mbit_ms": 1e8}  # columns: bits per second
LATENCY_S = 50e-6  # of a message
FRAME = 1514 / 1448  # bytes on the wire for those of a full segment: Ethernet, IP and TCP headers with time stamps


def stage_times(steps: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds per step of each run: of every stage the median over rounds, their sum, and on slower links.

    forward_ms is the part of compute_ms that is known to be forward, 0 where it is not known.

    Of a round its mean step counts, so that its exchange is in it; without local steps each step is a round. Rounds in
    which a step was skipped do not count, nor do the first WARM_UP_STEPS (half of the rounds in a very short run).

    On a link (RATES) a step takes its computation as measured, and its messages: NaN where workers were simulated,
    whose computation was that of all in turn, where one was alone, or where the number of collectives is not known.
    """
    numbered = steps.set_index([steps["run"], _rounds(steps)])
    rounds = numbered.groupby(level=[0, 1])
    sizes = rounds.size()
    whole = sizes[(sizes == sizes.groupby("run").transform("max")) & ~rounds["skipped"].any()]
    of_run = whole.groupby("run")
    warm = whole[of_run.cumcount() >= (-(-WARM_UP_STEPS // whole)).clip(upper=of_run.transform("size") // 2)]
    means = rounds[[f"{stage}_s" for stage in (*STAGES, "forward")]].mean().loc[warm.index]
    times = means.groupby("run").median().fillna(0) * 1000
    times.columns = pd.Index([f"{stage}_ms" for stage in (*STAGES, "forward")])
    times = times.assign(total_ms=times.drop(columns="forward_ms").sum(axis=1))
    by_run = numbered[numbered.index.isin(warm.index)].reset_index(drop=True).groupby("run")
    facts = by_run[["world_size", "cluster"]].first()
    sent = by_run[["bytes_sent", "num_collectives"]].mean()
    is_known = (facts["world_size"] > 1) & (facts["cluster"] != "simulated")
    for column, rate in RATES.items():
        messages_s = exchange_s(sent["bytes_sent"], sent["num_collectives"], facts["world_size"], ethernet(rate))
        times[column] = (times["total_ms"] - times["exchange_ms"] + 1000 * messages_s).where(is_known)
    return times


def ethernet(rate: float) -> Link:
    """Return a link of Ethernet with so many bits per second."""
    return Link(LATENCY_S, 8 * FRAME / rate)


def exchange_s(sent: pd.Series, calls: pd.Series, world_size: "int | pd.Series", link: Link) -> pd.Series:
    """Return the seconds that messages take over a link: computed from what was sent, nothing is timed.

    Each collective counts as an all-reduce by ring, 2 (n - 1) messages one after the other: at most as many.

    Args:
        sent: bytes of one worker.
        calls: collectives that these are of.
    """
    return link.alpha_s * (2 * (world_size - 1) * calls) + link.beta_s * sent


def _rounds(steps: pd.DataFrame) -> pd.Series:
    """Return the number of the round that each step is in: one ends where the first fragment's exchange does."""
    ends = steps["fragment"].eq(0)
    ends |= ~ends.groupby(steps["run"]).transform("any")
    return ends.groupby(steps["run"]).cumsum() - ends.astype(int)
