"""The gallery's scripts, killed after a checkpoint, continue and end like an uninterrupted run."""

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

import micro
from micro import patches
from micro.ddp import attaching
from micro.fsdp import attaching as sharded
from tests.dist.framework_loops import require
from tests.dist.fresh_ranks import run_fresh

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks")]

GALLERY = Path(__file__).parents[2] / "docs/gallery"
NEVER = 10**9
SCRIPTS = {  # scripts of the same training, and the framework that each needs
    "train_ddp": "",
    "train_accelerate": "accelerate",
    "train_fabric": "lightning",
    "train_lightning": "lightning",
    "train_trainer": "transformers",
}


class Ended(NamedTuple):
    """What a rank had in the end: weights, or its shards of them; its state; how many steps it took itself."""

    weights: Tensor
    state: list[Tensor]
    steps: int


def trained(script: str, killed_after: int, *arguments: Any) -> Ended:
    """Call a script's main function, in a process that is killed when it has taken so many steps."""
    drivers, steps = [], 0

    def count(*_: object) -> None:
        nonlocal steps
        if steps == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    def remembering(make: Any) -> Any:
        def made(*args: Any, **settings: Any) -> Any:
            drivers.append(make(*args, **settings))
            return drivers[-1]

        return made

    for place, name in ((attaching, "Attachment"), (sharded, "ShardedAttachment"), (micro, "LocalSteps")):
        setattr(place, name, remembering(getattr(place, name)))
    register_optimizer_step_pre_hook(count)
    sys.path.insert(0, str(GALLERY))
    model = importlib.import_module(script).main(*arguments)
    parameters = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters()]
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    state = [leaf.clone() for leaf in tree_leaves(drivers[-1].state_dict()) if isinstance(leaf, Tensor)]
    return Ended(weights, state, steps)


def assert_same(found: list[Ended], expected: list[Ended]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.weights, other.weights)
        assert all(torch.equal(*pair) for pair in zip(one.state, other.state, strict=True))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Two epochs of the loop that no framework runs, which is never interrupted."""
    first, second = run_fresh(2, trained, "train_ddp", NEVER, 2, tmp_path_factory.mktemp("plain"))
    assert torch.equal(first.weights, second.weights)
    assert not all(map(torch.equal, first.state, second.state)), "equal: another rank's would not show"
    return [first, second]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_killed_in_the_second_epoch_continues_like_the_plain_loop(
    script: str, expected: list[Ended], tmp_path: Path
) -> None:
    if SCRIPTS[script]:
        require(SCRIPTS[script])
    steps = expected[0].steps // 2  # steps of an epoch
    with pytest.raises(ProcessExitedException) as ended:
        run_fresh(2, trained, script, steps + 3, 2, tmp_path / "checkpoints")
    assert ended.value.exit_code == -signal.SIGKILL
    answers = [Ended(*answer) for answer in run_fresh(2, trained, script, NEVER, 2, tmp_path / "checkpoints")]
    assert [answer.steps for answer in answers] == [steps, steps], "not resumed at the end of the first epoch"
    assert_same(answers, expected)


@pytest.mark.parametrize(
    ("script", "world_size", "half", "whole", "more"),
    [
        ("tutorial", 2, 3, 6, ()),
        ("train_local", 2, 1, 2, ()),  # saves after 12 steps, in the third round of five
        ("train_fsdp", 4, 10, 20, (2,)),
    ],
)
def test_a_script_continues_from_its_checkpoint(
    script: str, world_size: int, half: int, whole: int, more: tuple[int, ...], tmp_path: Path
) -> None:
    if script == "train_local":
        require("accelerate")
    expected = run_fresh(world_size, trained, script, NEVER, whole, tmp_path / "whole", *more)
    run_fresh(world_size, trained, script, NEVER, half, tmp_path / "parted", *more)
    resumed = run_fresh(world_size, trained, script, NEVER, whole, tmp_path / "parted", *more)
    assert resumed[0].steps < expected[0].steps, "not resumed"
    assert_same(resumed, expected)


def served(steps: int, folder: Path) -> tuple[str, str]:
    """Run the script that trains and serves; return digests of the weights: as trained, and as served."""
    sys.path.insert(0, str(GALLERY))
    script = importlib.import_module("train_and_serve")
    model = script.main(steps, folder)
    return patches.digest(model.state_dict()), patches.digest(script.in_bfloat16(model))


def test_a_server_follows_training_and_a_later_one_follows_the_files(tmp_path: Path) -> None:
    (trained, rounded), (own, _) = run_fresh(2, served, 3, tmp_path)
    assert own == rounded != trained
    sys.path.insert(0, str(GALLERY))
    late = importlib.import_module("gpt").GPT().bfloat16()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    for path in files:
        patches.apply_(late.state_dict(), patches.load(path))
    assert patches.digest(late.state_dict()) == own
