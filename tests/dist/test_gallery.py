"""The scripts of the gallery, killed after they saved, go on from it to the weights and residuals of plain DDP."""

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

import micro
from micro.ddp import attaching
from tests.dist.framework_loops import require
from tests.dist.fresh_ranks import run_fresh

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks")]

GALLERY = Path(__file__).parents[2] / "docs/gallery"
SCRIPTS = {  # and the framework that each needs
    "train_ddp": "",
    "train_accelerate": "accelerate",
    "train_fabric": "lightning",
    "train_lightning": "lightning",
    "train_trainer": "transformers",
}


class Ended(NamedTuple):
    """What a rank had in the end, and how many steps it took itself."""

    weights: Tensor
    residuals: list[Tensor]
    steps: int


def trained(script: str, until: int, folder: Path, killed_after: int = 10**9) -> Ended:
    """Call a script's main function, in a process that is killed when it has taken so many steps."""
    attachments, steps = [], 0

    def remembered(*args: Any, **settings: Any) -> micro.Attachment:
        attachments.append(micro.Attachment(*args, **settings))
        return attachments[-1]

    def count(*_: object) -> None:
        nonlocal steps
        if steps == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    attaching.Attachment = remembered  # type: ignore[assignment, misc]
    register_optimizer_step_pre_hook(count)
    sys.path.insert(0, str(GALLERY))
    model = importlib.import_module(script).main(until, folder)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Ended(weights, [residual.clone() for residual in attachments[-1].residuals()], steps)


def assert_same(found: list[Ended], expected: list[Ended]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.weights, other.weights)
        assert len(one.residuals) == len(other.residuals)
        assert all(torch.equal(*pair) for pair in zip(one.residuals, other.residuals, strict=True))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Two epochs of the loop that no framework runs, which is never interrupted."""
    first, second = run_fresh(2, trained, "train_ddp", 2, tmp_path_factory.mktemp("plain"))
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(first.residuals[0], second.residuals[0]), "equal: another rank's would not show"
    return [first, second]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_killed_in_the_second_epoch_and_goes_on_as_the_plain_loop(
    script: str, expected: list[Ended], tmp_path: Path
) -> None:
    if SCRIPTS[script]:
        require(SCRIPTS[script])
    steps = expected[0].steps // 2  # of an epoch
    with pytest.raises(ProcessExitedException) as ended:
        run_fresh(2, trained, script, 2, tmp_path / "checkpoints", steps + 3)
    assert ended.value.exit_code == -signal.SIGKILL
    answers = [Ended(*answer) for answer in run_fresh(2, trained, script, 2, tmp_path / "checkpoints")]
    assert [answer.steps for answer in answers] == [steps, steps], "not resumed at the end of the first epoch"
    assert_same(answers, expected)


def test_the_tutorial_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = run_fresh(2, trained, "tutorial", 6, tmp_path / "whole")
    run_fresh(2, trained, "tutorial", 3, tmp_path / "parted")
    resumed = run_fresh(2, trained, "tutorial", 6, tmp_path / "parted")
    assert resumed[0].steps == 3
    assert_same(resumed, whole)
