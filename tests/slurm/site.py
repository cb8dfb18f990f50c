"""A SLURM of one's own on this machine: munge, a controller and some nodes, which all end with the context."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path

import pytest

from experiments.config import ROOT
from tests.ports import free_ports
from tests.waiting import is_alive, wait_until

_DAEMONS = ("munged", "slurmctld", "slurmd")
_CLIENTS = ("sbatch", "squeue", "srun", "scontrol", "scancel", "sinfo")
_START_S, _STOP_S, _ANSWER_S = 300.0, 60.0, 120.0
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # daemons are often on root's path alone


def unavailable() -> str | None:
    """Return why no SLURM can be started here, or None where one can."""
    if sys.platform != "linux":
        return "SLURM's tests need Linux"
    missing = [name for name in (*_DAEMONS, *_CLIENTS) if shutil.which(name, path=_PATH) is None]
    return (
        f"{', '.join(missing)} not installed: make system-packages (as root, on Debian or Ubuntu)" if missing else None
    )


@contextmanager
def running(num_nodes: int) -> Iterator["Site"]:
    """Have a site while a context lasts, which commands of SLURM in this process and its children find."""
    site = Site(num_nodes)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**site.environ, "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        patch.chdir(ROOT)
        try:
            site.start()
            yield site
        finally:
            site.stop()


class SiteError(RuntimeError):
    """A command of SLURM or munge failed; the text is its output."""


class Site:
    """Nodes node1, node2, ... of one partition, ``test``, with four cores each, whatever the machine has.

    Attributes:
        environ: what a client needs to reach it.
    """

    def __init__(self, num_nodes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-")).resolve()
        self._nodes = [f"node{number + 1}" for number in range(num_nodes)]
        self.environ = {"SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": _PATH}

    def ask(self, *command: str) -> str:
        """Return what a client says.

        Raises:
            SiteError: it refuses.
        """
        environ = {**os.environ, **self.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        if done.returncode:
            raise SiteError(f"{command[0]}: {done.stderr}")
        return done.stdout

    def cancel(self, *jobs: str) -> None:
        """End jobs, all of them if none is named, and wait until none of these is in the queue."""
        ended = jobs or tuple({_array(line) for line in self.queue()})
        if ended:
            self.ask("scancel", *ended)
        wait_until(lambda: not {_array(line) for line in self.queue()} & set(ended), f"the end of jobs {ended}")

    def begin(self, job: str) -> None:
        """Have a requeued job begin, which SLURM may let wait for minutes, unless it has begun by itself."""
        try:
            self.ask("scontrol", "update", f"jobid={job}", "StartTime=now")
        except SiteError as error:
            if "no longer pending" not in str(error):
                raise

    def queue(self) -> list[str]:
        """Return the ids and states of all jobs that wait or run, an array's tasks apart."""
        return self.ask("squeue", "--noheader", "--array", "--format=%i %T").splitlines()

    def job(self, name: str) -> dict[str, str]:
        """Return what scontrol tells of a job, or of a task of an array: ``ARRAY_TASK``."""
        text = self.ask("scontrol", "show", "job", "--oneliner", name)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def watchers(self, job: str = "") -> list[int]:
        """Return the processes that watch over the steps of a job, or of all; they end a little after it."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_own = (place / "cwd").readlink().is_relative_to(self._folder)
                if is_own and (place / "cmdline").read_text().startswith(f"slurmstepd: [{job}"):
                    found.append(int(place.name))
        return found

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        for name in ("munge", "state", "log", "run", *(f"spool/{node}" for node in self._nodes)):
            (self._folder / name).mkdir(parents=True)
        for folder in (self._folder, self._folder / "munge"):
            folder.chmod(0o755)  # munge's socket must be in reach of all users
        key = self._folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self._folder / "slurm.conf").write_text(self._configuration())
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is used; do not look for one
        places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.ask("munged", *(f"--{option}={self._folder}/munge/{name}" for option, name in places.items()))
        self.ask("slurmctld")
        for node in self._nodes:
            self.ask("slurmd", "-N", node)
        wait_until(self._is_up, f"a SLURM of {len(self._nodes)} idle nodes, see {self._folder}/log", timeout_s=_START_S)

    def _is_up(self) -> bool:
        with suppress(SiteError, subprocess.TimeoutExpired):
            return self.ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(self._nodes)
        return False

    def stop(self) -> None:
        """End all jobs and daemons."""
        with suppress(SiteError, subprocess.TimeoutExpired, OSError):  # a step's daemon outlives its controller
            self.cancel()
        _end([int(path.read_text()) for path in (*self._folder.glob("run/*.pid"), self._folder / "munge/pid")])
        for pid in self.watchers():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _configuration(self) -> str:
        host, folder = socket.gethostname().partition(".")[0], self._folder
        ports = free_ports(len(self._nodes) + 2)
        nodes = "".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            "Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN\n"
            for node, port in zip(self._nodes, ports[2:], strict=True)
        )
        # A job that is queued again waits by itself, as long as its credential lasts; other work may keep a daemon from
        # answering for a while.
        return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={getuser()}
SlurmdUser={getuser()}
AuthInfo=socket={folder}/munge/socket,cred_expire=1200
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=300
{nodes}PartitionName=test Nodes=ALL Default=NO MaxTime=01:00:00 State=UP
"""


def _array(line: str) -> str:
    """Return the job or array of a line of the queue."""
    return line.split()[0].split("_")[0]


def _end(pids: list[int]) -> None:
    """End daemons, and wait until they are gone."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}", timeout_s=_STOP_S)
    except TimeoutError:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
