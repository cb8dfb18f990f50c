"""The report of each step: the summary over all buckets, and on_step."""

import threading
from typing import Any

import pytest

import micro
from tests.refusals import refused
from tests.small_models import gradient, gradients, wrapped

pytestmark = pytest.mark.usefixtures("one_rank")
NAN = float("nan")


def reducer(**settings: Any) -> micro.SparseReducer:
    return micro.SparseReducer(micro.Micro(), density=0.2, **settings)


def test_each_step_is_reported_at_the_end_of_its_backward_in_the_callers_thread() -> None:
    told: list[tuple[micro.StepSummary, threading.Thread]] = []
    model = wrapped()
    attachment = micro.attach(model, reducer(), on_step=lambda step: told.append((step, threading.current_thread())))
    for step in range(3):
        gradient(model, step)
        assert told[-1][0] == attachment.summary
    with attachment.paused():
        gradient(model, 3)
    with model.no_sync():
        gradient(model, 4)
    with pytest.raises(micro.NonFiniteGradient):
        gradient(model, 5, factor=NAN)
    gradient(model, 6)
    assert [step.step for step, _ in told] == [0, 1, 2, 4]
    assert {thread for _, thread in told} == {threading.current_thread()}


def test_an_exception_of_on_step_is_raised_by_backward_and_training_can_continue() -> None:
    def on_step(step: micro.StepSummary) -> None:
        if step.step == 1:
            raise KeyError("disk full")

    model = wrapped()
    attachment = micro.attach(model, reducer(), on_step=on_step)
    gradient(model, 0)
    with pytest.raises(KeyError, match="disk full"):
        gradient(model, 1)
    assert len(gradients(model)) == 6, "the gradients are reduced by then"
    gradient(model, 2)
    assert attachment.summary.step == 2


def test_a_summary_adds_up_the_buckets() -> None:
    model = wrapped()
    attachment = micro.attach(model, reducer(nonfinite="skip"), dense="*.bias")
    refused(lambda: attachment.summary, "no step yet")
    gradient(model, 0)
    gradient(model, 1)  # DDP makes several buckets after the first
    step = attachment.summary
    assert len(step.buckets) > 1
    assert sum(bucket.numel for bucket in step.buckets) == 92
    assert step.dense_share == 12 / 92
    assert step.density == sum(bucket.global_count for bucket in step.buckets) / 92
    assert step.density_error == pytest.approx(abs(step.density / step.target_density - 1))
    thresholds = [bucket.threshold for bucket in step.buckets if bucket.threshold is not None]
    assert step.thresholds == (min(thresholds), max(thresholds))
    assert not step.skipped
    assert step.numbers()["exposed_s"] == step.exposed_s == attachment.exposed_s
    assert step.numbers().keys() >= {"density", "density_error", "bytes_sent", "threshold_min", "skipped"}
    gradient(model, 2, factor=NAN)
    assert (attachment.summary.skipped, attachment.summary.density) == (True, 0)
