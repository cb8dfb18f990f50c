"""What happens at the end of a backward: the replicas agree on what they have, reduce it, and decide together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from micro.clipping import clip_shards_
from micro.comm import Comm
from micro.drivers.bucket_states import BucketStates
from micro.drivers.loss_scale import LossScale
from micro.drivers.reductions import Reductions
from micro.flat import Layout
from micro.fsdp.groups import ShardGroup
from micro.fsdp.vectors import ShardVector, own, own_gradient, put, vector_of
from micro.group_comm import GroupComm
from micro.nonfinite import REMEDY, Finding, NonFiniteGradient
from micro.objects import gather_objects
from micro.peer_failures import PeerError
from micro.reducers.base import Reducer
from micro.requests import AllGather, AllReduce

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # a number of one byte says which


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients are exchanged, beside the reducer; see attach_fsdp.

    Attributes:
        whole_model: whether indices are selected over all groups at once.
        clip, clip_norm: which norm is bounded, and by what.
        scaler: that of the loss.
    """

    whole_model: bool
    clip: float | None
    clip_norm: str
    scaler: torch.amp.GradScaler | None

    def loss_scale(self) -> LossScale:
        """Return the factor on the gradients."""
        return LossScale(self.scaler)


@dataclass(frozen=True, slots=True)
class _Used:
    """A group of which a replica has a gradient: in which dtype it is reduced, and of which parameters there is one."""

    group: ShardGroup
    dtype: torch.dtype
    names: frozenset[str]


class Exchange:
    """Averages the gradients of all groups between the replicas, in the thread of backward, when FSDP is done.

    Then all gradients are there, so that the replicas can say which they have before anything is exchanged, whatever
    modules each has used; that a norm can be taken; and that an exception leaves FSDP as it is after any backward. No
    communicator of FSDP's is in use meanwhile, which NCCL asks for.

    Args:
        groups: of the model; the order is the same on all ranks.
        node: the ranks that share the shards.
        comm: the replicas.
        loss_scale: the factor on the gradients.
        settings: see there; ``clip`` may be changed between steps.
    """

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        reducer: Reducer,
        states: BucketStates,
        *,
        comm: GroupComm,
        node: Comm,
        loss_scale: LossScale,
        settings: Settings,
    ) -> None:
        self.clip = settings.clip
        self.steps = Reductions(
            reducer, states, comm, groups[0].device, loss_scale=loss_scale, whole_model=settings.whole_model
        )
        self._has_failed = False
        self._groups = groups
        self._states = states
        self._comm = comm
        self._node = node
        self._loss_scale = loss_scale
        self._clip_norm = settings.clip_norm
        self._device = groups[0].device
        self._trained = {name for each in groups for name, p in each.parameters().items() if p.requires_grad}

    def run(self) -> Exception | None:
        """Replace all gradients by their mean updates, on all ranks together; return the error to raise, if any.

        Where the reducer raises on one rank, its replicas fail too, and each tells the ranks of its node. All gradients
        are zero then.
        """
        self.steps.forget_step()
        if self._has_failed:
            self._zero_all()
            return RuntimeError("the replicas have lost contact, because a reducer failed before: close the attachment")
        error: Exception | None = None
        try:
            self._reduce()
        except Exception as caught:
            error = caught
            self._comm.abort(error)
        except BaseException as caught:  # somebody ends this process: the others see that
            self._comm.abort(caught)
            raise
        is_bad, has_failed = self._anywhere_in_node(bool(self.steps.findings), error is not None)
        if has_failed:
            self._has_failed = True
            self.steps.abandon()
            self._zero_all()
            error = error or PeerError("another rank of this node failed to reduce its shards: its error says why")
            self._states.break_off(error)
            return error
        error = self.steps.decide(is_bad=is_bad, error_of=self._error)
        self.steps.put_back()
        for group in self._groups:
            group.waiting_dtype = None
        return error

    def _reduce(self) -> None:
        """Reduce all vectors; where the reducer can, they share rounds of messages."""
        self.steps.begin_counts()  # what is sent before the first reduction is counted with it
        self.steps.begin()
        vectors = self._vectors()
        if self.clip is not None:
            nodes = self._comm if self._clip_norm == "global" else None
            limit = self.clip * self._loss_scale.value
            clip_shards_([vector.grad for vector in vectors], limit, self._node, nodes, self._device)
        for part in [vectors] if self.steps.whole_model and vectors else [[vector] for vector in vectors]:
            unused = [name for vector in part for name in vector.layout.names if name not in vector.used]
            self.steps.launch(part, lambda _, unused=unused: unused)  # type: ignore[misc]
        self.steps.finish_all()

    def _vectors(self) -> list[ShardVector]:
        """Return the gradients of each group that any replica has used; all replicas have the same vectors."""
        vectors = []
        for used in self._agree():
            parameters = used.group.parameters()
            self._trained |= used.names
            for name in used.names:
                if not own(parameters[name]).numel() and parameters[name].grad is None:
                    put(parameters[name], own(parameters[name]))  # as on the other ranks, though it is in no vector
            layout = self._layout(parameters)
            if layout is not None:
                vectors.append(vector_of(parameters, layout, used.names, used.dtype))
        return vectors

    def _agree(self) -> list[_Used]:
        """Return what the replicas have used; with scope model all groups as soon as one is: their states are one."""
        flags = [flag for group in self._groups for flag in _flags(group)]
        row = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        rows = self._comm.answer(AllGather(mine=row))
        columns = iter(zip(*rows.tolist(), strict=True))  # host sync: what the replicas have
        agreed = [_used(group, columns) for group in self._groups]
        known = {dtype for _, dtypes, _ in agreed for dtype in dtypes}
        for group, dtypes, _ in agreed:
            _check_one_dtype(group, known if self.steps.whole_model else dtypes)
        if self.steps.whole_model:
            return [_Used(group, dtype, names) for group, _, names in agreed for dtype in known]
        return [_Used(group, dtype, names) for group, dtypes, names in agreed for dtype in dtypes]

    def _layout(self, parameters: Mapping[str, nn.Parameter]) -> Layout | None:
        """Return where the shards of a group's parameters lie: of all that were ever trained, used or not.

        So a bucket stays the same bucket, with its thresholds, whatever a step uses. None where no shard has elements.
        """
        shards = {name: own(parameter) for name, parameter in parameters.items() if name in self._trained}
        shapes = {name: tuple(shard.shape) for name, shard in shards.items() if shard.numel()}
        return Layout(tuple(shapes), tuple(shapes.values())) if shapes else None

    def _anywhere_in_node(self, *flags: bool) -> list[bool]:
        """Return of each flag whether any rank of this node has it; those of other nodes have the same shards."""
        mine = torch.tensor(flags, dtype=torch.int32, device=self._device)
        counts = self._node.answer(AllReduce(mine=mine, kind="counts"))
        return [bool(count) for count in counts.tolist()]  # host sync: acted on here

    def _error(self, findings: Sequence[Finding]) -> NonFiniteGradient:
        """Return the error that names the bad parameters of all nodes and shards, the same on all ranks."""
        gradients = [f.layout.name_at(f.in_gradient) for f in findings if f.in_gradient is not None]
        means = [f.layout.name_at(f.in_update) for f in findings if f.in_update is not None]
        mine = [f"'{name}' on node {self._comm.rank}" for name in gradients] or [
            f"'{name}' in the mean" for name in means
        ]
        own_words = (self._states.step - 1, mine[:1])
        in_node = gather_objects(own_words, self._node.group) if isinstance(self._node, GroupComm) else [own_words]
        words: Any = [each for node in gather_objects(in_node, self._comm.group) for each in node]  # type: ignore[attr-defined]
        places = dict.fromkeys(place for _, found in words for place in found)
        return NonFiniteGradient(
            f"gradient of {', '.join(places)} is not finite at step {max(step for step, _ in words)}; nothing of it "
            f"was kept. {REMEDY}"
        )

    def _zero_all(self) -> None:
        """Make all gradients that wait zero: they were not averaged."""
        for group in self._groups:
            for parameter in group.parameters().values() if group.waiting_dtype is not None else ():
                gradient = own_gradient(parameter)
                if gradient is not None:
                    gradient.zero_()
            group.waiting_dtype = None


def _flags(group: ShardGroup) -> list[int]:
    """Return for each parameter 0, or if its gradient is to be averaged the number of its dtype."""
    number = 0 if group.waiting_dtype is None else 1 + DTYPES.index(group.waiting_dtype)
    return [0 if parameter.grad is None else number for parameter in group.parameters().values()]


def _used(group: ShardGroup, columns: Iterator[tuple[int, ...]]) -> tuple[ShardGroup, set[torch.dtype], frozenset[str]]:
    """Take this group's part of ``columns``, the flags of all replicas, one column per parameter."""
    flags = dict(zip(group.parameters(), columns, strict=False))
    names = frozenset(name for name, column in flags.items() if any(column))
    return group, {DTYPES[flag - 1] for column in flags.values() for flag in column if flag}, names


def _check_one_dtype(group: ShardGroup, dtypes: set[torch.dtype]) -> None:
    if len(dtypes) > 1:
        raise ValueError(
            f"gradients that are exchanged together must have one dtype, those of '{next(iter(group.parameters()))}' "
            f"have {' and '.join(sorted(map(str, dtypes)))}: use one MixedPrecisionPolicy on all replicas"
        )
