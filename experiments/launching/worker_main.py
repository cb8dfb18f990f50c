"""Main of a worker process: call the functions that its parent sends, and return their values.

``WorkerProcess`` starts it as ``python -m experiments.launching.worker_main SOCKET PARENT SIGNAL``.
"""

import pickle
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from experiments.config.start_up import collect_seldom
from experiments.launching.failures import is_lost_peer, short_line
from experiments.launching.process_lifetime import die_with_parent, leave


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An exception that a call raised.

    Attributes:
        message: Its type and text, one line.
        lost_peer: Whether it says that another rank is gone.
        time: Seconds since the epoch.
    """

    message: str
    traceback: str
    lost_peer: bool
    time: float


def serve(parent: Connection) -> None:
    """Answer one call after another until the parent closes its end, or until a call raises an exception.

    A request is a pickled (function, arguments), an answer a pickled (True, value) or (False, ErrorReport). After an
    exception the process ends at once: its peers detect that, and a normal exit would wait for threads.
    """
    with suppress(EOFError, ConnectionError):  # the parent has closed its end
        while True:
            request = parent.recv_bytes()
            try:
                function, arguments = pickle.loads(request)
                answer = pickle.dumps((True, function(*arguments)))
            except Exception as error:
                traceback.print_exc()
                parent.send_bytes(pickle.dumps((False, _report(error))))
                leave(1)
            parent.send_bytes(answer)


def _report(error: Exception) -> ErrorReport:
    return ErrorReport(
        message=short_line(f"{type(error).__name__}: {error}"),
        traceback="".join(traceback.format_exception(error)),
        lost_peer=is_lost_peer(error),
        time=time.time(),
    )


if __name__ == "__main__":
    from experiments.launching import worker_main  # the parent can unpickle its ErrorReport, not that of __main__

    socket, parent, number = map(int, sys.argv[1:])
    die_with_parent(parent, how=number)
    collect_seldom()
    worker_main.serve(Connection(socket))
