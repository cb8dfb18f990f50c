"""Simulated hosts on one machine: network namespaces on a bridge, with links limited to a rate in both directions.

A host has its own address, link and resolvable name; it shares the machine's cores, memory and disk. The machine's own
network does not change. Needs Linux, root and iproute2.
"""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from experiments.config.errors import UserError

MAX_HOSTS = 200
_TOOLS = ("ip", "tc", "unshare", "setpriv", "hostname")
_NAMESPACES, _HOST_FILES = Path("/run/netns"), Path("/etc/netns")  # folders of iproute2; see ip-netns(8)
_OWNED = re.compile(r"micro-(?P<pid>\d+)-(?P<started>\d+)-")
_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmg])bit")
_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9}
_HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 20 and its timestamps 12
_BURST_S = 0.0021  # a burst in seconds at the rate: enough for a 250 Hz timer; 256 KiB at 1 Gbit/s
_LEAST_BURST_KB = 128  # with less than 64 KiB plus headers, the kernel would split TCP packets
_LATENCY = "50ms"  # limit of the queue; TCP keeps it shorter
_SETTLE_S = 0.3  # after a barrier, queues still contain packets
# $PPID differs if the parent died before setpriv set the signal for that case.
_OWNED_START = 'hostname "$0" && [ "$PPID" = "$1" ] && shift && exec "$@"'
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Counter:
    """The kernel's counters of a host's link: bytes and packets sent, headers included.

    A packet is a TCP segment before segmentation: up to 64 KiB with one header.
    """

    num_bytes: int
    num_packets: int

    @property
    def payload_bytes(self) -> int:
        """Bytes sent, without headers."""
        return self.num_bytes - _HEADER_BYTES * self.num_packets

    def __sub__(self, before: "Counter") -> "Counter":
        return Counter(self.num_bytes - before.num_bytes, self.num_packets - before.num_packets)


def unavailable() -> str | None:
    """Try to create a host; return an error in one line, or None."""
    try:
        with Hosts(1, "1gbit") as hosts:
            name = _tool(*hosts.prefixes()[0], "hostname").strip()
    except (UserError, OSError) as error:
        return str(error)
    return None if name == hosts.names[0] else f"a process on a host failed: {name}"


def bits_per_s(rate: str) -> float:
    """Return the bits per second of a rate such as 100mbit. Raises: UserError: it is not a rate."""
    found = _RATE.fullmatch(rate)
    if not found or not float(found["number"]):
        raise UserError(f"a rate must be a number and kbit, mbit or gbit, such as 100mbit, got '{rate}'")
    return float(found["number"]) * _SCALES[found["unit"]]


def burst_s(rate: str) -> float:
    """Return the burst of a link after a pause, in seconds of its rate. Raises: UserError: it is not a rate."""
    return 8 * 1024 * _burst_kb(rate) / bits_per_s(rate)


class Hosts:
    """Hosts that exist inside a ``with``; everything is removed at its end.

    Their processes are killed. Leftovers of a killed command are removed when the next hosts are created.

    Attributes:
        names, addresses: of the hosts, in order. Every host can look up the names.

    Args:
        rate: of each link in both directions, such as 100mbit; unlimited when None.

    Raises:
        UserError: a number out of range, or, on entering, the machine cannot create hosts.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise UserError(f"the number of hosts must be in 1..{MAX_HOSTS}, got {num_hosts}")
        if rate is not None:
            bits_per_s(rate)
        self._rate = rate
        self.names = tuple(f"node{i + 1}" for i in range(num_hosts))
        self.addresses = tuple(f"10.77.0.{i + 1}" for i in range(num_hosts))
        owner = f"micro-{os.getpid()}-{_start_of(os.getpid())}-{next(_serial)}"
        self._bridge = f"{owner}-bridge"
        self._spaces = tuple(f"{owner}-{name}" for name in self.names)

    def __enter__(self) -> Self:
        _check_machine()
        for name in {place.name for folder in (_NAMESPACES, _HOST_FILES) for place in folder.glob("micro-*")}:
            if (owner := _OWNED.match(name)) and _start_of(int(owner["pid"])) != owner["started"]:
                _remove_space(name)  # left by a process that has ended
        with ExitStack() as undo:
            undo.callback(self._remove)
            self._build()
            if self._rate:
                self.shape(self._rate)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def shape(self, rate: str | None) -> None:
        """Set the rate of every link in both directions; None removes the limit. Raises: UserError: not a rate."""
        limit = f"tbf rate {rate} burst {_burst_kb(rate)}kb latency {_LATENCY}" if rate else ""
        for number, space in enumerate(self._spaces):
            for where, link in ((space, "eth0"), (self._bridge, f"port{number}")):
                if limit:
                    _run(f"tc -n {where} qdisc replace dev {link} root {limit}")
                elif self._rate:
                    _run(f"tc -n {where} qdisc delete dev {link} root")
        self._rate = rate

    def prefixes(self) -> list[list[str]]:
        """Return for each host the prefix that runs a command there, as a child of this process.

        The child gets SIGTERM when this process ends.
        """
        end = ["unshare", "--uts", "setpriv", "--pdeathsig", "TERM", "sh", "-c", _OWNED_START]
        return [
            ["ip", "netns", "exec", space, *end, name, str(os.getpid())]
            for space, name in zip(self._spaces, self.names, strict=True)
        ]

    def counters(self) -> list[Counter]:
        """Return the counters of each host since its start; call it while hosts send nothing."""
        time.sleep(_SETTLE_S)
        found = []
        for space in self._spaces:
            (link,) = json.loads(_run(f"ip -n {space} -s -j link show eth0"))
            found.append(Counter(link["stats64"]["tx"]["bytes"], link["stats64"]["tx"]["packets"]))
        return found

    def _build(self) -> None:
        bridge = self._bridge
        _run(f"ip netns add {bridge}")
        _run(f"ip -n {bridge} link add br0 type bridge stp_state 0 forward_delay 0")
        _run(f"ip -n {bridge} link set br0 up")
        table = "".join(f"{ip} {name}\n" for ip, name in zip(self.addresses, self.names, strict=True))
        for number, (space, address) in enumerate(zip(self._spaces, self.addresses, strict=True)):
            _run(f"ip netns add {space}")
            _run(f"ip -n {bridge} link add port{number} type veth peer name eth0 netns {space}")
            _run(f"ip -n {bridge} link set port{number} master br0 up")
            _run(f"ip -n {space} link set lo up")
            _run(f"ip -n {space} address add {address}/24 dev eth0")
            _run(f"ip -n {space} link set eth0 up")
            # The route sets the congestion control, because a namespace inherits the machine's: with bbr, which paces
            # itself, times of equal transfers vary.
            route = f"10.77.0.0/24 dev eth0 proto kernel scope link src {address} congctl cubic"
            _run(f"ip -n {space} route change {route}")
            (_HOST_FILES / space).mkdir(parents=True)
            (_HOST_FILES / space / "hosts").write_text(f"127.0.0.1 localhost\n{table}")

    def _remove(self) -> None:
        for space in (*self._spaces, self._bridge):
            _remove_space(space)


def _check_machine() -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        found = f"without {missing[0]}" if missing else f"{sys.platform}, user {os.getuid()}"
        raise UserError(
            f"hosts on one machine are Linux's network namespaces: run as root, with iproute2 and util-linux, "
            f"got {found}"
        )


def _burst_kb(rate: str) -> int:
    return max(_LEAST_BURST_KB, math.ceil(bits_per_s(rate) / 8 * _BURST_S / 1024))


def _run(line: str) -> str:
    return _tool(*line.split())


def _tool(*words: str) -> str:
    """Run a command of iproute2 and return its output."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"this machine can have no hosts: '{' '.join(words)}' failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _remove_space(name: str) -> None:
    """Kill the processes in a namespace and remove it with its links, if it exists."""
    if (_NAMESPACES / name).exists():
        inside = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True).stdout
        for pid in inside.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(("ip", "netns", "delete", name), capture_output=True)
    shutil.rmtree(_HOST_FILES / name, ignore_errors=True)


def _start_of(pid: int) -> str:
    """Return when a process started, in ticks since boot; with the process id this identifies the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
