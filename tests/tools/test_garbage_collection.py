"""A command starts with few full collections of garbage; a training, and what follows a command, have Python's own."""

import gc
from pathlib import Path

from experiments.config.command_line import run_command
from experiments.config.start_up import collect_seldom
from tests.tools.simulated_runs import IMAGES, Run, configured

USUAL = gc.get_threshold()


def test_a_command_starts_with_few_full_collections() -> None:
    seen = []
    assert run_command(lambda: seen.append(gc.get_threshold()) or 0) == 0
    assert seen[0][:2] == USUAL[:2]
    assert seen[0][2] > USUAL[2]
    assert gc.get_threshold() == USUAL


def test_a_training_collects_garbage_as_usual(tmp_path: Path) -> None:
    collect_seldom()
    Run(configured(tmp_path, *IMAGES, "epochs=1", "model=mlp"))
    assert gc.get_threshold() == USUAL
