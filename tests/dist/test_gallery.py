"""The scripts of the gallery train two ranks, save, resume, and give the weights of plain DDP, bit for bit."""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]

GALLERY = Path(__file__).parents[2] / "docs/gallery"
SCRIPTS = {
    "train_accelerate": "accelerate",
    "train_fabric": "lightning",
    "train_lightning": "lightning",
    "train_trainer": "transformers",
}


def trained(script: str, epochs: int, folder: str) -> Tensor:
    """Run a script's main function in this rank; return the weights."""
    sys.path.insert(0, str(GALLERY))
    try:
        model = importlib.import_module(script).main(epochs, Path(folder))
    finally:
        sys.path.remove(str(GALLERY))
        forget_singletons()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def forget_singletons() -> None:
    """Let the next script of this process begin anew: Accelerate keeps its state on classes."""
    if "accelerate" in sys.modules:
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def both(script: str, epochs: int, folder: Path) -> list[Tensor]:
    answers: list[Any] = ranks(2).run_apart(trained, script, epochs, str(folder))
    return answers


@functools.cache
def plain(folder: Path) -> Tensor:
    """Return the weights of the loop that no framework runs, after two epochs that were never interrupted."""
    first, second = both("train_ddp", 2, folder)
    assert torch.equal(first, second)
    return first


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return plain(tmp_path_factory.mktemp("plain"))


def test_plain_ddp_goes_on_from_its_checkpoint(expected: Tensor, tmp_path: Path) -> None:
    after_one = both("train_ddp", 1, tmp_path)[0]
    assert not torch.equal(after_one, expected)
    for weights in both("train_ddp", 2, tmp_path):
        assert torch.equal(weights, expected)


def test_the_tutorial_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = both("tutorial", 6, tmp_path / "whole")
    assert torch.equal(whole[0], whole[1])
    both("tutorial", 3, tmp_path / "parted")
    for weights in both("tutorial", 6, tmp_path / "parted"):
        assert torch.equal(weights, whole[0])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_framework_goes_on_from_its_checkpoint_as_the_plain_loop(
    script: str, expected: Tensor, tmp_path: Path
) -> None:
    framework = SCRIPTS[script]
    if importlib.util.find_spec(framework) is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip(f"{framework} is not installed: pip install '.[frameworks]'")
    folder = tmp_path / "checkpoints"
    both(script, 1, folder)
    for weights in both(script, 2, folder):
        assert torch.equal(weights, expected)
