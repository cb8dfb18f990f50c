"""The course of one backward: which of DDP's buckets is the first, which the last, and when it is over."""

from collections.abc import Callable
from weakref import ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from micro.spans import Seconds

NO_BACKWARD = -1  # what torch has for the number of the graph where none is computed


class Backward:
    """Follows a model's backward from bucket to bucket, and says when it has computed and when DDP's own work is done.

    Args:
        num_parameters: that DDP reduces.
        now: returns a time.
        at_computed: called once all gradients are computed, before DDP waits for the buckets.
        wait: blocks until all buckets are reduced.
        at_end: is given the seconds for which backward waited after all gradients were computed. What it raises comes
            out of backward().
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        num_parameters: int,
        *,
        now: Callable[[], Seconds],
        at_computed: Callable[[], None],
        wait: Callable[[], None],
        at_end: Callable[[Seconds], None],
    ) -> None:
        self._model = ref(model)  # which holds the attachment, where no garbage collector looks
        self._num_parameters = num_parameters
        self._now, self._at_computed, self._wait, self._at_end = now, at_computed, wait, at_end
        self._received: set[str] = set()  # the parameters of the buckets so far
        self._compute_end: Seconds = 0.0

    def place(self, bucket: dist.GradBucket, names: tuple[str, ...]) -> tuple[bool, bool]:
        """Return whether a bucket is the first and whether it is the last of its backward.

        In the first backward of a static graph DDP calls all buckets number 0 and none the last: there the parameters
        show it. Elsewhere they cannot: DDP goes on to reduce those that are frozen after it was built.

        A first bucket also ends a backward of which ``at_end`` was never called: where two attached models share a
        backward and both have an error, autograd raises the first and drops the call of the second.
        """
        is_first = bucket.index() == 0 and (not self._received or not self._received.isdisjoint(names))
        if is_first:
            self._received.clear()
        self._received.update(names)
        is_last = bucket.is_last() or (len(self._received) == self._num_parameters and self.is_static)
        if is_last:
            self._received.clear()
        return is_first, is_last

    @property
    def is_static(self) -> bool:
        """Whether the model was wrapped with static_graph=True, so that its first backward ends in another way."""
        model = self._model()
        return model is not None and bool(model.static_graph)

    @property
    def has_inputs(self) -> bool:
        """Whether this rank has inputs: in a join context, no backward runs where it has none."""
        return torch._C._current_graph_task_id() != NO_BACKWARD

    @property
    def counts_inputs(self) -> bool:
        """Whether the mean is to be over the ranks that have inputs, as a join context may want."""
        return not getattr(self._model(), "_divide_by_initial_world_size", True)

    def wait_for_end(self) -> None:
        """Have ``at_end`` called once DDP's own work is done; called with the last bucket of a backward.

        With the last and not before: where activations are computed again in backward, by a backward of their own
        (use_reentrant=True), each of those has an end too. An error raised at the first would leave DDP with buckets
        that never become ready.

        In a join context no backward runs on a rank that is out of inputs: DDP calls the hook for zero gradients and
        then waits. There ``at_end`` is called at once.
        """
        if self.has_inputs:
            _at_end_of_backward(self._computed)
            return
        started = self._now()
        self._at_computed()
        self._wait()
        self._at_end(self._now() - started)

    def _computed(self) -> None:
        self._compute_end = self._now()  # when DDP begins to wait
        self._at_computed()
        _at_end_of_backward(self._end)

    def _end(self) -> None:
        self._at_end(self._now() - self._compute_end)


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Have autograd's engine call this after all gradients are computed, and after what was queued before.

    What DDP does at the end, to wait for the futures, it queues behind the hooks of all buckets. An error raised by
    such a call comes out of backward() with its type; raised in a hook it would leave DDP waiting, and raised by a
    future it would lose its type. Inside of a backward that another one calls, this is the end of the inner one, as
    it is for DDP.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
