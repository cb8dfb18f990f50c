"""Reduce DDP's buckets on the lane: split them into vectors, reduce these, decide on all, and return them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from micro.drivers.lane import Lane
from micro.drivers.step import ModelStep
from micro.drivers.unused import unused_of
from micro.values import flat
from micro.values.flat import Layout, real


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of DDP, or a part of one.

    Attributes:
        layout: of its gradients in the vector ``grad`` (numel,).
        buffer: the whole bucket, which DDP gets back; ``grad`` is a view of it.
        future: what DDP waits for; None unless this is the bucket's last part.
    """

    layout: Layout
    grad: Tensor
    buffer: Tensor
    future: torch.futures.Future[Tensor] | None

    def check(self) -> None:
        """Raise ValueError unless the layout fits the vector; otherwise compiled loops would write beyond its end."""
        given, expected = self.grad.numel(), self.layout.numel
        if given != expected:
            raise ValueError(
                f"bucket of '{self.layout.names[0]}' holds {given} elements, its parameters {expected}: "
                "parameters must keep the shape and dtype that they had when DDP was built"
            )

    def put_back(self) -> None:
        """Complete DDP's future with the bucket, if this is its last part."""
        if self.future is not None and not self.future.done():
            self.future.set_result(self.buffer)


class Buckets:
    """Cuts DDP's buckets into vectors; the layouts of a bucket's parameters are computed once.

    Args:
        names: of the model's parameters.
        reduced: the parameters that buckets are expected to hold.

    Attributes:
        parameters: ids of ``reduced``, and of all parameters that a bucket has held.
    """

    def __init__(self, names: Mapping[Tensor, str], reduced: Iterable[Tensor]) -> None:
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._kept_alive = tuple(names)  # ids are unique only while their parameters live
        self.parameters = set(map(id, reduced))
        self._known: dict[object, tuple[tuple[str, ...], list[Layout]]] = {}

    def of(self, bucket: dist.GradBucket) -> tuple[tuple[str, ...], list[Layout]]:
        """Return the names of a bucket's parameters, and the layouts of its vectors."""
        parameters = bucket.parameters()
        key = tuple([(id(parameter), parameter.shape, parameter.dtype) for parameter in parameters])
        if key not in self._known:
            named = {self._names[id(parameter)]: parameter for parameter in parameters}
            self.parameters.update(map(id, parameters))
            self._known[key] = tuple(named), layouts_of(named)
        return self._known[key]


def layouts_of(parameters: Mapping[str, Tensor]) -> list[Layout]:
    """Return the layouts of the vectors of a bucket with these parameters.

    A vector has at most 2^31 - 1 elements, because indices are int32. DDP's first backward has one bucket for all
    parameters, which can be larger; it is cut between parameters, equally on all ranks. A parameter without elements is
    in no vector, so a bucket may have none.
    """
    layouts: list[dict[str, tuple[int, ...]]] = []
    free = 0
    for name, parameter in parameters.items():
        values = real(parameter)
        if not values.numel():
            continue
        if values.numel() > free:
            layouts.append({})
            free = flat.MAX_NUMEL
        layouts[-1][name] = tuple(values.shape)
        free -= values.numel()
    return [Layout(tuple(shapes), tuple(shapes.values())) for shapes in layouts]


def parts_of(layouts: list[Layout], grad: Tensor, future: torch.futures.Future[Tensor]) -> list[Bucket]:
    """Return the parts of a bucket's ``grad`` (numel,) with these layouts: views; the last extends to its end."""
    parts, start = [], 0
    for number, layout in enumerate(layouts, 1):
        is_last = number == len(layouts)
        vector = grad if len(layouts) == 1 else grad[start : grad.numel() if is_last else start + layout.numel]
        parts.append(Bucket(layout, vector, grad, future if is_last else None))
        start += layout.numel
    return parts


class BucketLane:
    """Reduces the buckets of a backward in the order in which they were put on the lane, several at a time.

    Each new bucket starts one round of messages (micro.comm.loop): the first message of this bucket, the second of the
    one before it, and so on. After the last bucket the remaining rounds follow. So backward hides all messages but the
    last few, and B buckets of c requests take B + c - 1 rounds, not B c. A step that needs the whole gradient first
    launches all buckets at the end. The round of a message must not depend on which buckets are waiting on the lane,
    because that differs between ranks.

    DDP gets its buckets back when the last one is reduced: only then is it known whether all are finite, and the step
    counts for all or for none. This loses no overlap, because backward uses none of them before its end.

    The thread of backward calls the public methods: begin, put for each bucket, finish. All others run on the lane, a
    task for each bucket.

    Args:
        steps: the reductions of the present step.
        finds_unused: whether DDP looks for parameters that no rank has used.

    Attributes:
        is_beside: whether backward continues while buckets are reduced.
    """

    def __init__(self, steps: ModelStep, lane: Lane, device: torch.device, *, finds_unused: bool) -> None:
        self._steps, self._lane, self._device = steps, lane, device
        self.is_beside = lane.is_beside
        self._unused = unused_of if finds_unused else None
        self._weight = 1.0  # factor of this backward's gradients
        self._waiting: list[Bucket] = []  # buckets that wait for the whole gradient
        self._begins: Callable[[], float] | None = None  # what the first bucket of a backward does first
        self._is_open = False

    def begin(self, *, has_inputs: bool, counts_inputs: bool) -> None:
        """Begin a backward with its first bucket; see ModelStep.begin."""
        self._is_open = True
        self._lane.backward_runs.set()
        self._begins = partial(self._steps.begin, has_inputs=has_inputs, counts_inputs=counts_inputs)

    def put(self, buckets: Sequence[Bucket], *, ends: bool = False) -> None:
        """Reduce the parts of a bucket in place, after all earlier ones; their futures are set at the end.

        Args:
            ends: whether the backward ends with them.
        """
        if ends:
            self._is_open = False
            self._lane.backward_runs.clear()
        begins, self._begins = self._begins, None
        self._lane.put(partial(self._reduce, buckets, begins, ends), [buckets[0].buffer] if buckets else ())

    def finish(self) -> None:
        """End the backward after its last bucket, unless it has ended with it."""
        if self._is_open:
            self.put((), ends=True)

    def wait(self) -> None:
        """Wait for all buckets that were put; on an accelerator the caller's stream waits for the lane's."""
        done, reached = Event(), list[Any]()

        def reach() -> None:
            if self._device.type == "cuda":
                reached.append(torch.cuda.current_stream(self._device).record_event())
            done.set()

        self._lane.put(reach)
        done.wait()
        for event in reached:
            torch.cuda.current_stream(self._device).wait_event(event)

    def close(self) -> None:
        """End the lane."""
        self._lane.close()

    def _reduce(self, buckets: Sequence[Bucket], begins: Callable[[], float] | None, ends: bool) -> None:
        """Run a task of the lane; it must not raise, since backward raises the error at its end."""
        if begins is not None and (self._steps.has_begun or self._waiting):
            self._release()  # the last backward ended with an error
        self._waiting += buckets
        try:
            if not self._steps.has_failed:
                self._go_on(begins, ends)
        except BaseException as error:
            self._steps.fail(error)
        if self._steps.has_failed:
            self._release()

    def _go_on(self, begins: Callable[[], float] | None, ends: bool) -> None:
        if begins is not None:
            self._weight = begins()
        is_whole = self._steps.needs_whole_gradient
        if self._waiting and (ends or not is_whole):
            for bucket in self._waiting:
                bucket.check()
                if self._weight != 1:
                    bucket.grad.mul_(self._weight)
            self._steps.launch(self._waiting, self._unused)
            self._waiting = []
            if not is_whole:
                self._steps.advance()
        if ends:
            self._steps.decide(is_finite=self._steps.end())

    def _release(self) -> None:
        """Give DDP zeros for all buckets after an error, so that backward ends and raises it."""
        left: list[Any] = [*self._steps.abandon(), *self._waiting]
        self._waiting = []
        for bucket in left:
            bucket.grad.zero_()
            bucket.put_back()
