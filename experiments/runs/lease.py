"""The lease of a run folder: one owner at a time among all machines that share the disk.

``.lease/N`` names the N-th owner of the folder, and the highest number counts. The next owner makes the next file,
which of several processes only one can do. An owner renews its file every few seconds, and renames it to
``N.released`` at the end. The lease of an owner that died can be taken after a time in which others saw no renewal, or
at once where they know that the process has ended. They count what they see: clocks of two machines are never
compared. An owner that was only stopped or cut off sees the higher number when it goes on, before it writes a
checkpoint or DONE, and stops.

No step needs a second one to be complete, so a crash at any moment leaves a state from which the next start goes on.
filelock's SoftFileLease is not used: where a file system cannot exchange two files in one step, as NFS, it never
takes over from an owner that died.
"""

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Literal

from experiments.config.errors import UserError
from experiments.runs.atomic_files import from_json
from experiments.runs.owner import Owner

BEAT_S = 3.0  # how often an owner renews its lease
LOOK_S = 0.5  # how often others look whether it does
LIMIT_S = 30.0  # how long they must have seen no renewal before they take the lease
STOP_S = 30.0  # how long an owner that lost its lease may take to stop

VARIABLE = "MICRO_LEASE"  # number, token and folder of the lease under which this process and its ranks write
_FOLDER = ".lease"
_NAME = re.compile(r"([0-9]+)(\.released)?")
_MAX_BYTES = 1 << 16


class LeaseLost(UserError):
    """This process no longer owns its run folder."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"run folder {self.path} {self.why}: this process stops and writes nothing more there"


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest lease of a folder.

    Attributes:
        number: It counts the owners of the folder.
        is_released: Whether the owner gave it back.
        owner: None if the file is not complete.
        beat: Time of the last renewal in nanoseconds, by the clock of the file system.
    """

    number: int
    is_released: bool
    owner: Owner | None
    beat: int


class LeaseHeld(Exception):
    """Another owner is alive."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry)
        self.entry = entry


class Lease:
    """A lease that this process holds, or whose holder it works for.

    Attributes:
        loss: Why it is no longer held; None while it is.
        succeeds_stray: Whether the processes of the owner before may still be alive, on another machine.
    """

    def __init__(
        self, path: Path, number: int, token: str, *, descriptor: int | None = None, succeeds_stray: bool = False
    ) -> None:
        self.loss: str | None = None
        self.succeeds_stray = succeeds_stray
        self._path, self._number, self._token = path.resolve(), number, token
        self._descriptor = descriptor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the lease while the context lasts, then release it.

        Raises:
            LeaseLost: At any moment, in the main thread: the lease was lost. It replaces whatever else was raised.
        """
        with self._signal_handled(), self._in_environment():
            self._thread.start()
            try:
                yield
            except BaseException:
                self._raise_if_lost()
                raise
            finally:
                self.stop()
                self._release()
            self._raise_if_lost()

    def stop(self) -> None:
        """Stop to renew the lease and to look whether it was lost, for instance before the folder is removed."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S)  # it may wait for the disk

    def _renew(self) -> None:
        while not self._stop.wait(BEAT_S):
            if self.beat():
                continue
            with suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            if not self._stop.wait(STOP_S):  # the main thread may wait for a peer, and never see the signal
                print(f"error: {LeaseLost(self._path, self.loss or '')}", file=sys.stderr, flush=True)
                os._exit(1)
            return

    def beat(self) -> bool:
        """Renew the lease; return False if it was lost."""
        self.loss = why_lost(self._path, self._number, self._token)
        if self._descriptor is not None and not self.loss:
            try:
                os.utime(self._descriptor)
            except OSError as error:  # a disk that cannot be written for a while ends no lease
                if error.errno == errno.ESTALE:
                    self.loss = "was taken over by another process"
        return self.loss is None

    def _raise_if_lost(self) -> None:
        if self.loss:
            raise LeaseLost(self._path, self.loss) from None

    def _release(self) -> None:
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        name = self._path / _FOLDER / str(self._number)
        if not self.loss:
            with suppress(OSError):  # removed, or not writable: others see the end of the process, or of the renewals
                name.rename(name.with_name(f"{self._number}.released"))

    @contextmanager
    def _signal_handled(self) -> Iterator[None]:
        """Raise LeaseLost in the main thread when the thread that renews the lease sends it SIGURG."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread alone
            return

        def stop(number: int, frame: FrameType | None) -> None:
            self._raise_if_lost()

        before = signal.signal(signal.SIGURG, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGURG, before)

    @contextmanager
    def _in_environment(self) -> Iterator[None]:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = f"{self._number} {self._token} {self._path}"
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def take(path: Path, owner: Owner) -> Lease:
    """Take the lease of a folder for this process.

    It takes as long as it needs to know whether the last owner is alive: no time if that released the lease or ran on
    this machine, else up to ``LIMIT_S``.

    Raises:
        LeaseHeld: Another owner is alive.
        OSError: The folder cannot be written.
    """
    watch = _Watch(path)
    while True:
        entry = newest(path)
        is_free, leaves_stray = _is_free(entry, owner)
        if not is_free:
            found = watch.look(entry)
            if found == "alive" and entry:
                raise LeaseHeld(entry)
            if found == "unknown":
                sleep(LOOK_S)
                continue
            leaves_stray = True
        number = entry.number + 1 if entry else 1
        descriptor = _make_file(path, number, owner)
        if descriptor is not None:
            _remove_older(path, number)
            return Lease(path, number, owner.token, descriptor=descriptor, succeeds_stray=leaves_stray)


def wait_for_owner(path: Path) -> Entry | None:
    """Return the lease of a living owner; None if none is seen in the time after which a lease may be taken over."""
    watch = _Watch(path)
    for _ in range(round(1.5 * LIMIT_S / LOOK_S)):
        entry = newest(path)
        if watch.look(entry) == "alive":
            return entry
        sleep(LOOK_S)
    return None


def newest(path: Path) -> Entry | None:
    """Return the newest lease of a folder, None if there never was one. Raises: OSError."""
    entry = None
    for _ in range(3):  # a file may be renamed between the two calls
        files = _files(path)
        if not files:
            return None
        number = max(files)
        entry = Entry(number, is_released=files[number].suffix != "", owner=None, beat=0)
        try:
            descriptor = os.open(files[number], os.O_RDONLY)  # on NFS an open file has attributes that are not cached
        except FileNotFoundError:
            continue
        try:
            owner, beat = from_json(Owner, os.read(descriptor, _MAX_BYTES)), os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
        return Entry(number, entry.is_released, owner, beat)
    return entry


def why_lost(path: Path, number: int, token: str) -> str | None:
    """Return why a lease is no longer held, None if it is, or if the disk does not answer."""
    try:
        entry = newest(path)
    except OSError:
        return None
    if entry is None:
        return "was removed"
    if entry.number == number and (entry.owner is None or entry.owner.token == token):
        return None
    return f"was taken over by {entry.owner or 'another process'}"


def check_lease(path: Path) -> None:
    """Raise LeaseLost if this process, or the launcher that started it, owned a folder and does so no longer."""
    number, _, rest = os.environ.get(VARIABLE, "").partition(" ")
    token, _, leased = rest.partition(" ")
    if number.isdecimal() and leased == str(path.resolve()) and (why := why_lost(path, int(number), token)):
        raise LeaseLost(path, why)


class _Watch:
    """Look at a lease again and again, and tell whether its owner is alive.

    Looks are counted, not seconds: while this process stands still, or waits for a disk that is away, an owner may be
    unable to renew its lease as well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: list[Entry | None] = []  # the last look
        self._num_unchanged = 0

    def look(self, entry: Entry | None) -> Literal["alive", "silent", "unknown"]:
        """Return what is known of the owner after one more look; it is silent after ``LIMIT_S``."""
        is_changed = bool(self._seen) and self._seen != [entry]
        self._num_unchanged = 0 if is_changed or not self._seen else self._num_unchanged + 1
        self._seen = [entry]
        if entry is None or entry.is_released:
            return "unknown"
        if entry.owner and (is_changed or entry.owner.is_alive()):
            return "alive"
        if self._num_unchanged == round(2 * BEAT_S / LOOK_S):
            who = entry.owner or "an unknown process"
            wait = f"it can be taken after {LIMIT_S:g} s without one"
            print(f"waiting: {self._path} belongs to {who}, which gives no sign of life; {wait}", file=sys.stderr)
        return "silent" if self._num_unchanged * LOOK_S >= LIMIT_S else "unknown"


def _is_free(entry: Entry | None, owner: Owner) -> tuple[bool, bool]:
    """Return whether the last owner certainly has ended, and whether its ranks on other nodes may not have."""
    if entry is None or entry.is_released:
        return True, False
    if entry.owner is None or not entry.owner.is_dead(has_flock=owner.has_flock):
        return False, False
    return True, entry.owner.launch is not None


def _make_file(path: Path, number: int, owner: Owner) -> int | None:
    """Make the file of the next owner and return its descriptor; None if another process was first. Raises: OSError."""
    name = path / _FOLDER / str(number)
    name.parent.mkdir(exist_ok=True)
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return None
    try:
        text = owner.to_json().encode()
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(name))
        latest = newest(path)
        if latest and (latest.number, latest.owner) == (number, owner):
            return descriptor
        name.unlink()  # the lease went on to others between the look and the file
    except OSError:
        with suppress(OSError):
            name.unlink()
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove_older(path: Path, number: int) -> None:
    """Remove the leases of earlier owners; an owner that goes on after a pause then finds its file gone."""
    own = path / _FOLDER / str(number)
    for name in own.parent.iterdir():
        if name != own and (found := _NAME.fullmatch(name.name)) and int(found[1]) <= number:
            with suppress(OSError):
                name.unlink()


def _files(path: Path) -> dict[int, Path]:
    """Return the files of leases by their number; of two with one number, that of the owner that came last."""
    try:
        names = sorted(os.listdir(path / _FOLDER), reverse=True)  # N comes after N.released
    except FileNotFoundError:
        return {}
    return {int(found[1]): path / _FOLDER / name for name in names if (found := _NAME.fullmatch(name))}
