"""Simulate a reducer on n ranks in one process, with the code that real processes run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micro.comm.lockstep import SimulatedRanks
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.reducers.base import BucketState, Reducer
from micro.reducers.outcome import Arrived
from micro.reducers.stats import StepStats
from micro.values.flat import Layout

LONG = 2**16  # elements from which ranks compute in parallel threads: a switch of threads costs some 20 us


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The result of one simulated step.

    Attributes:
        update: (numel,) mean update, the same on all ranks.
        stats: one per rank, in rank order.
        residuals: (world_size, numel) copies, if requested.
    """

    update: Tensor
    stats: list[StepStats]
    residuals: Tensor | None


class Simulation:
    """A reducer on ``world_size`` simulated ranks, for offline studies on any gradients.

    It runs the same code as real processes. Memory: world_size residuals of numel elements, and a copy of the
    gradients during a step.

    Args:
        reducer: what to study.
        layout: names and shapes of the parameters; Layout.flat(numel) for a plain vector.
        world_size: number of ranks, at least 1.
        dtype: of the gradients.
        device: of the gradients.
        shares: whether a result that is equal on all ranks is computed only once; see SimulatedRanks.
    """

    def __init__(
        self,
        reducer: Reducer,
        layout: Layout,
        world_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shares: bool = True,
    ) -> None:
        self.reducer, self.layout, self.world_size = reducer, layout, world_size
        self.dtype, self.device = dtype, torch.device(device)
        self._ranks = SimulatedRanks(world_size, shares=shares)
        for comm in self._ranks.comms:
            reducer.prepare(comm, self.device)
        self._states = [reducer.start(layout, dtype, self.device) for _ in range(world_size)]

    def step(self, gradients: Tensor, *, residuals: bool = False) -> SimulatedStep:
        """Reduce one step's ``gradients`` (world_size, numel), without modifying them.

        Raises:
            ValueError: the shape or the dtype is not the simulation's.
            NonFiniteGradient: see Reducer.reduce_.
            RuntimeError: an error interrupted an earlier step. After any error but these, load a saved state to
                continue.
        """
        rows = gradients.detach().clone()
        stats = self.step_(rows)
        kept = torch.stack(self.residuals()) if residuals else None
        return SimulatedStep(rows[0], stats, kept)

    def step_(self, gradients: Tensor, *, ahead: Callable[[Comm], Reduction[None]] | None = None) -> list[StepStats]:
        """Reduce one step in place: every row of ``gradients`` (world_size, numel) becomes the mean update.

        Args:
            ahead: a reduction that each rank runs first; its messages count as part of the step.
        """
        expected = (self.world_size, self.layout.numel)
        if tuple(gradients.shape) != expected or gradients.dtype != self.dtype:
            given = f"{tuple(gradients.shape)} of {gradients.dtype}"
            raise ValueError(f"gradients must be {expected} of {self.dtype}, got {given}")
        for state in self._states:
            state.check_whole()

        def reduction(comm: Comm) -> Reduction[StepStats]:
            comm.begin_step()
            if ahead is not None:
                yield from ahead(comm)
            return (yield from self.reducer.step(self._states[comm.rank], gradients[comm.rank], comm))

        on_cores = self.device.type == "cpu" and self.layout.numel >= LONG
        try:
            return self._ranks.carry_out([reduction(comm) for comm in self._ranks.comms], on_cores=on_cores)
        except BaseException as error:  # no state is usable any more
            for state in self._states:
                state.break_off(error)
            raise

    @property
    def arrived(self) -> Arrived | None:
        """A function that returns which elements the last step sent, (numel,) bool; None if it sent all."""
        return self._states[0].latest.arrived

    def residuals(self) -> list[Tensor]:
        """Return each rank's residual (numel,), not copied; empty if the reducer keeps none."""
        return self.memory("residual")

    def memory(self, name: str) -> list[Tensor]:
        """Return the vector ``name`` (numel,) of each rank's feedback memory, not copied; see micro.feedback."""
        return [state.vector(name) for state in self._states]

    def rebuild(self, layout: Layout) -> None:
        """Reorder the parameters, as DDP does after its first step."""
        self.layout = layout
        self._states = [self.reducer.rebuild(layout, [state], self.dtype, self.device) for state in self._states]

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state: everything that the next step depends on."""
        return {"ranks": [self.reducer.save(state) for state in self._states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Raises:
            ValueError: it has another world size.
        """
        self._states = [state for (state,) in self._loaded([[bucket] for bucket in saved["ranks"]])]
        self.layout = self._states[0].layout

    def load_buckets(self, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Load each rank's saved buckets, any number of them; the layout stays this simulation's.

        Raises:
            ValueError: they have another world size or method.
        """
        self._states = [
            buckets[0]
            if len(buckets) == 1 and buckets[0].layout == self.layout
            else self.reducer.rebuild(self.layout, buckets, self.dtype, self.device)
            for buckets in self._loaded(ranks)
        ]

    def _loaded(self, ranks: Sequence[Sequence[dict[str, Any]]]) -> list[list[BucketState]]:
        if len(ranks) != self.world_size:
            raise ValueError(f"state is of world_size {len(ranks)}, this simulation has {self.world_size}")
        return [[self.reducer.load(bucket, self.dtype, self.device) for bucket in buckets] for buckets in ranks]
