"""Ports that nothing listens at, for servers that start later."""

import random
import socket
from contextlib import ExitStack, suppress

BELOW = range(20_000, 32_000)  # Linux gives other ports to sockets that ask for any: a test run has thousands of these


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            with suppress(OSError):  # taken
                held.enter_context(socket.create_server(("127.0.0.1", port := random.SystemRandom().choice(BELOW))))
                ports.append(port)
    return ports


def free_port() -> int:
    """Return one; see ``free_ports``."""
    return free_ports(1)[0]
