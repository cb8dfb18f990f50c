"""The state of a run that a checkpoint holds, and how it is read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.runs.checkpoints import Checkpoint, damaged, open_checkpoint, rank_path
from experiments.runs.rank_files import read_rank
from experiments.runs.records import Extent
from micro.checkpoints.resizing import average


class Workers(Protocol):
    """What checkpointing needs of the workers of this process; see experiments.training.workers."""

    is_main: bool

    @property
    def num_ranks(self) -> int:
        """How many ranks the group has, those of other processes included."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of this process."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    def gather_items(self, item: Any) -> list[Any]:
        """Return the item of every process of the run, in rank order."""

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each rank of this process."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run: before step ``index`` of ``epoch``.

    Attributes:
        step: steps done since the start.
        epoch, index: the epoch of the next step, and its number in the epoch.
        loss_sum: sum of rank 0's losses in this epoch.
        time_s: seconds that the steps took.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    loss_sum: float = 0.0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a run that a checkpoint holds.

    Attributes:
        position: of the run when it was saved.
        shared: model and optimizer, which are equal on all ranks.
        ranks: the state of each rank of this process, in order.
        random: state of this process's random generators, None if they are seeded again.
        world_size: of the run that saved it.
        records: what was recorded until then, by the name of the file.
    """

    position: Position
    shared: dict[str, Any]
    ranks: list[dict[str, Any]]
    random: dict[str, Tensor] | None
    world_size: int
    records: Mapping[str, Extent] = field(default_factory=dict)


def read_start_from(config: TrainConfig, workers: Workers) -> Saved | None:
    """Return the checkpoint that ``start_from`` names, for this run's workers; None if it is not set.

    With another number of workers, each worker starts with the mean of all residuals. The model is updated by the mean
    over workers, so the total that is still to be sent stays the same. Thresholds, boundaries and the carried states of
    texts are initialized again, and the run resumes at the same fraction of the epoch.

    Raises:
        UserError: there is no complete checkpoint, or it has another number of workers and resize is not average.
    """
    if config.start_from is None:
        return None
    checkpoint = open_checkpoint(Path(config.start_from))
    if checkpoint.world_size == config.world_size:
        return read_state(checkpoint, workers)
    if config.resize == "refuse":
        raise UserError(
            f"start_from={config.start_from} had {checkpoint.world_size} workers, this run has {config.world_size}: "
            "make them equal, or set resize=average"
        )
    parts = _read_parts(checkpoint, range(checkpoint.world_size))
    states = average([part["own"] for part in parts.values()], config.world_size)
    own = [{**states[rank], "carry": None} for rank in workers.ranks]
    return _saved(parts[0]["shared"], own, None, checkpoint.world_size)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the torch generators that a step may use."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, Tensor] | None, device: torch.device) -> None:
    """Restore the state that ``random_state`` returned."""
    if states is None:
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def read_state(checkpoint: Checkpoint, workers: Workers) -> Saved:
    """Return what a checkpoint holds for the ranks of this process; a rank that it lacks gets the state of rank 0.

    Raises:
        DamagedCheckpoint: A part is missing or damaged.
    """
    sources = [rank if rank < checkpoint.world_size else 0 for rank in workers.ranks]
    parts = _read_parts(checkpoint, sorted({0, *sources}))
    own = [parts[rank]["own"] for rank in sources]
    random = parts[sources[0]]["random"] if sources[0] == workers.ranks[0] else None
    saved = _saved(parts[0]["shared"], own, random, checkpoint.world_size)
    return replace(saved, records=checkpoint.records)


def _read_parts(checkpoint: Checkpoint, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return what these ranks saved. Raises: DamagedCheckpoint, also where a part holds no such state."""
    parts = {rank: read_rank(checkpoint, rank) for rank in ranks}
    for rank, part in parts.items():
        problem = _foreign(part, {"own", "random", "shared"})
        if not problem and rank == 0:
            problem = _foreign(part["shared"], {"model", "optimizer", "num_steps", "position"})
            problem = problem or _foreign(part["shared"]["position"], set(Position.__slots__))
        if problem:
            raise damaged(rank_path(checkpoint.path, rank), f"it is no part of a run's checkpoint: {problem}")
    return parts


def _foreign(found: Any, keys: set[str]) -> str:
    """Return what keeps a value from being a mapping with these keys; empty where nothing does."""
    if not isinstance(found, dict):
        return f"a value of type {type(found).__name__} where {', '.join(sorted(keys))} are expected"
    missing = sorted(keys - found.keys())
    return f"{', '.join(missing)} missing" if missing else ""


def _saved(
    shared: dict[str, Any], ranks: list[dict[str, Any]], random: dict[str, Tensor] | None, world_size: int
) -> Saved:
    shared = dict(shared)
    return Saved(Position(**shared.pop("position")), shared, ranks, random, world_size)
