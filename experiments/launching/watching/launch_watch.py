"""What a launcher watches while the ranks of its node run: the ranks, and the other hosts of the run."""

import os
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from experiments.launching.process_state import process_state
from experiments.launching.rank_process import pid_path
from experiments.launching.watching.beats import beat_path
from experiments.launching.watching.host_watch import HostWatch, LostHost
from experiments.launching.watching.rank_watch import RankWatch, kill_ranks
from experiments.launching.watching.stall_report import StallReport, read_stall_report, remove_stall_report
from experiments.launching.watching.stalls import Stall


class LaunchWatch:
    """Watches over each start of the ranks of a node, and ends them when a rank stands still or a host is gone.

    Attributes:
        killed: The process ids that it has killed.
        has_started: Whether the ranks were started, so all nodes have met.
    """

    def __init__(self, run_dir: Path, timeout_s: float, *, endpoint: str, run_id: str) -> None:
        self._run_dir, self._timeout_s, self._endpoint, self._run_id = run_dir, timeout_s, endpoint, run_id
        self._own: StallReport | None = None
        self._ranks: tuple[int, ...] = ()
        self._hosts: HostWatch | None = None
        self._watch: RankWatch | None = None
        self._lock = threading.Lock()
        self.killed: set[int] = set()
        self.has_started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def start(self, environments: Iterable[Mapping[str, str]]) -> None:
        """Begin to watch ranks that are about to start, in place of those before.

        Args:
            environments: The environment variables of each rank of this node.
        """
        self._close()
        ranks = list(environments)
        self._ranks = tuple(sorted(int(variables["RANK"]) for variables in ranks))
        self._clear()
        self.has_started, self.killed = True, set()
        self._watch = RankWatch(self._run_dir, self._timeout_s, own_ranks=self.own_ranks, end=self._end)
        self._watch.__enter__()
        if int(ranks[0]["GROUP_WORLD_SIZE"]) > 1:
            self._hosts = HostWatch(
                self._endpoint,
                f"micro/{self._run_id}/{ranks[0]['MASTER_ADDR']}:{ranks[0]['MASTER_PORT']}",
                own=int(ranks[0]["GROUP_RANK"]),
                num_hosts=int(ranks[0]["GROUP_WORLD_SIZE"]),
                ranks=self._ranks,
                timeout_s=self._timeout_s,
                end=self._end_without,
                left=self._end_alone,
            )

    def found(self) -> StallReport | None:
        """Return why the run was ended: what this node found, or else what another found; None if no watcher did."""
        return self._own or (read_stall_report(self._run_dir) if self.has_started else None)

    def missed(self) -> Stall | None:
        """Return the rank that the others waited for when all were last seen; see RankWatch."""
        return self._watch.missed() if self._watch else None

    def own_ranks(self) -> dict[int, int]:
        """Return the process ids of the ranks that this process has started and that run."""
        found: dict[int, int] = {}
        for rank in self._ranks:
            with suppress(OSError, ValueError):  # not written yet
                pid = int(pid_path(self._run_dir, rank).read_text())
                process = process_state(pid)
                if process and process.parent == os.getpid():
                    found[rank] = pid
        return found

    def _end(self, report: StallReport) -> None:
        """End the ranks of this node; the agent sees that they have failed."""
        with self._lock:
            self._own = self._own or report
            pids = self.own_ranks()
            self.killed |= set(pids.values())
            kill_ranks(pids)

    def _end_without(self, lost: LostHost) -> None:
        """End this node's ranks, and the agent, which may wait for an answer of the store or for another meeting."""
        self._end(StallReport.of_host(self._run_dir, lost.rank, lost.message))
        self._break_connections()

    def _end_alone(self) -> None:
        """End the agent's wait for the others once its ranks have ended: they have left, and it waits for minutes."""
        if not self.own_ranks():
            self._break_connections()

    def _break_connections(self) -> None:
        break_connections(int(self._endpoint.rpartition(":")[2]))

    def _clear(self) -> None:
        """Remove what an earlier start has left."""
        self._own = None
        remove_stall_report(self._run_dir)
        for rank in self._ranks:
            beat_path(self._run_dir, rank).unlink(missing_ok=True)

    def _close(self) -> None:
        if self._hosts:
            self._hosts.close()
        if self._watch:
            self._watch.__exit__(None, None, None)
        self._hosts = None


def break_connections(port: int) -> None:
    """Shut down this process's TCP connections to a port, so that reads that wait there fail at once.

    A read of torch's store has no time limit once its host is gone; the kernel gives up after a quarter of an hour.
    """
    with suppress(OSError):  # no /proc: the kernel's limit holds
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, or not connected
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    _shut_down_towards(port, int(name))


def _shut_down_towards(port: int, descriptor: int) -> None:
    """Shut down a socket if it is a TCP connection to a port; the descriptor stays open for who has it."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if is_tcp and connection.getpeername()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)
