"""One attempt: start the command of a run, carry out its faults when they are due, and wait until all has ended."""

import functools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config.paths import ROOT
from experiments.launching.child_environment import child_environment
from tests.soak import orphans, points
from tests.soak.case import ANY, TIME, Fault
from tests.soak.forked import ForkedPopen

LIMIT_S = 240.0  # without any event, on a busy machine; a run here takes seconds
_MEETING_S = 90.0  # in which hosts meet; torch waits ten minutes for one that does not come
_STACKS_S = 1.0  # in which processes write their stacks


@dataclass(frozen=True)
class Command:
    """A command line of a run, and the environment variables of the process that runs it.

    Args:
        forked: Whether its process is forked from this one; a started one, which imports all anew, tells no points.
    """

    role: str
    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    forked: bool = True


@dataclass
class Ended:
    """How an attempt ended.

    Attributes:
        codes: Exit code of each command, negative for a signal.
        errors: Standard error of each.
        fired: The faults that came.
        hung: Whether it took longer than the limit and was killed.
        gave_up: Whether Ctrl-C was pressed on hosts that waited for one that did not come.
        left: Processes that were alive some seconds after the commands had ended.
        temporary: Files that it left in the folder of temporary files.
    """

    codes: list[int]
    errors: list[str]
    fired: list[Fault]
    hung: bool
    gave_up: bool
    left: list[str]
    temporary: list[str]
    elapsed_s: float


class Attempt:
    """The processes of an attempt.

    Args:
        folder: For their output, made anew.
        faults: Each comes once.
        act: Carries out a fault that concerns more than a process: gets it and this attempt.
    """

    def __init__(
        self,
        folder: Path,
        commands: Sequence[Command],
        faults: Sequence[Fault],
        act: Callable[[Fault, "Attempt"], None],
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tmp").mkdir(parents=True)
        self.folder, self.commands, self._act = folder, commands, act
        self._faults = list(faults)
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.pids: dict[str, int] = {}
        self._roles: dict[int, str] = {}
        self.fired: list[Fault] = []
        self._gave_up = False
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self) -> Ended:
        """Start the commands and wait for their end."""
        started, hung = time.monotonic(), True
        with ExitStack() as closing:
            closing.callback(self._end)
            self._selector = closing.enter_context(selectors.DefaultSelector())
            server = closing.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(self.folder / "socket"))
            server.listen(64)
            self._selector.register(server, selectors.EVENT_READ)
            for command in self.commands:
                self.start(command)
            for fault in self._faults:
                if fault.point == TIME:
                    self.after(fault.number / 10, functools.partial(self._strike, fault))
            self.after(_MEETING_S, self._give_up)
            hung = not self._serve(server)
            if hung:
                self._write_stacks()
        left = orphans.wait_for_end()
        return Ended(
            codes=[process.returncode for process in self._started],
            errors=[_read(self.folder / f"{number}.err") for number in range(len(self._started))],
            fired=self.fired,
            hung=hung,
            gave_up=self._gave_up,
            left=[f"{self._roles.get(pid, 'unknown')} ({state})" for pid, state in left.items()],
            temporary=sorted(path.name for path in (self.folder / "tmp").iterdir()),
            elapsed_s=time.monotonic() - started,
        )

    def start(self, command: Command) -> None:
        """Start a command, which the attempt waits for; its output is in files with its number."""
        at: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for fault in self._faults:
            at[fault.role][fault.point].append(fault.number)
        given = json.dumps({"folder": str(self.folder), "faults": at})
        variables = {"TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1", points.VARIABLE: given}
        variables |= {"MICRO_SOAK_ROLE": command.role, **command.variables}
        name = self.folder / str(len(self._started))
        with name.with_suffix(".out").open("w") as out, name.with_suffix(".err").open("w") as err:
            process = (ForkedPopen if command.forked else subprocess.Popen)(
                [sys.executable, *command.words],
                env=child_environment(**variables),
                cwd=ROOT,
                stdin=_nothing,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._started.append(process)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ)

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        """Call ``work`` after so many seconds, or when the commands have ended."""
        self._timers.append((time.monotonic() + seconds, work))

    def pid_of(self, fault: Fault) -> int | None:
        """Return the process that a fault strikes, None if it has not started."""
        if fault.target != ANY:
            return self.pids.get(fault.target)
        running = sorted(orphans.descendants())
        return running[int(fault.place[0] * len(running))] if running else None

    def _serve(self, server: socket.socket) -> bool:
        """Answer processes at points until all commands have ended; return False if they take too long."""
        deadline = time.monotonic() + LIMIT_S
        while len(self._selector.get_map()) > 1:
            now = time.monotonic()
            self._run_timers(now)
            if now > deadline:
                return False
            due = min([deadline, *(when for when, _ in self._timers)])
            for key, _ in self._selector.select(max(0.0, due - now)):
                if key.fileobj is server:
                    self._answer(server.accept()[0])
                else:
                    self._selector.unregister(key.fileobj)
                    os.close(key.fd)
        return True

    def _answer(self, wire: socket.socket) -> None:
        with wire, suppress(OSError):
            message = json.loads(wire.makefile().readline() or "{}")
            if "point" in message:
                wire.sendall(json.dumps(self._fire(message)).encode())
            elif message:
                self.pids[message["role"]] = message["pid"]
                self._roles[message["pid"]] = message["role"]

    def _fire(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out the faults of a point; a fault comes once, also if its process starts again."""
        answer: dict[str, Any] = {}
        for fault in list(self._faults):
            if (fault.role, fault.point, fault.number) != (message["role"], message["point"], message["number"]):
                continue
            self._faults.remove(fault)
            self.fired.append(fault)
            if fault.kind == "clock":
                answer["clock"] = fault.seconds
            else:
                self._act(fault, self)
        return answer

    def _strike(self, fault: Fault) -> None:
        """Carry out a fault that comes at a time, if a command still runs."""
        if any(process.poll() is None for process in self._started):
            self.fired.append(fault)
            self._act(fault, self)

    def _run_timers(self, now: float) -> None:
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            timer[1]()

    def _give_up(self) -> None:
        """Press Ctrl-C, as a user does, on hosts that have not met."""
        if len(self.commands) > 1 and not any(role.startswith("rank") for role in self.pids):
            for process in self._started:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    self._gave_up = True

    def _write_stacks(self) -> None:
        for pid in orphans.descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, points.STACKS)
        time.sleep(_STACKS_S)

    def _end(self) -> None:
        """Kill the commands that still run, collect all, and undo what timers would have undone."""
        for process in self._started:
            process.kill()
            process.wait()
        self._run_timers(float("inf"))


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


_nothing = open(os.devnull)  # noqa: SIM115 - for all commands
