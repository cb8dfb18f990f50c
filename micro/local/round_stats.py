"""The statistics of a round of local steps."""

from dataclasses import dataclass

from micro.drivers.summary import StepSummary
from micro.reducers.stats import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """Statistics of one round on one rank.

    Attributes:
        round: its number, from 0.
        fragment: the exchanged part of the model, from 0.
        num_steps: inner steps of this rank since the fragment's last exchange began.
        vectors: the statistics of each reduced vector.
        own_norm: L2 norm of this rank's weight difference, times its weight if ranks differ in ``every``.
        mean_norm: L2 norm of the update, equal on all ranks.
        cosine: between the two; 0 if one is zero. It falls as workers drift apart, and with sparser updates.
        drift: root mean square over ranks of norm(difference - update), relative to norm(update); equal on all ranks; 0
            if the update is zero.
        buffer_bytes: bytes of the model's buffers that this rank sent.
        exchange_s: seconds of the exchange: reduction, statistics, buffers.
        exposed_s: seconds for which it blocked training, including the outer step; less than ``exchange_s`` if the
            exchange overlaps with the next steps.
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
        """Whether weights were reset to the start of the round, because a difference had NaN or Inf."""
        return any(vector.skipped for vector in self.vectors)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent in the round, buffers included."""
        return sum(vector.bytes_sent for vector in self.vectors) + self.buffer_bytes

    @property
    def bytes_per_step(self) -> float:
        """Bytes sent per inner step."""
        return self.bytes_sent / max(self.num_steps, 1)
