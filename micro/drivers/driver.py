"""The base class of drivers, which attach a reducer to a model: attachments and local steps."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self

import torch.distributed as dist

from micro.checkpoints.description import describe
from micro.checkpoints.saved_state import check_header, header
from micro.comm.group import GroupComm
from micro.comm.ranks import Comm
from micro.drivers.meeting import Entry, meeting
from micro.reducers.base import Reducer
from micro.warn import warn


class Driver(ABC):
    """A reducer that is attached to a model; a context manager that closes it.

    Attributes:
        reducer: the reducer.
        comm: the ranks that reduce together.
    """

    reducer: Reducer
    comm: Comm
    _scope: str

    @property
    def rank(self) -> int:
        """This rank among those that train the model."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that train the model."""
        return self.comm.world_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks; None is the default one."""
        return self.comm.group if isinstance(self.comm, GroupComm) else None

    @abstractmethod
    def close(self) -> None:
        """Detach the reducer from the model."""

    def meet(self, call: str, *, remedy: str) -> AbstractContextManager[Entry]:
        """Return a context for all ranks that train the model; if one raises in it, all do.

        Args:
            call: what the user has called.
            remedy: what the user should do if a rank is missing.
        """
        if not isinstance(self.comm, GroupComm):
            return meeting(call, lambda: self.comm)
        return meeting(call, lambda: self.group, comm=self.comm, remedy=remedy)

    def _header(self, step: int) -> dict[str, Any]:
        return header(step=step, **self._identity())

    def check_state(self, saved: Any) -> None:
        """Raise ValueError if ``saved`` is of another rank, world size, method or newer version; load nothing."""
        check_header(saved, **self._identity())

    def _identity(self) -> dict[str, Any]:
        method = describe(self.reducer)
        return {"rank": self.rank, "world_size": self.world_size, "scope": self._scope, "method": method}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()

    def __copy__(self) -> "CopiedDriver":
        return CopiedDriver()

    def __deepcopy__(self, _: object) -> "CopiedDriver":
        return CopiedDriver()

    def __reduce__(self) -> tuple[type["CopiedDriver"], tuple[()]]:
        """Warn instead of raising, because often only rank 0 pickles, and the others would wait."""
        warn(
            f"a pickled {type(self).__name__} is no saved state, nothing that it keeps is in it: save what its "
            "state_dict() returns, of every rank"
        )
        return CopiedDriver, ()


class CopiedDriver:
    """The copy or pickle of a driver: attached to no model, without state; every use raises an error that says so."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"no '{name}': a copied or pickled attachment is attached to no model and is no saved state: call "
            "micro.attach on your model, and load what state_dict() returned"
        )
