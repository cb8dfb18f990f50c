"""What users turn on in a framework gives the weights of a plain loop that does the same, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.dist.framework_loops import LOOPS, plain, require
from tests.dist.fresh_ranks import run_fresh

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks")]


@pytest.fixture(scope="module")
def expected() -> Tensor:
    first, second = run_fresh(2, plain)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("loop", LOOPS)
def test_accumulation_clipping_bfloat16_and_evaluations_equal_a_plain_loop(
    loop: Callable[[Path], Tensor], expected: Tensor, tmp_path: Path
) -> None:
    require(LOOPS[loop])
    for weights in run_fresh(2, loop, tmp_path):
        assert torch.equal(weights, expected)
