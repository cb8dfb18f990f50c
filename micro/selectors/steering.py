"""A controller that adjusts one threshold so that about k entries pass it at every step.

A step that selects ``count`` entries also gives their mean log excess, ``tail = mean(log(abs(acc) / threshold))``
(Hill, Annals of Statistics 1975): the inverse slope of log count against log threshold. So the ideal threshold was near
``log(threshold) + tail * (count / k - 1)``, to a standard error of ``tail / sqrt(k)``. `Track.observe` feeds these to a
growing-memory alpha-beta filter of level and trend, and forecasts the next step's threshold. The linear form, not the
log, keeps the mean of ``count`` at k.

A `Track` reports when its forecast is not good enough. Scaling the input by c scales every threshold by c.
"""

import math
from dataclasses import dataclass, fields

TOLERANCE = 0.1  # goal: abs(count / k - 1) <= TOLERANCE + SIGMAS / sqrt(k); limits and memory follow from both
SIGMAS = 3.0  # standard errors that still count as chance
LOST = 1.0  # with a count above k * (1 + LOST), or below k / (1 + LOST), the past is discarded
SHORTEST_MEMORY = 8.0  # steps; a forecast from a line through N points has 4 / N of their variance: a half for 8
LARGEST_GAIN = 2.0  # twice the exact correction never settles, in any loop

_LOWEST, _HIGHEST = math.log(2.0**-126), math.log(2.0**127)  # normal float32


@dataclass(slots=True, kw_only=True)
class Track:
    """The controller's state: a forecast of the next step's threshold, and its quality.

    Attributes:
        log_threshold: forecast for the next step; undefined while age is 0.
        trend: expected change of log_threshold per step.
        tail: mean log excess of the selected entries.
        samples: number of entries behind the estimate of tail.
        age: steps since the track began.
        gain: factor on tail that keeps successive errors uncorrelated.
        error: count / k - 1 of the last step; if it searched, with the count that the forecast would have given.
        energy: recent mean of error**2; 0 while unknown.
        streak: good forecasts in a row, up to 2.
        k: target of the forecast; 0 while unknown.
    """

    log_threshold: float = 0.0
    trend: float = 0.0
    tail: float = 0.0
    samples: float = 0.0
    age: int = 0
    gain: float = 1.0
    error: float = 0.0
    energy: float = 0.0
    streak: int = 0
    k: int = 0

    @property
    def threshold(self) -> float | None:
        """The threshold of the next step, or None if that step must search for it.

        It requires two good forecasts in a row, and a relative error of tail, 1 / sqrt(samples), below a third.
        """
        if self.streak < 2 or self.samples < SIGMAS**2:
            return None
        return math.exp(self.log_threshold)

    def restart(self) -> None:
        """Forget everything."""
        for known in fields(self):
            setattr(self, known.name, known.default)

    def observe(self, *, threshold: float, count: int, tail: float, k: int) -> None:
        """Learn from a step.

        Args:
            threshold: of the step, searched or forecast.
            count: number of selected entries.
            tail: their mean log(abs(acc) / threshold); ignored if count is 0 or it is not finite.
            k: target of the step, >= 1.
        """
        steered = self.threshold is not None
        if steered and _leaves_band(count, k, LOST):
            self.restart()
            return
        # the shortest memory whose noise, 2 / N of SIGMAS / sqrt(k) for N points, stays within the tolerance
        memory = max(SHORTEST_MEMORY, 2 * SIGMAS / math.sqrt(k) / TOLERANCE)
        if count and math.isfinite(tail):  # averaged over the last memory * k entries
            self.samples = min(self.samples + count, max(memory * k, count))
            self.tail += count / self.samples * (tail - self.tail)
        ideal = math.log(threshold) + self.gain * self.tail * (count / k - 1)
        surprise = ideal - self.log_threshold
        forecast_count = count if steered else self._count_of(surprise, k)
        is_good = self.age > 0 and not any(_leaves_band(c, k, TOLERANCE) for c in (count, forecast_count))
        self.streak = min(self.streak + 1, 2) if is_good else 0
        error = forecast_count / k - 1
        if steered:
            self._whiten(error, 1 / k, memory)
        self._smooth(ideal, surprise, memory)
        self.error, self.k = error, k
        self.log_threshold = _in_range(self.log_threshold)

    def _count_of(self, surprise: float, k: int) -> float:
        """Return the count of a searched step at the forecast threshold."""
        if self.tail <= 0:
            return 0.0 if surprise else float(k)
        return k * math.exp(min(surprise / self.tail, _HIGHEST))

    def _whiten(self, error: float, variance: float, memory: float) -> None:
        """Lower the gain while successive errors alternate, raise it while they persist.

        With a good forecast, errors are uncorrelated. The tail alone misjudges the slope at the threshold for mixtures:
        new outliers with entries that just passed the threshold, or layers of different scale.
        """
        self.energy = max(variance, self.energy + (error**2 - self.energy) / memory)
        correlation = max(-1.0, min(1.0, error * self.error / self.energy))
        self.gain = max(1 / memory, min(LARGEST_GAIN, self.gain * math.exp(correlation / memory)))

    def _smooth(self, ideal: float, surprise: float, memory: float) -> None:
        """Move level and trend towards the ideal, like a line through the last min(age, memory) ideals.

        Under error feedback accumulators grow with a power of time (the square root for independent gradients). So the
        forecast growth per step shrinks like that of log(age), which approaches a straight line.
        """
        self.age += 1
        if self.age == 1:
            self.log_threshold = ideal
            return
        n = min(float(self.age), memory)
        self.trend += 6 / (n * (n + 1)) * surprise
        self.trend *= math.log1p(1 / self.age) / math.log1p(1 / (self.age - 1))
        self.log_threshold = self.log_threshold + (4 * n - 2) / (n * (n + 1)) * surprise + self.trend


def _in_range(log_threshold: float) -> float:
    return max(_LOWEST, min(_HIGHEST, log_threshold))


def _leaves_band(count: float, k: int, band: float) -> bool:
    """Return whether count leaves [k / (1 + band), k (1 + band)] by more than chance.

    The square root of a Poisson count has a standard deviation of 1/2, whatever its mean (Anscombe, Biometrika 1948).
    """
    lower, middle, upper = (2 * math.sqrt(c + 0.375) for c in (k / (1 + band), count, k * (1 + band)))
    return middle > upper + SIGMAS or middle < lower - SIGMAS
