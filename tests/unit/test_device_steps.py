"""Steps on an accelerator, where the host reads few numbers, give the bits of steps on a CPU."""

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from micro.exchanges import lists_in_rows, slots, sums_in_rows
from micro.selectors import redsync, reused, threshold
from micro.selectors.micro_rules import agreed, repaired
from micro.thread_ranks import SimulatedGroup
from tests.device_steps import outcomes, steps_of
from tests.fake_device import DeviceTensor

SCALES = [1.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1e-3, 1.0]  # guesses from the last step are far off


@pytest.fixture(scope="module")
def group() -> Iterator[SimulatedGroup]:
    """Give two ranks, each of which does all of its work itself."""
    with closing(SimulatedGroup(2, shares=False)) as ranks:
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
def test_a_step_on_a_device_gives_the_bits_of_the_cpu(method: str, group: SimulatedGroup) -> None:
    on_device, on_cpu = (outcomes(method, group, SCALES, on_device=where) for where in (True, False))
    assert on_device == on_cpu


@pytest.mark.parametrize("method", ["gtopk", "gtopk_published", "dsa_published", "oktopk"])
def test_momentum_is_cleared_on_a_device_where_something_was_sent(method: str, group: SimulatedGroup) -> None:
    more = ("sparsifier.feedback={name: momentum}",)
    on_device, on_cpu = (
        [[outcome for outcome, _ in steps] for steps in steps_of(method, group, SCALES, on_device=where, more=more)]
        for where in (True, False)
    )
    assert on_device == on_cpu


FULL = {
    "micro": (agreed, "PLENTY"),
    "micro_repaired": (repaired, "PLENTY"),
    "redsync": (redsync, "PLENTY"),
}


@pytest.mark.parametrize("method", FULL)
def test_lists_that_are_full_are_made_anew_and_the_record_says_so(
    method: str, group: SimulatedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = steps_of(method, group, SCALES, on_device=True)
    monkeypatch.setattr(*FULL[method], 0.4)  # of what is wanted
    full = steps_of(method, group, SCALES, on_device=True)
    more = 0
    for steps, others in zip(usual, full, strict=True):
        for (outcome, stats), (same, again) in zip(steps, others, strict=True):
            assert same == outcome
            assert again.overfull >= stats.overfull
            calls = again.num_collectives - stats.num_collectives
            assert calls == again.overfull - stats.overfull
            assert (again.counts_bytes > stats.counts_bytes) == (calls > 0)
            more += calls
    assert more > 2 * len(group.comms)


@pytest.mark.parametrize("method", ["dsa", "dsa_published"])
def test_slots_to_regions_save_a_message_where_they_are_long_enough(
    method: str, group: SimulatedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slots, in_lists = (steps_of(method, group, [1.0] * 6, on_device=where)[0] for where in (True, False))
    for step, ((_, there), (_, here)) in enumerate(zip(in_slots, in_lists, strict=True)):
        saved = 1 if step and not there.overfull else 0
        assert there.num_collectives == here.num_collectives - saved + 2 * there.overfull
        assert there.counts_bytes == here.counts_bytes + there.overfull * 16  # of two ranks
    assert not any(stats.overfull for _, stats in in_slots)
    monkeypatch.setattr(slots, "_length", four_fifths)
    too_short = steps_of(method, group, [1.0] * 6, on_device=True)[0]
    assert [stats.overfull for _, stats in too_short] == [False] + [True] * 5
    assert [outcome for outcome, _ in too_short] == [outcome for outcome, _ in in_lists]


@pytest.mark.parametrize("method", ["sage", "threshold", "dsa", "oktopk"])
def test_what_is_read_late_may_be_nothing_or_not_finite(method: str, group: SimulatedGroup) -> None:
    scales, more = [1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 1.0, 1.0], ("nonfinite=skip",)
    on_device, on_cpu = (steps_of(method, group, scales, on_device=where, more=more) for where in (True, False))
    for there, here in zip(on_device, on_cpu, strict=True):
        assert [outcome for outcome, _ in there] == [outcome for outcome, _ in here]
        assert [stats.skipped for _, stats in there] == [stats.skipped for _, stats in here]


def test_dense_sums_of_dsa_are_not_searched_for_zeros(group: SimulatedGroup) -> None:
    more = ("density=0.5",)
    on_device, on_cpu = (steps_of("dsa", group, [1.0] * 4, on_device=where, more=more) for where in (True, False))
    assert [[outcome for outcome, _ in steps] for steps in on_device] == [
        [outcome for outcome, _ in steps] for steps in on_cpu
    ]


def test_ok_topk_sends_no_lengths_once_it_knows_them(group: SimulatedGroup) -> None:
    steps = zip(*(steps_of("oktopk", group, [1.0] * 8, on_device=where)[0] for where in (True, False)), strict=True)
    for (_, there), (_, here) in list(steps)[2:]:
        assert not there.overfull
        assert there.num_collectives == here.num_collectives - 1
        assert there.counts_bytes == here.counts_bytes - 4  # to the other rank


@pytest.mark.parametrize("method", ["sage", "threshold"])
def test_lists_in_rows_travel_with_their_counts(method: str, group: SimulatedGroup) -> None:
    in_rows, in_lists = (steps_of(method, group, SCALES, on_device=where) for where in (True, False))
    for rank, (there, here) in enumerate(zip(in_rows, in_lists, strict=True)):
        assert [outcome for outcome, _ in there] == [outcome for outcome, _ in here]
        state = lists_in_rows.LastCounts()
        for (_, mine), (_, exact) in zip(there, here, strict=True):
            room = state.room(2)
            if room is not None and max(mine.counts) > room:
                state.widen()
            state.learn(mine.counts, DeviceTensor(torch.empty(0)))
            if not mine.overfull and room is not None:
                assert (mine.counts_bytes, mine.indices_bytes) == (8, 4 * room)
                assert room >= max(mine.counts)
                assert mine.values_bytes == exact.values_bytes
                assert mine.num_collectives == exact.num_collectives - 1
            elif room is not None:
                assert mine.indices_bytes == 4 * (room + mine.counts[rank])


def four_fifths(count: int, share: float) -> int:
    """Return a length that is too short for what it is made for."""
    return max(1, int(0.8 * count))


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("sage", (lists_in_rows, "_length", four_fifths)),
        ("threshold", (lists_in_rows, "_length", four_fifths)),
        ("threshold", (threshold, "PLENTY", 0.4)),
    ],
)
def test_lists_that_rows_do_not_hold_are_sent_once_more(
    method: str, place: tuple[Any, str, Any], group: SimulatedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_lists = steps_of(method, group, SCALES, on_device=False)
    monkeypatch.setattr(*place)
    too_short = steps_of(method, group, SCALES, on_device=True)
    for there, here in zip(too_short, in_lists, strict=True):
        assert [outcome for outcome, _ in there] == [outcome for outcome, _ in here]
        assert sum(stats.overfull for _, stats in there) >= 3


SHORT = {
    "slots": (slots, "_length", four_fifths),
    "rows": (sums_in_rows, "capacity_for", lambda most, room=0.0: 2 * int(0.4 * most)),
    "lists": (reused, "PLENTY", 0.4),
}


@pytest.mark.parametrize(
    ("what", "selector"),
    [("lists", "reused"), *((what, selector) for what in ("slots", "rows") for selector in ("reused", "sage", "topk"))],
)
def test_what_is_too_short_for_ok_topk_is_sent_once_more(
    what: str, selector: str, group: SimulatedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (f"sparsifier.selector={{name: {selector}}}",)
    on_cpu = steps_of("oktopk", group, SCALES, on_device=False, more=more)
    monkeypatch.setattr(*SHORT[what])
    on_device = steps_of("oktopk", group, SCALES, on_device=True, more=more)
    for there, here in zip(on_device, on_cpu, strict=True):
        assert [outcome for outcome, _ in there] == [outcome for outcome, _ in here]
        assert sum(stats.overfull for _, stats in there) >= 3


@pytest.mark.parametrize("method", ["gaussiank", "sidco", "redsync", "dgc"])
def test_a_choice_that_is_counted_needs_no_more_messages(method: str, group: SimulatedGroup) -> None:
    steps = [steps_of(method, group, [1.0] * 6, on_device=where)[0] for where in (True, False)]
    for (_, on_device), (_, on_cpu) in zip(*steps, strict=True):
        assert on_device.num_collectives == on_cpu.num_collectives + on_device.overfull
    assert not all(stats.overfull for _, stats in steps[0])


def test_a_gradient_that_is_not_finite_is_known_to_all_from_the_counts(group: SimulatedGroup) -> None:
    for method in ("gaussiank", "redsync"):
        on_device, on_cpu = (
            steps_of(method, group, [1.0, 1.0, math.nan, 1.0], on_device=where, more=("nonfinite=skip",))
            for where in (True, False)
        )
        assert [[stats.skipped for _, stats in steps] for steps in on_device] == [[False, False, True, False]] * 2
        assert [[outcome for outcome, _ in steps] for steps in on_device] == [
            [outcome for outcome, _ in steps] for steps in on_cpu
        ]


@pytest.mark.parametrize("method", ["demo", "fft", "fft_feedback", "powersgd"])
def test_a_mean_that_does_not_count_is_undone_on_a_device(method: str, group: SimulatedGroup) -> None:
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
