"""Ports that nothing listens at, for servers that start later."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux: of sockets that ask for any port
NUM_BELOW = 12_000


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free.

    They lie below those that the system gives to sockets that ask for any: a test run has thousands of these, and one
    of them could take a port before the server that it was chosen for listens at it.
    """
    low = int(RANGE.read_text().split()[0]) if RANGE.exists() else 0
    below = range(max(low - NUM_BELOW, 1024), low)
    candidates = [*random.Random().sample(below, min(len(below), 10 * count)), *[0] * count]  # 0: any
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            with suppress(OSError):  # taken
                server = held.enter_context(socket.create_server(("127.0.0.1", candidates.pop(0))))
                ports.append(int(server.getsockname()[1]))
        return ports


def free_port() -> int:
    """Return one; see ``free_ports``."""
    return free_ports(1)[0]
