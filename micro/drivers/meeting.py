"""Compare settings and models of all ranks before attaching: all continue, or all raise the same one-line error.

Ranks meet through their process group's store, without a collective: a rank that refuses its settings, is missing, or
has another model is named by the others, which would otherwise wait in their first collective until the timeout.
"""

import ctypes
import pickle
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from micro.checkpoints.description import describe, difference
from micro.comm.group import GroupComm
from micro.comm.peers import LOOK_S, SURE_S, PeerError, named
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather
from micro.values.flat import real

SAMPLE = 1024  # elements of a parameter that tell it from another, where ranks began with the same weights
LONGEST_S = 0.25  # between two looks at the store
PATIENCE_S = 10.0  # after which a warning names the ranks that have not come
EVERYWHERE = "call it on all ranks"


@dataclass(slots=True)
class Entry:
    """What a rank brings.

    Attributes:
        settings: plain data and parts, the same on all ranks.
        parameters: by name, the same on all ranks of a ``part`` of the model.
        part: names the ranks that hold the same parameters; by default all do.
        is_exact: compare all bits of the weights, not those of a sample.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    part: str = ""
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class _Said:
    """What the others read of it: an error, or all else; of each parameter its shape and a checksum."""

    call: str
    error: str | None
    settings: Any = None
    parameters: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    part: str = ""


@contextmanager
def meeting(
    call: str,
    ranks_of: Callable[[], Comm | dist.ProcessGroup | None],
    *,
    comm: GroupComm | None = None,
    remedy: str = EVERYWHERE,
) -> Iterator[Entry]:
    """Raise on every rank where this context raises on any, or where they bring different settings or models.

    Ranks may come late. After PATIENCE_S a warning names those that have not come.

    Args:
        call: what the user has called.
        ranks_of: returns who meets: a process group, None for the default one, or a Comm. What it raises is told the
            ranks of the default group, which are the ones that wait, as a rule.
        comm: between which these ranks take steps. A rank that waits in a step, for one that waits here, ends both
            waits: ``comm`` is given up then.
        remedy: what a user does where a rank has not come.

    Raises:
        ValueError: on all ranks; the rank whose context raised has its own error.
        PeerError: a rank did not come until the store's time-out, has begun a step instead, or has failed.
    """
    entry, error = Entry(), None
    try:
        ranks = ranks_of()
    except Exception as caught:
        if dist.is_initialized():
            _enter(_Said(call, str(caught)), _group_of(None))
        raise
    try:
        yield entry
        checksums = {name: _described(p, is_exact=entry.is_exact) for name, p in entry.parameters.items()}
        said = _Said(call, None, describe(entry.settings), checksums, entry.part)
    except Exception as caught:  # whatever it is, the others must not wait
        error, said = caught, _Said(call, str(caught))
    if isinstance(ranks, Comm) and not isinstance(ranks, GroupComm):
        found = _in_memory(said, ranks)
    else:
        in_store = _InStore(said, _group_of(ranks), comm, remedy)
        del ranks  # a group on gloo that is given up closes its sockets when nothing, no traceback, refers to it
        found = in_store.result()
    if error is not None:
        raise error
    if found is not None:
        raise found


def _group_of(ranks: Any) -> dist.ProcessGroup:
    found = (ranks.group if isinstance(ranks, GroupComm) else ranks) or dist.group.WORLD
    assert found is not None, "a process group is initialised"
    return found


def _in_memory(said: _Said, comm: Any) -> Exception | None:
    """Return what is wrong, for ranks that share memory: every one of them reads what all say."""
    own = torch.frombuffer(bytearray(pickle.dumps(said)), dtype=torch.uint8)
    lengths = comm.answer(AllGather(mine=torch.tensor([own.numel()])))[:, 0].tolist()
    rows = comm.answer(AllGather(mine=torch.nn.functional.pad(own, (0, max(lengths) - own.numel()))))
    all_said = [pickle.loads(content_of(row[:length])) for row, length in zip(rows, lengths, strict=True)]
    return _what_is_wrong(dict(enumerate(all_said)))


class _InStore:
    """A meeting in the store of a process group: its first rank reads what all say, and the others what it finds."""

    def __init__(self, said: _Said, group: dist.ProcessGroup, comm: GroupComm | None, remedy: str) -> None:
        self._said, self._comm, self._remedy = said, comm, remedy
        self._ranks, self._own, self._store = (
            dist.get_process_group_ranks(group),
            dist.get_rank(),
            group.get_group_store(),
        )
        self._key = _enter(said, group)
        backend = group._get_backend(group._device_types[0])
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # wrapped where torch debugs
        self._limit_s = (getattr(options, "_timeout", None) or dist.default_pg_timeout).total_seconds()
        self._started, self._has_warned = time.monotonic(), False

    def result(self) -> Exception | None:
        """Return what is wrong, once all ranks have come."""
        if self._own == self._ranks[0] and self._said.error is None:
            found: Exception | None
            try:
                others = {rank: pickle.loads(self._read(str(rank))) for rank in self._ranks[1:]}
                found = _what_is_wrong({self._own: self._said, **others})
            except PeerError as error:
                found = error
            self._store.set(f"{self._key}/result", pickle.dumps(found))  # type: ignore[arg-type]
            return found
        return pickle.loads(self._read("result"))  # type: ignore[no-any-return]

    def _read(self, name: str) -> bytes:
        """Return what is written under ``name``, once it is."""
        pause_s, look_s = 0.001, min(SURE_S, self._limit_s)
        while not self._store.check([f"{self._key}/{name}"]):
            if (waited_s := time.monotonic() - self._started) >= look_s:
                self._look(waited_s)
                look_s = waited_s + max(LOOK_S, len(self._ranks) / 64)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        return bytes(self._store.get(f"{self._key}/{name}"))

    def _look(self, waited_s: float) -> None:
        """Raise PeerError where not all ranks will come; warn once where some take long."""
        missing = [rank for rank in self._ranks if not self._store.check([f"{self._key}/{rank}"])]
        call, who = self._said.call, named(missing or self._ranks[:1])
        if waited_s >= self._limit_s:
            raise PeerError(f"{who} did not come to {call} within {self._limit_s:.0f} s: {self._remedy}")
        if missing and self._comm is not None and (words := self._end_of_steps(missing)) is not None:
            error = PeerError(words)
            self._comm.abort(error)
            raise error
        if missing and waited_s >= PATIENCE_S and not self._has_warned:
            self._has_warned = True
            if self._own == min(set(self._ranks).difference(missing)):  # one of those that wait
                words = f"{who} did not come to {call} yet, rank {self._own} has waited for {waited_s:.0f} s"
                warnings.warn(f"{words}: {self._remedy}", stacklevel=2)

    def _end_of_steps(self, missing: Sequence[int]) -> str | None:
        """Return in words why ranks that have not come take no more steps with this one."""
        if (failures := self._comm.failures if self._comm is not None else None) is None:
            return None
        if (found := failures.found()) is not None:
            return found
        ahead = [rank for rank in failures.ahead() if rank in missing]
        if not ahead:
            return None
        return f"{named(ahead)} began a step, while rank {self._own} waits in {self._said.call}: {self._remedy}"


def _enter(said: _Said, group: dist.ProcessGroup) -> str:
    """Write what this rank says where its group meets next, which is returned; a first rank that refuses ends it."""
    store, own = group.get_group_store(), dist.get_rank()
    key = f"micro/meeting/{store.add(f'micro/meetings/{own}', 1)}"  # each rank counts its own
    store.set(f"{key}/{own}", pickle.dumps(said))  # type: ignore[arg-type]  # its annotation lacks bytes
    if said.error is not None and own == dist.get_process_group_ranks(group)[0]:
        store.set(f"{key}/result", pickle.dumps(_what_is_wrong({own: said})))  # type: ignore[arg-type]
    return key


def _what_is_wrong(all_said: Mapping[int, _Said]) -> ValueError | None:
    """Return the first thing that is wrong of what each rank said; None where nothing is."""
    words = _in_words(all_said)
    return None if words is None else ValueError(words)


def _in_words(all_said: Mapping[int, _Said]) -> str | None:
    for rank, said in all_said.items():
        if said.error is not None:
            return f"rank {rank} refused {said.call}: {said.error}"
    first, *_ = all_said
    heads = dict[str, int]()
    for rank, said in all_said.items():
        if said.call != all_said[first].call:
            return f"ranks must make the same calls, rank {first} calls {all_said[first].call}, rank {rank} {said.call}"
        if found := difference(all_said[first].settings, said.settings):
            return f"settings must be the same on all ranks, rank {first} has {found[0]}, rank {rank} {found[1]}"
        head = heads.setdefault(said.part, rank)
        words = _other_model(head, all_said[head].parameters, rank, said.parameters)
        if words is not None:
            return words
    return None


def _other_model(head: int, expected: Mapping[str, Any], rank: int, given: Mapping[str, Any]) -> str | None:
    """Return in words how the model of ``rank`` is another than that of ``head``; None where both have one."""
    for both in zip_longest(expected.items(), given.items()):
        one, two = [f"'{pair[0]}' {pair[1][0]}" if pair else "no more" for pair in both]
        if one != two:
            return (
                f"the model must be the same on all ranks, rank {head} has {one}, rank {rank} {two}: with several "
                "models, call it for them in the same order on all ranks"
            )
    for name, described in expected.items():
        if given[name] != described:
            return (
                f"weights must be the same on all ranks at the start, '{name}' of rank {rank} differs from rank "
                f"{head}'s: give all ranks one seed, or load the same weights; with several models, keep to one order"
            )
    return None


def _described(parameter: Tensor, *, is_exact: bool) -> tuple[tuple[int, ...], int]:
    if parameter.is_meta:
        raise ValueError("a parameter has no values yet: initialise the weights before")
    values = real(parameter.detach())
    step = max(1, values.numel() // SAMPLE)
    return tuple(values.shape), zlib.crc32(content_of(values if is_exact else values.reshape(-1)[::step]))


def content_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's numbers."""
    here = tensor.contiguous().cpu()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size()) if here.numel() else b""
