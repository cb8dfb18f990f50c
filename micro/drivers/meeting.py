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

SAMPLE = 1024  # elements of a parameter that are compared
LONGEST_S = 0.25  # longest pause between two reads of the store
PATIENCE_S = 10.0  # a warning then names the ranks that have not arrived
EVERYWHERE = "call it on all ranks"


@dataclass(slots=True)
class Entry:
    """What a rank has to compare.

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
class _Report:
    """What other ranks read: an error, or settings, and each parameter's shape and checksum."""

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
    """Raise on all ranks if this context raises on one, or if settings or models differ.

    Ranks may arrive late. After PATIENCE_S a warning names those that are missing.

    Args:
        call: what the user has called.
        ranks_of: returns the ranks: a process group, None for the default one, or a Comm. If it raises, the ranks of
            the default group get the error, because they are usually those that wait.
        comm: the ranks that take steps together. If one waits in a step while another waits here, both waits end, and
            ``comm`` is aborted.
        remedy: what the user should do if a rank is missing.

    Raises:
        ValueError: on all ranks; the rank whose context raised has its own error.
        PeerError: a rank did not arrive before the store's timeout, began a step instead, or failed.
    """
    entry, error = Entry(), None
    try:
        ranks = ranks_of()
    except Exception as caught:
        if dist.is_initialized():
            _enter(_Report(call, str(caught)), _group_of(None))
        raise
    try:
        yield entry
        checksums = {name: _described(p, is_exact=entry.is_exact) for name, p in entry.parameters.items()}
        report = _Report(call, None, describe(entry.settings), checksums, entry.part)
    except Exception as caught:  # of any type: the others must not wait
        error, report = caught, _Report(call, str(caught))
    if isinstance(ranks, Comm) and not isinstance(ranks, GroupComm):
        found = _in_memory(report, ranks)
    else:
        in_store = _InStore(report, _group_of(ranks), comm, remedy)
        del ranks  # an aborted gloo group closes its sockets only when no traceback refers to it
        found = in_store.result()
    if error is not None:
        raise error
    if found is not None:
        raise found


def _group_of(ranks: Any) -> dist.ProcessGroup:
    found = (ranks.group if isinstance(ranks, GroupComm) else ranks) or dist.group.WORLD
    assert found is not None, "a process group is initialised"
    return found


def _in_memory(report: _Report, comm: Any) -> Exception | None:
    """Return the first problem, for ranks in one process: each reads what all have."""
    own = torch.frombuffer(bytearray(pickle.dumps(report)), dtype=torch.uint8)
    lengths = comm.answer(AllGather(mine=torch.tensor([own.numel()])))[:, 0].tolist()
    rows = comm.answer(AllGather(mine=torch.nn.functional.pad(own, (0, max(lengths) - own.numel()))))
    reports = [pickle.loads(content_of(row[:length])) for row, length in zip(rows, lengths, strict=True)]
    return _first_problem(dict(enumerate(reports)))


class _InStore:
    """A meeting in a process group's store: the first rank compares what all wrote, the others read the result."""

    def __init__(self, report: _Report, group: dist.ProcessGroup, comm: GroupComm | None, remedy: str) -> None:
        self._report, self._comm, self._remedy = report, comm, remedy
        self._ranks, self._own, self._store = (
            dist.get_process_group_ranks(group),
            dist.get_rank(),
            group.get_group_store(),
        )
        self._key = _enter(report, group)
        backend = group._get_backend(group._device_types[0])
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # wrapped in debug mode
        self._limit_s = (getattr(options, "_timeout", None) or dist.default_pg_timeout).total_seconds()
        self._started, self._has_warned = time.monotonic(), False

    def result(self) -> Exception | None:
        """Wait for all ranks; return the first problem, or None."""
        if self._own == self._ranks[0] and self._report.error is None:
            found: Exception | None
            try:
                others = {rank: pickle.loads(self._read(str(rank))) for rank in self._ranks[1:]}
                found = _first_problem({self._own: self._report, **others})
            except PeerError as error:
                found = error
            self._store.set(f"{self._key}/result", pickle.dumps(found))  # type: ignore[arg-type]
            return found
        return pickle.loads(self._read("result"))  # type: ignore[no-any-return]

    def _read(self, name: str) -> bytes:
        """Wait for the value of ``name`` and return it."""
        pause_s, look_s = 0.001, min(SURE_S, self._limit_s)
        while not self._store.check([f"{self._key}/{name}"]):
            if (waited_s := time.monotonic() - self._started) >= look_s:
                self._look(waited_s)
                look_s = waited_s + max(LOOK_S, len(self._ranks) / 64)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        return bytes(self._store.get(f"{self._key}/{name}"))

    def _look(self, waited_s: float) -> None:
        """Raise PeerError if a rank will not arrive; warn once if one takes long."""
        missing = [rank for rank in self._ranks if not self._store.check([f"{self._key}/{rank}"])]
        call, who = self._report.call, named(missing or self._ranks[:1])
        if waited_s >= self._limit_s:
            raise PeerError(f"{who} did not come to {call} within {self._limit_s:.0f} s: {self._remedy}")
        if missing and self._comm is not None and (words := self._end_of_steps(missing)) is not None:
            error = PeerError(words)
            self._comm.abort(error)
            raise error
        if missing and waited_s >= PATIENCE_S and not self._has_warned:
            self._has_warned = True
            if self._own == min(set(self._ranks).difference(missing)):  # only one of the waiting ranks warns
                words = f"{who} did not come to {call} yet, rank {self._own} has waited for {waited_s:.0f} s"
                warnings.warn(f"{words}: {self._remedy}", stacklevel=2)

    def _end_of_steps(self, missing: Sequence[int]) -> str | None:
        """Return why the ``missing`` ranks will take no step with this one, or None."""
        if (failures := self._comm.failures if self._comm is not None else None) is None:
            return None
        if (found := failures.found()) is not None:
            return found
        ahead = [rank for rank in failures.ahead() if rank in missing]
        if not ahead:
            return None
        return f"{named(ahead)} began a step, while rank {self._own} waits in {self._report.call}: {self._remedy}"


def _enter(report: _Report, group: dist.ProcessGroup) -> str:
    """Write this rank's report and return the meeting's key. If the first rank refuses, its error is the result."""
    store, own = group.get_group_store(), dist.get_rank()
    key = f"micro/meeting/{store.add(f'micro/meetings/{own}', 1)}"  # each rank counts its meetings
    store.set(f"{key}/{own}", pickle.dumps(report))  # type: ignore[arg-type]  # its annotation lacks bytes
    if report.error is not None and own == dist.get_process_group_ranks(group)[0]:
        store.set(f"{key}/result", pickle.dumps(_first_problem({own: report})))  # type: ignore[arg-type]
    return key


def _first_problem(reports: Mapping[int, _Report]) -> ValueError | None:
    """Return the first problem in the reports of all ranks, or None."""
    words = _problem_of(reports)
    return None if words is None else ValueError(words)


def _problem_of(reports: Mapping[int, _Report]) -> str | None:
    for rank, report in reports.items():
        if report.error is not None:
            return f"rank {rank} refused {report.call}: {report.error}"
    first, *_ = reports
    heads = dict[str, int]()
    for rank, report in reports.items():
        if report.call != reports[first].call:
            return (
                f"ranks must make the same calls, rank {first} calls {reports[first].call}, rank {rank} {report.call}"
            )
        if found := difference(reports[first].settings, report.settings):
            return f"settings must be the same on all ranks, rank {first} has {found[0]}, rank {rank} {found[1]}"
        head = heads.setdefault(report.part, rank)
        words = _other_model(head, reports[head].parameters, rank, report.parameters)
        if words is not None:
            return words
    return None


def _other_model(head: int, expected: Mapping[str, Any], rank: int, given: Mapping[str, Any]) -> str | None:
    """Return how the model of ``rank`` differs from that of ``head``, or None."""
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
