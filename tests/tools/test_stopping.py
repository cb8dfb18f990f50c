"""Stop signals: SIGINT, SIGTERM and SIGUSR1 in the start of a command, in its work, in a run, and in its save."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import train
from experiments.config.command_line import run_command
from experiments.config.stopping import STOP_SIGNALS
from tests.dist.commands import ROOT
from tests.dist.rank_functions import called
from tests.finished_runs import only_run, weights_of
from tests.tools.simulated_runs import IMAGES, struck
from tests.waiting import LIMIT_S

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
SMALL = [*IMAGES, "cluster=simulated", "cluster.world_size=2", "tracking=none"]
# An import that swallows what a handler of signals raises, as some of torch's do.
TORCH = """
import os
try:
    os.kill(os.getpid(), {number})
    for _ in range(1000):
        pass
except BaseException:
    pass
os._exit(7)
"""


def start(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, **settings)


def train_with(number: int, folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Start a training that imports a module named torch which sends this signal."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(TORCH.format(number=int(number)))
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return start("-m", "experiments.train", f"output={folder}/runs", env=environ, **settings)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_a_command_imports_ends_it_with_its_code(tmp_path: Path, number: signal.Signals) -> None:
    ended = train_with(number, tmp_path)
    line = f"stopped by {NAMES[number]}, with nothing to save: run the same command again\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (CODES[number], "", line)
    assert not (tmp_path / "runs").exists()


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """As nohup and the background jobs of a script have it."""
    ended = train_with(signal.SIGINT, tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (ended.returncode, ended.stderr) == (7, "")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_in_the_work_of_a_command_is_one_line(
    capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    assert run_command(lambda: signal.raise_signal(number) or 0, stopped="nothing was written") == CODES[number]
    assert capsys.readouterr() == ("", f"stopped by {NAMES[number]}; nothing was written\n")
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


def test_a_run_is_saved_at_each_signal_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    assert called(train.main, *SMALL, f"output={tmp_path}/whole").returncode == 0
    parted = [*SMALL, f"output={tmp_path}/parted"]
    for step, number in enumerate(STOP_SIGNALS, start=3):
        with struck(step, lambda number=number: signal.raise_signal(number)):  # type: ignore[misc]
            ended = called(train.main, *parted)
        assert ended.returncode == CODES[number]
        saved = only_run(tmp_path / "parted") / f"checkpoints/step-{step + 1:09}"
        line = f"stopped by {NAMES[number]}, saved as {saved}: run the same command to resume"
        assert line in ended.stderr.splitlines()
    assert called(train.main, *parted).returncode == 0
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "parted")


SECOND = """
import signal
from experiments.config.stopping import stop_signals
with stop_signals.recorded():
    signal.raise_signal(signal.SIGINT)
    print(stop_signals.number, flush=True)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("this would wait for a peer", flush=True)
"""


def test_a_second_interrupt_leaves_at_once() -> None:
    ended = start("-c", SECOND)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (130, "2\n", 1)
