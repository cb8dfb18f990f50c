"""n ranks in one process, and the same code as on n processes."""

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

LONG = 2**16  # elements of a gradient for which several ranks compute at a time: to hand one over costs some 20 us


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What one simulated step gave.

    Attributes:
        update: (numel,) mean update, the same on all ranks.
        stats: one per rank, in rank order.
        residuals: (world_size, numel) copies, where requested.
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
        layout: names and shapes of the gradient; Layout.flat(numel) where there are none.
        world_size: number of ranks, at least 1.
        dtype, device: of the gradients.
        shares: whether one rank computes for all what is alike on all of them; see SimulatedRanks.
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
        """Reduce one step's ``gradients`` (world_size, numel), which are left as they are.

        Raises:
            ValueError: the shape or the dtype is not the simulation's.
            NonFiniteGradient: see Reducer.reduce_.
            RuntimeError: an error broke off an earlier step. After any error but these, load a saved state to go on.
        """
        rows = gradients.detach().clone()
        stats = self.step_(rows)
        kept = torch.stack(self.residuals()) if residuals else None
        return SimulatedStep(rows[0], stats, kept)

    def step_(self, gradients: Tensor, *, ahead: Callable[[Comm], Reduction[None]] | None = None) -> list[StepStats]:
        """Reduce one step in place: every row of ``gradients`` (world_size, numel) becomes the mean update.

        Args:
            ahead: what each rank does before its gradient is reduced; what it sends counts as of the step.
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
        except BaseException as error:  # none of the states can go on
            for state in self._states:
                state.break_off(error)
            raise

    @property
    def arrived(self) -> Arrived | None:
        """What returns where the last step sent something, (numel,) bool; None where it did so everywhere."""
        return self._states[0].latest.arrived

    def residuals(self) -> list[Tensor]:
        """Return each rank's residual (numel,), not copied; empty where the reducer keeps none."""
        return self.memory("residual")

    def memory(self, name: str) -> list[Tensor]:
        """Return what each rank's feedback keeps under ``name`` (numel,), not copied; see micro.feedback."""
        return [state.vector(name) for state in self._states]

    def rebuild(self, layout: Layout) -> None:
        """Go on with the same parameters in another order, as DDP does after its first step."""
        self.layout = layout
        self._states = [self.reducer.rebuild(layout, [state], self.dtype, self.device) for state in self._states]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {"ranks": [self.reducer.save(state) for state in self._states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned.

        Raises:
            ValueError: it is of another world size.
        """
        self._states = [state for (state,) in self._loaded([[bucket] for bucket in saved["ranks"]])]
        self.layout = self._states[0].layout

    def load_buckets(self, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Go on from each rank's saved buckets, however many they were; the layout stays this simulation's.

        Raises:
            ValueError: they are of another world size or method.
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
