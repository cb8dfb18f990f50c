"""Local steps: H steps of a worker's own optimizer, then one exchange of how far the workers have moved."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from micro.checkpoints.description import describe
from micro.checkpoints.saved_state import check_header, header
from micro.comm import Comm, GroupComm
from micro.flat import real
from micro.local.agreement import check_equal, check_same_place, check_same_weights, refused_together
from micro.local.buffers import BufferPolicy, copies, exchange_, learnt_buffers
from micro.local.checks import check_method, check_outer, check_settings, check_unchanged, trained_parameters
from micro.local.fragment import Fragment
from micro.local.group import comm_of, device_of
from micro.local.movement import Movement
from micro.local.outer import MakeOuter, Outer
from micro.local.round_stats import RoundStats
from micro.nonfinite import NonFiniteGradient
from micro.reducers.base import Reducer, saved_layout
from micro.stats import StepStats

SCOPE = "local"


class LocalSteps:
    """Every worker trains by itself for ``every`` steps; then its difference of weights is reduced like a gradient.

        local = micro.LocalSteps(model, optimizer, reducer, every=30)

    The loop stays as it is: the exchange hangs on ``optimizer.step()``. At the start of a round the weights are equal
    on all ranks, bit for bit. After ``every`` steps each rank has moved by delta = start - now, in units of weights,
    with the learning rate in it; the reducer makes the mean of all deltas, or a sparse approximation of it; the outer
    optimizer takes that for the gradient of the start; and all ranks begin the next round from there. Residuals are in
    units of weights. Inner optimizers keep their states, each rank its own.

    With the dense reducer and `Outer()` this is LocalSGD; with ``Outer(lr=0.7, momentum=0.9, nesterov=True)`` and AdamW
    inside DiLoCo; with chunks, two bits and a residual that decays SparseLoCo. Any reducer goes.

    Args:
        model: with the same weights on all ranks. Not wrapped in DDP, unless that averages within a smaller group.
        optimizer: the inner one, of all trained parameters of the model. With several, the one that steps last.
        reducer: of the differences of weights.
        every: H, inner steps of a round.
        outer: makes the outer optimizer of the global weights: `Outer`, or a function such as
            ``functools.partial(torch.optim.Adam, lr=1e-3)``.
        buffers: what becomes of batch norm's statistics and the like at the end of a round. "mean": numbers with a
            fraction become their mean over ranks, others rank 0's; "first": all become rank 0's; "own": each rank keeps
            its own.
        replicas: the process group between which rounds are exchanged; by default all ranks. Where each of several
            nodes trains a replica by DDP, it is this rank's peers in the other nodes.
        comm: the ranks, in place of a process group: those of micro.SimulatedGroup are threads.
        momentum_with_feedback: let the outer optimizer have momentum though the reducer keeps what it has not sent.
        on_round: called with the statistics at the end of each round.

    A step that a GradScaler leaves out is no step: the rank comes to the exchange one batch later, and the others wait.

    Raises:
        ValueError: on all ranks, where one of them has settings out of range, a model or an optimizer that does not
            fit, other settings than rank 0, or weights that are not rank 0's to the bit.
        NonFiniteGradient: out of ``optimizer.step()``, on all ranks, where weights hold NaN or Inf at the end of a
        round
            and the reducer's policy is to stop; all ranks are back at the start of the round then. With the policy to
            skip they go on from there, and a rank whose own weights were not finite begins with a new inner state.

    Source: LocalSGD: Stich, ICLR 2019, arXiv 1805.09767. DiLoCo: Douillard et al., 2023, arXiv 2311.08105. SparseLoCo:
    Sarfi et al., 2025, arXiv 2508.15706. Differences: one vector instead of a collective for each tensor; what the
    exchange has not sent stays in the residual whatever becomes of the round.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        reducer: Reducer,
        *,
        every: int,
        outer: MakeOuter = Outer(),  # noqa: B008 - frozen
        buffers: BufferPolicy | str = "mean",
        replicas: Any = None,
        comm: Comm | None = None,
        momentum_with_feedback: bool = False,
        on_round: Callable[[RoundStats], object] | None = None,
    ) -> None:
        self.comm = comm_of(model, replicas, comm)
        device = device_of(model)
        try:
            with refused_together(self.comm, device):
                check_settings(every, buffers, on_round)
                self.reducer = check_method(reducer)
                parameters = trained_parameters(model, optimizer)
                self.reducer.check_parameters({name: tuple(real(p.detach()).shape) for name, p in parameters.items()})
            self.reducer.prepare(self.comm, device)
            with refused_together(self.comm, device):
                self._fragments = _by_dtype(parameters, self.reducer, outer)
                for fragment in self._fragments:
                    check_outer(fragment.outer, fragment.state, allows_both=momentum_with_feedback)
            self._check_together(every, buffers, parameters, device)
        except BaseException:
            if isinstance(self.comm, GroupComm) and comm is None:
                self.comm.close()
            raise
        self.every, self.outer, self.on_round = every, outer, on_round
        self._model, self._optimizer, self._parameters = model, optimizer, parameters
        self._shapes = {name: tuple(real(p.detach()).shape) for name, p in parameters.items()}
        self._device, self._policy, self._owns_comm = device, str(buffers), comm is None
        self.num_steps = self.num_rounds = 0
        self.stats: RoundStats | None = None
        self._kept_buffers = copies(model)
        self._versions: int | None = None
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def _check_together(self, every: int, buffers: str, parameters: dict[str, Tensor], device: torch.device) -> None:
        settings = {
            "every": every,
            "buffers": buffers,
            "reducer": describe(self.reducer),
            "outer": [fragment.outer_settings() for fragment in self._fragments],
            "parameters": [[name, *real(p.detach()).shape] for name, p in parameters.items()],
        }
        check_equal(settings, self.comm, device)
        check_same_weights(parameters, self.comm, device)

    @property
    def steps_in_round(self) -> int:
        """Inner steps since the weights were equal on all ranks; 0 at the start of a round."""
        return max(fragment.num_steps for fragment in self._fragments)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one per vector, not copied; empty where the reducer keeps none."""
        return [fragment.state.residual for fragment in self._fragments]

    def _before(self, *_: object) -> None:
        if self._versions is not None and self._versions != self._version():
            raise RuntimeError(
                "weights were changed in the middle of a round, by other than the optimizer: load them at the start "
                "of a round and call restart(), or use load_state_dict"
            )

    def _after(self, *_: object) -> None:
        self.num_steps += 1
        for fragment in self._fragments:
            fragment.num_steps += 1
        if self.steps_in_round == self.every:
            self._end_round()
        self._versions = self._version() if self.steps_in_round else None

    def finish(self) -> None:
        """End the round that is under way, if it has had a step, on all ranks: the weights are equal then."""
        if self.steps_in_round:
            self._end_round()
            self._versions = None

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Let the parameters be the weights of the last round's end in this context, the same on all ranks.

        For an evaluation in the middle of a round. They must not be trained there.
        """
        if not self.steps_in_round:
            yield
            return
        kept = [fragment.own_weights() for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.write(fragment.layout.views(fragment.start))
        try:
            yield
        finally:
            for fragment, weights in zip(self._fragments, kept, strict=True):
                fragment.write(weights)
            self._versions = self._version()

    def restart(self) -> None:
        """Take the weights as they are now for the start of a round, on all ranks; what was kept stays.

        Raises:
            ValueError: they are not the same on all ranks.
        """
        check_same_weights(self._parameters, self.comm, self._device)
        for fragment in self._fragments:
            fragment.begin()
        self._versions = None

    def _end_round(self) -> None:
        started = time.perf_counter()
        num_steps, fragments = self.steps_in_round, self._fragments
        check_unchanged(self._parameters, self._device, self._shapes)
        with self._failing_together():
            self.comm.begin_step()
            check_same_place({"round": self.num_rounds, "vectors": len(fragments)}, self.comm, self._device)
            vectors = self._reduce()
            movement = Movement.of(fragments)
            if any(vector.skipped for vector in vectors):
                self._go_back()
            else:
                for fragment in fragments:
                    fragment.step()
            sent = exchange_(learnt_buffers(self._model), self._policy, self.comm)
        self._kept_buffers = copies(self._model)
        self.stats = RoundStats(
            round=self.num_rounds,
            num_steps=num_steps,
            vectors=vectors,
            own_norm=movement.own,
            mean_norm=movement.mean,
            cosine=movement.cosine,
            buffer_bytes=sent,
            exchange_s=time.perf_counter() - started,
        )
        self.num_rounds += 1
        if self.on_round is not None:
            self.on_round(self.stats)

    def _reduce(self) -> tuple[StepStats, ...]:
        moved = [fragment.measure() for fragment in self._fragments]
        try:
            return self.reducer.reduce_buckets_([fragment.state for fragment in self._fragments], moved, self.comm)
        except NonFiniteGradient:
            self._go_back()
            self.num_rounds += 1
            raise

    def _go_back(self) -> None:
        """Return to the start of the round; a rank that had left the finite numbers forgets its inner state too."""
        if not all(fragment.is_finite() for fragment in self._fragments):
            self._optimizer.state.clear()
        for fragment in self._fragments:
            fragment.restart()
        for buffer, kept in zip(learnt_buffers(self._model), self._kept_buffers, strict=True):
            buffer.copy_(kept)
        self._versions = None

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """After an error of this rank alone, have the others fail too, and not wait for it."""
        try:
            yield
        except NonFiniteGradient:  # which all ranks raise
            raise
        except BaseException as error:
            if isinstance(self.comm, GroupComm) and self._owns_comm:
                self.comm.abort(error)
            raise

    def _version(self) -> int:
        return sum(parameter._version for parameter in self._parameters.values())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: global weights, residuals, outer optimizer, place in the round; save one per rank.

        In the middle of a round it holds this rank's own weights too. The inner optimizer and the model's buffers save
        themselves. Everything is plain data and tensors, which ``torch.load(weights_only=True)`` reads.
        """
        return {
            **header(step=self.num_steps, **self._identity()),
            "every": self.every,
            "num_rounds": self.num_rounds,
            "buckets": [fragment.save() for fragment in self._fragments],
            "buffers": [kept.clone() for kept in self._kept_buffers],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned on the same rank, in the middle of a round too: parameters are set.

        Raises:
            ValueError: it is of another rank, world size or method, of other parameters, or of another ``every``.
        """
        check_header(saved, **self._identity())
        if saved["every"] != self.every:
            raise ValueError(f"state was saved with every={saved['every']}, this has every={self.every}: use the same")
        own = [fragment.layout for fragment in self._fragments]
        if [saved_layout(bucket) for bucket in saved["buckets"]] != own:
            raise ValueError("state is of other parameters than the model's: use the model that saved it")
        for fragment, bucket in zip(self._fragments, saved["buckets"], strict=True):
            fragment.load(bucket)
        self._kept_buffers = [kept.to(self._device) for kept in saved["buffers"]]
        self.num_steps, self.num_rounds = saved["step"], saved["num_rounds"]
        self._versions = self._version() if self.steps_in_round else None

    def _identity(self) -> dict[str, Any]:
        return {
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
            "scope": SCOPE,
            "method": describe(self.reducer),
        }

    def close(self) -> None:
        """Let go of the optimizer: its steps exchange nothing any more. The model keeps this rank's weights."""
        for hook in self._hooks:
            hook.remove()
        if self._owns_comm and isinstance(self.comm, GroupComm):
            self.comm.close()

    def __enter__(self) -> "LocalSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _by_dtype(parameters: Mapping[str, Tensor], reducer: Reducer, outer: MakeOuter) -> list[Fragment]:
    """Return a fragment for the parameters of each dtype."""
    dtypes = {name: real(parameter.detach()).dtype for name, parameter in parameters.items()}
    return [
        Fragment({name: p for name, p in parameters.items() if dtypes[name] == dtype}, reducer, outer)
        for dtype in dict.fromkeys(dtypes.values())
    ]
