"""Steps on an accelerator give the bits of steps on a CPU."""

import math
from collections.abc import Iterator
from contextlib import closing

import pytest

from micro.lockstep import SimulatedRanks
from tests.device_steps import outcomes, steps_of

SCALES = [1.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1e-3, 1.0]  # guesses from the last step are far off


@pytest.fixture(scope="module")
def group() -> Iterator[SimulatedRanks]:
    """Give two ranks, each of which does all of its work itself."""
    with closing(SimulatedRanks(2, shares=False)) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "method",
    [
        "micro",
        "micro_repaired",
        "micro_slack",
        "micro_tensors",
        "micro_scaled_elements",
        "exdyna",
        "gaussiank",
        "sidco",
        "redsync",
        "dgc",
        "sage",
        "threshold",
        "gtopk",
        "gtopk_published",
        "dsa",
        "dsa_published",
        "oktopk",
    ],
)
def test_a_step_on_a_device_gives_the_bits_of_the_cpu(method: str, group: SimulatedRanks) -> None:
    on_device, on_cpu = (outcomes(method, group, SCALES, on_device=where) for where in (True, False))
    assert on_device == on_cpu


@pytest.mark.parametrize("method", ["gtopk", "gtopk_published", "dsa_published", "oktopk"])
def test_momentum_is_cleared_on_a_device_where_something_was_sent(method: str, group: SimulatedRanks) -> None:
    more = ("sparsifier.feedback={name: momentum}",)
    on_device, on_cpu = (
        [[outcome for outcome, _ in steps] for steps in steps_of(method, group, SCALES, on_device=where, more=more)]
        for where in (True, False)
    )
    assert on_device == on_cpu


@pytest.mark.parametrize("method", ["gaussiank", "redsync", "sage", "threshold", "dsa", "oktopk"])
def test_a_gradient_on_a_device_may_be_zero_or_not_finite(method: str, group: SimulatedRanks) -> None:
    scales, more = [1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 1.0, 1.0], ("nonfinite=skip",)
    on_device, on_cpu = (steps_of(method, group, scales, on_device=where, more=more) for where in (True, False))
    for there, here in zip(on_device, on_cpu, strict=True):
        assert [outcome for outcome, _ in there] == [outcome for outcome, _ in here]
        assert [stats.skipped for _, stats in there] == [stats.skipped for _, stats in here]


def test_dense_sums_of_dsa_are_not_searched_for_zeros(group: SimulatedRanks) -> None:
    more = ("density=0.5",)
    on_device, on_cpu = (steps_of("dsa", group, [1.0] * 4, on_device=where, more=more) for where in (True, False))
    assert [[outcome for outcome, _ in steps] for steps in on_device] == [
        [outcome for outcome, _ in steps] for steps in on_cpu
    ]


@pytest.mark.parametrize("method", ["demo", "fft", "fft_feedback", "powersgd"])
def test_a_mean_that_does_not_count_is_undone_on_a_device(method: str, group: SimulatedRanks) -> None:
    """There the host learns of the NaN after the mean was written."""
    on_device, on_cpu = (
        steps_of(method, group, [1.0, math.nan, 1.0, 1.0], on_device=where, more=("nonfinite=skip",))
        for where in (True, False)
    )
    for ranks in zip(on_device, on_cpu, strict=True):
        (outcomes_there, there), (outcomes_here, here) = (zip(*steps, strict=True) for steps in ranks)
        assert outcomes_there == outcomes_here
        assert [(stats.skipped, stats.relative_error) for stats in there] == [
            (stats.skipped, stats.relative_error) for stats in here
        ]
        assert [stats.skipped for stats in here] == [False, True, False, False]
