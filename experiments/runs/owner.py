"""The owner of a run folder: which process, on which machine, of which job."""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from experiments.config.errors import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that owns, or owned, a run folder.

    Attributes:
        token: Different for each time that a folder is taken.
        host, pid, job, since: For the user; ``job`` is that of SLURM, ``since`` the time by the owner's clock.
        machine: The boot of the kernel, so that containers on one machine are the same and a restart is another.
        pid_namespace: Where ``pid`` counts: containers have process ids of their own. None if unknown.
        started: When the process started, in clock ticks since the boot: a process id is used again. None if unknown.
        has_flock: Whether it also holds the lock of the operating system, which ends with the process.
        launch: What the nodes of one launch have in common; None for a run of one node.
    """

    token: str
    host: str
    pid: int
    job: str | None
    since: str
    machine: str
    pid_namespace: int | None
    started: int | None
    has_flock: bool
    launch: str | None

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return one_line(f"pid {self.pid} on {self.host}{job} since {self.since}")

    def to_json(self) -> str:
        """Return the owner as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    def is_alive(self) -> bool:
        """Return whether this is certain: the process runs on this machine, in this process's namespace."""
        return self._is_visible() and process_started(self.pid) == self.started

    def is_dead(self, *, has_flock: bool) -> bool:
        """Return whether this is certain: it ran on this machine and has ended.

        Args:
            has_flock: Whether this process holds the lock of the operating system.
        """
        if self.machine == machine() and self.has_flock and has_flock:
            return True
        return self._is_visible() and process_started(self.pid) != self.started

    def _is_visible(self) -> bool:
        here = self.machine == machine() and self.pid_namespace == pid_namespace()
        return here and self.pid_namespace is not None and self.started is not None


def this_process(*, has_flock: bool, launch: str | None) -> Owner:
    """Return this process as the owner of a folder that it takes now."""
    return Owner(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        job=slurm_job(os.environ),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        pid_namespace=pid_namespace(),
        started=process_started(os.getpid()),
        has_flock=has_flock,
        launch=launch,
    )


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """Return the name of the SLURM job that this process belongs to, a requeued one apart; None outside of SLURM."""
    job, restart = environ.get("SLURM_JOB_ID"), environ.get("SLURM_RESTART_COUNT", "0")
    return job and f"SLURM job {job}" + (f", restart {restart}" if restart != "0" else "")


def machine() -> str:
    """Return what no other running kernel has; where there is no such thing, the name of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"host {socket.gethostname()}"


def pid_namespace() -> int | None:
    """Return the namespace of this process's process id, None where it cannot be known."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def process_started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None if it has ended or cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie has ended; proc_pid_stat(5) counts from 3 here
