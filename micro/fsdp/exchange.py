"""Exchange gradients at the end of a backward: the replicas agree on the parameters, reduce, and decide on the step."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from micro.comm.peers import PeerError
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, AllReduce, Reduction
from micro.drivers.step import ModelStep
from micro.fsdp.groups import ShardGroup
from micro.fsdp.vectors import ShardVector, own, own_gradient, put, vector_of
from micro.values.flat import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # sent as an index of one byte


class Exchange:
    """Averages the gradients of all groups between the replicas, in the thread of backward, when FSDP is done.

    All gradients exist by then. So replicas that used different modules first agree on the parameters, norms can be
    computed, and after an exception FSDP is in its usual state. None of FSDP's communicators is in use, as NCCL
    requires.

    Args:
        groups: of the model, in the same order on all ranks.
        steps: the reductions of the current step, between the replicas.
        node: the ranks that share the shards.
    """

    def __init__(self, groups: Sequence[ShardGroup], steps: ModelStep, node: Comm) -> None:
        self._groups, self._steps, self._node = groups, steps, node
        self._trained = {name for each in groups for name, p in each.parameters().items() if p.requires_grad}

    def run(self) -> None:
        """Replace all gradients by their mean updates, on all ranks together; the caller raises ``steps.error``.

        If the reducer raises on one rank, its replicas fail too, and each informs its node. All gradients are then
        zero.
        """
        steps, is_finite = self._steps, True
        if steps.has_failed:
            self._zero_all()
            return
        try:
            steps.begin()
            steps.launch(self._vectors(), _unused)
            is_finite = steps.end()
        except BaseException as error:
            steps.fail(error)
            if not isinstance(error, Exception):  # the process is being ended: the others notice that
                raise
        mine = torch.tensor([not is_finite, steps.has_failed], dtype=torch.int32, device=self._groups[0].device)
        counts = self._node.answer(AllReduce(mine=mine, kind="counts"))  # other nodes have the same shards
        num_bad, num_failed = counts.tolist()  # host sync: acted on here
        if num_failed:
            steps.give_up(PeerError("another rank of this node failed to reduce its shards: its error says why"))
            steps.abandon()
            self._zero_all()
            return
        steps.decide(is_finite=not num_bad)
        for group in self._groups:
            group.waiting_dtype = None

    def _vectors(self) -> list[ShardVector]:
        """Return the gradients of each group that any replica used, as vectors with equal layouts on all replicas.

        With scope model, all groups as soon as one is used, because they share one state.
        """
        flags = [flag for group in self._groups for flag in _flags(group)]
        mine = torch.tensor(flags, dtype=torch.uint8, device=self._groups[0].device)
        rows = self._steps.comm.answer(AllGather(mine=mine)).tolist()  # host sync: what the replicas have
        columns = zip(*rows, strict=True)  # one for each parameter
        found = [(group, dict(zip(group.parameters(), columns, strict=False))) for group in self._groups]
        anywhere = {flag for _, by_name in found for column in by_name.values() for flag in column if flag}
        vectors = []
        for group, by_name in found:
            here = {flag for column in by_name.values() for flag in column if flag}
            numbers = sorted(anywhere if self._steps.whole_model else here)
            _check_one_dtype(group, numbers)
            used = frozenset(name for name, column in by_name.items() if any(column))
            vectors += [self._vector(group, used, DTYPES[number - 1]) for number in numbers]
        return [vector for vector in vectors if vector is not None]

    def _vector(self, group: ShardGroup, used: frozenset[str], dtype: torch.dtype) -> ShardVector | None:
        """Return the gradients of all group parameters that were ever trained; None if no shard has elements.

        Unused parameters are included, so the bucket and its thresholds stay the same in every step.
        """
        parameters = group.parameters()
        self._trained |= used
        for name in used:
            if not own(parameters[name]).numel() and parameters[name].grad is None:
                put(parameters[name], own(parameters[name]))  # as on the other ranks, although no vector contains it
        shards = {name: own(parameter) for name, parameter in parameters.items() if name in self._trained}
        shapes = {name: tuple(shard.shape) for name, shard in shards.items() if shard.numel()}
        layout = Layout(tuple(shapes), tuple(shapes.values())) if shapes else None
        return None if layout is None else vector_of(parameters, layout, used, dtype)

    def _zero_all(self) -> None:
        """Set all waiting gradients to zero, since they were not averaged."""
        for group in self._groups:
            for parameter in group.parameters().values() if group.waiting_dtype is not None else ():
                gradient = own_gradient(parameter)
                if gradient is not None:
                    gradient.zero_()
            group.waiting_dtype = None


def _unused(vectors: Sequence[Any]) -> Reduction[Collection[str]]:
    yield from ()  # the replicas have already exchanged it
    return [name for vector in vectors for name in vector.layout.names if name not in vector.used]


def _flags(group: ShardGroup) -> list[int]:
    """Return for each parameter the number of its gradient's dtype, 0 if it has none to average."""
    number = 0 if group.waiting_dtype is None else 1 + DTYPES.index(group.waiting_dtype)
    return [0 if parameter.grad is None else number for parameter in group.parameters().values()]


def _check_one_dtype(group: ShardGroup, numbers: Sequence[int]) -> None:
    if len(numbers) > 1:
        dtypes = " and ".join(str(DTYPES[number - 1]) for number in numbers)
        raise ValueError(
            f"gradients that are exchanged together must have one dtype, those of '{next(iter(group.parameters()))}' "
            f"have {dtypes}: use one MixedPrecisionPolicy on all replicas"
        )
