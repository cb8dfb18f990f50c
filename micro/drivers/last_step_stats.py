"""What the last step reports, gathered bucket by bucket."""

from micro.spans import Seconds
from micro.stats import StepStats


class LastStep:
    """The statistics of the last step on one rank.

    Attributes:
        stats: one per reduced vector, in the order in which they were reduced.
        bucket_names: the parameters of each of DDP's buckets, in the same order.
        exposed: seconds of the last backward after all gradients were computed: the communication it did not hide.
    """

    def __init__(self) -> None:
        self.stats: list[StepStats] = []
        self.bucket_names: list[tuple[str, ...]] = []
        self.exposed: Seconds = 0.0

    @property
    def skipped(self) -> bool:
        """Whether the step was taken back: its update is zero in all buckets, on all ranks alike."""
        return any(stats.skipped for stats in self.stats)

    def begin(self) -> None:
        """Forget the step before."""
        self.stats.clear()
        self.bucket_names.clear()
