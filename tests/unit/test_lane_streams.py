"""Any two uses of a tensor on two streams, by backward and by a lane, have a path of waits between them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import requests
from micro.comm.group import GroupComm
from micro.comm.ranks import Comm
from micro.ddp.backward import Bucket, BucketLane
from micro.drivers.lane import CallerLane, Lane, ThreadLane
from micro.drivers.loss_scale import LossScale
from micro.drivers.step import BucketStates, ModelStep
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from micro.values.flat import regroup
from tests.recorded_streams import MAIN, Record, RecordedStream, recorded_streams

pytestmark = pytest.mark.usefixtures("one_rank")

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
RESIDUAL = "residual of "
NAMES = ("last", "middle", "first")  # names of the buckets, in the order of backward


class Gradient(Tensor):
    """A gradient that notes for which streams its memory is kept."""

    record: Record
    label: str

    def record_stream(self, stream: RecordedStream) -> None:
        self.record.note(f"keep {self.label}", stream.name)


class StreamFuture:
    """A future as PyTorch has them for a device: set behind the setter's stream, waited for by the waiter's."""

    def __init__(self) -> None:
        self._event: Any = None
        self._is_set = threading.Event()

    def done(self) -> bool:
        return self._event is not None

    def set_result(self, value: Tensor) -> None:
        self._event = torch.cuda.current_stream().record_event()
        self._is_set.set()

    def wait(self) -> None:
        assert self._is_set.wait(20)
        torch.cuda.current_stream().wait_event(self._event)


@dataclass(frozen=True)
class Noting(micro.SparseReducer):
    """Notes that it uses a bucket's gradient, and its residual, on the current stream."""

    record: Record = field(default_factory=Record)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> requests.Reduction[Outcome]:
        (name,) = state.layout.names
        for used in (name, f"{RESIDUAL}{name}"):
            use(self.record, used)
        return (yield from micro.SparseReducer.reduction(self, state, grad.as_subclass(Tensor), comm))


def use(record: Record, name: str) -> None:
    record.note(f"use {name}", torch.cuda.current_stream().name)  # type: ignore[attr-defined]


def backward(make: Callable[[torch.device], Lane]) -> Record:
    """Return what two backwards of three buckets ask of the streams, with a look at the residuals in between."""
    with recorded_streams() as record:
        reducer = Noting(micro.TopK(), 0.5, record=record)
        states = BucketStates(reducer, {name: torch.zeros(4) for name in NAMES})
        settings: dict[str, Any] = {"loss_scale": LossScale(None), "whole_model": False, "clip": None, "clip_": None}
        steps = ModelStep(
            reducer, states, GroupComm(), CUDA, error_of=lambda _: AssertionError(), parameters={}, **settings
        )
        lane = BucketLane(steps, make(CUDA), CUDA, finds_unused=False)
        for _ in range(2):
            futures = [StreamFuture() for _ in NAMES]
            lane.begin(has_inputs=True, counts_inputs=False)
            for name, future in zip(NAMES, futures, strict=True):
                use(record, name)  # backward writes the gradient
                grad = torch.ones(4).as_subclass(Gradient)
                grad.record, grad.label = record, name
                bucket = Bucket(micro.Layout.flat(4, name), grad, grad, future)  # type: ignore[arg-type]
                lane.put([bucket])
            lane.finish()
            lane.wait()
            for name in NAMES:
                use(record, f"{RESIDUAL}{name}")  # as a checkpoint does
            for name, future in zip(NAMES, futures, strict=True):
                future.wait()
                use(record, name)  # the optimizer reads it
        assert steps.error is None
        lane.close()
    return record


def races(record: Record) -> set[str]:
    """Return the names of tensors with consecutive uses on two streams that no event orders."""
    before: list[set[int]] = []
    last: dict[str, int] = {}
    events: dict[int | None, int] = {}
    uses: dict[str, list[int]] = {}
    for i, (what, stream, event) in enumerate(record.calls):
        reached = {i} | (before[last[stream]] if stream in last else set())
        if what == "wait":
            reached |= before[events[event]]
        elif what == "record":
            events[event] = i
        elif what.startswith("use "):
            uses.setdefault(what.removeprefix("use "), []).append(i)
        before.append(reached)
        last[stream] = i
    return {name for name, places in uses.items() for one, other in pairwise(places) if one not in before[other]}


@pytest.mark.parametrize("lane", [ThreadLane, CallerLane])
def test_all_uses_are_in_order_and_gradients_are_kept_for_the_lane(lane: Callable[[torch.device], Lane]) -> None:
    record = backward(lane)
    assert races(record) == set()
    streams = [MAIN, "side 1"]
    used = {(what.removeprefix("use "), stream) for what, stream, _ in record.calls if what.startswith("use ")}
    assert used == {(f"{start}{name}", on) for name in NAMES for start in ("", RESIDUAL) for on in streams}
    kept = {(what.removeprefix("keep "), stream) for what, stream, _ in record.calls if what.startswith("keep ")}
    assert kept == {(name, "side 1") for name in NAMES}


class LoadedGradient(Gradient):
    is_cuda = True  # type: ignore[assignment]  # says so


def test_what_is_moved_to_a_new_bucket_is_kept_until_the_lane_has_copied_it() -> None:
    """It may have been loaded on another stream, whose next user would write over it as soon as it is free."""
    with recorded_streams() as record:
        piece = torch.ones(4).as_subclass(LoadedGradient)
        piece.record, piece.label = record, "old"
        lane = ThreadLane(CUDA)
        layout = micro.Layout.flat(4, "weight")
        lane.put(lambda: regroup({"weight": piece}, layout, dtype=torch.float32, device=CPU))  # type: ignore[arg-type, return-value]
        lane.close()
    assert [stream for what, stream, _ in record.calls if what == "keep old"] == ["side 1"]
