"""Two ranks of this machine that measure, started early: they import while their starter does other things."""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from experiments.launching.child_environment import child_environment

WORLD_SIZE = 2
PATIENCE_S = 100  # where kernels are not compiled yet, that takes longer than all the rest
ANSWER, MEETING = "answer.json", "meeting"
_MODULE = "experiments.checkup.ranks"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the two ranks found.

    Attributes:
        model: whose gradient was reduced.
        numel: elements of it.
        density: that was asked of MiCRO.
        sizes, seconds: of an all-reduce between the two: bytes of the vector, and medians.
        select_s: what a reduction of that gradient by MiCRO takes beside its collectives, on the slower rank.
    """

    model: str
    numel: int
    density: float
    sizes: list[int]
    seconds: list[float]
    select_s: float


class Pair:
    """The two ranks, for the length of a ``with``; they are killed at its end."""

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="micro-doctor-")))
            self._log = undo.enter_context(tempfile.TemporaryFile("w+"))
            self._ranks: list[subprocess.Popen[bytes]] = []
            undo.callback(self._stop)
            for rank in range(WORLD_SIZE):
                self._ranks.append(self._start(rank))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def measured(self) -> Measured:
        """Wait for what the ranks find.

        Raises:
            RuntimeError: one failed, or they took too long; with the last of what they said.
        """
        end = time.monotonic() + PATIENCE_S
        while None in (codes := [rank.poll() for rank in self._ranks]) and not any(codes) and time.monotonic() < end:
            time.sleep(_POLL_S)
        if codes != [0] * WORLD_SIZE:
            raise RuntimeError(f"two ranks on this machine could not measure: {self._last_words()}")
        return Measured(**json.loads((self._folder / ANSWER).read_text()))

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        environment = child_environment(OMP_NUM_THREADS="1")
        command = [sys.executable, "-m", _MODULE, str(rank), str(self._folder)]
        return subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)

    def _stop(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()

    def _last_words(self) -> str:
        self._log.seek(0)
        said = [" ".join(line.split()) for line in self._log.read().splitlines() if line.strip()]
        return said[-1] if said else f"no answer within {PATIENCE_S} s"
