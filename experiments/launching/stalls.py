"""Track the step and phase of each rank, to name the rank for which a collective waited in vain.

A rank records its phase in memory. A thread sends it to the ranks' store every second, and writes it into the run
folder every ten seconds, for a launcher whose ranks were aborted. If a collective times out, the rank records that at
once. The rank without a timeout and in the earliest step is behind: the others name it and end it. If no rank waits in
a collective, a step that takes twice the limit ends its process.
"""

import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

from experiments.launching.failures import Failure, Kind, RankFailure, is_lost_peer, is_timeout, short_line
from experiments.runs.run_folder import RunFolder
from micro.comm.peers import StoreCalls

_SEND_S = 1.0
_FILE_S = 10.0  # between files of a rank: 64 ranks write six a second, however short a step is
_OTHERS_S = 5.0  # in which the other ranks of a collective note that its limit has ended their wait too


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a rank does.

    Attributes:
        host, pid: where it is.
        step: that it takes, or took last; -1 before the first.
        phase: what it began, such as "step" or "the evaluation".
        since: when, in seconds since the epoch.
        waited: whether it has waited in a collective for longer than the limit.
    """

    rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    step: int = -1
    phase: str = "the start"
    since: float = field(default_factory=time.time)
    waited: bool = False

    def __str__(self) -> str:
        """Return where the rank is, in words."""
        return f"step {self.step}" if self.phase == "step" else f"{self.phase}, after step {self.step}"


class Notes:
    """The note of this rank, and those of the others. Before ``kept`` begins nothing is written."""

    def __init__(self) -> None:
        self._kept: tuple[RunFolder, dist.Store] | None = None
        self._note, self._limit_s, self._armed_at = Note(), 0.0, 0.0
        self._filed: Note | None = None
        self._filed_at = -math.inf

    @contextmanager
    def kept(self, folder: RunFolder, store: dist.Store, limit_s: float) -> Iterator[None]:
        """Keep this rank's note in this context; an error of a wait in vain becomes one that names who was missing.

        Args:
            limit_s: of the collectives.

        Raises:
            RankFailure: a collective reached its limit, and another rank is behind; a rank of this host is ended.
        """
        with suppress(OSError):  # another node's folder
            folder.ranks_path.mkdir(exist_ok=True)
        self._limit_s, self._note, self._filed_at = limit_s, Note(rank=dist.get_rank()), -math.inf
        is_over = threading.Event()
        self._send(folder, store)
        self._kept = folder, store
        threading.Thread(target=self._send_often, args=(folder, store, is_over), daemon=True).start()
        try:
            yield
        except Exception as error:
            behind = self._behind(folder, store) if is_lost_peer(error) and is_timeout(str(error)) else None
            if behind is None:
                raise
            if behind.host == socket.gethostname() and behind.pid != os.getpid():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(behind.pid, signal.SIGKILL)  # it would not end by itself
            stood = f"was stuck for {time.time() - behind.since:.0f} s in {behind} (pid {behind.pid} on {behind.host})"
            waited = f"the others waited for it in step {self._note.step} until cluster.timeout_s={limit_s:g}"
            message, now = short_line(f"{stood}; {waited}"), time.time()
            raise RankFailure(Failure(rank=behind.rank, kind=Kind.STALLED, message=message, time=now)) from error
        finally:
            is_over.set()
            self._armed_at, self._kept = 0.0, None
            faulthandler.cancel_dump_traceback_later()

    def begin(self, phase: str, step: int | None = None) -> None:
        """Note what this rank begins now; a phase without a step may take as long as it takes."""
        if not self._kept:
            return
        step_now = self._note.step if step is None else step
        self._note = replace(self._note, phase=phase, step=step_now, since=time.time())
        if step is None:
            self._armed_at = 0.0
            faulthandler.cancel_dump_traceback_later()
        elif time.monotonic() - self._armed_at > self._limit_s / 10:  # not at each step: it starts a thread
            self._armed_at = time.monotonic()
            with suppress(OSError, ValueError, AttributeError):  # standard error is no file: in tests
                faulthandler.dump_traceback_later(2 * self._limit_s, exit=True, file=sys.stderr)

    def _send_often(self, folder: RunFolder, store: dist.Store, is_over: threading.Event) -> None:
        with suppress(RuntimeError):  # the store is gone: the run ends
            while not is_over.wait(_SEND_S):
                self._send(folder, store)

    def _send(self, folder: RunFolder, store: dist.Store) -> None:
        """Send this rank's note to the store, and write it where the file is old or the rank has waited in vain."""
        note = self._note
        text = json.dumps(asdict(note))
        store.set(f"note/{note.rank}", text)
        is_due = time.monotonic() - self._filed_at >= min(_FILE_S, self._limit_s / 4)
        if note is not self._filed and (note.waited or is_due):
            self._filed, self._filed_at = note, time.monotonic()
            with suppress(OSError):  # another node's folder, or a full disk
                (folder.ranks_path / f"note-{note.rank}.json").write_text(text)

    def _behind(self, folder: RunFolder, store: dist.Store) -> Note | None:
        """Note that this rank has waited in vain; return the note of the rank furthest behind, where one is."""
        calls, keys = StoreCalls(), [f"note/{rank}" for rank in range(dist.get_world_size())]
        self._note = replace(self._note, waited=True)
        calls.call(lambda: self._send(folder, store), None)
        end = time.monotonic() + _OTHERS_S
        while True:
            texts: list[bytes] = calls.call(lambda: [store.get(key) for key in keys if store.check([key])], [])
            found = _parsed(texts) if texts else read_notes(folder)
            if sum(not note.waited for note in found) <= 1 or time.monotonic() > end:
                return furthest_behind(found)
            time.sleep(0.2)


def read_notes(folder: RunFolder) -> list[Note]:
    """Return the last note of each rank that has left one in a run folder."""
    return _parsed(path.read_bytes() for path in folder.ranks_path.glob("note-*.json"))


def furthest_behind(notes: Iterable[Note]) -> Note | None:
    """Return the note of the rank that has not waited and is in the earliest step; None where all have waited."""
    missing = [note for note in notes if not note.waited]
    return min(missing, key=lambda note: (note.step, note.since), default=None)


def _parsed(texts: Iterable[bytes]) -> list[Note]:
    """Return the notes that are whole: one that is written at this moment may not be."""
    found = []
    for text in texts:
        with suppress(ValueError, TypeError):
            found.append(Note(**json.loads(text)))
    return found


notes = Notes()
