"""A host that is gone is named by those that remain, and knows itself that it is cut off, by a clock the test moves."""

import socket
import threading

import pytest

from experiments.launching.host_watch import Host, HostRules, LostHost
from experiments.launching.launch_watch import break_connections

LIMIT_S = 50.0
HOSTS = {number: Host(f"node{number + 1}", f"10.0.0.{number + 1}", (2 * number, 2 * number + 1)) for number in range(3)}


def watch(own: int, lost: int, *, num_hosts: int = 3, cut_s: float = 100.0, back_s: float = 1e9) -> LostHost | None:
    """Return what a host finds when another, or itself, is cut off between two moments; host 0 has the store."""
    hosts = {number: HOSTS[number] for number in range(num_hosts)}
    rules = HostRules(hosts, own=own, keeper="node1", limit_s=LIMIT_S)
    numbers = dict.fromkeys(hosts, "0")
    for now in range(0, 400, 5):
        is_cut = cut_s <= now < back_s
        apart = [number for number in hosts if is_cut and (number == lost) != (own == lost)]
        numbers |= {number: str(now) for number in hosts if not (is_cut and (number == lost) != (lost == 0))}
        if 0 not in apart:
            rules.note(now, numbers)
        found = rules.look(now, lambda host, apart=apart: host not in [hosts[number] for number in apart])  # type: ignore[misc]
        if found:
            assert cut_s + LIMIT_S - 5 <= now <= cut_s + LIMIT_S + 5
            return found
    return None


@pytest.mark.parametrize(
    ("own", "lost", "num_hosts", "rank", "words"),
    [
        (0, 2, 3, 4, "lost host node3 (ranks 4, 5): it has not answered for 50 s"),
        (1, 2, 3, 4, "lost host node3 (ranks 4, 5): it has not answered for 50 s"),
        (2, 2, 3, 4, "this host, node3, is cut off from the others: node1, where the hosts met, has not answered"),
        (0, 0, 3, 0, "this host, node1, is cut off from the others: no other host has answered for 50 s"),
        (1, 0, 3, 0, "lost host node1 (ranks 0, 1): it has not answered for 50 s, while node3 can be reached"),
        (0, 1, 2, 2, "lost host node2 (ranks 2, 3): it has not answered for 50 s"),
        (1, 1, 2, 2, "this host, node2, is cut off from the others: node1, where the hosts met, has not answered"),
    ],
)
def test_the_host_that_is_gone_is_named(own: int, lost: int, num_hosts: int, rank: int, words: str) -> None:
    found = watch(own, lost, num_hosts=num_hosts)
    assert found is not None
    assert found.message.startswith(words)
    assert found.rank == rank


@pytest.mark.parametrize("own", range(3))
def test_an_outage_that_is_shorter_than_the_limit_loses_nobody(own: int) -> None:
    assert watch(own, 2, back_s=145.0) is None


def test_a_host_that_has_left_is_not_lost() -> None:
    rules = HostRules(HOSTS, own=0, keeper="node1", limit_s=LIMIT_S)
    for now in range(0, 400, 5):
        rules.note(now, {0: str(now), 1: str(now), 2: "left" if now > 50 else str(now)})
        assert rules.look(now, lambda host: False) is None


def test_a_read_of_a_store_that_is_gone_ends_when_its_connection_is_broken() -> None:
    ours, theirs = socket.socketpair()  # sockets without a port are left alone
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            threading.Timer(0.1, break_connections, (port,)).start()
            assert client.recv(1) == b""
            assert accepted.getpeername() == client.getsockname()
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
