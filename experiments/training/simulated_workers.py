"""All workers of a run in one process: one model, and a simulated rank per worker that reduces gradients."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import TrainConfig
from experiments.training.tasks import Batch, Task
from experiments.training.workers import GradientWorkers, Reduced, kept_buffers, moved_to
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.drivers.arrivals import note, refusal
from micro.kernels import preparing
from micro.reducers.outcome import Latest
from micro.reducers.scope import scoped
from micro.values.clipping import clip_


class SimulatedWorkers(GradientWorkers):
    """All ranks in this process: their replicas are identical, so one model stands for all of them.

    The ranks' gradients are computed in turn and reduced by ``micro.Simulation``; batch-norm statistics are rank 0's,
    as DDP keeps them. The order of parameters in the flat gradient is that in which gradients become ready in backward,
    as DDP's is. So the result equals that of real processes up to the order of floating-point sums.

    Args:
        reducer: in place of the one that the configuration describes.

    Attributes:
        layout: names and shapes of a gradient.
        watch: called with each rank and its gradient (numel,) before the reduction.
    """

    def __init__(self, config: TrainConfig, task: Task, *, reducer: micro.Reducer | None = None) -> None:
        super().__init__(config, task)
        preparing.prepare()
        self._parameters = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
        self.layout = micro.Layout.of({name: self._parameters[name] for name in self._ready_order()})
        self.watch: Callable[[int, Tensor], object] = lambda rank, gradient: None
        reducer = reducer or scoped(build_reducer(config), config.scope)
        reducer.check_parameters(dict(zip(self.layout.names, self.layout.shapes, strict=True)))
        self._simulate = partial(micro.Simulation, reducer, self.layout, config.world_size, device=task.device)
        self._simulation = self._simulate()
        self._rows = torch.zeros(config.world_size, self.layout.numel, device=task.device)

    def reduce(self, step: int, lr: float) -> Reduced:
        """Compute each rank's gradient in turn, then reduce them all."""
        started = time.perf_counter()
        batches = self._draw()
        drawn = time.perf_counter()
        self._rows.zero_()
        losses = [self._gradient(step, rank, given, lr) for rank, given in enumerate(batches)]
        compute_s = time.perf_counter() - drawn
        stats = self._simulation.step_(self._rows, ahead=partial(self._clip_and_show, self._clip(lr)))
        self._point_gradients_at(0)
        simulation, refused = self._simulation, refusal(self._simulation.reducer)
        arrived = simulation.arrived
        note(self._parameters, simulation.layout, Latest(arrived and cache(arrived)), refusal=refused)
        first = stats[0]
        exposed_s = first.select_s + first.exchange_s + first.rest_s
        return Reduced(losses[0], (first,), compute_s, self._forward_s(), exposed_s, drawn - started)

    def residuals(self) -> list[Tensor]:
        """Return rank 0's residual."""
        return self._simulation.residuals()[:1]

    @property
    def update(self) -> Tensor:
        """The last step's update (numel,), in the order of ``layout``; not copied."""
        return self._rows[0]

    def states(self) -> list[dict[str, Any]]:
        """Return every rank's state."""
        ranks = self._simulation.state_dict()["ranks"]
        return [{"buckets": [bucket], "carry": carry} for bucket, carry in zip(ranks, self._carries, strict=True)]

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore every rank's state, which may have been saved with several buckets."""
        self._simulation.load_buckets([state["buckets"] for state in states])
        self._carries = [moved_to(state["carry"], self.task.device) for state in states]

    @contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Begin with new states when the context ends: copies of the old ones would take the memory of all ranks."""
        watch, self.watch = self.watch, lambda rank, gradient: None
        yield
        self.watch = watch
        del self._simulation
        self._simulation = self._simulate()

    def _gradient(self, step: int, rank: int, batches: Sequence[Batch], lr: float) -> Tensor:
        with kept_buffers(self.task.model) if rank else nullcontext():
            self._point_gradients_at(rank)
            self.task.seed(step, rank)
            return self._backward(self.task.model, rank, batches, self._scale(lr))

    def _clip_and_show(self, limit: float | None, comm: Comm) -> Reduction[None]:
        """Clip the gradient of a rank and show it to the watch."""
        if limit is not None:
            among = comm if self._config.optimizer.clip_norm == "global" else None
            yield from clip_([self._rows[comm.rank]], limit, among=among)
        self.watch(comm.rank, self._rows[comm.rank])

    def _point_gradients_at(self, rank: int) -> None:
        """Make the gradients views of a rank's row, each with the memory layout of its parameter, as DDP does."""
        row = self._rows[rank]
        for name, place in self._simulation.layout.slices():
            parameter, offset = self._parameters[name], row.storage_offset() + place.start
            parameter.grad = row.as_strided(parameter.shape, parameter.stride(), offset)

    def _ready_order(self) -> list[str]:
        """Return the parameters' names in the order in which a backward makes their gradients."""
        ready: list[str] = []
        watches = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
            for name, parameter in self._parameters.items()
        ]
        with kept_buffers(self.task.model):
            self.task.seed(0, 0)
            self.task.loss(self.task.model, next(self._batches[0].epoch(0)))[0].backward()
        for watch in watches:
            watch.remove()
        return ready + [name for name in self._parameters if name not in ready]
