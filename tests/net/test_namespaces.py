"""Hosts on one machine: they reach each other at the rate of their links, and the kernel counts what torch sends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from experiments.tools.ranks.hosts import Counter, Hosts, bits_per_s, unavailable
from tests.net.on_hosts import ROOT, Exit, run, start
from tests.refusals import refused
from tests.waiting import LIMIT_S, is_alive, wait_until

WORKER = Path(__file__).parent / "workers/collectives.py"
REASON = unavailable()

pytestmark = pytest.mark.xdist_group("hosts")
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(4) as made:
        yield made


def spaces_of(pid: int) -> set[str]:
    """Return what a process has made and not removed."""
    folders = (Path("/run/netns"), Path("/etc/netns"))
    return {str(place) for folder in folders for place in folder.glob(f"micro-{pid}-*")}


@pytest.mark.net
@needs_hosts
def test_hosts_have_names_of_their_own_and_look_up_each_other(hosts: Hosts) -> None:
    program = "import socket; print(socket.gethostname(), *map(socket.gethostbyname, ['node1', 'node4']))"
    assert run(hosts, [["-c", program]] * 4) == [Exit(0, f"node{i} 10.77.0.1 10.77.0.4\n") for i in (1, 2, 3, 4)]


@pytest.mark.net
@needs_hosts
def test_the_link_has_its_rate_and_the_kernel_counts_what_collectives_send(hosts: Hosts) -> None:
    numel, n, rate = 1_000_000, 4, "200mbit"  # so slow that a busy processor keeps up with the link
    hosts.shape(rate)
    before = hosts.counters()
    ended = run(hosts, [[str(WORKER), str(numel)]] * n, as_ranks=True)
    assert [one.code for one in ended] == [0] * n, ended
    ring = 2 * 4 * numel * (n - 1) / n
    reduces, gathers = 3, 2  # counts of the worker
    for now, then in zip(hosts.counters(), before, strict=True):
        expected = reduces * ring + gathers * 4 * numel / 8 * (n - 1)
        assert (now - then).payload_bytes == pytest.approx(expected, rel=0.03)
    wire = 8 * ring * 1514 / 1448 / bits_per_s(rate)
    assert 0.93 * wire < float(ended[0].output.split()[-1]) < 1.25 * wire


@pytest.mark.net
@needs_hosts
def test_an_error_leaves_nothing_behind() -> None:
    before = spaces_of(os.getpid())
    with suppress(ZeroDivisionError), Hosts(2, "10mbit") as hosts:
        process = start(hosts, 1, ["-c", "import time; time.sleep(600)"])
        assert len(spaces_of(os.getpid())) > 3
        raise ZeroDivisionError
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert spaces_of(os.getpid()) == before


@pytest.mark.net
@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_nothing_for_long(number: signal.Signals) -> None:
    """A killed process cannot tidy up: the next hosts do."""
    program = (
        "import subprocess, time\nfrom experiments.tools.ranks.hosts import Hosts\n"
        "with Hosts(2) as hosts:\n"
        "    print(subprocess.Popen([*hosts.prefixes()[0], 'sleep', '600']).pid, flush=True)\n"
        "    time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout
    pid = int(owner.stdout.readline())
    owner.send_signal(number)
    owner.communicate(timeout=LIMIT_S)
    if number != signal.SIGINT:
        with Hosts(1):
            pass
    assert not spaces_of(owner.pid)
    wait_until(lambda: not is_alive(pid), "the end of the process")


def test_payload_is_what_the_headers_leave() -> None:
    later, before = Counter(num_bytes=10_000, num_packets=5), Counter(num_bytes=1_000, num_packets=2)
    assert (later - before).payload_bytes == 9_000 - 3 * 66


def test_rates_and_numbers_of_hosts_have_their_bounds() -> None:
    assert [bits_per_s(rate) for rate in ("64kbit", "2.5gbit")] == [64e3, 2.5e9]
    for rate in ("fast", "100", "0mbit", "1mbit; reboot"):
        refused(lambda rate=rate: Hosts(2, rate), "rate", rate)  # type: ignore[misc]
    for number in (0, 201):
        refused(lambda number=number: Hosts(number), "number of hosts", number)  # type: ignore[misc]
