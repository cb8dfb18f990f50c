"""Disturb trainings for a time that you set, and check that each ends with the weights of an undisturbed run.

    python -m tests.soak --time 2h --seed 7      every kind of run and of fault, for two hours
    python -m tests.soak --seed 1234 --cases 1    the case of a seed once more
    python -m tests.soak --kinds simulated --faults signal,torn --methods micro,topk --time 10m

Signals strike a process of the run, a rank stands still, the disk fills, files are torn, the folder vanishes, the
command is given twice. Then the same command is given again until the run has ended. A case fails unless the run ends
with the same weights and records, every attempt ends in a few lines, and nothing is left behind: no process, draft or
lock. What a failed case left is kept. Full disks need root. The exit code is 1 if a case failed, 130 after Ctrl-C.
"""

import argparse
import ctypes
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from experiments.config import ROOT
from experiments.config.command_line import Parser, comma_list, run_command
from experiments.config.conf_files import choices_of
from experiments.config.errors import UserError, check_choice
from experiments.config.stopping import STOP_SIGNALS, exit_code
from experiments.launching.rank_environment import with_python_path
from experiments.runs.files import load_json
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from experiments.training.preflight import prepare_runs
from tests.small_disks import MemoryDisk, mounted

KINDS = {"simulated": 6, "local": 4, "torchrun": 1}  # kinds of runs, with their shares of the cases
FAULTS = {"signal": 12, "pause": 2, "freeze": 1, "full": 2, "removed": 1, "twice": 2, "torn": 4}
SIGNALS = (
    *(*STOP_SIGNALS, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR2),  # end a process without a handler
)
START_S, LONGEST_DELAY_S = 6.0, 0.4  # approximate start of a run; longest time between a step and a fault
TIMEOUT_S = 60  # timeout of collectives, which ends a run with a frozen rank
LIMIT_S = 240.0 + TIMEOUT_S  # limit of an attempt on a busy machine; a run takes seconds
END_S = 20.0  # limit for processes that end with their parent
CALM_ATTEMPTS = 4  # after the last fault; more than one where an error says to start from scratch
MAX_LINES = 6  # that a command prints on standard error, beside these
USUAL = re.compile(r"step \d+/\d+(, |$)|^resumed from step |^checkpoint not used: |^stopped by |^note: |^\s*$")
SAVED = {exit_code(number) for number in STOP_SIGNALS}
MODELS = {
    "mlp": "model=mlp model.settings.hidden=16 dataset=synthetic dataset.settings.num_samples={samples}",
    "resnet": "model=resnet8 dataset=synthetic dataset.settings.num_samples={samples}",
    "lstm": "model=lstm_small model.settings.hidden=16 dataset=manuals dataset.settings.max_words=200 "
    "dataset.settings.num_train={words} dataset.settings.num_test=200",
}
SELDOM = (
    "density_warmup.steps=5 scope=tensor scope=model precision=bfloat16 save_weights=true measure_residual_every=3 "
    "nonfinite=skip optimizer.clip=1.0 optimizer.lr_at=gradient"
)
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Fault:
    """What happens ``delay_s`` after so many recorded steps; ``place``, in [0, 1), chooses the process or the file."""

    kind: str
    step: int
    delay_s: float
    place: float
    signal: int

    def __str__(self) -> str:
        what = signal.Signals(self.signal).name if self.kind == "signal" else self.kind
        return f"{what} {self.delay_s:.2f} s after step {self.step}"


def draw_words(seed: int, kind: str, method: str) -> list[str]:
    """Return the command line of a run that is accepted, without its output."""
    draw = random.Random(f"setup {seed}")
    while True:
        num_ranks = draw.choice((1, 2, 3, 4) if kind == "simulated" else (2, 2, 3))
        samples = draw.randint(8, 20) * 4 * num_ranks
        words = MODELS[draw.choices([*MODELS], [6, 1, 2])[0]].format(samples=samples, words=samples * 33).split()
        words += [f"sparsifier={method}", "batch_size=4", f"epochs={draw.randint(1, 3)}"]
        words += [f"density={draw.choice((0.01, 0.05, 0.3))}", f"seed={draw.randrange(1000)}"]
        words += [f"checkpoint.every_steps={draw.randint(1, 6)}", f"checkpoint.keep={draw.randint(1, 3)}"]
        words += [word for word in SELDOM.split() if draw.random() < 0.12]
        if kind == "simulated":
            words += ["cluster=simulated", f"cluster.world_size={num_ranks}"]
        else:
            words += [f"cluster.nproc_per_node={num_ranks}", f"cluster.timeout_s={TIMEOUT_S}"]
        with suppress(UserError):  # parts that do not fit each other are drawn again
            prepare_runs([words])
            return words


def draw_faults(seed: int, kinds: Sequence[str], num_steps: int) -> list[list[Fault]]:
    """Return the faults of each of the first attempts of a seed."""
    draw = random.Random(f"faults {seed}")

    def fault() -> Fault:
        step = draw.choice((0, *[draw.randrange(1, num_steps + 1)] * 5))
        delay_s = draw.random() * (LONGEST_DELAY_S if step else START_S)
        (kind,) = draw.choices(kinds, [FAULTS[each] for each in kinds])
        return Fault(kind, step, delay_s, draw.random(), int(draw.choice(SIGNALS)))

    numbers = [draw.choice((1, 1, 2)) for _ in range(draw.choice((1, 1, 2, 3)))]
    return [sorted((fault() for _ in range(number)), key=lambda each: each.step) for number in numbers]


class Case:
    """A run that is disturbed in ``output``, the only run there; ``problems`` says what was wrong."""

    def __init__(self, words: Sequence[str], output: Path, disk: MemoryDisk | None = None) -> None:
        self._words, self._output, self._disk = words, output, disk
        self._commands: list[subprocess.Popen[bytes]] = []
        self.fired, self.story, self.problems = Counter[str](), list[str](), list[str]()

    def attempt(self, faults: Sequence[Fault], *more: str) -> tuple[list[int | None], list[str]]:
        """Give the command, disturb it, and wait for the end; return its exit codes and its lines of errors."""
        self._commands, self._more = [], more
        self._start()
        fired = [fault for fault in faults if fault.kind != "torn" and self._is_due(fault) and self._strike(fault)]
        codes, deadline = list[int | None](), time.monotonic() + LIMIT_S
        for command in self._commands:
            with suppress(subprocess.TimeoutExpired):
                command.wait(max(0.0, deadline - time.monotonic()))
            codes.append(command.returncode)
            command.kill()
        self.problems += _end_of_all()
        if self._disk and any(fault.kind == "full" for fault in fired):
            self._disk.free()
        self.fired.update(fault.kind for fault in fired)
        said = [self._log(number).read_text(errors="replace") for number in range(len(codes))]
        errors = [line for text in said for line in text.splitlines() if line.startswith("error:")]
        self.story.append("; ".join([f"{', '.join(map(str, fired)) or 'no fault'}; exit {codes}", *errors]))
        killed = {-fault.signal for fault in fired if fault.kind == "signal"}
        for code, text in zip(codes, said, strict=True):
            self.problems += _problems(code, text, killed, is_torchrun="torch.distributed.run" in self._words)
        if any(codes) and not (fired or self.fired["torn"]):
            self.problems.append(f"exit codes {codes} without a fault")
        for fault in faults:
            if fault.kind == "torn":
                self._tear(fault)
        return codes, errors

    def _log(self, number: int) -> Path:
        return self._output.with_name(f"{self._output.name}.{number}.err")

    def _start(self) -> None:
        command = [sys.executable, *self._words, f"output={self._output}", *self._more]
        environ = with_python_path({**os.environ, "OMP_NUM_THREADS": "1"})
        with self._log(len(self._commands)).open("w") as err:
            self._commands.append(
                subprocess.Popen(
                    command, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
                )
            )

    def _is_due(self, fault: Fault) -> bool:
        """Wait for the moment of a fault; return False if the command has ended before."""
        command, end = self._commands[0], None
        while command.poll() is None:
            with suppress(OSError):
                rows = sum(path.read_bytes().count(b"\n") for path in self._output.glob("*/steps.jsonl"))
                end = time.monotonic() + fault.delay_s if end is None and fault.step <= rows else end
            if end is not None and time.monotonic() >= end:
                return True
            time.sleep(0.002)
        return False

    def _strike(self, fault: Fault) -> bool:
        """Carry out a fault; return whether there was something to strike."""
        processes = [each for each in psutil.Process().children(recursive=True) if _may_be_struck(each, fault)]
        if fault.kind == "full" and self._disk:
            self._disk.fill()
        elif fault.kind == "removed":
            for folder in self._output.iterdir():
                shutil.rmtree(folder, ignore_errors=True)
        elif fault.kind == "twice":
            self._start()
        elif processes and fault.kind in ("signal", "pause", "freeze"):
            with suppress(ProcessLookupError):
                pid = processes[int(fault.place * len(processes))].pid
                os.kill(pid, fault.signal if fault.kind == "signal" else signal.SIGSTOP)
                if fault.kind == "pause":
                    time.sleep(0.5)
                    os.kill(pid, signal.SIGCONT)
        else:
            return False
        return True

    def _tear(self, fault: Fault) -> None:
        """Change a byte of a file in the run's folder, or cut off its end, if there is one."""
        files = sorted(path for path in self._output.rglob("*") if path.is_file() and path.stat().st_size)
        if files:
            share, path = fault.place * len(files) % 1, files[int(fault.place * len(files))]
            content = bytearray(path.read_bytes())
            at = int(share * len(content))
            if fault.signal % 2:
                content[at] ^= 1
            else:
                del content[at:]
            path.write_bytes(content)
            self.fired["torn"] += 1
            self.story.append(f"torn {path.name} at {at}")

    def outcome(self) -> dict[str, Any] | None:
        """Return the weights and the records without times; None if the run has not finished."""
        folders = [RunFolder(path) for path in self._output.glob("*") if path.is_dir()]
        if len(folders) != 1 or not (weights := load_json(folders[0].done_path).get("weights_sha256")):
            return None
        rows = [*read_records(folders[0].steps_path), *read_records(folders[0].epochs_path)]
        return {"weights": weights, "rows": [{key: row[key] for key in row if not key.endswith("_s")} for row in rows]}

    def compare(self, expected: dict[str, Any]) -> None:
        """Record how the end differs from the undisturbed run, and which files are left behind."""
        outcome = self.outcome() or {}
        self.problems += [f"its {key} differ" for key, value in expected.items() if outcome.get(key) != value]
        drafts = (path for pattern in (".*.tmp", ".draft-*", ".old-*") for path in self._output.rglob(pattern))
        self.problems += [f"left behind: {path}" for path in drafts]
        self.problems += [f"{path} is locked" for path in self._output.glob("*") if RunFolder(path).is_locked()]


def _may_be_struck(process: psutil.Process, fault: Fault) -> bool:
    with suppress(psutil.Error):
        return fault.kind != "freeze" or "LOCAL_RANK" in process.environ()
    return False


def _end_of_all() -> list[str]:
    """Wait some seconds for the end of all processes below this one; kill the others, and return which they were."""
    end = time.monotonic() + END_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=0.1)  # collects those that ended
    while running := psutil.Process().children(recursive=True):
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(running, timeout=1)
    return [f"left behind: {process}" for process in left]


def _problems(code: int | None, said: str, killed: set[int], *, is_torchrun: bool) -> list[str]:
    """Return what is wrong with a command's end, from its standard error."""
    if code is None:
        return ["it did not end"]
    if is_torchrun:  # which prints what it likes
        return []
    lines, found = [line for line in said.splitlines() if not USUAL.search(line)], list[str]()
    if any(line.startswith("Traceback") for line in lines) or len(lines) > MAX_LINES:
        found.append(f"{len(lines)} lines on standard error: {lines[:1]} ... {lines[-1:]}")
    if code not in SAVED | killed | {0, 1, 2, 128 + signal.SIGHUP, 128 + signal.SIGQUIT}:
        found.append(f"exit code {code}")
    if code in (1, 2) and not any(line.startswith("error:") for line in lines):
        found.append(f"exit code {code} without a line that begins with error:")
    if code in SAVED and not re.search("^(stopped by|left without saving)", said, re.M):
        found.append(f"exit code {code}, and not a word of what is saved")
    return found


def carry_out(seed: int, options: argparse.Namespace, work: Path) -> tuple[str, Case]:
    """Carry out the case of a seed; return what it is, and what became of it."""
    draw = random.Random(seed)
    kind, method = draw.choices(options.kinds, [KINDS[each] for each in options.kinds])[0], draw.choice(options.methods)
    words = ["-m", "experiments.train", *draw_words(seed, kind, method)]
    if kind == "torchrun":
        number = next(word for word in words if "nproc_per_node" in word).partition("=")[2]
        agent = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
        words = [*agent, f"--nproc-per-node={number}", *words]
    whole = Case(words, work / "whole")
    whole.attempt(())
    expected = whole.outcome()
    if whole.problems or not expected:
        whole.problems.append("the undisturbed run did not end well")
        return f"{kind}, {method}", whole
    kinds = [each for each in options.faults if each != "freeze" or kind == "local"]
    attempts = draw_faults(seed, kinds, len(expected["rows"]))
    with ExitStack() as closing:
        disk = None
        if any(fault.kind == "full" for each in attempts for fault in each) and not os.geteuid():
            disk = closing.enter_context(mounted(MemoryDisk(work / "disturbed", "24m")))
        case, more = Case(words, work / "disturbed", disk), list[str]()
        for number, faults in enumerate([*attempts, *[[]] * CALM_ATTEMPTS], start=1):
            codes, errors = case.attempt(faults, *more)
            more = ["resume=scratch"] if any("resume=scratch" in line for line in errors) else []
            if number > len(attempts) and not any(codes):
                break
        case.compare(expected)
        if disk and case.problems:
            shutil.copytree(work / "disturbed", work / "disk")
    return f"{kind}, {method}", case


def _run(options: argparse.Namespace) -> int:
    """Carry out cases until the time is over or there were enough; return the exit code."""
    for name, known in (("kinds", [*KINDS]), ("faults", [*FAULTS]), ("methods", choices_of("sparsifier"))):
        setattr(options, name, getattr(options, name) or known)
        for word in getattr(options, name):
            check_choice(f"--{name}", known, word)
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1):  # processes whose parents die become children of this one
        raise OSError("this system has no subreapers")
    fired, num_failed, number, end = Counter[str](), 0, 0, time.monotonic() + options.time
    for seed in itertools.count(options.seed):
        if time.monotonic() >= end or number == options.cases:
            break
        number, started = number + 1, time.monotonic()
        with tempfile.TemporaryDirectory(prefix="micro-soak-") as work:
            what, case = carry_out(seed, options, Path(work))
            ended = f"FAILED: {'; '.join(case.problems)}" if case.problems else "equal"
            print(f"seed {seed}: {what}, {time.monotonic() - started:.0f} s: {' | '.join([*case.story, ended])}")
            fired.update(case.fired)
            if case.problems:
                num_failed += 1
                kept = shutil.copytree(work, options.folder / str(seed), dirs_exist_ok=True)
                same = " ".join(f"--{key} {','.join(getattr(options, key))}" for key in ("kinds", "faults", "methods"))
                print(f"  kept: {kept}; again: python -m tests.soak --seed {seed} --cases 1 {same}", flush=True)
    print(f"{number} cases, {num_failed} failed; {', '.join(f'{count} {kind}' for kind, count in fired.most_common())}")
    return int(num_failed > 0)


def _parser() -> Parser:
    description, _, text = (__doc__ or "").partition("\n\n")
    parser = Parser("python -m tests.soak", description=description, epilog=text)
    add = parser.add_argument
    add("--time", type=_seconds, default=600, help="how long, as 90s, 30m or 2h (default: 10m)")
    add("--seed", type=int, default=int(time.time()), help="of the first case (default: the time)")
    add("--cases", type=int, help="stop after so many (default: when the time is over)")
    add("--kinds", type=comma_list(str), help="of runs: simulated,local,torchrun (default: all)")
    add("--faults", type=comma_list(str), help="kinds of faults (default: all)")
    add("--methods", type=comma_list(str), help="names of conf/sparsifier (default: all)")
    add("--folder", type=Path, default=Path("results/soak"), help="for what failed cases left")
    return parser


def _seconds(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d*)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a time as 90s, 30m or 2h, got '{text}'")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda: _run(_parser().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
