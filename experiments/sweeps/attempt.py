"""Carry out one run of a sweep: a failure becomes one line for the user and does not end the sweep."""

import traceback

from experiments.config.errors import UserError, one_line_with_type
from experiments.config.schema import TrainConfig
from experiments.launching.failures import RankFailure
from experiments.runs.atomic_files import DiskError
from experiments.runs.lock import FolderInUse
from experiments.runs.run_folder import RunFolder
from experiments.training.runner import Watcher, execute
from micro import NonFiniteGradient


def attempt(config: TrainConfig, folder: RunFolder, watcher: Watcher) -> str | None:
    """Carry out a run to its end; return the reason of a failure in one line, None after a success.

    Raises:
        FolderInUse: another process holds the run.
        DiskError: the disk is full, read-only or broken: the next run would fail as well.
        SystemExit: a signal stopped the run, after it was saved.
    """
    try:
        execute(config, watcher, folder=folder)
    except RankFailure as error:
        reason = f"rank {error.rank} failed: {error.message}"
        if error.failure.of_disk:
            raise DiskError(reason) from None
        return reason
    except (FolderInUse, DiskError):
        raise
    except (UserError, NonFiniteGradient) as error:
        return str(error)
    except Exception as error:  # for instance out of memory: the other runs may need less
        traceback.print_exc()
        return one_line_with_type(error)
    return None
