"""The soak itself: a seed stands for one case, an error's advice is followed, and what is wrong with an end is said."""

import signal
from pathlib import Path

import pytest

from experiments.runs.checkpointing import NoWholeCheckpoint
from tests.soak import advice
from tests.soak.attempt import Ended
from tests.soak.case import FAULTS, Fault, Plan, Setup, draw_plan, draw_setup, methods
from tests.soak.summary import Summary
from tests.soak.trial import Result
from tests.soak.verdict import problems_of_attempt, problems_of_end

COUNTS = {role: {"start": 1, "disk": 50, "collective": 40} for role in ("command", "rank0", "rank1")}
LOCAL = Setup("local", "micro", (), 2)


def plan(seed: int) -> Plan:
    return draw_plan(seed, FAULTS, COUNTS, LOCAL)


def ended(code: int = 0, errors: str = "", *faults: Fault, hung: bool = False, left: tuple[str, ...] = ()) -> Ended:
    return Ended([code], [errors], list(faults), hung, False, [*left], [], 1.0)


def test_a_seed_stands_for_one_run_and_its_faults() -> None:
    assert draw_setup(3, ["simulated"], ["dense"]) == draw_setup(3, ["simulated"], ["dense"])
    assert [plan(seed) for seed in range(20)] == [plan(seed) for seed in range(20)]
    assert len({str(plan(seed)) for seed in range(20)}) == 20


def test_every_method_and_every_kind_of_fault_has_its_turn() -> None:
    drawn = [plan(seed) for seed in range(300)]
    faults = [fault for one in drawn for each in (*one.attempts, *one.between, one.after) for fault in each]
    assert {fault.kind for fault in faults} == set(FAULTS) - {"cut", "slow", "vanish"}
    assert {signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGSEGV} <= {fault.signal for fault in faults}
    last = len(methods()) - 1
    assert [draw_setup(number, ["simulated"], methods()).method for number in (0, last)] == [
        methods()[0],
        methods()[-1],
    ]


def test_a_folder_or_a_word_that_an_error_advises_is_taken(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    assert advice.follow(f"error: run: no file that this program wrote: remove {draft} (log: a)") == []
    assert not draft.exists()
    assert advice.follow(f"error: run: {NoWholeCheckpoint(tmp_path, ['damaged'])} (log: a)") == ["resume=scratch"]
    assert advice.follow("error: something else") is None


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ended(hung=True), "it did not end"),
        (ended(left=("rank1 (S)",)), "left behind: rank1"),
        (ended(1, "Traceback (most recent call last):\nValueError: x"), "a traceback: ValueError: x"),
        (ended(1, ""), "without a line that begins with error:"),
        (ended(77, "error: x"), "exit code 77"),
        (ended(0), "exit code 0 without DONE"),
        (ended(1, "error: x"), "exit code 1 without a fault"),
        (ended(-9, "", Fault("signal", signal=11)), "exit code -9"),
        (ended(-15, "", Fault("signal", signal=15)), "exit code -15"),
        (ended(130, "", Fault("signal", signal=2)), "exit code 130, and not a word of what is saved"),
        (ended(1, "error: rank 0 failed", Fault("freeze", target="rank1")), "the error is not 'rank 1 failed: stood"),
        (ended(1, "error: cannot write", Fault("full")), "not a word of free space"),
    ],
)
def test_what_is_wrong_with_an_attempt_is_said(end: Ended, words: str, tmp_path: Path) -> None:
    found = problems_of_attempt(end, LOCAL, tmp_path, torn=False)
    assert any(words in problem for problem in found), found


def test_a_case_without_an_end_is_a_failure_with_its_seed(tmp_path: Path) -> None:
    assert problems_of_end(tmp_path, None) == ["it has not finished"]  # type: ignore[arg-type]
    summary = Summary(7)
    summary.add(1234, LOCAL, Result(problems=["its weights differ"]))
    assert summary.failures == ["seed 1234, local, micro: its weights differ"]
