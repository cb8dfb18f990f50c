"""Carry out one case after another, and show what became of them."""

import argparse
import functools
import gc
import itertools
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.live import Live

from experiments.config.command_line import INTERRUPTED
from experiments.config.errors import UserError
from experiments.ranks.hosts import Hosts, unavailable
from tests.soak import orphans
from tests.soak.case import FAULTS, KINDS, Setup, draw_setup, methods
from tests.soak.damage import can_mount
from tests.soak.forked import preload
from tests.soak.summary import Summary
from tests.soak.trial import Result, Trial

PER_SETUP = 4  # consecutive seeds that share a setup, and so one undisturbed run


def soak(options: argparse.Namespace) -> int:
    """Run the cases that the options describe; return the exit code."""
    orphans.adopt()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored in a background job
        signal.signal(number, signal.default_int_handler)
    preload()
    interrupted = False
    try:
        with Soak(options) as work:
            try:
                work.run()
            except KeyboardInterrupt:
                interrupted = True
    finally:
        gc.unfreeze()  # libraries report what is left at the end as a leak
    return 1 if work.summary.failures else INTERRUPTED if interrupted else 0


class Soak:
    """A soak that lasts as long as the context; at its end the summary is shown."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._kinds, self._faults = options.kinds or list(KINDS), options.faults or list(FAULTS)
        self._impossible: set[str] = set()  # kinds of runs and faults
        self._methods = options.methods or methods()
        self._first = options.seed if options.seed is not None else int(time.time())
        self._console = Console(highlight=False, soft_wrap=True)
        self._setup = functools.lru_cache(1)(lambda number: draw_setup(number, self._kinds, self._methods))
        self._trial_setup: Setup | None = None
        self._closing = ExitStack()
        self.summary = Summary(self._first)

    def __enter__(self) -> "Soak":
        with ExitStack() as closing:
            self._work = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="micro-soak-")))
            self._leave_out()
            wanted = "hosts" in self._kinds and "hosts" not in self._impossible
            self._hosts = closing.enter_context(Hosts(2, "1gbit")) if wanted else None
            if self._console.is_terminal:  # without a thread of its own, which forked processes would lack
                self._live = closing.enter_context(
                    Live(self.summary.table(), console=self._console, auto_refresh=False)
                )
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        self.summary.check_itself()
        if not self._console.is_terminal:
            self._console.print(self.summary.table())
        for line in self.summary.failures:
            self._say(line)

    def run(self) -> None:
        """Carry out cases until the time is over or there were enough."""
        end = time.monotonic() + self._options.time
        for seed in itertools.count(self._first):
            if time.monotonic() >= end or seed - self._first == self._options.cases:
                return
            setup = self._setup(seed // PER_SETUP)
            if setup.kind not in self._impossible:
                self._carry_out(seed, setup)

    def _carry_out(self, seed: int, setup: Setup) -> None:
        started = time.monotonic()
        if setup != self._trial_setup:
            self._trial, self._trial_setup = Trial(setup, self._work / "setup", self._hosts), setup
        elif self._trial.problems:
            return  # the undisturbed run failed, which the first of its cases has told
        result = self._trial.disturb(seed, self._faults, self._impossible)
        self._note(seed, setup, result, time.monotonic() - started)
        self._trial.forget(seed)

    def _note(self, seed: int, setup: Setup, result: Result, elapsed_s: float) -> None:
        self.summary.add(seed, setup, result)
        ended = f"FAILED: {'; '.join(result.problems)}" if result.problems else "equal"
        head = f"seed {seed}: {setup.kind} {setup.num_ranks}, {setup.method}, {elapsed_s:.0f} s"
        self._say(f"{head}: {' | '.join(result.story)} | {ended}")
        if result.problems:
            kept = self._options.folder / str(seed)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self._work / "setup", kept, ignore=_no_sockets)
            self._say(f"  command: {' '.join(setup.words)}; kept: {kept}; again: {self._again(seed)}")
        if self._console.is_terminal:
            self._live.update(self.summary.table(), refresh=True)

    def _again(self, seed: int) -> str:
        """Return the command that repeats a case."""
        chosen = ((name, getattr(self._options, name)) for name in ("kinds", "faults", "methods"))
        words = [f" --{name} {','.join(values)}" for name, values in chosen if values]
        return f"make soak SEED={seed} CASES=1" + (f" ARGS='{''.join(words).strip()}'" if words else "")

    def _leave_out(self) -> None:
        """Say what this machine cannot have; its cases are left out, and those of other seeds stay the same."""
        if "hosts" in self._kinds and (reason := unavailable()):
            self._impossible.add("hosts")
            self._say(f"left out: {reason}")
            if self._kinds == ["hosts"]:
                raise UserError(f"--kinds hosts is impossible here: {reason}")
        if "full" in self._faults and not can_mount():
            self._impossible.add("full")
            self._say("left out: full disks are small file systems, which only root can mount")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_socket()]
