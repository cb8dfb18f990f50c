"""Networks of two speeds as cost models: nodes of several ranks, with one link within a node and another between nodes.

``Hierarchical`` and ``FlatOnNodes`` differ in how all ranks together carry out a collective. What the ranks of two
levels (micro.TwoLevel) call is the same on both: collectives of the ranks of a node, and collectives between nodes,
ranks_per_node of which run side by side and share the node's interfaces.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from experiments.planning.costs import Flat, Link, Network, rounds
from micro.comm.ranks import Op, bytes_sent
from micro.predicted_traffic import Calls, Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork(ABC):
    """Nodes of several ranks each.

    Attributes:
        intra: within a node, by ring.
        inter: across nodes, by ``algorithm``; beta_s is of one rail.
        rails: network interfaces of a node that carry traffic side by side, at most one for each rank.

    Raises:
        ValueError: rails out of range, no ranks, or no such algorithm.
    """

    intra: Link
    inter: Link
    ranks_per_node: int
    num_nodes: int
    rails: int = 1
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        if not 1 <= self.rails <= self.ranks_per_node:
            raise ValueError(f"rails must be in [1, {self.ranks_per_node}], the ranks of a node, got {self.rails}")
        _ = self.within, self.between  # check the other fields

    @abstractmethod
    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective of all ranks."""

    @abstractmethod
    def bytes_by_level(self, op: Op, num_bytes: float) -> tuple[float, float]:
        """Return the bytes that a rank, in the mean, sends within its node and to others in a collective of all."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks_per_node * self.num_nodes

    @property
    def within(self) -> Flat:
        """The ranks of one node."""
        return Flat(self.intra, self.ranks_per_node)

    @property
    def between(self) -> Flat:
        """The ranks of one place in all nodes: each has its part of the node's interfaces."""
        link = replace(self.inter, beta_s=self.inter.beta_s * self.ranks_per_node / self.rails)
        return Flat(link, self.num_nodes, self.algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchical(NodeNetwork):
    """Nodes of several ranks each: data that must leave a node leaves it once.

    An all-reduce is a reduce-scatter in the node, all-reduces of equal parts across nodes, an all-gather in the node;
    all other operations are divided in the same way: each rank of a node talks to the ranks of the same local rank in
    other nodes. So every operation has a part within the node and a part across nodes, and the ranks of a node share
    its rails. What a scatter sends to other nodes is sent within the node first, where it changes its place.
    """

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of the part within the node and of that across nodes."""
        within, across = self._shares(op)
        # The nodes are ranks: sizes are what all ranks of a node send together, over all rails; each adds its part.
        link = Link(self.inter.alpha_s, self.inter.beta_s / self.rails, self.inter.gamma_s / self.ranks_per_node)
        nodes = Flat(link, self.num_nodes, self.algorithm)
        return self.within.seconds(op, within * num_bytes) + nodes.seconds(op, across * num_bytes)

    def bytes_by_level(self, op: Op, num_bytes: float) -> tuple[float, float]:
        """Return the bytes of both parts."""
        within, across = self._shares(op)
        leaving = bytes_sent(op, across * num_bytes, self.num_nodes) / self.ranks_per_node
        return bytes_sent(op, within * num_bytes, self.ranks_per_node), leaving

    def _shares(self, op: Op) -> tuple[float, float]:
        """Return the factors on an operation's bytes: for a rank within its node, and for a node across nodes."""
        local, nodes = self.ranks_per_node, self.num_nodes
        if op in ("gather_rows", "gather_lists"):
            return nodes, local
        if op == "scatter":  # first to the rank of the receiver's place, then across
            others = max(self.world_size - 1, 1)
            return (local - 1) * nodes / others, (nodes - 1) * local**2 / others
        return 1, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOnNodes(NodeNetwork):
    """Nodes of several ranks each, whose collectives know nothing of nodes.

    All-reduce, both gathers and the second half of a broadcast go by a ring in the order of ranks: of every step, the
    message between nodes is the slowest where the link between nodes is. What is scattered is sent pairwise: a rank's
    messages to other nodes share the node's interfaces with those of all its ranks. Comm sends lists so too where
    their lengths differ much, which these costs leave out. ``algorithm`` is that of ranks of two levels alone.
    """

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of one collective."""
        if self.num_nodes == 1:
            return self.within.seconds(op, num_bytes)
        n, local, intra, inter = self.world_size, self.ranks_per_node, self.intra, self.inter
        if op == "scatter":
            each, link = num_bytes / (n - 1), self.between.link
            within_s = (local - 1) * (intra.alpha_s + each * intra.beta_s)
            return within_s + (n - local) * (link.alpha_s + each * link.beta_s)
        if op == "all_reduce":
            added_s = (n - 1) / n * num_bytes * max(intra.gamma_s, inter.gamma_s)
            return 2 * (n - 1) * self._ring_step_s(num_bytes / n) + added_s
        if op == "broadcast":  # every rank gets its part, first across nodes and then within them
            across_s = rounds(self.num_nodes) * inter.alpha_s + (n - local) / n * num_bytes * inter.beta_s
            within_s = rounds(local) * intra.alpha_s + (local - 1) / n * num_bytes * intra.beta_s
            return across_s + within_s + (n - 1) * self._ring_step_s(num_bytes / n)
        return (n - 1) * self._ring_step_s(num_bytes)

    def bytes_by_level(self, op: Op, num_bytes: float) -> tuple[float, float]:
        """Return the bytes of the messages within nodes and between them."""
        whole, n = bytes_sent(op, num_bytes, self.world_size), self.world_size
        if self.num_nodes == 1:
            return whole, 0.0
        if op == "scatter":
            leaving = whole * (n - self.ranks_per_node) / (n - 1)
        elif op == "broadcast":  # each node but the source's receives it once
            leaving = num_bytes * (self.num_nodes - 1) / n
        else:  # of a ring, one rank of a node sends to the next node
            leaving = whole / self.ranks_per_node
        return whole - leaving, leaving

    def _ring_step_s(self, num_bytes: float) -> float:
        """Return the seconds of one step of the ring, in which every rank sends a message to the next."""
        across = self.inter.alpha_s + num_bytes * self.inter.beta_s / self.rails
        if self.ranks_per_node == 1:
            return across
        return max(across, self.intra.alpha_s + num_bytes * self.intra.beta_s)


def seconds_of(volume: Volume, network: Network) -> float:
    """Return the seconds of all collectives of a bucket, one after the other; those of a node's places side by side.

    Raises:
        ValueError: ranks of two levels on a network of one speed, or of nodes of another size.
    """

    def seconds(calls: Calls, among: Network) -> float:
        return sum(among.seconds(op, size) for op, size in calls)

    if not volume.place_calls:
        return seconds(volume.calls, network)
    if not isinstance(network, NodeNetwork):
        raise ValueError("two_level needs a network of two speeds, within nodes and between them: this one has one")
    if network.ranks_per_node != volume.ranks_per_node:
        raise ValueError(
            f"two_level has {volume.ranks_per_node} ranks per node, the network {network.ranks_per_node}: "
            "give both the same"
        )
    slowest = max(seconds(calls, network.between) for calls in set(volume.place_calls))
    return seconds(volume.calls, network) + seconds(volume.local_calls, network.within) + slowest


def level_bytes(volume: Volume, network: NodeNetwork) -> tuple[float, float]:
    """Return the bytes of a bucket that a rank sends within its node and to other nodes, as means over the ranks."""
    of_all = [network.bytes_by_level(op, size) for op, size in volume.calls]
    within = volume.local_bytes + sum(local for local, _ in of_all)
    between = replace(volume, calls=()).between_bytes + sum(leaving for _, leaving in of_all)
    return within, between
