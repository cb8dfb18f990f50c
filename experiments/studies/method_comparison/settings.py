"""The settings of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

FIGURE_WORLD_SIZE = 16  # of figures and tables that show one number of workers, where it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """What is compared, and on which gradients.

    Attributes:
        methods: names of conf/sparsifier.
        streams: of gradients, keys of gradient_sources.TITLES.
        world_sizes: numbers of simulated ranks, ascending.
        density: target of every method.
        densities: further targets, for the error over compression on the last stream.
        equal_bytes: a method; the others' densities are found at which they send as much, on the last stream.
        numel: length of drawn gradients.
        num_steps: of each trial.
        seed: of drawn gradients.
        recorded_training: overrides of the training that is recorded, as for experiments.train.
        selection_lengths: numbers of elements at which selection is timed.
        repeats: steps that each time is the median of.
        max_gb: memory that gradients may take.
    """

    methods: Sequence[str]
    streams: Sequence[str]
    world_sizes: Sequence[int]
    density: float
    densities: Sequence[float] = ()
    equal_bytes: str | None = None
    numel: int
    num_steps: int
    seed: int = 0
    recorded_training: Sequence[str] = ()
    selection_lengths: Sequence[int] = ()
    repeats: int
    max_gb: float

    @property
    def figure_world_size(self) -> int:
        """The number of workers of what is measured for one number alone."""
        return figure_world_size(self.world_sizes)


def figure_world_size(world_sizes: Sequence[int]) -> int:
    """Return the number of workers that figures of one number show, among those measured."""
    return FIGURE_WORLD_SIZE if FIGURE_WORLD_SIZE in world_sizes else max(world_sizes)
