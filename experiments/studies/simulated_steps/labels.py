"""Names of schedules, of a method under a schedule, and of rates, for tables and figures."""

import math

from experiments.reports.names import label
from experiments.studies.simulated_steps.step import DENSE

SCHEDULES = {
    "layerwise": "WFBP",
    "single": "SyncEASGD",
    "mgwfbp": "MG-WFBP",
    "exact": "exact",
    "ddp": "DDP",
    "asc": "ASC-WFBP",
    "dear": "DeAR",
}


def schedule_name(schedule: str) -> str:
    """Name of a schedule in legends and tables."""
    return SCHEDULES.get(schedule, schedule)


def way_name(method: str, schedule: str) -> str:
    """Name of a method under a schedule."""
    if method == DENSE:
        return schedule_name(schedule)
    return f"{label(method)}, {'one bucket' if schedule == 'single' else schedule_name(schedule)}"


def in_legend(method: str, schedule: str) -> str:
    """Name of a method under a schedule where no heading says what is what: ``dense, exact schedule``."""
    name = way_name(method, schedule)
    return f"{'dense, ' if method == DENSE else ''}{name}{' schedule' if schedule == 'exact' else ''}"


def rate_name(value: float) -> str:
    """Write bits per second: ``100M``, ``10G``; never and always, where there is no border."""
    if value in (0, math.inf):
        return "always" if value else "never"
    power = math.floor(math.log10(value) / 3 + 1e-9)
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"
