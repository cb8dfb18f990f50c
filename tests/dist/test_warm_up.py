"""Loops are compiled before the first step of a run, whose time is training time, and not in it."""

import gc
from pathlib import Path
from typing import Any

import pytest

from experiments.config.identity import run_name
from experiments.runs.run_folder import RunFolder
from experiments.training.group import start_group
from experiments.training.loop import Trainer
from experiments.training.preflight import prepare_runs
from experiments.training.run import run_rank
from tests.dist.fresh_ranks import run_fresh

numba = pytest.importorskip("numba")

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks")]

IMAGES = [
    "model=mlp",
    "dataset=synthetic",
    "dataset.settings.num_samples=160",
    "batch_size=8",
    "epochs=1",
    "checkpoint.every_s=0",
]


def loops_compiled(words: list[str]) -> tuple[int, int]:
    """Train; return how many forms of loops this process had compiled before the first step, and after the last."""
    (config,) = prepare_runs([[*IMAGES, *words]])
    folder, found = RunFolder(Path(config.output) / run_name(config)), list[int]()
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.config_path.touch()

    def count() -> None:
        loops = (each for each in gc.get_objects() if isinstance(each, numba.core.dispatcher.Dispatcher))
        found.append(sum(len(loop.signatures) for loop in loops if loop.py_func.__module__.startswith("micro.")))

    def train(trainer: Trainer, *arguments: Any) -> bool:
        count()
        return whole(trainer, *arguments)

    whole, Trainer.run = Trainer.run, train  # type: ignore[method-assign]
    run_rank(config, folder, [], start_group(config))
    count()
    return found[0], found[1]


@pytest.mark.parametrize(
    "words",
    [
        ["cluster=simulated", "sparsifier=qsgd"],
        ["cluster=simulated", "cluster.world_size=2", "rounds.every=4", "sparsifier=topk"],
        ["sparsifier=micro"],
        ["rounds.every=4", "sparsifier=micro"],
    ],
    ids=" ".join,
)
def test_no_loop_is_compiled_in_a_step(words: list[str], tmp_path: Path) -> None:
    ranks = run_fresh(1 if "cluster=simulated" in words else 2, loops_compiled, [*words, f"output={tmp_path}"])
    for before, after in ranks:
        assert before == after > 0
