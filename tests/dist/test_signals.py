"""A training leaves alone the signals that are not its own: submitit has a handler for SIGUSR2."""

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.dist.processes import ranks
from tests.dist.rank_functions import Ended, train
from tests.finished_runs import only_run
from tests.waiting import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


def handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def train_as_submitit_does(words: list[str], output: Path) -> tuple[Ended, int]:
    """Train with a handler of SIGUSR2; return how often it was called, of once during the training and once after."""
    received: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    before = handlers()

    def strike() -> None:
        wait_until(lambda: any(output.glob("*/steps.jsonl")), "a step")
        os.kill(os.getpid(), signal.SIGUSR2)

    striker = threading.Thread(target=strike)
    striker.start()
    ended = train(*words)
    striker.join()
    assert handlers() == before
    os.kill(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    return ended, len(received)


def test_the_signal_of_submitit_reaches_its_handler(tmp_path: Path) -> None:
    words = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=512", "batch_size=8", "epochs=3"]
    for ended, calls in ranks(2).run_apart(train_as_submitit_does, [*words, f"output={tmp_path}"], tmp_path):
        assert ended.returncode == 0, ended.stderr
        assert calls == 2
    assert (only_run(tmp_path) / "DONE").exists()
