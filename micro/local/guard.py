"""Raise an error of one rank on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from micro.comm.group import PrivateComm
from micro.comm.ranks import Comm
from micro.values.nonfinite import NonFiniteGradient


@contextmanager
def failing_together(comm: Comm) -> Iterator[None]:
    """If this rank alone raises, make the others fail too, with its message, instead of waiting."""
    try:
        yield
    except NonFiniteGradient:  # raised on all ranks anyway
        raise
    except BaseException as error:
        if isinstance(comm, PrivateComm):
            comm.abort(error)
        raise
