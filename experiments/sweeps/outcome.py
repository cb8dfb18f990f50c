"""The outcome of a sweep."""

from dataclasses import dataclass, field
from pathlib import Path

from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, failure_log, state_of

ON_ERROR = ("continue", "stop")  # what a sweep does after a run failed


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that failed: its name, the reason in one line, and the log file if there is one."""

    run: str
    why: str
    log: Path | None


@dataclass(slots=True)
class Outcome:
    """The outcome of a sweep.

    Attributes:
        failures: In the order in which they happened.
        num_left: Runs that were not started, after a failure or a signal.
        num_elsewhere: Runs that another process finished while this sweep waited for them or carried out others.
        stopped: Exit code of the signal that stopped the sweep, None without one.
        has_disk_error: Whether a disk takes no more, so that no further run is started.
    """

    failures: list[FailedRun] = field(default_factory=list)
    num_left: int = 0
    num_elsewhere: int = 0
    stopped: int | None = None
    has_disk_error: bool = False

    @property
    def exit_code(self) -> int:
        """0 if all runs are finished, 1 if one failed, or the code of the signal that stopped the sweep."""
        if self.stopped is not None:
            return self.stopped
        return 1 if self.failures or self.num_left else 0

    def add_failure(self, folder: RunFolder, why: str) -> None:
        """Record that the run of ``folder`` failed."""
        self.failures.append(FailedRun(folder.path.name, why, failure_log(folder)))

    def count_left(self, folders: list[RunFolder]) -> None:
        """Count the runs that neither failed nor are finished."""
        failed = {failure.run for failure in self.failures}
        self.num_left = sum(folder.path.name not in failed and state_of(folder) != State.DONE for folder in folders)
