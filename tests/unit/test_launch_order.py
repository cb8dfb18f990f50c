"""The order in which a reducer is called does not depend on how fast backward or the lane is."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.reducers.base import BucketState
from micro.stats import StepStats

pytestmark = pytest.mark.usefixtures("one_rank")

NUM_LAYERS = 4
WAIT_S = 200.0


@dataclass(frozen=True)
class Recording(micro.DenseReducer):
    """Records its calls."""

    calls: list[str] = field(default_factory=list)
    launched: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_launch: threading.Event = field(default_factory=threading.Event)

    def launch(self, state: BucketState, grad: Tensor, comm: micro.GroupComm) -> Callable[[], StepStats]:
        assert self.may_launch.wait(WAIT_S)
        (name,) = state.layout.names if len(state.layout.names) == 1 else ("all",)
        self.calls.append(f"launch {name}")
        self.launched.release()
        finish = micro.DenseReducer.launch(self, state, grad, comm)

        def recorded() -> StepStats:
            self.calls.append(f"finish {name}")
            return finish()

        return recorded


class WaitingInBackward(torch.autograd.Function):
    """In its backward it waits for something."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, wait: Callable[[], None]) -> Tensor:
        ctx.wait = wait  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.wait()  # type: ignore[attr-defined]
        return grad, None


class Layers(nn.Module):
    """Linear layers; backward waits between any two of them."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(NUM_LAYERS))
        self.wait = wait

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(WaitingInBackward.apply(x, self.wait))
        return x


def calls_of(*, lane_is_fast: bool) -> list[str]:
    """Return the calls of a backward; the lane keeps up with it, or begins when all gradients are there."""
    reducer = Recording()
    is_warm = False

    def wait() -> None:
        if is_warm and lane_is_fast:
            assert reducer.launched.acquire(timeout=WAIT_S)

    model = DistributedDataParallel(Layers(wait), bucket_cap_mb=1e-5)
    attachment = micro.attach(model, reducer)
    reducer.may_launch.set()
    for _ in range(2):  # DDP makes its buckets in the first
        model(torch.ones(2, 4)).sum().backward()
    assert len(attachment.bucket_names) == NUM_LAYERS
    reducer.calls.clear()
    is_warm = True
    while reducer.launched.acquire(blocking=False):
        pass
    if not lane_is_fast:
        reducer.may_launch.clear()
        first = next(iter(model.parameters()))
        first.register_post_accumulate_grad_hook(lambda _: reducer.may_launch.set())
    else:
        reducer.launched.release()  # nothing is launched before the first gradient is there
    model(torch.ones(2, 4)).sum().backward()
    return reducer.calls


@pytest.mark.parametrize("lane_is_fast", [True, False])
def test_each_bucket_is_launched_before_the_one_before_it_is_finished(lane_is_fast: bool) -> None:
    last, *others = (f"layers.{index}.weight" for index in reversed(range(NUM_LAYERS)))
    expected = [f"launch {last}"]
    for name in others:
        expected += [f"launch {name}", f"finish {last}"]
        last = name
    assert calls_of(lane_is_fast=lane_is_fast) == [*expected, f"finish {last}"]
