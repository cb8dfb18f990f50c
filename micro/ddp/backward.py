"""The course of one backward: which of DDP's buckets is the first, which the last, and when it is over."""

from collections.abc import Callable, Sequence
from weakref import ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from micro.ddp.bucket_lane import BucketLane
from micro.ddp.buckets import Bucket

NO_BACKWARD = -1  # what torch has for the number of the graph where none is computed


class Backward:
    """Follows a model's backward from bucket to bucket, each of which it gives to the lane, and ends it where DDP does.

    Args:
        now: returns a time.
        at_end: called when DDP's own work is done, with the seconds for which backward waited after all gradients were
            computed. What it raises comes out of backward().
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        lane: BucketLane,
        *,
        now: Callable[[], float],
        at_end: Callable[[float], None],
    ) -> None:
        self._model = ref(model)  # which holds the attachment, where no garbage collector looks
        self._num_reduced = int(model._get_ddp_logging_data()["num_parameter_tensors"])  # trained when DDP was built
        self._lane, self._now, self._at_end = lane, now, at_end
        self._received: set[str] = set()  # the parameters of the buckets so far
        self._compute_end: float = 0.0

    def receive(self, bucket: dist.GradBucket, names: tuple[str, ...], parts: Sequence[Bucket]) -> None:
        """Give the parts of a bucket to the lane.

        In the first backward of a static graph DDP calls all buckets number 0 and none the last: there the parameters
        show it. Elsewhere they cannot: DDP goes on to reduce those that are frozen after it was built. In all backwards
        of a static graph it waits for the buckets as soon as the last hook returns.

        A first bucket also ends a backward of which ``at_end`` was never called: where two attached models share a
        backward and both have an error, autograd raises the first and drops the call of the second.

        In a join context no backward runs on a rank that is out of inputs: DDP calls the hook for zero gradients and
        then waits. There ``at_end`` is called at once, and the mean may be over the ranks that have inputs.
        """
        model = self._model()
        assert model is not None, "its own backward runs"
        has_inputs, is_static = torch._C._current_graph_task_id() != NO_BACKWARD, bool(model.static_graph)
        if bucket.index() == 0 and (not self._received or not self._received.isdisjoint(names)):
            self._received.clear()
            counts_inputs = not getattr(model, "_divide_by_initial_world_size", True)
            self._lane.begin(has_inputs=has_inputs, counts_inputs=counts_inputs)
        self._received.update(names)
        self._lane.put(parts)
        if not bucket.is_last() and not (is_static and len(self._received) == self._num_reduced):
            return
        self._received.clear()
        if self._lane.is_beside or is_static or not has_inputs:
            self._lane.finish()
        if has_inputs:
            _at_end_of_backward(self._computed)
        else:
            started = self._now()
            self._lane.wait()
            self._at_end(self._now() - started)

    def _computed(self) -> None:
        """Note when DDP begins to wait. A lane in this thread waits for the ends of collectives not before."""
        self._compute_end = self._now()
        self._lane.finish()
        _at_end_of_backward(self._end)

    def _end(self) -> None:
        self._at_end(self._now() - self._compute_end)


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Have autograd's engine call this after all gradients are computed, and after what was queued before.

    What DDP does at the end, to wait for the futures, it queues behind the hooks of all buckets. An error raised by
    such a call comes out of backward() with its type; raised in a hook it would leave DDP waiting, and raised by a
    future it would lose its type. Inside of a backward that another one calls, as where activations are computed again
    (use_reentrant=True), this is the end of the inner one, as it is for DDP: so it is queued with the last bucket.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
