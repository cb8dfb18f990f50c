"""What a round reports."""

from dataclasses import dataclass

from micro.stats import StepStats
from micro.summary import StepSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """One round as one rank saw it.

    Attributes:
        round: its number, from 0.
        num_steps: inner steps of this rank since the weights that it is about were equal.
        vectors: the statistics of each vector that was reduced.
        own_norm: L2 norm of this rank's difference of weights.
        mean_norm: that of the update, the same on all ranks.
        cosine: between the two; 0 where one is zero. It falls as the workers drift apart, and as the update is sparser.
        buffer_bytes: bytes that this rank sent of the model's buffers.
        exchange_s: seconds of the whole round's end: differences, reduction, outer step, new weights.
    """

    round: int
    num_steps: int
    vectors: tuple[StepStats, ...]
    own_norm: float
    mean_norm: float
    cosine: float
    buffer_bytes: float
    exchange_s: float

    @property
    def summary(self) -> StepSummary:
        """The statistics of all vectors together."""
        return StepSummary(self.vectors, self.exchange_s)

    @property
    def skipped(self) -> bool:
        """Whether weights went back to the start of the round, because a difference held NaN or Inf."""
        return any(vector.skipped for vector in self.vectors)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent in the round, buffers included."""
        return sum(vector.bytes_sent for vector in self.vectors) + self.buffer_bytes

    @property
    def bytes_per_step(self) -> float:
        """Bytes sent for each inner step."""
        return self.bytes_sent / max(self.num_steps, 1)
