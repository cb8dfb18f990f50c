"""What tests do on hosts beside what the benchmarks need: run a command on each, and cut one off."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from experiments.ranks.hosts import Hosts


class Exit(NamedTuple):
    """The exit code of a process on a host (negative for a signal), and its output."""

    code: int
    output: str


def start(
    hosts: Hosts, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.Popen[Any]:
    """Start a process on a host, with variables beside this process's own; it ends with the hosts."""
    words = [*hosts.prefixes()[host], *command]
    return subprocess.Popen(words, env={**os.environ, **(environment or {})}, **settings)


def run(
    hosts: Hosts,
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]] = (),
    *,
    timeout_s: float,
) -> list[Exit]:
    """Run one process on each host and return how they ended; those that take longer are killed."""
    given = environments or [{}] * len(commands)
    with ExitStack() as closing:
        logs = [closing.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        started = [
            start(hosts, host, command, more, stdout=log, stderr=log)
            for host, (command, more, log) in enumerate(zip(commands, given, logs, strict=True))
        ]
        end = time.monotonic() + timeout_s
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
    """Cut a host off from the others while the context lasts: packets are lost, and nobody is told."""
    link = ("ip", "-n", hosts._bridge, "link", "set", f"port{host}")
    subprocess.run((*link, "down"), check=True)
    try:
        yield
    finally:
        subprocess.run((*link, "up"), check=True)
