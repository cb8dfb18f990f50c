"""The runs of a sweep that other processes hold: they are left for the end, and then waited for."""

import time
from collections.abc import Callable
from time import sleep

from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import folder_of

_POLL_S = 1.0


class HeldRuns:
    """Runs that could not start because another process holds their folder, for instance a second sweep of the study.

    Args:
        say: Prints one line for the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._held: list[TrainConfig] = []
        self._said: set[str] = set()
        self._announced: set[str] = set()
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, config: TrainConfig, holder: str) -> None:
        """Keep a run for later and say who holds it."""
        self._held.append(config)
        line = f"held: {_name(config)}: in use by {holder}; tried again at the end"
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def take_ended(self) -> list[TrainConfig]:
        """Remove and return the runs that are finished or no longer held; looks at the folders once a second."""
        if not self._held or time.monotonic() - self._looked < _POLL_S:
            return []
        self._looked = time.monotonic()
        ended = [config for config in self._held if _has_ended(config)]
        self._held = [config for config in self._held if config not in ended]
        return ended

    def announce(self) -> None:
        """Say once which runs are waited for."""
        names = {_name(config) for config in self._held}
        if names - self._announced:
            self._announced |= names
            runs = "a run that another process holds" if len(names) == 1 else f"{len(names)} runs of other processes"
            self._say(f"waiting for {runs} (Ctrl-C stops): {', '.join(sorted(names))}")

    def wait(self) -> list[TrainConfig]:
        """Wait until a run is finished or no longer held; return those that are. Raises: KeyboardInterrupt."""
        self.announce()
        while not (ended := self.take_ended()):
            sleep(_POLL_S)
        return ended


def _has_ended(config: TrainConfig) -> bool:
    folder = folder_of(config)
    return folder.is_done() or not folder.is_locked()


def _name(config: TrainConfig) -> str:
    return folder_of(config).path.name
