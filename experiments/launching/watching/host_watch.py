"""Watch the hosts of a run through the store at which they met: which of them is gone, or whether this one is cut off.

Each host raises a number in the store every few seconds and reads those of the others. A host whose number stands, or
a store that does not answer, for half of the run's time limit is gone. A shorter outage is none: TCP makes up for it.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import TCPStore

from experiments.launching.watching.beats import beat_interval_s
from experiments.launching.watching.stalls import ranks_in_words

_CONNECT_S = 2.0
_LEFT = "left"


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a run.

    Attributes:
        name, address: of the host.
        ranks: that run there.
    """

    name: str
    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LostHost:
    """What a host has found: the rank to name, and one line."""

    rank: int
    message: str


class HostRules:
    """Judge which host is gone.

    Args:
        hosts: those that are known, by their number; this one is among them, and number 0 need not have the store.
        own: the number of this host.
        keeper: the name or address of the host that has the store.
        limit_s: seconds after which a host is gone.
        now: the time at which the hosts met, in seconds of a clock that never goes back.
    """

    def __init__(self, hosts: Mapping[int, Host], *, own: int, keeper: str, limit_s: float, now: float) -> None:
        self._hosts, self._own, self._keeper, self.limit_s = dict(hosts), own, keeper, limit_s
        self._signs: dict[int, tuple[str, float]] = {}
        self._answered = now

    def meet(self, hosts: Mapping[int, Host]) -> None:
        """Take in hosts that have told their name and address; the others are not judged."""
        self._hosts = {**self._hosts, **hosts}

    def note(self, now: float, numbers: Mapping[int, str]) -> None:
        """Take in the numbers that the store has returned, of hosts that are known."""
        self._answered = now
        for host, number in numbers.items():
            if self._signs.get(host, ("", 0.0))[0] != number:
                self._signs[host] = (number, now)

    def look(self, now: float, reaches: Callable[[Host], bool]) -> LostHost | None:
        """Return the host that is gone, None if there is none.

        Args:
            reaches: whether this host reaches another at this moment.
        """
        if now - self._answered >= self.limit_s:
            return self._store_is_gone(now - self._answered, reaches)
        silent = [
            host
            for host, (number, since) in self._signs.items()
            if host != self._own and number != _LEFT and self._answered - since >= self.limit_s
        ]
        if not silent:
            return None
        others = [host for host in self._hosts if host != self._own]
        if len(others) > 1 and silent == others and not any(reaches(self._hosts[host]) for host in others):
            return self._cut_off(f"no other host has answered for {self.limit_s:.0f} s")
        first = self._hosts[min(silent)]
        names = ", ".join(self._hosts[host].name for host in sorted(silent))
        lost = ranks_in_words([rank for host in silent for rank in self._hosts[host].ranks])
        since = max(now - self._signs[host][1] for host in silent)
        return LostHost(first.ranks[0], f"lost host {names} ({lost}): it has not answered for {since:.0f} s")

    def _store_is_gone(self, silent_s: float, reaches: Callable[[Host], bool]) -> LostHost:
        others = [host for number, host in self._hosts.items() if number != self._own]
        keeper = next((host for host in others if self._keeper in (host.name, host.address)), None)
        name = keeper.name if keeper else self._keeper
        reached = [host.name for host in others if host is not keeper and reaches(host)]
        if keeper is None or not reached:
            return self._cut_off(f"{name}, where the hosts met, has not answered for {silent_s:.0f} s")
        words = f"lost host {name} ({ranks_in_words(list(keeper.ranks))}): it has not answered for {silent_s:.0f} s"
        return LostHost(keeper.ranks[0], f"{words}, while {', '.join(reached)} can be reached")

    def _cut_off(self, words: str) -> LostHost:
        own = self._hosts[self._own]
        return LostHost(own.ranks[0], f"this host, {own.name}, is cut off from the others: {words}")


class HostWatch:
    """Threads that tell the other hosts that this one is there, and find out which of them is gone.

    Args:
        endpoint: HOST:PORT of the store.
        prefix: of the keys, the same on all hosts and another one for each start of the ranks.
        own, num_hosts: the number of this host, and how many there are.
        ranks: of this host.
        timeout_s: the time limit of the run's collectives.
        end: called once, when a host is gone.
        left: called every few seconds once all other hosts have ended their work.
    """

    def __init__(
        self,
        endpoint: str,
        prefix: str,
        *,
        own: int,
        num_hosts: int,
        ranks: tuple[int, ...],
        timeout_s: float,
        end: Callable[[LostHost], None],
        left: Callable[[], None],
    ) -> None:
        self._keeper, _, port = endpoint.rpartition(":")
        self._port = int(port)
        self._prefix, self._own, self._num_hosts, self._ranks = prefix, own, num_hosts, ranks
        self._end, self._left = end, left
        self._limit_s, self._interval_s = timeout_s / 2, beat_interval_s(timeout_s)
        mine = Host(socket.gethostname(), "", ranks)
        self._rules = HostRules({own: mine}, own=own, keeper=self._keeper, limit_s=self._limit_s, now=time.monotonic())
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange_beats, self._judge)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; the other hosts no longer wait for this one.

        Where Python ends while a thread is in a call of torch's store, the process is aborted: they are waited for.
        """
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CONNECT_S)  # no longer: a store that is gone may not answer

    def _exchange_beats(self) -> None:
        """Send this host's beat to the store and read those of the others, until the work is over."""
        with suppress(RuntimeError, OSError, ValueError):  # the host that has the store has ended its work, or failed
            store = self._connect()
            number, met = 0, set[int]()
            while not self._over.wait(self._interval_s):
                number += 1
                store.set(self._key("beat", self._own), str(number))
                met |= self._meet(store, set(range(self._num_hosts)) - met)
                numbers = {host: store.get(self._key("beat", host)).decode() for host in met}
                self._rules.note(time.monotonic(), numbers)
                if len(met) == self._num_hosts and {*numbers.values()} == {str(number), _LEFT}:
                    self._left()
            store.set(self._key("beat", self._own), _LEFT)
            return
        if not self._is_late():
            self._over.set()  # the connection was closed, so the host is there: its ranks say what happened

    def _is_late(self) -> bool:
        return not self._over.is_set() and not self._reaches_port(self._keeper)

    def _connect(self) -> TCPStore:
        limit = timedelta(seconds=self._limit_s)
        store = TCPStore(self._keeper, self._port, is_master=False, wait_for_workers=False, timeout=limit)
        mine = Host(socket.gethostname(), _address_towards(self._keeper, self._port), self._ranks)
        store.set(self._key("beat", self._own), "0")
        store.set(self._key("host", self._own), json.dumps(asdict(mine)))
        return store

    def _meet(self, store: TCPStore, missing: set[int]) -> set[int]:
        """Return those of the missing hosts that are there by now, without waiting for any."""
        found = {host for host in missing if store.check([self._key("host", host)])}
        self._rules.meet({host: _host(store.get(self._key("host", host))) for host in found})
        return found

    def _judge(self) -> None:
        while not self._over.wait(self._interval_s):
            if lost := self._rules.look(time.monotonic(), self._reaches):
                self._over.set()
                self._end(lost)

    def _key(self, kind: str, host: int) -> str:
        return f"{self._prefix}/{kind}/{host}"

    def _reaches(self, host: Host) -> bool:
        return self._reaches_port(host.address)

    def _reaches_port(self, address: str) -> bool:
        """Return whether a host answers, at the port of the store: a host that refuses the connection is there."""
        try:
            socket.create_connection((address, self._port), timeout=_CONNECT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True


def _host(text: bytes) -> Host:
    fields = json.loads(text)
    return Host(fields["name"], fields["address"], tuple(fields["ranks"]))


def _address_towards(host: str, port: int) -> str:
    """Return the address of this host on its way to another one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
