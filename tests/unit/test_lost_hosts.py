"""A host that is gone is named by those that remain, and knows itself that it is cut off, by a clock the test moves."""

import json
import socket
import threading
from dataclasses import asdict

import pytest
from torch.distributed import TCPStore

from experiments.launching.watching import host_watch
from experiments.launching.watching.host_watch import Host, HostRules, LostHost
from experiments.launching.watching.launch_watch import break_connections

LIMIT_S = 50.0
HOSTS = {number: Host(f"node{number + 1}", f"10.0.0.{number + 1}", (2 * number, 2 * number + 1)) for number in range(3)}


def watch(own: int, lost: int, *, num_hosts: int = 3, cut_s: float = 100.0, back_s: float = 1e9) -> LostHost | None:
    """Return what a host finds when another, or itself, is cut off between two moments; host 0 has the store."""
    hosts = {number: HOSTS[number] for number in range(num_hosts)}
    rules = HostRules(hosts, own=own, keeper="node1", limit_s=LIMIT_S, now=0.0)
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


def test_a_host_that_was_late_before_the_store_fell_silent_is_not_blamed_for_that() -> None:
    rules = HostRules(dict(list(HOSTS.items())[:2]), own=1, keeper="node1", limit_s=LIMIT_S, now=0.0)
    rules.note(5.0, {0: "1", 1: "1"})
    rules.note(20.0, {0: "1", 1: "2"})
    assert rules.look(60.0, lambda host: False) is None
    found = rules.look(70.0, lambda host: False)
    assert found is not None
    assert found.message.startswith("this host, node2, is cut off from the others")


def test_a_host_that_is_cut_off_before_it_has_met_the_others_knows_it() -> None:
    rules = HostRules({1: HOSTS[1]}, own=1, keeper="node1", limit_s=LIMIT_S, now=10.0)
    assert rules.look(55.0, lambda host: False) is None
    found = rules.look(60.0, lambda host: False)
    assert found == LostHost(
        2, "this host, node2, is cut off from the others: node1, where the hosts met, has not answered for 50 s"
    )


def test_a_host_that_the_others_have_not_met_is_not_waited_for() -> None:
    rules = HostRules({0: HOSTS[0]}, own=0, keeper="node1", limit_s=LIMIT_S, now=0.0)
    for now in range(0, 400, 5):
        if now == 200:
            rules.meet({1: HOSTS[1]})
        rules.note(now, dict.fromkeys((0, 1) if now >= 200 else (0,), str(now)))
        assert rules.look(now, lambda host: True) is None


def test_a_watch_whose_store_never_answers_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ended, never = list[LostHost](), threading.Event(), threading.Event()

    def end(*lost: LostHost) -> None:
        found.extend(lost)
        ended.set()

    def no_answer(*_: object, **__: object) -> None:
        never.wait(300)
        raise ConnectionError

    monkeypatch.setattr(host_watch, "TCPStore", no_answer)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # refuses connections, as a host does whose store has ended
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        host_watch.HostWatch(endpoint, "run", own=1, num_hosts=2, ranks=(2, 3), timeout_s=0.4, end=end, left=end)
        assert ended.wait(300)
    never.set()
    assert found[0].rank == 2
    assert "is cut off from the others: 127.0.0.1, where the hosts met, has not answered" in found[0].message


@pytest.mark.parametrize("own", range(3))
def test_an_outage_that_is_shorter_than_the_limit_loses_nobody(own: int) -> None:
    assert watch(own, 2, back_s=145.0) is None


def test_a_host_that_has_left_is_not_lost() -> None:
    rules = HostRules(HOSTS, own=0, keeper="node1", limit_s=LIMIT_S, now=0.0)
    for now in range(0, 400, 5):
        rules.note(now, {0: str(now), 1: str(now), 2: "left" if now > 50 else str(now)})
        assert rules.look(now, lambda host: False) is None


@pytest.mark.parametrize(("others", "is_alone"), [(["left", "left"], True), (["left", "7"], False), (["left"], False)])
def test_a_host_knows_that_all_others_have_ended_their_work(others: list[str], is_alone: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number, beat in enumerate(others, 1):
        store.set(f"run/beat/{number}", beat)
        store.set(f"run/host/{number}", json.dumps(asdict(HOSTS[number])))
    alone = threading.Event()
    endpoint = f"127.0.0.1:{store.port}"
    common = {"own": 0, "num_hosts": 3, "ranks": (0, 1), "timeout_s": 2.0}
    watch = host_watch.HostWatch(endpoint, "run", **common, end=lambda _: None, left=alone.set)  # type: ignore[arg-type]
    assert alone.wait(300 if is_alone else 0.4) == is_alone
    watch.close()


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
