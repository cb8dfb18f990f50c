"""Ranks that tests share: processes that stay up from one test to the next, because starting them is what costs."""

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from experiments.launching.failures import RankFailure
from experiments.launching.rank_group import RankGroup

COLLECTIVE_S = 60.0


class RankError(AssertionError):
    """A rank raised an exception, died or did not answer; the message says which, with the traceback of the first."""


class Ranks:
    """``world_size`` processes in one torch.distributed group.

    A test in which a rank fails, or that takes too long, costs the group; the next test gets a fresh one.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._group: RankGroup | None = None

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call ``work(*args)`` on every rank at once and return the results in rank order.

        Args:
            work: a function of a module, so that the processes can import it.

        Raises:
            RankError: a rank raised an exception, died, or did not answer in time.
        """
        if self._group is None:
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            group = RankGroup(self.world_size, backend=self.backend, env=env, collective_s=COLLECTIVE_S)
            self._group = group.__enter__()
        try:
            return self._group.call(_call, work, args, timeout_s=timeout_s)
        except RankFailure as error:
            self.close()
            raise RankError(f"{error}\n{error.failure.traceback or ''}") from None

    def close(self) -> None:
        """End the processes."""
        if self._group is not None:
            self._group.__exit__(None, None, None)
        self._group = None


@functools.cache
def ranks(world_size: int, backend: str = "gloo") -> Ranks:
    """Return the group of this size that all tests share; it starts when first used and ends with the test run."""
    group = Ranks(world_size, backend)
    atexit.register(group.close)
    return group


def _call(work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _leave_groups()  # not before: another rank may have been in one
    return work(*args)


def _leave_groups() -> None:
    """Give up the groups that the last test made: each has threads that wake many times a second for ever."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
