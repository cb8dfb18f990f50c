"""Serve torch's store at one address of this machine: by itself it listens on all of them, and asks for no password."""

import ipaddress
import socket
import sys
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore | None:
    """Start the server of a store at one address of this machine.

    torch's own calls for a server on the port then share this one, as long as the caller keeps what is returned.

    Args:
        address: Of IPv4 or IPv6. A name is left to torch, for other hosts may know it by another address.
        port: 0 for any free one; the store's ``port`` is the one taken.
        timeout: Of the store's operations.

    Returns:
        The store; None for a name, an address of another machine or a port that is taken: torch then does as ever.
    """
    address = LOOPBACK if address == "localhost" else address
    with suppress(OSError, ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        listening = socket.create_server((address, port), family=family)
        return TCPStore(
            address,
            listening.getsockname()[1],
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
    return None


def hold_port(port: int) -> socket.socket | None:
    """Keep other processes of this machine from taking a port that a server is about to listen at.

    torch chooses a free port for the ranks' store seconds before rank 0 listens at it. The socket is bound and does
    not listen, so that Linux lets a server with SO_REUSEADDR, as torch's and serve_store's have, listen beside it, and
    gives the port to no socket that asks for any free one.

    Returns:
        The socket: the port is held until it is closed. None where the port is taken, or the system is not Linux.
    """
    if sys.platform != "linux":
        return None
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        return None
    return held
