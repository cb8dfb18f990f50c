"""Faults that concern more than a process: the disk, the run folder, a second command, the links of hosts."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from experiments.ranks.hosts import Hosts
from tests.soak.attempt import Attempt
from tests.soak.case import Fault

_DISK_MIB = 24
_SLOW = "200kbit"


class Damage:
    """Carries out the faults of a case.

    Args:
        output: The folder that holds the run's folder.
        hosts: On which the ranks are, None for one machine.
    """

    def __init__(self, output: Path, hosts: Hosts | None) -> None:
        self._output, self._hosts = output, hosts
        self._filler = output / ".filler"

    def act(self, fault: Fault, attempt: Attempt) -> None:
        """Carry out a fault while one of the attempt's processes stands still."""
        if fault.kind == "signal":
            _send(attempt.pid_of(fault), fault.signal)
        elif fault.kind == "pause":
            pid = attempt.pid_of(fault)
            _send(pid, signal.SIGSTOP)
            attempt.after(fault.seconds, lambda: _send(pid, signal.SIGCONT))
        elif fault.kind == "freeze":
            _send(attempt.pid_of(fault), signal.SIGSTOP)
        elif fault.kind == "full":
            self._fill()
        elif fault.kind == "removed":
            for folder in run_folders(self._output):
                shutil.rmtree(folder, ignore_errors=True)
        elif fault.kind == "twice":
            attempt.start(replace(attempt.commands[0], role="second"))
        elif self._hosts and fault.kind in ("cut", "vanish"):
            self._switch(int(fault.target), "nomaster")
            attempt.after(fault.seconds, lambda: self._switch(int(fault.target), "master", "br0"))
        elif self._hosts and fault.kind == "slow":
            self._hosts.shape(_SLOW)
            attempt.after(fault.seconds, lambda: self._hosts.shape("1gbit"))  # type: ignore[union-attr]

    def free(self) -> None:
        """Free the disk again."""
        self._filler.unlink(missing_ok=True)

    def tear(self, fault: Fault) -> str | None:
        """Change a byte of a file in the run's folder, or cut its end off; return its name, None if there is none."""
        folders = run_folders(self._output)
        files = sorted(
            path for folder in folders for path in folder.rglob("*") if path.is_file() and path.stat().st_size
        )
        if not files:
            return None
        path = files[int(fault.place[0] * len(files))]
        content = bytearray(path.read_bytes())
        at = int(fault.place[1] * len(content))
        if fault.flip:
            content[at] ^= 1 << int(fault.place[1] * 8e6) % 8
        else:
            del content[at:]
        path.write_bytes(content)
        return f"{path.relative_to(folders[0])} of {len(content)} bytes, at {at}"

    def _fill(self) -> None:
        block = 1 << 20
        with self._filler.open("ab", buffering=0) as file:
            while block:
                try:
                    file.write(bytes(block))
                except OSError:
                    block //= 2

    def _switch(self, host: int, *place: str) -> None:
        """Take a host's end of its link out of the bridge, or put it back: packets are lost, and no end is told."""
        assert self._hosts
        subprocess.run(["ip", "-n", self._hosts._bridge, "link", "set", f"port{host}", *place], check=True)


def _send(pid: int | None, number: int) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def run_folders(output: Path) -> list[Path]:
    """Return the folders of runs below ``output``."""
    return sorted(path for path in output.glob("*") if path.is_dir())


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Have a file system of its own at ``folder`` while the context lasts; needs root."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def can_mount() -> bool:
    """Return whether this process may mount a file system."""
    return os.geteuid() == 0 and shutil.which("mount") is not None
