"""Carry out one run of a sweep, in the process that was made for it."""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch

from experiments.config.errors import UserError, one_line_with_type
from experiments.config.schema import TrainConfig
from experiments.config.stopping import handled, raise_stop
from experiments.launching.failures import RankFailure
from experiments.runs.atomic_files import cannot_write
from experiments.runs.run_folder import RunFolder
from experiments.training.runner import execute
from micro import NonFiniteGradient


def carry_out(
    config: TrainConfig, folder: RunFolder, answer: Connection, variables: Mapping[str, str], num_threads: int | None
) -> None:
    """Carry out a run with its output in its log; send the reason of a failure in one line, None after a success.

    Nothing is sent where a signal stops the run: the exit code says so.

    Args:
        variables: the environment of the sweep; this process was forked from one that may have another.
        num_threads: of torch in this process; None keeps OMP_NUM_THREADS.
    """
    os.setsid()  # a terminal's Ctrl-C reaches the sweep alone, which passes it on
    with handled(raise_stop):
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        os.environ.update(variables)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        try:
            folder.make()
            with folder.log_path.open("ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        except (UserError, OSError) as error:
            answer.send(str(cannot_write(folder.log_path, error) if isinstance(error, OSError) else error))
        else:
            answer.send(_failure(config, folder))


def _failure(config: TrainConfig, folder: RunFolder) -> str | None:
    """Carry out a run; return why it failed, None after a success."""
    try:
        execute(config, folder=folder)
    except (UserError, RankFailure, NonFiniteGradient) as error:
        reason = str(error)
    except Exception as error:  # for instance out of memory: the other runs may need less
        traceback.print_exc()
        reason = one_line_with_type(error)
    else:
        return None
    print(f"error: {reason}", file=sys.stderr)
    return reason


def _stop_with_parent() -> None:
    """Save and stop the run when the sweep's process has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
