"""The progress of a run is drawn on a terminal, and nowhere else."""

import os
import pty
import select
import termios

import pytest

from experiments.launching.rank_environment import TERMINAL
from experiments.tracking.progress import bar


def test_a_bar_shows_steps_loss_and_the_last_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    monkeypatch.setenv(TERMINAL, os.ttyname(theirs))
    with bar("mlp [seed 1]", 1, 4) as shown:
        assert shown
        shown("steps", {"step": 1, "loss": 0.25})
        shown("epochs", {"step": 2, "accuracy": 0.75})
        shown("steps", {"step": 3, "loss": 0.5})
    text = ""
    while select.select([ours], [], [], 0.2)[0]:
        text += os.read(ours, 1 << 16).decode()
    for word in ("mlp [seed 1]", "4/4", "loss 0.5", "accuracy 0.75"):
        assert word in text
    assert "\x1b[?25l" not in text, "a rank that is killed could not show the cursor again"
    for end in (ours, theirs):
        os.close(end)


def test_a_terminal_that_is_gone_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TERMINAL, "/dev/pts/none")
    with bar("mlp", 0, 4) as shown:
        assert shown is None
