"""Streams of gradients to compare methods: drawn from known distributions, or recorded from a training."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.config.errors import UserError
from micro import Layout
from micro.density.base import target_count
from micro.selectors.threshold import hard_threshold
from micro.values.randomness import generator

NUM_LAYERS = 8
SHARED = -1  # in place of the rank, seeds values that all ranks share


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a stream, equal for all methods.

    Attributes:
        stream: a key of TITLES.
        layout: names and shapes of the parameters.
        rows: (num_steps, world_size, numel) float32; a smaller world takes the first ranks.
    """

    stream: str
    layout: Layout
    rows: Tensor
    _totals: dict[int, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, step: int, world_size: int) -> Tensor:
        """Return the gradients (world_size, numel) of a step, not copied."""
        return self.rows[step, :world_size]

    def totals(self, world_size: int) -> list[Tensor]:
        """Return the sums (numel,) over ranks of each step, in double precision, cached for one world size."""
        if world_size not in self._totals:
            self._totals.clear()
            self._totals[world_size] = [wide_sum(rows[:world_size]) for rows in self.rows]
        return self._totals[world_size]


def wide_sum(vectors: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the sum (numel,) of one or more vectors in double precision.

    Added one by one: torch's sum over rows takes eight times as long with a wider dtype.
    """
    total = vectors[0].double()
    for vector in vectors[1:]:
        total += vector
    return total


def normal(numel: int, randomness: torch.Generator) -> Tensor:
    """Draw (numel,) standard normal values."""
    return torch.randn(numel, generator=randomness)


def laplace(numel: int, randomness: torch.Generator) -> Tensor:
    """Draw (numel,) Laplace values of scale 1."""
    magnitudes = torch.empty(numel).exponential_(generator=randomness)
    return magnitudes * (torch.randint(2, (numel,), generator=randomness) * 2 - 1)


def student(numel: int, randomness: torch.Generator) -> Tensor:
    """Draw (numel,) values of Student's t with 3 degrees of freedom: heavy tails."""
    chi_squared = torch.randn(3, numel, generator=randomness).square().sum(0)
    return torch.randn(numel, generator=randomness) / (chi_squared / 3).sqrt()


def layers(numel: int, randomness: torch.Generator) -> Tensor:
    """Draw (numel,) normal values in 8 layers whose scale rises from 0.01 to 1."""
    scales = 10 ** torch.linspace(-2, 0, NUM_LAYERS)
    return torch.randn(numel, generator=randomness) * scales.repeat_interleave(-(-numel // NUM_LAYERS))[:numel]


SHAPES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": normal,
    "laplace": laplace,
    "student": student,
    "layers": layers,
    "correlated": laplace,
}
RECORDED = "recorded"
TITLES = {
    "normal": "normal",
    "laplace": "Laplace",
    "student": "Student t(3)",
    "layers": "layers of different scale",
    "correlated": "correlated ranks",
    RECORDED: "recorded",
}


def synthetic(
    stream: str, *, numel: int, num_steps: int, world_size: int, density: float, seed: int = 0, max_gb: float = 1.0
) -> Gradients:
    """Draw a stream of gradients, each seeded by (seed, step, rank).

    At their scale the threshold 1 / (2 sqrt k), the start of some methods, selects about k normal values: at any other
    scale these methods would miss their target density.

    Raises:
        UserError: the gradients need more memory than allowed.
    """
    check_size(num_steps, world_size, numel, max_gb)
    rows = torch.empty(num_steps, world_size, numel)
    scale = fitting_scale(density, numel)
    for step in range(num_steps):
        shared = SHAPES[stream](numel, generator(seed, step, SHARED)) if stream == "correlated" else 0.0
        for rank in range(world_size):
            torch.mul(SHAPES[stream](numel, generator(seed, step, rank)) + shared, scale, out=rows[step, rank])
    return Gradients(stream, layered(numel), rows)


def layered(numel: int) -> Layout:
    """Return a layout of up to 8 equal layers, each a nearly square matrix and a remainder."""
    block = -(-numel // NUM_LAYERS)
    named: dict[str, tuple[int, ...]] = {}
    for place, start in enumerate(range(0, numel, block)):
        size = min(block, numel - start)
        height = math.isqrt(size)
        named[f"layer{place}.weight"] = (height, size // height)
        if size % height:
            named[f"layer{place}.bias"] = (size % height,)
    return Layout(tuple(named), tuple(named.values()))


def fitting_scale(density: float, numel: int) -> float:
    """Return the scale of normal gradients at which the threshold 1 / (2 sqrt k) selects about k of them."""
    quantile = -statistics.NormalDist().inv_cdf(min(density, 0.999) / 2)
    return hard_threshold(target_count(density, numel)) / quantile


def check_size(num_steps: int, world_size: int, numel: int, max_gb: float) -> None:
    """Raise UserError if so many gradients exceed the allowed memory."""
    needed_gb = 4e-9 * num_steps * world_size * numel
    if needed_gb > max_gb:
        raise UserError(
            f"{num_steps} steps x {world_size} ranks x {numel:,} elements need {needed_gb:.3g} GB, allowed are "
            f"{max_gb:g}: lower --steps or --world-sizes, or raise --max-gb"
        )
