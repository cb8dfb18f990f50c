"""NaN and Inf are found where they are, and nothing else is taken for them."""

import math

import pytest
import torch

import micro
from micro.comm import Comm
from micro.kernels.reference import first_nonfinite
from micro.lockstep import SimulatedRanks
from micro.nonfinite import Finding, check_policy, report
from micro.requests import carried_out

LAYOUT = micro.Layout(("a", "b"), ((4,), (6,)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_first_bad_index_is_found(value: float, dtype: torch.dtype) -> None:
    vector = torch.ones(1000, dtype=dtype)
    vector[700] = value
    vector[900] = -value
    assert first_nonfinite(vector) == 700


@pytest.mark.parametrize(
    "vector",
    [
        torch.zeros(3),
        torch.full((10,), 3e38),  # the sum overflows, no element does
        torch.full((10,), -1e308, dtype=torch.float64),
        torch.full((1000,), 60000.0, dtype=torch.float16),
        torch.full((10,), 3e38, dtype=torch.bfloat16),
    ],
)
def test_finite_vectors_are_finite_however_large(vector: torch.Tensor) -> None:
    assert first_nonfinite(vector) is None


def test_opposite_infinities_do_not_cancel() -> None:
    assert first_nonfinite(torch.tensor([1.0, math.inf, -math.inf])) == 1


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_known_policies(policy: str) -> None:
    check_policy(policy)


@pytest.mark.parametrize("policy", ["", "raise", "Stop"])
def test_unknown_policies(policy: str) -> None:
    with pytest.raises(ValueError, match=f"nonfinite must be one of stop, skip, got '{policy}'"):
        check_policy(policy)


def test_the_report_names_every_bad_rank_the_same_way_on_all() -> None:
    bad = [None, 3, 4, None]
    other = micro.Layout.flat(4, "c")
    errors = SimulatedRanks(4).carry_out(
        [
            report([Finding(LAYOUT, bad[rank]), Finding(other, 1 if rank > 1 else None)], 12, torch.device("cpu"))
            for rank in range(4)
        ]
    )
    messages = {str(error) for error in errors}
    assert len(messages) == 1
    words = "gradient of 'a' on rank 1, 'b' on rank 2, 'c' on rank 3 is not finite at step 12,"
    assert messages.pop().startswith(words)


def test_errors_are_one_line_and_say_what_to_do() -> None:
    for finding in (Finding(LAYOUT, 9), Finding(LAYOUT, None, 9)):
        error = carried_out(report([finding], 3, torch.device("cpu")), Comm())
        assert "'b'" in str(error)
        assert "step 3" in str(error)
        assert "nonfinite=skip" in str(error)
        assert "\n" not in str(error)
