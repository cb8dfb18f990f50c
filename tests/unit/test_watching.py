"""What is told of each step: the summary over all buckets, on_step, and the loggers made for it."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.integrations import tensorboard, wandb
from tests.small_models import batch

pytestmark = pytest.mark.usefixtures("one_rank")


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), bucket_cap_mb=1e-4)


def backward(model: nn.Module, step: int, factor: float = 1.0) -> None:
    model.zero_grad()
    (model(batch(step)).square().mean() * factor).backward()


REDUCER = micro.SparseReducer(micro.Micro(), density=0.2, nonfinite="skip")


def test_each_step_is_told_at_the_end_of_its_backward_in_the_callers_thread() -> None:
    reported: list[micro.StepSummary] = []
    threads: set[threading.Thread] = set()

    def on_step(step: micro.StepSummary) -> None:
        reported.append(step)
        threads.add(threading.current_thread())

    model = wrapped()
    attachment = micro.attach(model, replace(REDUCER, nonfinite="stop"), on_step=on_step)
    for step in range(3):
        backward(model, step)
        assert reported[-1] == attachment.summary
    with attachment.paused():
        backward(model, 3)
    with model.no_sync():
        backward(model, 4)
    with pytest.raises(micro.NonFiniteGradient):
        backward(model, 5, float("nan"))
    backward(model, 6)
    assert [step.step for step in reported] == [0, 1, 2, 4]
    assert threads == {threading.current_thread()}


def test_an_exception_of_on_step_comes_out_of_backward_and_training_goes_on() -> None:
    def on_step(step: micro.StepSummary) -> None:
        if step.step == 1:
            raise KeyError("disk full")

    model = wrapped()
    attachment = micro.attach(model, REDUCER, on_step=on_step)
    backward(model, 0)
    with pytest.raises(KeyError, match="disk full"):
        backward(model, 1)
    assert all(parameter.grad is not None for parameter in model.parameters()), "the gradients are reduced by then"
    backward(model, 2)
    assert attachment.summary.step == 2


def test_a_summary_adds_up_the_buckets() -> None:
    model = wrapped()
    attachment = micro.attach(model, REDUCER, dense="*.bias")
    with pytest.raises(ValueError, match="no step yet"):
        _ = attachment.summary
    backward(model, 0)
    backward(model, 1)  # DDP makes several buckets after the first
    step = attachment.summary
    assert len(step.buckets) > 1
    assert sum(bucket.numel for bucket in step.buckets) == 92
    assert step.dense_share == 12 / 92
    assert step.density == sum(bucket.global_count for bucket in step.buckets) / 92
    assert step.density_error == pytest.approx(abs(step.density / step.target_density - 1))
    assert step.thresholds == (
        min(bucket.threshold for bucket in step.buckets if bucket.threshold is not None),
        max(bucket.threshold for bucket in step.buckets if bucket.threshold is not None),
    )
    assert not step.skipped
    assert step.numbers()["exposed_s"] == step.exposed_s == attachment.exposed_s
    assert step.numbers().keys() >= {"density", "density_error", "bytes_sent", "threshold_min", "skipped"}
    backward(model, 2, float("nan"))
    assert attachment.summary.skipped
    assert attachment.summary.density == 0


class Writer:
    """What TensorBoard's SummaryWriter and a run of W&B take."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int | None]] = []
        self.logged: list[tuple[dict[str, Any], bool | None]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> None:
        self.logged.append((data, commit))


def test_tensorboard_gets_every_number_with_its_step() -> None:
    model, writer = wrapped(), Writer()
    attachment = micro.attach(model, REDUCER, on_step=tensorboard.log_to(writer, every=2))
    for step in range(3):
        backward(model, step)
    expected = [(f"micro/{name}", value, 2) for name, value in attachment.summary.numbers().items()]
    assert [scalar for scalar in writer.scalars if scalar[2] == 2] == expected
    assert {step for _, _, step in writer.scalars} == {0, 2}


def test_wandb_gets_the_numbers_together_with_what_the_loop_logs_next() -> None:
    model, run = wrapped(), Writer()
    attachment = micro.attach(model, REDUCER, on_step=wandb.log_to(run, prefix="sparse/"))
    backward(model, 0)
    numbers = {f"sparse/{name}": value for name, value in attachment.summary.numbers().items()}
    assert run.logged == [({"sparse/step": 0, **numbers}, False)]


@pytest.mark.parametrize(
    ("make", "given"),
    [(lambda: wandb.log_to(None), "NoneType"), (lambda: tensorboard.log_to("runs"), "str")],  # type: ignore[arg-type]
)
def test_what_cannot_be_logged_to_is_refused(make: Any, given: str) -> None:
    with pytest.raises(ValueError, match=f"log_to.*{given}"):
        make()
