"""The groups of ranks in which a run was trained: it may lose some, and go on with those that are there."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.config.schema import TrainConfig
from experiments.runs.saved_state import Saved


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that trained together.

    Attributes:
        step: their first.
        round: rounds that had ended before.
        num_ranks: how many they are.
        num_new: those of them that were not in the group before. They took its weights, without a residual and with a
            new inner state.
        num_lost: ranks of the group before that are not in this one. Their residuals are lost.
    """

    step: int
    round: int
    num_ranks: int
    num_new: int = 0
    num_lost: int = 0


def with_ranks_there(config: TrainConfig, num_ranks: int) -> TrainConfig:
    """Return the settings for the ranks that are there, among which the data is dealt."""
    if config.world_size == num_ranks:
        return config
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, world_size=num_ranks))


def groups_until_now(config: TrainConfig, saved: Saved | None, num_ranks: int) -> list[Group]:
    """Return the groups in which a run was trained until ``saved``, and the present one; none without lost workers.

    Args:
        saved: what the run resumes from; None where it begins.
    """
    if config.rounds.lost_workers == "stop":
        return []
    if saved is None:
        return [Group(0, 0, num_ranks)]
    earlier = [Group(**group) for group in saved.shared.get("groups", ())]
    former, step = saved.world_size, saved.position.step
    if earlier and former == num_ranks:
        return earlier
    number = step // config.rounds.every
    changed = Group(step, number, num_ranks, max(0, num_ranks - former), max(0, former - num_ranks))
    return [*earlier, changed]


def plain(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return groups as plain data, for a checkpoint and the manifest."""
    return [asdict(group) for group in groups]


def in_words(group: Mapping[str, Any], most: int) -> str:
    """Return a line about a group of a manifest that is not the first.

    Args:
        most: ranks of the run.
    """
    line = f"went on with {group['num_ranks']} of {most} ranks from step {group['step']}, round {group['round']}"
    lost, new = group["num_lost"], group["num_new"]
    parts = [f"{lost} lost, with their residuals" if lost else "", f"{new} new, without a residual" if new else ""]
    return ": ".join([line, *filter(None, parts)])
