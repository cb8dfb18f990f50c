"""Check the address where ranks or nodes will meet: the host exists, the port is free, or torch's store answers there.

torch itself waits without an end for a listener that is not its store, and prints tracebacks of its C++ code.
"""

import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum

from experiments.config.errors import UserError
from experiments.launching.rank_environment import RankEnvironment

LATE_S = 600.0  # how long a host that starts later than the others is waited for; that of torch's rendezvous
_NAMED_S = 5.0  # how long the name of a host may take to be found
_ANSWER_S = 2.0  # how long a store may take to answer
_SILENT_S = 3.0  # after which a listener that never answered is no store
_OWN_ANSWER_S = 30.0  # how long a store of this process may take to answer
_QUIET_S = 5.0  # after which the user reads what is waited for
_POLL_S = 0.2
# What a client of TCPStore sends first (torch 2.11 to 2.15, TCPStoreBackend.hpp): validate with its magic number, then
# ping with a number that the store returns. ``_knows_protocol`` checks that the installed torch still answers to it.
_NONCE = b"mcro"
_GREETING = struct.pack("=BIB", 0, 0x3C85F7CE, 13) + _NONCE


class Answer(Enum):
    """What came back from an address."""

    STORE = "a store of torch"
    FOREIGN = "something that is no store of torch"
    SILENT = "something that does not answer"
    NOBODY = "nobody"


def check_endpoint(host: str, port: int, *, nnodes: int, key: str, wait_s: float = LATE_S) -> None:
    """Return when this node can host the store of a rendezvous at an address, or when another node hosts it.

    Args:
        port: 0 for any free one.
        key: The setting that named the address, for the message.
        wait_s: How long a node that is not there yet is waited for, in seconds; 0: not here, it is waited for later.

    Raises:
        UserError: The host is unknown, the port is taken, or the node did not come.
    """
    given = f"{key}={host}:{port}"
    addresses = _addresses(host, given)
    if any(map(_is_of_this_machine, addresses)):
        # Several launchers on one machine may be the nodes of one run: the first of them hosts the store.
        if port and (why := why_not_free(port)) and (nnodes == 1 or not _has_store(addresses, port)):
            raise UserError(f"{given}: {why}; name another port, or leave it out on one node")
    elif nnodes == 1:
        raise UserError(f"{given} must be an address of this machine, the only node; leave it out")
    else:
        _wait_for_store(addresses, port, given, wait_s)


def check_master(ranks: RankEnvironment, environ: Mapping[str, str] = os.environ, *, wait_s: float = LATE_S) -> None:
    """Return when a rank that torchrun or srun started can host the store that the ranks share, or can reach it.

    Args:
        wait_s: As in ``check_endpoint``.

    Raises:
        UserError: The host is unknown, the port is taken, or no store came to be there.
    """
    given = f"MASTER_ADDR={ranks.master_addr} MASTER_PORT={ranks.master_port}"
    addresses = _addresses(ranks.master_addr, given)
    if ranks.rank or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _wait_for_store(addresses, ranks.master_port, given, wait_s)
    elif why := why_not_free(ranks.master_port):
        raise UserError(f"{given}: {why}; set MASTER_PORT to a free port, the same on all ranks")


def why_not_free(port: int) -> str:
    """Return why this process cannot listen on a port of this machine; an empty string if it can."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
        if dual:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))  # and no listen: others that wait for a store must not reach this socket
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use on this machine"
            if error.errno == errno.EACCES:
                return f"port {port} may not be used by this user"
    return ""


def _wait_for_store(addresses: list[str], port: int, given: str, wait_s: float) -> None:
    """Wait for a store; with ``wait_s`` of 0 return if nobody listens yet. Raises: UserError."""
    answer = _listener(addresses, port, wait_s, lambda: print(_waiting(given, wait_s), file=sys.stderr, flush=True))
    if answer is Answer.NOBODY and wait_s:
        raise UserError(f"{given}: nobody listened there for {wait_s:g} s; is that host's command running?")
    if answer in (Answer.FOREIGN, Answer.SILENT):
        raise UserError(f"{given}: {answer.value} listens there; name a free port, the same everywhere")


def _waiting(given: str, wait_s: float) -> str:
    return f"waiting for {given}, which may start within {wait_s:g} s"


def _has_store(addresses: list[str], port: int) -> bool:
    """Return whether a store listens, or is about to, on a port that is in use."""
    return _listener(addresses, port, _SILENT_S) is Answer.STORE


def _listener(addresses: list[str], port: int, wait_s: float, tell: Callable[[], None] = lambda: None) -> Answer:
    """Return who listens on a port, after a wait of at most ``wait_s`` seconds for anybody.

    Args:
        tell: Called once after a while.
    """
    started = time.monotonic()
    silent_since: float | None = None
    while (answer := _ask(addresses, port)) is not Answer.STORE:
        now = time.monotonic()
        silent_since = (silent_since or now - _POLL_S) if answer is Answer.SILENT else None
        if answer is Answer.FOREIGN or (silent_since and now - silent_since >= _SILENT_S):
            return answer if _knows_protocol() else Answer.STORE  # as far as this module can tell
        if answer is Answer.NOBODY and now - started >= wait_s:
            return answer
        if answer is Answer.NOBODY and now - started > _QUIET_S:
            tell()
            tell = _say_nothing
        time.sleep(_POLL_S)
    return answer


def _say_nothing() -> None:
    """Do nothing: the user has read it."""


def _ask(addresses: list[str], port: int) -> Answer:
    """Greet what listens on a port as a client of torch's store does, and return what it is."""
    found = [_ask_one(address, port) for address in addresses]
    order = (Answer.STORE, Answer.FOREIGN, Answer.SILENT, Answer.NOBODY)
    return min(found, key=order.index)


def _ask_one(address: str, port: int, answer_s: float | None = None) -> Answer:
    try:
        connection = socket.create_connection((address, port), timeout=answer_s or _ANSWER_S)
    except OSError:
        return Answer.NOBODY
    answer = b""
    with connection:
        try:
            connection.sendall(_GREETING)
            while len(answer) < len(_NONCE) and (part := connection.recv(len(_NONCE) - len(answer))):
                answer += part
        except OSError:  # a time-out, or a reset
            return Answer.SILENT
    if answer == _NONCE:
        return Answer.STORE
    return Answer.FOREIGN if answer else Answer.SILENT


def _knows_protocol() -> bool:
    """Return whether a store of the torch that is installed answers as this module expects."""
    from torch.distributed import TCPStore  # here: most runs have no need of it, and mistakes are reported before torch

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _ask_one("127.0.0.1", store.port, _OWN_ANSWER_S) is Answer.STORE


def _addresses(host: str, given: str) -> list[str]:
    """Return the IP addresses of a host, within a limit of time: a server of names may not answer."""
    found: list[str] = []
    errors: list[str] = []

    def look_up() -> None:
        try:
            rows = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as error:
            errors.append(getattr(error, "strerror", None) or str(error))
        else:
            found.extend(dict.fromkeys(str(row[4][0]) for row in rows))

    _within(_NAMED_S, look_up)
    if not found:
        why = errors[0].lower() if errors else f"no answer within {_NAMED_S:g} s"
        raise UserError(f"{given}: the host {host!r} is not known here ({why}); name a host or an IP address")
    return found


def _within(limit_s: float, work: Callable[[], None]) -> None:
    """Call a function on a thread, and wait for it no longer than a limit."""
    thread = threading.Thread(target=work, daemon=True, name="look up a host")
    thread.start()
    thread.join(limit_s)


def _is_of_this_machine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
