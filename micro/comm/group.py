"""The only file that starts collectives of a step, for the requests of a process group.

Requests of one way that are due at the same time share a collective (micro.comm.joint): rows, and lists that travel as
rows; lists of other lengths; small sums of one dtype; copies of one source and dtype.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from micro.comm import process_groups
from micro.comm.joint import joint
from micro.comm.loop import Loop
from micro.comm.peers import PeerError, PeerFailures, named
from micro.comm.ranks import Comm, Started
from micro.comm.requests import AllReduce, Broadcast, Request, Sending, described

Group = dist.ProcessGroup | None
ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch's equal-size all-gather under the name that this version has (renamed in torch 2.13)."""


class GroupComm(Comm):
    """The ranks of a torch.distributed process group (gloo or NCCL); the default group when none is given.

    With ``failures``, a collective on the CPU ends with an error soon after another rank has reported one there.

    Attributes:
        loop: carries out the reductions of several buckets that are under way.
        failures: where ranks tell each other that they have failed, or None.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timed: bool = False, failures: PeerFailures | None = None
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timed=timed)
        self._group = group
        self._is_closed = False
        self.failures = failures
        self.loop = Loop()
        self._compares = os.environ.get("MICRO_DEBUG") == "1"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None is the default one.

        Raises:
            RuntimeError: it was given up.
        """
        if self._is_closed:
            raise RuntimeError("the process group was given up: its attachment is closed, or a rank of it failed")
        return self._group

    def close(self) -> None:
        """Forget the process group, which is somebody else's; a collective raises from now on."""
        self._group, self._is_closed = None, True
        self.loop.abandon()
        for part in self._parts():
            part.close()

    def abort(self, error: BaseException) -> None:
        """Close after an error on this rank, and have the other ranks fail too where it is known how."""
        self.report(error)
        for part in self._parts():
            part.abort(error)
        self.close()

    def report(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one, where it is known how, that it has failed."""
        if self.failures is not None:
            self.failures.report(error)

    def _parts(self) -> Iterator["GroupComm"]:
        return (part for parts in self.parts.values() for part in parts if isinstance(part, GroupComm))

    def subgroup(self, ranks: range, device: torch.device) -> Comm:
        """Return a process group of some of these ranks; see Comm."""
        return PrivateComm(self.group, device, timed=self.timed, ranks=ranks)

    def start(self, requests: Sequence[Request]) -> Started:
        """Start the collectives in which these requests travel, and count them; those of one way share one.

        Which share one is the same on all ranks.
        """
        if self._compares:
            _compare(requests, self)
        ways: dict[Hashable, list[Any]] = {}
        received: dict[Request, Any] = {}
        for request in requests:
            if not isinstance(request, Sending) or request.is_empty:
                received[request] = request.alone()
                continue
            request.count()
            together = ways.setdefault(request.way, [])
            request.comm.traffic.num_shared += bool(together)
            together.append(request)
        under_way = []
        for way, together in ways.items():
            message, split = (together[0], None) if len(together) == 1 else joint(together)
            under_way.append((message, split, together, *_started(message, way, self.group)))

        def answers() -> list[Any]:
            for message, split, together, work, filled in under_way:
                self._wait(work, filled.device)
                answer = message.answer(filled)
                received.update(zip(together, split(answer) if split else [answer], strict=True))
            return [*map(received.__getitem__, requests)]

        return Started(answers, lambda: all(work.is_completed() for *_, work, _ in under_way))

    def wait_for_all(self) -> None:
        """Return once all ranks of the group have called this, or raise what one has reported."""
        self._wait(dist.barrier(self.group, async_op=True), torch.device("cpu"))

    def _wait(self, work: dist.Work, device: torch.device) -> None:
        """Wait for a collective; on an accelerator its stream does, and the host goes on."""
        if self.failures is None or device.type == "cuda":
            work.wait()
        else:
            self.failures.wait(work)


class PrivateComm(GroupComm):
    """The ranks of ``group`` over a new process group, so that these collectives never mix with others.

    With ``ranks``, it is a group of those places in ``group``, this rank's among them; only they make it.

    The new group has the backend of ``group`` for ``device``, its timeout and its options. All ranks make their groups
    in the same order: torch derives a name, at which ranks meet, from the number of groups made so far. On gloo it is
    made once all its ranks have joined it, so that one that fails right after leaves no other alone with a broken
    connection.

    To close it needs no other rank on gloo: it closes this process's sockets. What this rank sent before still
    arrives; a collective that waits for this rank fails at once, in place of waiting for the timeout. On NCCL the
    ranks close their groups in the same order too, after the work on the device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        timed: bool = False,
        ranks: range | None = None,
    ) -> None:
        own = group or dist.group.WORLD
        assert own is not None, "DDP was built on a process group"
        members = dist.get_process_group_ranks(own)
        chosen = members if ranks is None else [members[rank] for rank in ranks]
        process_groups.destroy_abandoned()
        made = process_groups.new_group_like(own, device, chosen)
        super().__init__(made, timed=timed, failures=PeerFailures(made))
        self._abandon = weakref.finalize(self, process_groups.abandoned.append, made)
        if made.name() == "gloo":  # there a rank that closes its group ends those that still connect to it
            self.wait_for_all()

    def close(self) -> None:
        """Destroy the process group; a collective raises from now on."""
        group = self._group
        super().close()
        self._abandon.detach()
        if group is not None:
            process_groups.destroy(group)

    def abort(self, error: BaseException) -> None:
        """Close after an error on this rank, so that the other ranks fail too; waits for none of them."""
        group = self._group
        if group is not None:
            self.report(error)  # before the others' collectives end
            self._group = None
            self._abandon.detach()
            if group.name() == "gloo":
                process_groups.abort(group)
            else:  # NCCL may wait for the other ranks in it
                threading.Thread(
                    target=process_groups.abort, args=(group,), daemon=True, name="micro aborts a group"
                ).start()
        process_groups.clear_frames(error)
        super().abort(error)


def _compare(requests: Sequence[Request], comm: GroupComm) -> None:
    """Raise PeerError, on all ranks, where they request different things at one time: a hash of each is compared."""
    words = described([request for request in requests if isinstance(request, Sending)])
    (device, *_) = [request.mine.device for request in requests if isinstance(request, Sending)]
    own = torch.frombuffer(bytearray(blake2b(words.encode(), digest_size=8).digest()), dtype=torch.uint8).to(device)
    hashes = own.new_empty((comm.world_size, own.numel()))
    comm._wait(ALL_GATHER(hashes.view(-1), own, group=comm.group, async_op=True), device)
    found = [tuple(each) for each in hashes.tolist()]  # host sync: to find mistakes
    usual = Counter(found).most_common(1)[0][0]
    ranks = dist.get_process_group_ranks(comm.group)
    if others := [rank for rank, each in zip(ranks, found, strict=True) if each != usual]:
        same = [rank for rank in ranks if rank not in others]
        raise PeerError(f"{named(others)} and {named(same)} request different things at one time; this rank: {words}")


def _started(request: Any, way: Hashable, group: Group) -> tuple[Any, Tensor]:
    """Start the collective of a request; return it, and the memory that it fills."""
    mine = request.mine
    if isinstance(request, AllReduce):
        return dist.all_reduce(mine, group=group, async_op=True), mine
    if isinstance(request, Broadcast):
        return dist.broadcast(mine, group_src=request.source, group=group, async_op=True), mine
    if way == "rows":
        row = request.row()
        sent = aligned(row) if row.is_cuda else row
        filled = sent.new_empty((request.comm.world_size, sent.numel()))
        work = ALL_GATHER(filled.view(-1), sent, group=group, async_op=True)
        return work, filled if sent is row else filled[:, : row.numel()]
    sent, to_ranks, from_ranks = request.parts()
    filled = sent.new_empty(sum(from_ranks))
    return dist.all_to_all_single(filled, sent, from_ranks, to_ranks, group=group, async_op=True), filled


def aligned(row: Tensor) -> Tensor:
    """Return ``row`` (m,) filled up to a multiple of 16 bytes, which NCCL copies by loads of 16."""
    return torch.nn.functional.pad(row, (0, -row.nbytes % 16 // row.element_size()))


def mean_async(x: Tensor, group: Group, num_summands: int) -> torch.futures.Future[Tensor]:
    """Start to replace ``x`` by its mean over the ranks, as DDP does where it has no hook; return the future of x."""
    work = dist.all_reduce(x.div_(num_summands), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def count_of(holds: bool, group: Group, device: torch.device) -> int:
    """Return on how many ranks something holds."""
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, group=group)
    return int(flag)  # host sync: in a join context that asks for it, where nothing is attached
