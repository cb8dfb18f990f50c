"""SIDCo: the threshold of a sparsity-inducing law, fitted again and again to what exceeds the last threshold."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from micro.comm import Comm
from micro.parts import Rule, check_rule
from micro.selectors.base import Selector
from micro.selectors.fitting import Correction, select_near, strictly_above
from micro.sparse import Selection, Step

Law = Literal["exponential", "gamma", "pareto"]

FIRST_SHARE = 0.25  # what the first of several stages keeps
CALLS = 5  # steps between two decisions about the number of stages
TOO_MANY, TOO_FEW = 1.2, 0.8  # mean count / k beyond which it changes
PIECE = 1 << 18  # entries summed up at a time: they stay in the cache


@dataclass(slots=True)
class SidcoState:
    """How many stages there are now, and how well they did.

    Attributes:
        stages: fits per step.
        calls: steps since the last decision about them.
        excess: sum of count / k over these steps.
        corrections: what was learned about the guesses of each number of stages (rule 'repaired').
    """

    stages: int = 1
    calls: int = 0
    excess: float = 0.0
    corrections: dict[int, Correction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidco(Selector[SidcoState]):
    """Select what exceeds the quantile of a law with a peak at zero, fitted in stages to ever fewer entries.

    The first stage fits the law to all magnitudes and keeps about a quarter; each further one fits it to how far the
    survivors exceed their smallest. One pass for the statistics, one for the scan; later stages touch survivors alone.
    Ranks fit and choose by themselves, so the union grows with their number (build-up).

    Args:
        law: 'exponential' (double exponential gradients, the paper's SIDCo-E), 'gamma' (double gamma first, generalised
            Pareto after it, SIDCo-GP) or 'pareto' (double generalised Pareto, SIDCo-P).
        stages: fits per step, at most ceil(log2(numel / k)); None follows the counts: from 1 on, one fewer after 5
            steps of more than 1.2 k on average, one more after 5 steps of less than 0.8 k.
        rule: 'repaired', the fitted threshold is corrected by a factor learned from earlier steps and the count bounded
            by 4 k / 3: see micro.selectors.fitting; 'published', the fitted threshold as it is.

    Source: Abdelmoniem, Elzanaty, Alouini and Canini, An efficient statistical-based gradient compression technique for
    distributed training systems, MLSys 2021, arXiv 2101.10761, and its public code. Differences: the number of stages
    is each bucket's own (the code shares it between all tensors) and starts at 1; the vector is not divided by its
    norm, which changes nothing; the gamma law is fitted to what is not zero; where a fit has no answer the threshold is
    the limit it tends to (shape 0, no variance), and a stage with fewer than two survivors, or equal ones, ends the
    refinement (the code fails or divides by zero); a density of a quarter or more takes one stage. With 'repaired' the
    number of stages follows the count that the law would have given without the factor.

    Raises:
        ValueError: no such law or rule, or stages less than 1.
    """

    law: Law = "exponential"
    stages: int | None = None
    rule: Rule = "repaired"
    name: ClassVar[str] = "sidco"

    def __post_init__(self) -> None:
        check_rule(self)
        if self.law not in get_args(Law):
            raise ValueError(f"law of sidco must be one of {', '.join(get_args(Law))}, got '{self.law}'")
        if self.stages is not None and self.stages < 1:
            raise ValueError(f"stages of sidco must be at least 1, or None to adapt, got {self.stages}")

    def start(self) -> SidcoState:
        """Return one stage, and nothing learned."""
        return SidcoState()

    def load(self, saved: dict[str, Any]) -> SidcoState:
        """Return the state that ``save`` described."""
        corrections = {stages: Correction(**track) for stages, track in saved["corrections"].items()}
        return SidcoState(**(saved | {"corrections": corrections}))

    def select(self, state: SidcoState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return this rank's indices beyond its own threshold."""
        k = min(step.target_count, acc.numel())
        density = k / acc.numel()
        most = most_stages(density)
        num_stages = min(self.stages or state.stages, most)
        survivors = fit(acc, self.law, stage_shares(density, num_stages))
        if self.rule == "published":
            selection = _beyond(acc, survivors)
            count = float(selection.indices.numel())
        else:
            correction = state.corrections.setdefault(num_stages, Correction())
            selection = _near(correction, acc, survivors, k)
            count = _count_at(survivors.threshold, selection, correction)
        if self.stages is None:
            _follow(state, count / k, num_stages, most)
        return selection


def most_stages(density: float) -> int:
    """Return ceil(log2(1 / density)), at least 1; 1 also where the first of several stages would keep too little."""
    return max(1, math.ceil(-math.log2(density))) if density < FIRST_SHARE else 1


def stage_shares(density: float, num_stages: int) -> list[float]:
    """Return the share that each stage keeps of the last one's survivors; their product is ``density``."""
    if num_stages == 1:
        return [density]
    return [FIRST_SHARE, *[(density / FIRST_SHARE) ** (1 / (num_stages - 1))] * (num_stages - 1)]


@dataclass(frozen=True, slots=True)
class Survivors:
    """What a fit in stages leaves.

    Attributes:
        threshold: of the last stage, on abs(acc).
        indices: (m,) int32 of the entries that the last stage was fitted to, ascending; None for all.
        magnitudes: theirs (m,).
    """

    threshold: float
    indices: Tensor | None = None
    magnitudes: Tensor | None = None


def fit(acc: Tensor, law: Law, shares: list[float]) -> Survivors:
    """Fit a law to abs(acc) (numel,) in stages that keep these shares."""
    size, mean, variance, mean_log = moments(acc, logs=law == "gamma")
    density = min(1.0, shares[0] * acc.numel() / max(size, 1))  # among those that the law is fitted to
    survivors = Survivors(_quantile(law, mean, variance, mean_log, density))
    law = "pareto" if law == "gamma" else law
    for share in shares[1:]:
        indices, magnitudes = _passed(acc, survivors)
        if indices.numel() < 2:
            return survivors
        floor = magnitudes.min()
        _, mean, variance, _ = moments(magnitudes - floor)
        if not mean > 0:
            return survivors
        threshold = float(floor) + _quantile(law, mean, variance, 0.0, share)  # host sync: the next stage's scan
        survivors = Survivors(threshold, indices, magnitudes)
    return survivors


def moments(x: Tensor, *, logs: bool = False) -> tuple[int, float, float, float]:
    """Return size, mean and unbiased variance of abs(x) (numel,), and the mean of its logarithm, in double precision.

    Args:
        logs: leave zeros out, and compute the mean logarithm, which is 0 otherwise.
    """
    sums = torch.stack([_sums(piece, logs) for piece in x.split(PIECE)]).sum(0)
    size, total, squares, log_total = sums.tolist()  # host sync: the threshold follows from them
    if not size:
        return 0, 0.0, 0.0, 0.0
    mean = total / size
    variance = (squares - total * mean) / (size - 1) if size > 1 else 0.0
    return int(size), mean, variance, log_total / size


def _sums(piece: Tensor, logs: bool) -> Tensor:
    magnitudes = piece.abs().double()
    if not logs:
        size = torch.full((), piece.numel(), dtype=torch.float64, device=piece.device)
        return torch.stack([size, magnitudes.sum(), magnitudes.dot(magnitudes), torch.zeros_like(size)])
    size = magnitudes.count_nonzero().double()
    logarithms = magnitudes.log().clamp_(min=-1e4)  # of a zero: left out by the next line
    return torch.stack([size, magnitudes.sum(), magnitudes.dot(magnitudes), (logarithms * (magnitudes > 0)).sum()])


def _quantile(law: Law, mean: float, variance: float, mean_log: float, density: float) -> float:
    if not mean > 0:
        return 0.0
    if law == "gamma":
        return gamma_quantile(mean, mean_log, density)
    return exponential_quantile(mean, density) if law == "exponential" else pareto_quantile(mean, variance, density)


def exponential_quantile(mean: float, density: float) -> float:
    """Return what an exponential variable of this mean exceeds with probability ``density``."""
    return -mean * math.log(density)


def pareto_quantile(mean: float, variance: float, density: float) -> float:
    """Return what a generalised Pareto variable of this mean and variance exceeds with probability ``density``.

    Fitted by moments, shape = (1 - mean^2 / variance) / 2 < 1/2. Shape 0 is the exponential law; without variance the
    threshold is the mean.
    """
    ratio = mean * mean / variance if variance > 0 else math.inf
    if math.isinf(ratio):
        return mean
    bend, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2  # bend = -shape
    return scale * (-math.expm1(bend * math.log(density)) / bend if bend else -math.log(density))


def gamma_quantile(mean: float, mean_log: float, density: float) -> float:
    """Return what a gamma variable of this mean and mean logarithm exceeds with probability ``density``.

    The shape is the closed form near the likelihood's maximum (Minka, 2002); without spread the threshold is the mean.
    """
    spread = math.log(mean) - mean_log
    if not spread > 1e-12:
        return mean
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    return mean / shape * _standard_gamma_quantile(shape, density)


def _standard_gamma_quantile(shape: float, density: float) -> float:
    """Invert the upper incomplete gamma function: ten times the right one of 64 intervals."""
    if density >= 1:
        return 0.0
    excess = -math.log(density)
    low, high = 0.0, shape + math.sqrt(2 * shape * excess) + excess  # Chernoff's bound on the quantile
    for _ in range(10):
        grid = torch.linspace(low, high, 65, dtype=torch.float64)
        beyond = torch.special.gammaincc(torch.full_like(grid, shape), grid)
        place = min(int((beyond > density).sum()), 64)
        low, high = float(grid[max(place - 1, 0)]), float(grid[place])
    return (low + high) / 2


def _passed(acc: Tensor, survivors: Survivors) -> tuple[Tensor, Tensor]:
    """Return indices and magnitudes of what exceeds the threshold of the last stage."""
    if survivors.indices is None or survivors.magnitudes is None:
        return strictly_above(acc, survivors.threshold)
    places, magnitudes = strictly_above(survivors.magnitudes, survivors.threshold)
    return survivors.indices.index_select(0, places), magnitudes


def _beyond(acc: Tensor, survivors: Survivors) -> Selection:
    return Selection(_passed(acc, survivors)[0], threshold=survivors.threshold)


def _near(correction: Correction, acc: Tensor, survivors: Survivors, k: int) -> Selection:
    """Select near k, among the survivors where there are enough of them: they are the largest magnitudes."""
    indices, magnitudes = survivors.indices, survivors.magnitudes
    if indices is None or magnitudes is None or indices.numel() < 2 * k:
        return select_near(correction, acc, survivors.threshold, k)
    among = select_near(correction, magnitudes, survivors.threshold, k)
    return Selection(indices.index_select(0, among.indices), threshold=among.threshold)


def _count_at(guess: float, selection: Selection, correction: Correction) -> float:
    """Return about how many the law's own threshold would have selected, along the tail of what was selected."""
    count, tail = float(selection.indices.numel()), correction.track.tail
    if not selection.threshold or not 0 < guess < math.inf or not tail > 0:
        return count
    return count * math.exp(max(-50.0, min(50.0, math.log(selection.threshold / guess) / tail)))


def _follow(state: SidcoState, excess: float, num_stages: int, most: int) -> None:
    """Change the number of stages by one where the mean excess of the last CALLS steps asks for it."""
    state.calls, state.excess = state.calls + 1, state.excess + excess
    if state.calls < CALLS:
        return
    mean = state.excess / state.calls
    change = (mean < TOO_FEW) - (mean > TOO_MANY)
    state.stages, state.calls, state.excess = max(1, min(most, num_stages + change)), 0, 0.0
