"""The rendezvous endpoint of a run: whether it is this node, this node's reachable address, and waiting for it.

Everything is based on addresses, because the machine's name may be unknown or, as on Debian, mean 127.0.1.1.
"""

import fcntl
import ipaddress
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread

import torch.distributed as dist

from experiments.config.errors import UserError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface
_NOWHERE = "192.0.2.1"  # RFC 5737: of no machine; nothing is sent there
_TRY_S, _PAUSE_S = 5.0, 0.2
ANSWER_S = 20.0  # in which a store answers
_KEY = "cluster.rdzv_endpoint"


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes meet, as this node sees it.

    Attributes:
        is_here: the address is one of this machine's.
        address: the name or address by which other nodes reach this one.
        interface: of that address, where gloo would not find it by the machine's own name; else None.
    """

    host: str
    port: int
    is_here: bool
    address: str
    interface: str | None

    def wait(self, limit_s: float) -> None:
        """Return once the endpoint is served, or may be served by this process.

        The wait is in Python, where handlers of signals run; torch waits where they do not.

        Raises:
            UserError: nothing answered there within ``limit_s`` seconds, or something else than the store of a run.
        """
        if self.is_here and _is_free(self.port):
            return
        end = time.monotonic() + limit_s
        while (error := _connect(self.host, self.port)) is not None:
            if time.monotonic() > end:
                raise UserError(
                    f"nothing answered at {_KEY}={self.host}:{self.port} within {limit_s:.0f} s ({error}): start the "
                    "run on that node too, and let this port through"
                )
            time.sleep(_PAUSE_S)
        if not _is_store(self.host, self.port):
            raise UserError(
                f"port {self.port} of {_KEY}={self.host}:{self.port} is in use by another program: name a free one, "
                "the same on all nodes"
            )


def endpoint_of(host: str, port: int) -> Endpoint:
    """Return an endpoint whose host is known here."""
    known = [info[4][0] for info in socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)]
    own = [str(address) for address in known if _is_own(str(address))]
    reached = next((address for address in own if not _is_loopback(address)), None)
    if own and _is_loopback_name(host):
        return Endpoint(host, port, is_here=True, address=host, interface=None)  # all nodes are on this machine
    if reached is None:
        reached = _outward() if own else _source_towards(host, port)
    interface = None if _gloo_finds_itself() or reached is None else _interfaces().get(reached)
    return Endpoint(host, port, is_here=bool(own), address=host if own else reached or "", interface=interface)


def _connect(host: str, port: int) -> OSError | None:
    try:
        socket.create_connection((host, port), timeout=_TRY_S).close()
    except OSError as error:
        return error
    return None


def _is_store(host: str, port: int) -> bool:
    """Return whether a store answers; asked in a thread, for torch waits without end for another program's answer."""
    stores: list[dist.Store] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):
            stores.append(dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S)))

    asking = Thread(target=ask, daemon=True, name="micro asks for a store")
    asking.start()
    asking.join(ANSWER_S)
    return bool(stores)


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            tried.bind(("", port))
            tried.listen(1)
            return True
    return False


def _is_own(address: str) -> bool:
    """Return whether an address is this machine's: a socket can be bound to those alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as tried:
        tried.bind((address, 0))
        return True
    return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_loopback_name(host: str) -> bool:
    """Return whether a host means the machine itself on every machine; a machine's own name may do so there alone."""
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"


def _gloo_finds_itself() -> bool:
    """Return whether the first address of the machine's own name is one that others reach: gloo listens there."""
    with suppress(OSError, UnicodeError):
        return not _is_loopback(str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0]))
    return False


def _source_towards(host: str, port: int) -> str | None:
    """Return the address from which this machine sends to a host; nothing is sent."""
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(address)
            return str(towards.getsockname()[0])
    return None


def _outward() -> str | None:
    """Return the address of the default route, or else the first that is not a loopback."""
    return _source_towards(_NOWHERE, 9) or next((each for each in _interfaces() if not _is_loopback(each)), None)


def _interfaces() -> dict[str, str]:
    """Return the interfaces of this machine by their IPv4 address; none where it is not Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found
