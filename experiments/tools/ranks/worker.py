"""The process of a rank in a `RankGroup`: calls the functions that the parent sends, and returns their values.

It imports nothing from this repository, because ``bench step --against`` runs it with another revision's code.
"""

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # as in linux/prctl.h


def serve(parent: Connection) -> None:
    """Answer calls until the parent closes its end, or until a call raises.

    A request is a pickled (function, arguments), an answer (True, value) or (False, description of the exception).
    After an exception the process exits at once: peers detect that, and a normal exit would wait for threads.
    """
    while True:
        try:
            request = parent.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            function, arguments = pickle.loads(request)
            answer = pickle.dumps((True, function(*arguments)))
        except Exception as error:
            parent.send_bytes(pickle.dumps((False, describe(error))))
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        parent.send_bytes(answer)


def describe(error: Exception) -> dict[str, Any]:
    """Return an exception's message in one line, its traceback, and its time in seconds since the epoch."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return {"message": message, "traceback": "".join(traceback.format_exception(error)), "time": time.time()}


def join(backend: str, store: Path, limit_s: float) -> None:
    """Join the process group, with the rank from the environment variables.

    Args:
        store: a file shared by the ranks.
        limit_s: time limit of a collective.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend,
        init_method=store.as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=limit_s),
    )


def end_with(parent: int) -> None:
    """Make Linux kill this process when its parent ends, even while it waits in a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
