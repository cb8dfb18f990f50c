"""Hosts in tests: run a command on each, and disconnect one."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tools.ranks.hosts import Hosts
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
NEEDED = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Exit(NamedTuple):
    """The exit code of a process on a host (negative for a signal), and its output."""

    code: int
    output: str


def start(hosts: Hosts, host: int, words: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
    """Start Python on a host; it ends with the hosts."""
    environment = {**os.environ, **NEEDED, **settings.pop("env", {})}
    return subprocess.Popen([*hosts.prefixes()[host], sys.executable, *words], env=environment, **settings)


def rank_environment(hosts: Hosts, rank: int, per_host: int = 1) -> dict[str, str]:
    """Return the variables of torchrun for one of ``per_host`` ranks on each host."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank % per_host, "WORLD_SIZE": per_host * len(hosts.names)}
    return {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"} | {k: str(v) for k, v in numbers.items()}


def run(hosts: Hosts, commands: Sequence[Sequence[str]], per_host: int = 1, *, as_ranks: bool = False) -> list[Exit]:
    """Run Python programs, ``per_host`` on each host, and return how they ended; what takes too long is killed."""
    with ExitStack() as closing:
        logs = [closing.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        started = []
        for rank, (words, log) in enumerate(zip(commands, logs, strict=True)):
            env = rank_environment(hosts, rank, per_host) if as_ranks else {}
            started.append(start(hosts, rank // per_host, words, env=env, stdout=log, stderr=log))
        end = time.monotonic() + LIMIT_S
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
        for log in logs:
            log.seek(0)
        return [Exit(process.returncode, log.read()) for process, log in zip(started, logs, strict=True)]


@contextmanager
def cut(hosts: Hosts, host: int) -> Iterator[None]:
    """Disconnect a host within this context: packets are lost without an error."""
    link = ("ip", "-n", hosts._bridge, "link", "set", f"port{host}")
    subprocess.run((*link, "down"), check=True)
    try:
        yield
    finally:
        subprocess.run((*link, "up"), check=True)
