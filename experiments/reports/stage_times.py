"""Seconds of a step and of its stages, from the records of runs."""

import pandas as pd

from experiments.reports.frames import STAGES
from experiments.reports.link_times import link_times

WARM_UP_STEPS = 10  # caches, allocators and connections settle; left out of times where a run is long enough


def stage_times(steps: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds per step of each run: of every stage the median over rounds, their sum, and on slower links.

    Of a round its mean step counts, so that its exchange is in it; without local steps each step is a round. Rounds in
    which a step was skipped do not count, nor do the first WARM_UP_STEPS (half of the rounds in a very short run).
    """
    numbered = steps.set_index([steps["run"], _rounds(steps)])
    rounds = numbered.groupby(level=[0, 1])
    sizes = rounds.size()
    whole = sizes[(sizes == sizes.groupby("run").transform("max")) & ~rounds["skipped"].any()]
    of_run = whole.groupby("run")
    warm = whole[of_run.cumcount() >= (-(-WARM_UP_STEPS // whole)).clip(upper=of_run.transform("size") // 2)]
    means = rounds[[f"{stage}_s" for stage in STAGES]].mean().loc[warm.index]
    times = means.groupby("run").median().fillna(0) * 1000
    times.columns = pd.Index([f"{stage}_ms" for stage in STAGES])
    times = times.assign(total_ms=times.sum(axis=1))
    counted = numbered[numbered.index.isin(warm.index)].reset_index(drop=True)
    return times.join(link_times(counted, times))


def _rounds(steps: pd.DataFrame) -> pd.Series:
    """Return the number of the round that each step is in: one ends where the first fragment's exchange does."""
    ends = steps["fragment"].eq(0)
    ends |= ~ends.groupby(steps["run"]).transform("any")
    return ends.groupby(steps["run"]).cumsum() - ends.astype(int)
