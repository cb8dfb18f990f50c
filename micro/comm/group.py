"""The ranks of a process group, and how what reductions request travels between them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from micro.comm import messages
from micro.comm.loop import Loop
from micro.comm.peer_failures import PeerFailures
from micro.comm.ranks import Comm, Started
from micro.comm.requests import Request


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
        both = (part for levels in self._levels.values() for part in (levels.within, levels.between))
        return (part for part in both if isinstance(part, GroupComm))

    def _subgroup(self, ranks: range, device: torch.device) -> Comm:
        from micro.comm.private_group import PrivateComm  # which extends this class

        return PrivateComm(self.group, device, timed=self.timed, ranks=ranks)

    def start(self, requests: Sequence[Request]) -> Started:
        """Start the collectives in which these requests travel, and count them; see Comm."""
        under_way = messages.start(requests, self.group)

        def answers() -> list[Any]:
            received: dict[Request, Any] = {}
            for collective in under_way:
                self._wait(collective.work, collective.device)
                received.update(zip(collective.requests, collective.received(), strict=True))
            return [received[each] if each in received else each.alone() for each in requests]

        return Started(answers, lambda: all(collective.work.is_completed() for collective in under_way))

    def wait_for_all(self) -> None:
        """Return once all ranks of the group have called this, or raise what one has reported."""
        self._wait(dist.barrier(self.group, async_op=True), torch.device("cpu"))

    def _wait(self, work: dist.Work, device: torch.device) -> None:
        """Wait for a collective; on an accelerator its stream does, and the host goes on."""
        if self.failures is None or device.type == "cuda":
            work.wait()
        else:
            self.failures.wait(work)
