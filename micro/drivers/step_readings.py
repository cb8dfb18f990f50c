"""What an attachment says of its last step, whatever it is attached to."""

from abc import ABC, abstractmethod
from typing import Protocol

from micro.clipping import check_clip
from micro.drivers.last_step_stats import LastStep
from micro.stats import StepStats
from micro.summary import StepSummary


class Stepping(Protocol):
    """What takes the steps of an attachment.

    Attributes:
        clip: the greatest norm of the gradient, or None.
        last_step: its statistics.
    """

    clip: float | None
    last_step: LastStep

    @property
    def skipped(self) -> bool:
        """Whether the last step was not finite."""


class StepReadings(ABC):
    """The last step of an attachment, and the limit of norms for the next."""

    @property
    @abstractmethod
    def _stepping(self) -> Stepping:
        """What takes the steps."""

    @property
    def stats(self) -> tuple[StepStats, ...]:
        """The statistics of the last step, one per reduced vector.

        On DDP in the order in which they were reduced; on FSDP of this rank's shards, in the model's order.
        """
        return tuple(self._stepping.last_step.stats)

    @property
    def skipped(self) -> bool:
        """Whether the last step was not finite, so that the whole update is zero; the same on all ranks.

        A loop that must not move in such a step, by momentum or weight decay, leaves out ``optimizer.step()``. With a
        scaler the update is Inf, and the scaler does that.
        """
        return self._stepping.skipped

    @property
    def summary(self) -> StepSummary:
        """The statistics of the last step over all vectors that this rank reduced.

        Raises:
            ValueError: no step was taken yet.
        """
        if not self.stats:
            raise ValueError("there is no step yet to be summarized: call backward first")
        return StepSummary(self.stats, self._stepping.last_step.exposed)

    @property
    def bucket_names(self) -> list[tuple[str, ...]]:
        """The parameters of each reduced vector: of DDP's buckets or of FSDP's modules, in the order of ``stats``."""
        return self._stepping.last_step.bucket_names

    @property
    def exposed_s(self) -> float:
        """Seconds of the last backward after all gradients were computed: the communication it did not hide.

        On FSDP it is the whole exchange between nodes, which follows the backward.
        """
        return float(self._stepping.last_step.exposed)

    @property
    def clip(self) -> float | None:
        """The greatest norm of the gradient, as it was attached; may be changed between steps, on all ranks alike."""
        return self._stepping.clip

    @clip.setter
    def clip(self, limit: float | None) -> None:
        check_clip(limit)
        self._stepping.clip = limit
