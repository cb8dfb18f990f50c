"""A group of ranks as nodes: the ranks of a node, and those of the same place in all nodes."""

import copy
from dataclasses import dataclass

import torch

from micro.comm.ranks import Comm


@dataclass(frozen=True, slots=True)
class Levels:
    """A group of ranks as nodes: ``within``, the ranks of this rank's node; ``between``, those of the same place.

    Rank r is the rank ``r % ranks_per_node`` within its node and the rank ``r // ranks_per_node`` between nodes.
    """

    within: Comm
    between: Comm


def levels_of(comm: Comm, ranks_per_node: int, device: torch.device) -> Levels:
    """Return this rank's node and its peers in other nodes; all ranks make them together, at the first call.

    Both have no traffic yet, and the clock of this reduction.

    Args:
        device: of what they will send.

    Raises:
        ValueError: the ranks cannot be divided into nodes of this size.
    """
    if comm.world_size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node must divide the number of ranks, got {ranks_per_node} for {comm.world_size} ranks"
        )
    if ranks_per_node not in comm.parts:
        node, place = divmod(comm.rank, ranks_per_node)
        within = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        between = range(place, comm.world_size, ranks_per_node)
        comm.parts[ranks_per_node] = _part(comm, within, device), _part(comm, between, device)
    within_node, between_nodes = comm.parts[ranks_per_node]
    return Levels(_beside(comm, within_node), _beside(comm, between_nodes))


def _beside(comm: Comm, part: Comm) -> Comm:
    own = copy.copy(part)
    own.clock, own.timed = comm.clock, comm.timed
    own.begin_step()
    return own


def _part(comm: Comm, ranks: range, device: torch.device) -> Comm:
    return Comm(timed=comm.timed) if len(ranks) == 1 else comm.subgroup(ranks, device)
