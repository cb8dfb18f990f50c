"""The sums over a vector that fits of thresholds use."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers on the host, in double precision; some 1e-6 of each is rounding.

    Attributes:
        count: of what is summed up.
        total: its sum.
        squares: sum of its squares.
        magnitudes: sum of its magnitudes.
        largest, smallest: of its magnitudes; 0 and infinity where there are none.
    """

    count: float
    total: float
    squares: float
    magnitudes: float
    largest: float
    smallest: float

    @property
    def mean(self) -> float:
        """The mean; count is at least 1."""
        return self.total / self.count

    @property
    def mean_magnitude(self) -> float:
        """The mean magnitude; count is at least 1."""
        return self.magnitudes / self.count

    @property
    def variance(self) -> float:
        """The unbiased variance; count is at least 2."""
        return max(self.squares - self.total * self.mean, 0.0) / (self.count - 1)

    @property
    def variance_of_magnitudes(self) -> float:
        """The unbiased variance of the magnitudes; count is at least 2."""
        return max(self.squares - self.magnitudes * self.mean_magnitude, 0.0) / (self.count - 1)
