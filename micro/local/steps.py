"""The class LocalSteps: H local optimizer steps per rank, then one exchange of weight differences."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from micro.comm.group import GroupComm, PrivateComm
from micro.comm.ranks import Comm
from micro.drivers.arrivals import note_whole
from micro.drivers.driver import Driver
from micro.drivers.lane import CallerLane, Lane, ThreadLane
from micro.drivers.meeting import meeting
from micro.drivers.optimizer_steps import outermost
from micro.drivers.settings import compared_with
from micro.local import checks
from micro.local.buffers import BufferPolicy, Buffers
from micro.local.exchange import Exchange, next_exchange
from micro.local.fragment import Fragment
from micro.local.guard import failing_together
from micro.local.outer import MakeOuter, Outer, check_outer
from micro.local.round_stats import RoundStats
from micro.local.splitting import Fragments, check_streaming, split
from micro.local.weight_watch import WeightWatch
from micro.local.weights import FlatWeights
from micro.reducers.base import Reducer, prepare, saved_layout
from micro.values.flat import real
from micro.values.nonfinite import NonFiniteGradient

STREAMING = ("every", "delay", "mix")  # must equal those of a loaded state
UNCOUNTED = "give LocalSteps the optimizer whose step() the loop calls (of SAM the base_optimizer), "


class LocalSteps(Driver):
    """Train each rank alone for ``every`` steps, then reduce the weight differences like gradients.

        local = micro.LocalSteps(model, optimizer, reducer, every=30)

    The loop stays as it is: the exchange hangs on ``optimizer.step()``. At the start of a round the weights are equal
    on all ranks, bit for bit. After ``every`` steps each rank has moved by delta = start - now, learning rate included.
    The reducer makes the mean of all deltas, or a sparse approximation of it; the outer optimizer takes that for the
    gradient of the start, and all ranks go on from there. Deltas and residuals are in units of weights. Inner
    optimizers keep their states, each rank its own.

    With the dense reducer and `Outer()` this is LocalSGD; with ``Outer(lr=0.7, momentum=0.9, nesterov=True)`` and an
    inner AdamW, DiLoCo; with chunked top-k, 2-bit values and a decaying residual, SparseLoCo. Every reducer works.

    Args:
        model: with the same weights on all ranks. Not wrapped in DDP, unless that averages within a smaller group.
        optimizer: the inner one, of all trained parameters, or several in the order in which they step; also in the
            wrapper of Accelerate or Fabric. A step is one of the last. None may exchange anything itself.
        reducer: of the differences of weights.
        every: H, inner steps of a round; or a list with each rank's own, in proportion to which its difference counts.
        outer: makes the outer optimizer: `Outer`, or for instance ``functools.partial(torch.optim.Adam, lr=1e-3)``.
        buffers: how buffers such as batch norm statistics are synchronised at the end of a round. "mean":
            floating-point buffers are averaged, others copied from rank 0; "first": all are copied from rank 0; "own":
            each rank keeps its own.
        fragments: P fragments of about equal size, or for each fragment one or several patterns of parameter names
            (``*`` is any text, ``?`` one character, ``[ab]`` a or b), which together match each trained parameter once.
            Fragment p of P is exchanged after step (p + 1) H / P of a round.
        delay: steps between the start of an exchange and its outer step, less than ``every``. Training continues
            meanwhile; the outer step uses the differences from the start of the exchange.
        mix: weight of the new global weights when parameters are updated after an exchange, in (0, 1]: 0.5 averages
            local and global weights, 1 discards the local ones.
        written: patterns of parameters that the loop itself modifies, such as by clamping: its changes between rounds
            count as training. Embeddings with a max_norm are included automatically.
        own: parameters, of the model or not, that the optimizer trains and that are not exchanged.
        replicas: the process group that exchanges rounds; by default all ranks. If each node trains a replica with DDP,
            this rank's peers on the other nodes.
        comm: the ranks of SimulatedRanks, in place of a process group.
        momentum_with_feedback: allow an outer optimizer with momentum together with a residual.
        on_round: called with the statistics at the end of each exchange.

    Attributes:
        stats, steps_in_round: of the last exchange; inner steps since the start of the round.

    Steps skipped by a GradScaler do not count: the rank reaches the exchange one batch later, and the others wait. So
    ranks may end with different numbers of steps, as with uneven data; all must call ``finish``.

    Raises:
        ValueError: on all ranks, if a rank has invalid settings, an unsuitable model or optimizer, other settings than
            rank 0, or weights that differ from rank 0's in any bit.
        NonFiniteGradient: from ``optimizer.step()`` or ``finish()``, on all ranks, if weights have NaN or Inf at the
            end of a round and the reducer's policy is to stop; all ranks are then back at the start of the round. With
            the policy to skip, training continues from there, and a rank with non-finite weights gets a new inner
            state.
        RuntimeError: from ``optimizer.step()``, if a parameter with a gradient is not exchanged; from ``step``,
            ``finish()`` and ``state_dict()``, if weights were loaded or changed between rounds without a counted step
            or a call of `restart`: the exchange would undo the change. The other ranks then fail too.

    Source: LocalSGD: Stich, ICLR 2019, arXiv 1805.09767. DiLoCo: Douillard et al., 2023, arXiv 2311.08105. Streaming
    DiLoCo: Douillard et al., 2025, arXiv 2501.18512. SparseLoCo: Sarfi et al., 2025, arXiv 2508.15706. Differences: one
    vector per fragment instead of a collective per tensor; what was not sent stays in the residual even if the round is
    skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        reducer: Reducer,
        *,
        every: int | Sequence[int],
        outer: MakeOuter = Outer(),  # noqa: B008 - frozen
        buffers: BufferPolicy | str = "mean",
        fragments: Fragments = 1,
        delay: int = 0,
        mix: float = 1.0,
        written: str | Sequence[str] = (),
        own: Iterable[Tensor] = (),
        replicas: Any = None,
        comm: Comm | None = None,
        momentum_with_feedback: bool = False,
        on_round: Callable[[RoundStats], object] | None = None,
    ) -> None:
        ranks = partial(checks.ranks_of, replicas, comm)
        with checks.ranks_of_replica(model, comm) as within, meeting("micro.LocalSteps", ranks) as entry:
            checks.check_settings(buffers, on_round)
            steps, weight = checks.pace(every, ranks())
            check_streaming(fragments, delay, mix, steps)
            checks.check_apart(model, ranks())
            self.reducer = checks.check_method(reducer)
            self.optimizers = checks.as_optimizers(optimizer)
            kept = checks.as_own(own)
            self._parameters = checks.trained_parameters(model, self.optimizers, kept)
            self.reducer.check_parameters({name: tuple(real(p.detach()).shape) for name, p in self._parameters.items()})
            parts = split(self._parameters, fragments)
            self._fragments = [
                Fragment(number, (number + 1) * steps // len(parts), part, self.reducer, outer)
                for number, part in enumerate(parts)
            ]
            for vector in self._vectors:
                check_outer(vector.outer, vector.state, allows_both=momentum_with_feedback)
                vector.weight = weight
            self._watch = WeightWatch(model, self._parameters, written, kept)
            entry.parameters = self._parameters
            entry.settings |= {"every": every, "delay": delay, "mix": mix, "buffers": str(buffers)}
            entry.settings |= compared_with(self.reducer) | {"outer": [each.outer_settings() for each in self._vectors]}
            entry.settings["fragments"] = [list(each.layout.names) for each in self._vectors]
            within.settings = entry.settings | {"every": steps}
        note_whole(self._parameters)  # each worker's own gradients
        self.device = next(iter(self._parameters.values())).device
        self._scope, self._owns_comm = "local", comm is None
        self.comm = PrivateComm(replicas, self.device) if comm is None else comm
        if isinstance(self.comm, PrivateComm) and self._owns_comm:
            prepare(self.reducer, self.comm, self.device)
        else:
            self.reducer.prepare(self.comm, self.device)
        self.every, self.delay, self.mix, self.on_round = steps, delay, mix, on_round
        self.stats: RoundStats | None = None
        self.buffers = Buffers(model, buffers)
        self.num_steps = self.steps_in_round = 0
        self._lane: Lane | None = None  # runs exchanges concurrently with inner steps; not for simulated ranks
        if delay and isinstance(self.comm, GroupComm):
            self._lane = CallerLane(self.device) if self.device.type == "cuda" else ThreadLane(self.device)
        self._hooks = self._watch.hooks()
        self._hooks += [each.register_step_pre_hook(outermost(self._before_step)) for each in self.optimizers]
        self._hooks += [each.register_step_post_hook(self._note_part_of_step) for each in self.optimizers[:-1]]
        self._hooks.append(self.optimizers[-1].register_step_post_hook(outermost(lambda *_: self.after_step())))
        checks.IN_USE.update(self.optimizers)

    @property
    def _vectors(self) -> list[FlatWeights]:
        return [vector for fragment in self._fragments for vector in fragment.vectors]

    @property
    def _under_way(self) -> list[Exchange]:
        return [fragment.under_way for fragment in self._fragments if fragment.under_way is not None]

    @property
    def is_equal(self) -> bool:
        """Whether weights are equal on all ranks: between rounds, without an unfinished exchange."""
        return not any(fragment.has_local_progress or fragment.under_way for fragment in self._fragments)

    @property
    def num_rounds(self) -> int:
        """Number of rounds in which every fragment's exchange has finished."""
        return min(fragment.num_rounds for fragment in self._fragments)

    @property
    def ranks_meet_next(self) -> bool:
        """Whether an exchange begins or ends after the next step, which simulated ranks must then take together."""
        begins = any(fragment.phase == self.steps_in_round + 1 for fragment in self._fragments)
        return begins or any(exchange.age + 1 == self.delay for exchange in self._under_way)

    def share_start(self, first: "LocalSteps") -> None:
        """Share the global weights and the outer optimizer with ``first``, to save memory on simulated ranks.

        Call it on each of them. Between two exchanges no rank may be a step ahead of another.
        """
        for own, shared in zip(self._vectors, first._vectors, strict=True):
            own.share(shared, self.comm)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one per vector, not copied; empty if the reducer keeps none."""
        self._wait()
        return [vector.state.residual for vector in self._vectors]

    def use_manual_steps(self) -> None:
        """Let the caller call ``after_step`` after each step of the optimizer, instead of a hook.

        For simulated ranks, which step one after another and exchange together.
        """
        self._hooks.pop().remove()

    @_disable_dynamo
    def _before_step(self, *_: object) -> None:
        with failing_together(self.comm):
            self._watch.check_step(self.optimizers)
            self._watch.check(self._fragments)

    def _check(self) -> None:
        """Raise RuntimeError if weights changed without a counted step, unless a step is about to be counted."""
        with failing_together(self.comm):
            self._watch.check(self._fragments, UNCOUNTED)

    @_disable_dynamo
    def _note_part_of_step(self, *_: object) -> None:
        """Record a step of an optimizer before the last, as the last may step less often or be skipped."""
        for fragment in self._fragments:
            fragment.has_local_progress = True

    @_disable_dynamo  # otherwise compiling the step would compile the exchange
    def after_step(self) -> None:
        """Count a step, finish the exchanges that are due and begin others; called by the optimizer's hook."""
        self.num_steps += 1
        step = self.steps_in_round + 1
        self.steps_in_round = step % self.every
        for fragment in self._fragments:
            fragment.advance()
        for fragment in self._fragments:
            if fragment.under_way is not None and fragment.under_way.age == self.delay:
                self._end(fragment, self.mix)
        for fragment in self._fragments:
            if fragment.phase == step:
                place = self._position(fragment.number)
                self._begin(fragment, partial(next_exchange, place, self.comm, self.device), self._lane)
                if not self.delay:
                    self._end(fragment, self.mix)

    def finish(self) -> None:
        """Finish all exchanges, and exchange what changed since; then weights are equal on all ranks.

        Call it on all ranks; it returns when all have. Ranks may have taken different numbers of steps: a rank that has
        finished joins the exchanges of the others, usually with a difference of zero. The mean is still over all ranks.
        """
        self._check()
        ages = {fragment: each.age for fragment in self._fragments if (each := fragment.under_way) is not None}
        for fragment in sorted(ages, key=lambda fragment: -ages[fragment]):
            self._end(fragment, self.mix)
        while True:
            with failing_together(self.comm):
                number = next_exchange(self._position(-1), self.comm, self.device)
            if number is None:
                break
            self._begin(self._fragments[number], lambda: None, None)
            self._end(self._fragments[number], 1.0)
        self.steps_in_round = 0

    def _position(self, number: int) -> list[int]:
        """Return this rank's position at the exchange of a fragment, for ``next_exchange``."""
        ended, moved = zip(*((each.num_rounds, int(each.has_local_progress)) for each in self._fragments), strict=True)
        return [number, *ended, *moved]

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Use the global weights of the last exchanges, equal on all ranks, inside this context, to evaluate.

        Other weights, such as averages, may be loaded inside it. On exit the parameters are restored.
        """
        self._check()
        kept = {v: v.own_weights() for each in self._fragments if each.has_local_progress for v in each.vectors}
        for vector in kept:
            vector.mix(1.0)
        self._watch.lends = True
        try:
            yield
        finally:
            self._watch.lends = False
            for vector in self._vectors:
                vector.write(kept.get(vector) or vector.layout.views(vector.start))

    def restart(self) -> None:
        """Start a round from the current weights, on all ranks; the reducer's state is kept.

        The result of an unfinished exchange is dropped.

        Raises:
            ValueError: the weights differ between ranks.
        """
        self._wait()
        with meeting("LocalSteps.restart", lambda: self.comm) as entry:
            self._watch.check_lent()
            entry.parameters = self._parameters
        for fragment in self._fragments:
            fragment.restart()
        self.buffers.kept = self.buffers.copies()
        self._watch.forget_load()
        self.steps_in_round = 0

    def _wait(self) -> None:
        for exchange in self._under_way:
            with suppress(NonFiniteGradient):
                exchange.result()

    def _begin(self, fragment: Fragment, agree: Callable[[], object], lane: Lane | None) -> None:
        """Compute this rank's weight differences and reduce them, now or on a lane."""
        started = time.perf_counter()
        with failing_together(self.comm):
            exchange = fragment.begin_exchange(self.buffers.copies() if fragment is self._fragments[-1] else {})
        reduce = partial(exchange.reduce, agree, self.reducer, self.comm, self.buffers.policy)
        exchange.start(failing_together(self.comm)(partial(reduce, keeps_own=lane is not None)), lane)
        exchange.exposed_s = time.perf_counter() - started

    def _end(self, fragment: Fragment, mix: float) -> None:
        """Wait for a fragment's exchange, and take the outer step."""
        started = time.perf_counter()
        exchange, fragment.under_way = fragment.under_way, None
        assert exchange is not None
        fragment.num_rounds += 1
        try:
            stats = exchange.result()
        except NonFiniteGradient:
            self._go_back()
            raise
        with failing_together(self.comm):
            if stats.skipped:
                self._go_back()
            else:
                fragment.step(mix)
                if exchange.buffers:
                    self.buffers.take(exchange.buffers)
        self.stats = replace(stats, exposed_s=exchange.exposed_s + time.perf_counter() - started)
        if self.on_round is not None:
            self.on_round(self.stats)

    def _go_back(self) -> None:
        """Reset to the global weights; a rank with non-finite weights also resets its inner state."""
        if not all(vector.is_finite() for vector in self._vectors):
            for optimizer in self.optimizers:
                optimizer.state.clear()
        for fragment in self._fragments:
            fragment.go_back()
        self.buffers.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: global weights, residuals, outer optimizer, step in the round; save one per rank.

        In the middle of a round it includes this rank's weights. It waits for an unfinished exchange and saves its
        update with the step at which it is due. Save the inner optimizer and the model's buffers separately. The state
        is plain data and tensors, for ``torch.load(weights_only=True)``.
        """
        self._check()
        return {
            **self._header(self.num_steps),
            **{name: getattr(self, name) for name in STREAMING},
            "num_rounds": self.num_rounds,
            "steps_in_round": self.steps_in_round,
            "fragments": [fragment.save() for fragment in self._fragments],
            "buckets": [
                v.save(has_local_progress=each.has_local_progress) for each in self._fragments for v in each.vectors
            ],
            "buffers": {name: kept.clone() for name, kept in self.buffers.kept.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on the same rank, and set the parameters; also in the middle of a round.

        Raises:
            ValueError: rank, world size, method, parameters, fragments, ``every``, ``delay`` or ``mix`` differ.
        """
        self.check_state(saved)
        for name in STREAMING:
            if saved[name] != (own := getattr(self, name)):
                raise ValueError(f"state was saved with {name}={saved[name]}, this has {name}={own}: use the same")
        if [saved_layout(bucket) for bucket in saved["buckets"]] != [vector.layout for vector in self._vectors]:
            raise ValueError("state is of other parameters or fragments than these: use the model that saved it")
        self._wait()  # an unfinished exchange would use the loaded state
        vectors = iter(saved["buckets"])
        for fragment, place in zip(self._fragments, saved["fragments"], strict=True):
            fragment.load(place, [next(vectors) for _ in fragment.vectors])
        self.buffers.kept = {name: kept.to(self.device) for name, kept in saved["buffers"].items()}
        self.num_steps, self.steps_in_round = saved["step"], saved["steps_in_round"]
        self._watch.forget_load()

    def close(self) -> None:
        """Detach from the optimizer: its steps no longer exchange. The model keeps this rank's weights."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self.optimizers:
            checks.IN_USE.discard(optimizer)
        if self._lane is not None:
            self._lane.close()
        if self._owns_comm and isinstance(self.comm, PrivateComm):
            self.comm.close()
