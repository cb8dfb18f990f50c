"""Report which rank failed, and why, through the process group's store, to ranks waiting in a collective."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
LOOK_S = 1.0  # between two looks at the store while a collective does not end
SURE_S = 3.0  # a rank that has waited in a collective for so long has said so
ENDS = timedelta(seconds=LOOK_S)
ANSWER_S = 5.0  # in which a store answers, however busy its host is


class PeerError(RuntimeError):
    """Another rank ended this one's collective: it has failed or stayed away. The message names it and says why."""


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def named(ranks: Sequence[int], one_of: str = "") -> str:
    """Return these ranks in words, with ``one_of`` ahead of several."""
    return f"{one_of}ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"


def words_of_failure(rank: int, error: BaseException, what: str = "failed") -> str:
    """Return what the peers of a rank are told of its error, in one line."""
    return f"rank {rank} {what}: {first_line(error)}"


class StoreCalls:
    """Calls on one store, one after the other; each in a thread of its own, which is left behind if it never ends."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def call(self, function: Callable[[], T], default: T) -> T:
        """Return what ``function`` returns; ``default`` where the store is gone, or has not answered in time."""
        if self._last is not None and self._last.is_alive():
            return default  # it has not answered yet
        results: list[T] = []

        def work() -> None:
            with suppress(RuntimeError):  # the store is gone with the rank that had it
                results.append(function())

        self._last = threading.Thread(target=work, daemon=True, name="micro asks the store")
        self._last.start()
        self._last.join(ANSWER_S)
        return results[0] if results else default


class PeerFailures:
    """What ended the work of a rank, known to all ranks of ``group``; each makes its own, all as many.

    A rank that fails writes why to the group's store, which needs no other rank to answer. A rank that waits looks
    there every second, so that it neither waits until the group's timeout for a rank that has given up, nor is left
    with an error that names a broken connection alone. A rank that waits for longer than a second writes in which
    collective, so that the error of a time-out names the ranks that have not come to it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank()  # of all, by which launchers and logs call it, whatever its place in the group
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != self._rank]
        self._store = group.get_group_store()
        number = self._store.add(f"micro/number/{dist.get_rank(group)}", 1)  # as many as every rank made before
        self._key, self._waits = f"micro/failure/{number}", f"micro/waits/{number}"
        self._num_waits = 0
        self._calls = StoreCalls()
        self._has_lost_peer = False

    def report(self, error: BaseException) -> None:
        """Write that this rank has failed, unless the failure of another rank is there already."""
        if self.found() is None:
            self._write(
                self._key, words_of_failure(self._rank, error, "lost a peer" if self._has_lost_peer else "failed")
            )

    def found(self) -> str | None:
        """Return which rank failed first, and why; None where none has."""
        return self._calls.call(lambda: self._read(self._key), None)

    def ahead(self) -> list[int]:
        """Return which ranks have waited for a second in a collective to which this rank has not come."""
        keys = {rank: f"{self._waits}/{rank}" for rank in self._others}
        counts: dict[int, str | None] = self._calls.call(lambda: {r: self._read(key) for r, key in keys.items()}, {})
        return [rank for rank, count in counts.items() if int(count or 0) > self._num_waits]

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective of the group on the CPU.

        Raises:
            PeerError: another rank has failed, has not come until the group's timeout, or the connection to one is
                lost.
        """
        started = time.monotonic()
        self._num_waits += 1
        has_said_so = False
        try:
            while True:
                try:
                    work.wait(ENDS)
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # raises what has ended it; otherwise the error says that the time is over
                        return
                if not has_said_so:
                    self._write(f"{self._waits}/{self._rank}", str(self._num_waits))
                    has_said_so = True
                if self.found() is not None:
                    raise RuntimeError("a rank has left this collective")
        except RuntimeError as error:
            failure = self.found()
            if failure is None:
                self._has_lost_peer = True
                failure = f"{self._lost(error, time.monotonic() - started)}: {first_line(error)}"
            raise PeerError(failure) from error

    def _lost(self, error: RuntimeError, waited_s: float) -> str:
        """Return which ranks ended a collective by an error that names none."""
        if waited_s >= SURE_S and "timed out" in str(error).lower():
            here, read = str(self._num_waits), self._read
            keys = {rank: f"{self._waits}/{rank}" for rank in self._others}
            missing: list[int] = self._calls.call(lambda: [each for each, key in keys.items() if read(key) != here], [])
            if missing:
                return f"{named(missing)} did not come to a collective within {waited_s:.0f} s"
        return f"lost contact with {named(self._others, 'one of ')}"

    def _write(self, key: str, words: str) -> None:
        self._calls.call(lambda: self._store.set(key, words), None)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
