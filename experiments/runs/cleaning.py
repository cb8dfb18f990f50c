"""Remove the folders of runs that failed or were stopped."""

import shutil
from collections.abc import Iterable
from contextlib import suppress

from experiments.config.errors import UserError
from experiments.runs.disks import reason
from experiments.runs.run_folder import FolderInUse, RunFolder
from experiments.runs.status import State, state_of


def removable(folders: Iterable[RunFolder], *, finished_too: bool = False) -> list[RunFolder]:
    """Return the folders of runs that failed, were stopped or are damaged; with ``finished_too`` all that ended.

    A run that was finished, and is damaged, counts as finished: it may hold the only weights.
    """
    states = (State.FAILED, State.STOPPED, State.DAMAGED)
    return [each for each in folders if (finished_too if each.is_done() else state_of(each) in states)]


def remove(folders: Iterable[RunFolder]) -> list[RunFolder]:
    """Remove the folders; return those that stay because a process uses them.

    Raises:
        UserError: a folder cannot be removed.
    """
    stayed = []
    for folder in folders:
        try:
            with folder.locked():
                with suppress(FileNotFoundError):
                    folder.done_path.unlink()  # first: an interrupted removal must not look like a finished run
                shutil.rmtree(folder.path)
        except FolderInUse:
            stayed.append(folder)
        except OSError as error:
            raise UserError(f"cannot remove {folder.path}: {reason(error)}; remove it by hand") from None
    return stayed
