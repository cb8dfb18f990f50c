"""Cost models of networks of nodes, with different links within a node and between nodes.

``Hierarchical`` and ``FlatOnNodes`` differ in how a collective of all ranks works. micro.TwoLevel calls the same on
both: collectives within nodes, and ranks_per_node concurrent collectives between nodes, which share the nodes'
interfaces.
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
        intra: link within a node, used as a ring.
        inter: link between nodes, used by ``algorithm``; beta_s is that of one rail.
        rails: parallel network interfaces of a node, at most one per rank.

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
        """Return the mean bytes per rank that a collective of all ranks sends within nodes, and between nodes."""

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
        """Ranks with equal local rank in all nodes; each has its share of the node's interfaces."""
        link = replace(self.inter, beta_s=self.inter.beta_s * self.ranks_per_node / self.rails)
        return Flat(link, self.num_nodes, self.algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchical(NodeNetwork):
    """Nodes of several ranks with hierarchical collectives: data leaves a node at most once.

    An all-reduce is a reduce-scatter in the node, all-reduces of equal parts between nodes, and an all-gather in the
    node; other operations are split likewise, between ranks with equal local rank. So every operation has a part within
    the node and a part between nodes, and the ranks of a node share its rails. An all-to-all first sends data within
    the node, to the local rank of its receiver.
    """

    def seconds(self, op: Op, num_bytes: float) -> float:
        """Return the seconds of the part within the node plus the part between nodes."""
        within, across = self._shares(op)
        # Nodes act as ranks: sizes are those of all ranks of a node, over all rails; each rank adds its part.
        link = Link(self.inter.alpha_s, self.inter.beta_s / self.rails, self.inter.gamma_s / self.ranks_per_node)
        nodes = Flat(link, self.num_nodes, self.algorithm)
        return self.within.seconds(op, within * num_bytes) + nodes.seconds(op, across * num_bytes)

    def bytes_by_level(self, op: Op, num_bytes: float) -> tuple[float, float]:
        """Return the bytes of both parts."""
        within, across = self._shares(op)
        leaving = bytes_sent(op, across * num_bytes, self.num_nodes) / self.ranks_per_node
        return bytes_sent(op, within * num_bytes, self.ranks_per_node), leaving

    def _shares(self, op: Op) -> tuple[float, float]:
        """Return the factors on an operation's bytes: for a rank within its node, and for a node between nodes."""
        local, nodes = self.ranks_per_node, self.num_nodes
        if op in ("gather_rows", "gather_lists"):
            return nodes, local
        if op == "scatter":  # first to the receiver's local rank, then to its node
            others = max(self.world_size - 1, 1)
            return (local - 1) * nodes / others, (nodes - 1) * local**2 / others
        return 1, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOnNodes(NodeNetwork):
    """Nodes of several ranks with collectives that ignore nodes.

    All-reduce, both gathers and the second half of a broadcast use a ring in the order of ranks; the slowest link sets
    the time of each step. An all-to-all sends pairwise: messages to other nodes share the node's interfaces. Comm sends
    lists of very different lengths pairwise too, which is ignored here. ``algorithm`` applies only to two levels.
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
        if op == "broadcast":  # every rank gets its part, first between nodes and then within them
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
        else:  # in a ring, one rank of a node sends to the next node
            leaving = whole / self.ranks_per_node
        return whole - leaving, leaving

    def _ring_step_s(self, num_bytes: float) -> float:
        """Return the seconds of one step of the ring, with a message from every rank to the next."""
        across = self.inter.alpha_s + num_bytes * self.inter.beta_s / self.rails
        if self.ranks_per_node == 1:
            return across
        return max(across, self.intra.alpha_s + num_bytes * self.intra.beta_s)


def seconds_of(volume: Volume, network: Network) -> float:
    """Return the seconds of all collectives of a bucket in sequence; those of different local ranks overlap.

    Raises:
        ValueError: a two-level method on a network without nodes, or with nodes of another size.
    """

    def seconds(calls: Calls, among: Network) -> float:
        return sum(among.seconds(op, size) for op, size in calls)

    if not volume.place_calls:
        return seconds(volume.calls, network)
    if not isinstance(network, NodeNetwork):
        raise ValueError(
            "two_level needs a network of nodes, with links within nodes and between them: this one has equal links"
        )
    if network.ranks_per_node != volume.ranks_per_node:
        raise ValueError(
            f"two_level has {volume.ranks_per_node} ranks per node, the network {network.ranks_per_node}: "
            "give both the same"
        )
    slowest = max(seconds(calls, network.between) for calls in set(volume.place_calls))
    return seconds(volume.calls, network) + seconds(volume.local_calls, network.within) + slowest


def level_bytes(volume: Volume, network: NodeNetwork) -> tuple[float, float]:
    """Return the mean bytes per rank that a bucket sends within nodes, and between nodes."""
    of_all = [network.bytes_by_level(op, size) for op, size in volume.calls]
    within = volume.local_bytes + sum(local for local, _ in of_all)
    between = replace(volume, calls=()).between_bytes + sum(leaving for _, leaving in of_all)
    return within, between
