"""An error of one rank is one of all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from micro.comm.group import PrivateComm
from micro.comm.ranks import Comm
from micro.values.nonfinite import NonFiniteGradient


@contextmanager
def failing_together(comm: Comm) -> Iterator[None]:
    """After an error of this rank alone, have the others fail too, with its words, and not wait for it."""
    try:
        yield
    except NonFiniteGradient:  # which all ranks raise
        raise
    except BaseException as error:
        if isinstance(comm, PrivateComm):
            comm.abort(error)
        raise
