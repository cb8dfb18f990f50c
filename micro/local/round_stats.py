"""What a round reports."""

from dataclasses import dataclass

from micro.drivers.summary import StepSummary
from micro.reducers.stats import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """One round as one rank saw it.

    Attributes:
        round: its number, from 0.
        fragment: of the model that was exchanged, from 0.
        num_steps: inner steps of this rank since the fragment's last exchange began.
        vectors: the statistics of each vector that was reduced.
        own_norm: L2 norm of this rank's difference of weights, times its weight where ranks differ in ``every``.
        mean_norm: that of the update, the same on all ranks.
        cosine: between the two; 0 where one is zero. It falls as the workers drift apart, and as the update is sparser.
        drift: root of the mean over ranks of the squared norm of the difference of weights less the update, over that
            of the update: how far the workers are from what they agree on, the same on all ranks; 0 where the update is
            zero.
        buffer_bytes: bytes that this rank sent of the model's buffers.
        exchange_s: seconds of the exchange: reduction, statistics, buffers.
        exposed_s: seconds that training stood still for it: all of them and the outer step, or where the exchange goes
            on beside the next steps, only what was left of it.
    """

    round: int
    fragment: int = 0
    num_steps: int
    vectors: tuple[StepStats, ...]
    own_norm: float
    mean_norm: float
    cosine: float
    drift: float
    buffer_bytes: float
    exchange_s: float
    exposed_s: float = 0.0

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
