"""Steer one threshold, known to every rank, so that about k entries pass it at every step.

A step that selects ``count`` entries also gives their mean log excess, ``tail = mean(log(abs(acc) / threshold))``
(Hill, Annals of Statistics 1975): the inverse slope of log count against log threshold. So the threshold that would
have been right lay near ``log(threshold) + tail * (count / k - 1)``, to a standard error of ``tail / sqrt(k)``.
`observe` feeds these to a growing-memory alpha-beta filter of level and trend, and forecasts the next step's threshold.
The linear form, not the log, keeps the mean of ``count`` at k.

A `Track` says when its forecast is not good enough: the step then searches its threshold (`micro_rules.quantile`).
Everything is relative: scaling the input by c scales every threshold by c. Functions are pure, and a track holds plain
numbers, equal on all ranks when what they are made from is.
"""

import math
from dataclasses import dataclass, field, replace

TOLERANCE = 0.1  # wanted: abs(count / k - 1) <= TOLERANCE + SIGMAS / sqrt(k); alarms and memory follow from these two
SIGMAS = 3.0  # standard errors that are still called chance
LOST = 1.0  # a count beyond k * (1 + LOST), or below k / (1 + LOST): the past says nothing about the next step
SHORTEST_MEMORY = 8.0  # steps; a line through N points forecasts with 4 / N of their variance: 8 keeps that to half
LARGEST_GAIN = 2.0  # twice the exact correction never settles, in any loop

_LOG_RANGE = math.log(2.0**-126), math.log(2.0**127)  # normal float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What all ranks know about the next step's threshold.

    Attributes:
        log_threshold: forecast for the next step; means nothing while age is 0.
        trend: expected change of log_threshold per step.
        tail: mean log excess of the selected entries.
        samples: entries that tail was estimated from.
        age: steps since the track began.
        gain: factor on tail that keeps successive errors uncorrelated.
        error: count / k - 1 of the last step, or what the forecast would have made it where the step was searched.
        energy: recent mean of error**2; 0 while unknown.
        streak: good forecasts in a row, up to 2.
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

    @property
    def threshold(self) -> float | None:
        """The steered threshold of the next step, or None where that step has to search it.

        Steering takes two good forecasts in a row, and a tail known to a third (its error is tail / sqrt(samples)).
        """
        if self.streak < 2 or self.samples < SIGMAS**2:
            return None
        return math.exp(self.log_threshold)


@dataclass(slots=True)
class Tracked:
    """The state of a method that keeps a track, and the k that it is aimed at where that changes with time."""

    track: Track = field(default_factory=Track)
    k: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.track, dict):  # as saved
            self.track = Track(**self.track)


def observe(track: Track, *, threshold: float, count: int, tail: float, k: int) -> Track:
    """Return the track after a step.

    Args:
        track: as it stood before that step.
        threshold: what the step used, searched or steered.
        count: entries that all ranks together selected.
        tail: their mean log(abs(acc) / threshold); not used where count is 0 or the mean is not finite.
        k: entries wanted in that step, >= 1.
    """
    steered = track.threshold is not None
    if steered and _is_beyond(count, k, LOST):
        return Track()
    # as few steps as keep the filter's own noise, 2 / N of SIGMAS / sqrt(k) for N points, within the tolerance
    memory = max(SHORTEST_MEMORY, 2 * SIGMAS / math.sqrt(k) / TOLERANCE)
    track = _learn_tail(track, count, tail, memory * k)
    ideal = math.log(threshold) + track.gain * track.tail * (count / k - 1)
    surprise = ideal - track.log_threshold
    forecast_count = count if steered else _count_of(surprise, track.tail, k)
    is_good = track.age > 0 and not any(_is_beyond(c, k, TOLERANCE) for c in (count, forecast_count))
    track = replace(track, streak=min(track.streak + 1, 2) if is_good else 0)
    if steered:
        track = _whiten(track, forecast_count / k - 1, 1 / k, memory)
    track = replace(_smooth(track, ideal, surprise, memory), error=forecast_count / k - 1)
    return aim(track, k, k)


def aim(track: Track, k: int, next_k: int) -> Track:
    """Carry the forecast from k to next_k along the tail, and keep it a normal float32.

    A change beyond TOLERANCE makes the next step search.
    """
    low, high = _LOG_RANGE
    log_threshold = max(low, min(high, track.log_threshold + track.tail * math.log(k / next_k)))
    streak = 0 if abs(math.log(next_k / k)) > math.log1p(TOLERANCE) else track.streak
    return replace(track, log_threshold=log_threshold, streak=streak)


def _is_beyond(count: float, k: int, band: float) -> bool:
    """Return whether count leaves [k / (1 + band), k (1 + band)] by more than chance.

    The square root of a Poisson count has a standard deviation of 1/2, whatever its mean (Anscombe, Biometrika 1948).
    """
    lower, middle, upper = (2 * math.sqrt(c + 0.375) for c in (k / (1 + band), count, k * (1 + band)))
    return middle > upper + SIGMAS or middle < lower - SIGMAS


def _count_of(surprise: float, tail: float, k: int) -> float:
    """Return the count that a searched step would have had at the forecast threshold."""
    if tail <= 0:
        return 0.0 if surprise else float(k)
    return k * math.exp(min(surprise / tail, _LOG_RANGE[1]))


def _learn_tail(track: Track, count: int, tail: float, capacity: float) -> Track:
    """Average the tail over entries, of which the last ``capacity`` count."""
    if not count or not math.isfinite(tail):
        return track
    samples = min(track.samples + count, max(capacity, count))
    return replace(track, samples=samples, tail=track.tail + count / samples * (tail - track.tail))


def _whiten(track: Track, error: float, variance: float, memory: float) -> Track:
    """Lower the gain while successive errors alternate, raise it while they persist.

    A good forecast leaves them uncorrelated. The tail by itself misjudges the slope at the threshold where the selected
    are a mixture: fresh outliers beside entries that just grew past the threshold, or layers of different scale.
    """
    energy = max(variance, track.energy + (error**2 - track.energy) / memory)
    correlation = max(-1.0, min(1.0, error * track.error / energy))
    gain = max(1 / memory, min(LARGEST_GAIN, track.gain * math.exp(correlation / memory)))
    return replace(track, gain=gain, energy=energy)


def _smooth(track: Track, ideal: float, surprise: float, memory: float) -> Track:
    """Move level and trend towards the ideal, as the least-squares line through the last min(age, memory) ideals does.

    Under error feedback accumulators grow with a power of the time since the start (the square root for independent
    gradients), so the growth of a step is forecast to shrink as that of log(age) does, which tends to a straight line.
    """
    age = track.age + 1
    if age == 1:
        return replace(track, age=age, log_threshold=ideal)
    n = min(float(age), memory)
    level = track.log_threshold + (4 * n - 2) / (n * (n + 1)) * surprise
    trend = track.trend + 6 / (n * (n + 1)) * surprise
    trend *= math.log1p(1 / age) / math.log1p(1 / (age - 1))
    return replace(track, age=age, log_threshold=level + trend, trend=trend)
