"""The rules by which a rank that stands still is told from one that works.

1. A rank **stands still** when, for a fifth of the time limit and at most a minute, its beat did not change and its
   process had no processor time: a process that a signal stopped, one that waits for a disk that does not answer,
   native code that waits and keeps the interpreter's lock. A rank of another host, whose process is not seen, stands
   still when its beat did not change for half of the limit. A process that a debugger stopped is not judged by this.
2. A rank **is missed** when others have waited in a collective for four fifths of the time limit, and it has begun
   fewer collectives than they, or waits in none: it loops, or computes for too long.
3. Everything else works: a long step, an evaluation, a compilation, slow data, a prompt of a debugger, however long
   they take, if they take as long on all ranks.

Rule 2 comes before the time-out of the collective itself, which ends the run in any case and does not know who is
missed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.launching.process_state import STOPPED, TRACED, ProcessState
from experiments.launching.watching.beats import Beat

_LONGEST_STILL_S = 60.0
_LONGEST_LOOK_S = 10.0  # between two looks; after a longer time the watcher itself was stopped, and starts again


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look shows of a rank: its last beat, and its process where that is on this host."""

    beat: Beat
    process: ProcessState | None


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that stands still, or that others wait for in vain.

    Attributes:
        rank: of the run.
        what: the first words of a message: what it does, and for how long.
        others: the last words: who waits for it, and in which collective.
        place: the line of Python that it was in at its last beat.
    """

    rank: int
    what: str
    others: str
    place: str

    def message(self) -> str:
        """Return one line."""
        words = f"{self.what}, at {self.place}"
        return f"{words}; {self.others}" if self.others else words


@dataclass(slots=True)
class _Last:
    sign: object
    changed: float


class StallRules:
    """Judge what is seen of the ranks, look by look; see the module.

    Args:
        timeout_s: the time limit of the run's collectives.
    """

    def __init__(self, timeout_s: float) -> None:
        self.still_s = min(timeout_s / 5, _LONGEST_STILL_S)
        self.remote_s = timeout_s / 2
        self.wait_s = 0.8 * timeout_s
        self._last: dict[int, _Last] = {}
        self._looked: float | None = None

    def look(self, now: float, seen: Mapping[int, Seen]) -> Stall | None:
        """Return the rank that stands still or is missed, None if all work.

        Args:
            now: seconds of a clock that never goes back.
            seen: the ranks that have begun and not ended.
        """
        if self._looked is not None and now - self._looked > _LONGEST_LOOK_S:
            self._last.clear()
        self._looked = now
        for rank in self._last.keys() - seen.keys():
            del self._last[rank]
        for rank, one in seen.items():
            self._note(now, rank, one)
        return self._still(now, seen) or self._missed(seen)

    def behind(self, seen: Mapping[int, Seen]) -> Stall | None:
        """Return the rank that others wait for, however long they have waited; None if that cannot be told."""
        waiting = {rank: one.beat for rank, one in seen.items() if one.beat.collective}
        most = max((one.beat.num_collectives for one in seen.values()), default=0)
        late = [rank for rank, one in seen.items() if one.beat.num_collectives < most]
        missed = late or [rank for rank in seen if rank not in waiting]
        if not (late or (waiting and missed)):
            return None
        rank = min(missed, key=lambda rank: (seen[rank].beat.num_collectives, rank))
        beat = seen[rank].beat
        others = _others(seen, rank)
        doing = f"waited in {beat.collective}, which is not the collective of the others" if beat.collective else "was"
        return Stall(
            rank, f"did not reach the collective of the others: it {doing} in {beat.activity}", others, beat.place
        )

    def _note(self, now: float, rank: int, one: Seen) -> None:
        sign = (one.beat.number, one.beat.pid, one.process.cpu_ticks if one.process else None)
        if rank not in self._last or self._last[rank].sign != sign or (one.process and one.process.letter == TRACED):
            self._last[rank] = _Last(sign, now)

    def _still(self, now: float, seen: Mapping[int, Seen]) -> Stall | None:
        still_s = {rank: now - last.changed for rank, last in self._last.items()}
        found = [
            rank for rank, one in seen.items() if still_s[rank] >= (self.still_s if one.process else self.remote_s)
        ]
        if not found:
            return None
        rank = max(found, key=lambda rank: (still_s[rank], -rank))
        beat, process = seen[rank].beat, seen[rank].process
        why = " (stopped by a signal)" if process and process.letter == STOPPED else ""
        host = "" if process else f" on {beat.host}"
        what = f"stood still for {still_s[rank]:.0f} s{why}{host}, last seen in {beat.activity}"
        return Stall(rank, what, _others(seen, rank), beat.place)

    def _missed(self, seen: Mapping[int, Seen]) -> Stall | None:
        longest_s = max((one.beat.collective_s for one in seen.values()), default=0.0)
        return self.behind(seen) if longest_s >= self.wait_s else None


def _others(seen: Mapping[int, Seen], rank: int) -> str:
    """Return who waits in a collective, but for ``rank``, in words."""
    waiting = {other: one.beat for other, one in seen.items() if other != rank and one.beat.collective}
    if not waiting:
        return ""
    names = sorted({str(beat.collective) for beat in waiting.values()})
    longest_s = max(beat.collective_s for beat in waiting.values())
    return f"{ranks_in_words(list(waiting))} waited in {' and '.join(names)} for {longest_s:.0f} s"


def ranks_in_words(ranks: list[int]) -> str:
    """Return "rank 1", "ranks 0, 2", or "14 ranks"."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"
