"""What a soak has seen so far: a table while it runs and at its end."""

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from tests.soak.case import Setup
from tests.soak.trial import Result

_MAX_GROWTH_MIB = 64
_SETTLED = 20  # cases after which memory must no longer grow


@dataclass
class Summary:
    """Counts over all cases, and a line for each that failed."""

    seed: int
    started: float = field(default_factory=time.monotonic)
    kinds: Counter[str] = field(default_factory=Counter)
    methods: set[str] = field(default_factory=set)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    settled_mib: float = 0.0

    def add(self, seed: int, setup: Setup, result: Result) -> None:
        """Count a case."""
        self.kinds[setup.kind] += 1
        self.methods.add(setup.method)
        self.faults.update(result.fired)
        self.longest_s = max(self.longest_s, result.longest_s)
        ended = "failed" if result.problems else "equal after an error's advice" if result.refused else "equal"
        self.outcomes[ended] += 1
        if result.problems:
            self.failures.append(f"seed {seed}, {setup.kind}, {setup.method}: {'; '.join(result.problems)}")
        if self.num_cases == _SETTLED:
            self.settled_mib = resident_mib()

    @property
    def num_cases(self) -> int:
        """Cases that have ended."""
        return self.outcomes.total()

    def check_itself(self) -> None:
        """Add a failure if the memory of this process has grown since the first cases."""
        grown = resident_mib() - self.settled_mib if self.settled_mib else 0.0
        if grown > _MAX_GROWTH_MIB:
            self.failures.append(f"the soak itself: its memory has grown by {grown:.0f} MiB")

    def table(self) -> Table:
        """Return the counts as a table."""
        table = Table(title=f"soak, {time.monotonic() - self.started:.0f} s, from seed {self.seed}", show_header=False)
        table.add_row("cases", f"{self.num_cases}: {_counts(self.kinds)}")
        table.add_row("methods", str(len(self.methods)))
        table.add_row("faults", f"{self.faults.total()}: {_counts(self.faults)}")
        table.add_row("outcomes", _counts(self.outcomes))
        table.add_row("longest attempt", f"{self.longest_s:.1f} s")
        table.add_row("memory", f"{resident_mib():.0f} MiB")
        table.add_row("failed", str(len(self.failures)))
        return table


def resident_mib() -> float:
    """Return the memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counter.most_common()) or "none"
