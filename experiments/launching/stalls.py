"""Where each rank is: the step and phase that it notes, so that one that others wait for in vain can be named.

A rank notes what it begins in the run folder and in the ranks' store, which ranks without a shared disk can read. When
the time limit of a collective ends its wait, it notes that too. Who has noted no such wait, and is in the earliest
step, is furthest behind: the others name it and end it. Where no rank waits in a collective, a step that takes twice
the limit ends its process.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from experiments.launching.failures import StalledRank, is_lost_peer, is_timeout
from experiments.runs.atomic_files import from_json
from experiments.runs.run_folder import RunFolder
from micro.store_calls import StoreCalls

_OTHERS_S = 5.0  # in which the other ranks of a collective note that its limit has ended their wait too


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a rank does.

    Attributes:
        rank: of the run.
        host, pid: where it is.
        step: that it takes, or took last; -1 before the first.
        phase: what it began, such as "the step" or "the evaluation".
        since: when, in seconds since the epoch.
        waited: whether it has waited in a collective for longer than the limit.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    since: float
    waited: bool


class Notes:
    """The note of this rank, and those of the others. Before ``kept`` begins nothing is written."""

    def __init__(self) -> None:
        self._note = Note(
            rank=0, host=socket.gethostname(), pid=os.getpid(), step=-1, phase="the start", since=0.0, waited=False
        )
        self._folder: RunFolder | None = None
        self._store: dist.Store | None = None
        self._limit_s = self._armed_at = 0.0
        self._world_size = 1

    @contextmanager
    def kept(self, folder: RunFolder, store: dist.Store, limit_s: float) -> Iterator[None]:
        """Keep this rank's note in this context; an error of a wait in vain becomes one that names who was missing.

        Args:
            limit_s: of the collectives.

        Raises:
            StalledRank: a collective reached its limit, and another rank is behind; a rank of this host is ended.
        """
        self._folder, self._store, self._limit_s = folder, store, limit_s
        with suppress(OSError):  # another node's folder
            folder.ranks_path.mkdir(exist_ok=True)
        self._world_size = dist.get_world_size()
        self._note = replace(self._note, rank=dist.get_rank(), pid=os.getpid(), step=-1, waited=False)
        self.begin("the start")
        try:
            yield
        except Exception as error:
            if not (is_lost_peer(error) and is_timeout(str(error))):
                raise
            behind = self._behind()
            if behind is None:
                raise
            _end(behind)
            raise StalledRank(behind.rank, self._words(behind)) from error
        finally:
            self._disarm()
            self._folder = self._store = None

    def begin(self, phase: str, step: int | None = None) -> None:
        """Note what this rank begins now; a phase without a step may take as long as it takes."""
        if self._folder is None:
            return
        self._write(replace(self._note, phase=phase, step=self._note.step if step is None else step, since=time.time()))
        self._arm() if step is not None else self._disarm()

    def _write(self, note: Note) -> None:
        assert self._folder is not None
        assert self._store is not None
        self._note, text = note, json.dumps(asdict(note))
        path = note_path(self._folder, note.rank)
        with suppress(OSError):  # another node's folder, or a full disk
            path.write_text(text)
        self._store.set(f"note/{note.rank}", text)

    def _behind(self) -> Note | None:
        """Note that this rank has waited in vain; return the note of the rank furthest behind, where one is."""
        calls, store = StoreCalls(), self._store
        assert store is not None
        calls.call(lambda: self._write(replace(self._note, waited=True)), None)
        end, found = time.monotonic() + _OTHERS_S, dict[int, Note]()
        while time.monotonic() < end:
            found = calls.call(lambda: self._read_store(store), {}) or self._read_folder()
            if sum(not note.waited for note in found.values()) <= 1:
                break
            time.sleep(0.2)
        return furthest_behind(found)

    def _read_store(self, store: dist.Store) -> dict[int, Note]:
        keys = [f"note/{rank}" for rank in range(self._world_size)]
        notes = [from_json(Note, store.get(key)) for key in keys if store.check([key])]
        return {note.rank: note for note in notes if note}

    def _read_folder(self) -> dict[int, Note]:
        return read_notes(self._folder) if self._folder else {}

    def _words(self, note: Note) -> str:
        stood_s = time.time() - note.since
        return (
            f"stood for {stood_s:.0f} s in {place_of(note)} (pid {note.pid} on {note.host}); the others waited for it "
            f"in step {self._note.step} until cluster.timeout_s={self._limit_s:g}"
        )

    def _arm(self) -> None:
        """Have this process end, with its stacks in its log, where no step begins within twice the limit."""
        now = time.monotonic()
        if now - self._armed_at > self._limit_s / 10:  # it starts a thread
            self._armed_at = now
            with suppress(OSError, ValueError, AttributeError):  # standard error is no file: in tests
                faulthandler.dump_traceback_later(2 * self._limit_s, exit=True, file=sys.stderr)

    def _disarm(self) -> None:
        self._armed_at = 0.0
        faulthandler.cancel_dump_traceback_later()


def read_notes(folder: RunFolder) -> dict[int, Note]:
    """Return the last note of each rank that has left one in a run folder."""
    found: dict[int, Note] = {}
    for path in folder.ranks_path.glob("note-*.json"):
        with suppress(OSError):
            if note := from_json(Note, path.read_bytes()):
                found[note.rank] = note
    return found


def furthest_behind(notes: Mapping[int, Note]) -> Note | None:
    """Return the note of the rank that has not waited and is in the earliest step; None where all have waited."""
    missing = [note for note in notes.values() if not note.waited]
    return min(missing, key=lambda note: (note.step, note.since)) if missing else None


def place_of(note: Note) -> str:
    """Return where a rank is, in words."""
    return f"{note.phase} {note.step}" if note.phase == "step" else f"{note.phase}, after step {note.step}"


def note_path(folder: RunFolder, rank: int) -> Path:
    """Return the file of a rank's note."""
    return folder.ranks_path / f"note-{rank}.json"


def _end(note: Note) -> None:
    """End a rank of this host that stands: it would not end by itself."""
    if note.host == socket.gethostname() and note.pid != os.getpid():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(note.pid, signal.SIGKILL)


notes = Notes()
