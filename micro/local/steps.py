"""Local steps: H steps of a worker's own optimizer, then one exchange of how far the workers have moved."""

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
from micro.drivers.attachment import Driver
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

STREAMING = ("every", "delay", "mix")  # which a saved state must have been saved with
UNCOUNTED = "give LocalSteps the optimizer whose step() the loop calls (of SAM the base_optimizer), "


class LocalSteps(Driver):
    """Every worker trains by itself for ``every`` steps; then its difference of weights is reduced like a gradient.

        local = micro.LocalSteps(model, optimizer, reducer, every=30)

    The loop stays as it is: the exchange hangs on ``optimizer.step()``. At the start of a round the weights are equal
    on all ranks, bit for bit. After ``every`` steps each rank has moved by delta = start - now, learning rate included.
    The reducer makes the mean of all deltas, or a sparse approximation of it; the outer optimizer takes that for the
    gradient of the start, and all ranks go on from there. Deltas and residuals are in units of weights. Inner
    optimizers keep their states, each rank its own.

    With the dense reducer and `Outer()` this is LocalSGD; with ``Outer(lr=0.7, momentum=0.9, nesterov=True)`` and AdamW
    inside DiLoCo; with chunks, two bits and a residual that decays SparseLoCo. Any reducer goes.

    Args:
        model: with the same weights on all ranks. Not wrapped in DDP, unless that averages within a smaller group.
        optimizer: the inner one, of all trained parameters, or several in the order in which they step; also in the
            wrapper of Accelerate or Fabric. A step is one of the last. None may exchange anything itself.
        reducer: of the differences of weights.
        every: H, inner steps of a round; or a list with each rank's own, in proportion to which its difference counts.
        outer: makes the outer optimizer: `Outer`, or for instance ``functools.partial(torch.optim.Adam, lr=1e-3)``.
        buffers: what becomes of batch norm's statistics and the like at the end of a round. "mean": numbers with a
            fraction become their mean over ranks, others rank 0's; "first": all become rank 0's; "own": each rank keeps
            its own.
        fragments: P fragments of about equal size, or for each a pattern of names of parameters or several (``*`` is
            any text, ``?`` one character, ``[ab]`` a or b), which together name each trained parameter once. Fragment p
            of P is exchanged after step (p + 1) H / P of a round.
        delay: steps from the begin of an exchange to its outer step, less than ``every``. Training goes on meanwhile;
            the outer step is by the difference of weights at the begin.
        mix: share of the new global weights in the parameters after an exchange, in (0, 1]; the rest is what they were.
        written: patterns of parameters that the loop itself writes, such as by clamping or normalising them: what it
            writes between rounds is movement too. Embeddings with a max_norm are such without being named.
        own: parameters, of the model or not, that the optimizer trains and that each rank keeps to itself.
        replicas: the process group between which rounds are exchanged; by default all ranks. Where each of several
            nodes trains a replica by DDP, it is this rank's peers in the other nodes.
        comm: the ranks, in place of a process group: those of SimulatedRanks.
        momentum_with_feedback: let the outer optimizer have momentum though the reducer keeps what it has not sent.
        on_round: called with the statistics at the end of each exchange.

    Attributes:
        stats, steps_in_round: of the last exchange; inner steps since the start of the round.

    A step that a GradScaler leaves out is no step: the rank comes to the exchange one batch later, and the others wait.
    So ranks may end with different numbers of steps, as with uneven data: see ``finish``, which all call.

    Raises:
        ValueError: on all ranks, where one of them has settings out of range, a model or an optimizer that does not
            fit, other settings than rank 0, or weights that are not rank 0's to the bit.
        NonFiniteGradient: out of ``optimizer.step()`` or ``finish()``, on all ranks, where weights hold NaN or Inf at
            the end of a round and the reducer's policy is to stop; all ranks are back at the start of the round then.
            With the policy to skip they go on from there, and a rank whose own weights were not finite begins with a
            new inner state.
        RuntimeError: out of ``optimizer.step()``, where a parameter has a gradient that nobody exchanges; out of it, of
            ``finish()`` and of ``state_dict()``, where weights were loaded or changed between rounds, and neither a
            step was counted nor `restart` called: the exchange would undo it. The other ranks fail then too.

    Source: LocalSGD: Stich, ICLR 2019, arXiv 1805.09767. DiLoCo: Douillard et al., 2023, arXiv 2311.08105. Streaming
    DiLoCo: Douillard et al., 2025, arXiv 2501.18512. SparseLoCo: Sarfi et al., 2025, arXiv 2508.15706. Differences: one
    vector of a fragment in place of a collective for each tensor; what the exchange has not sent stays in the residual
    whatever becomes of the round.
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
        self._lane: Lane | None = None  # beside which inner steps go on; simulated ranks meet in one call
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
        """Whether weights are equal on all ranks: between rounds, where no fragment is late."""
        return not any(fragment.is_apart or fragment.under_way for fragment in self._fragments)

    @property
    def num_rounds(self) -> int:
        """Rounds in which the exchange of every fragment has ended."""
        return min(fragment.num_rounds for fragment in self._fragments)

    @property
    def ranks_meet_next(self) -> bool:
        """Whether an exchange begins or ends after the next step, so that all simulated ranks must take it at once."""
        begins = any(fragment.phase == self.steps_in_round + 1 for fragment in self._fragments)
        return begins or any(exchange.age + 1 == self.delay for exchange in self._under_way)

    def share_start(self, first: "LocalSteps") -> None:
        """Have the global weights and the outer optimizer in memory once for simulated ranks, as those of ``first``.

        Each of them calls this. Between two exchanges none may be a step ahead of another.
        """
        for own, shared in zip(self._vectors, first._vectors, strict=True):
            own.share(shared, self.comm)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one per vector, not copied; empty where the reducer keeps none."""
        self._wait()
        return [vector.state.residual for vector in self._vectors]

    def count_by_hand(self) -> None:
        """Leave it to the caller to call ``after_step`` after each step of the optimizer.

        For simulated ranks: they step one after another, and meet in one call for the exchange.
        """
        self._hooks.pop().remove()

    @_disable_dynamo
    def _before_step(self, *_: object) -> None:
        with failing_together(self.comm):
            self._watch.check_step(self.optimizers)
            self._watch.check(self._fragments)

    def _check(self) -> None:
        """Look for steps that were not counted, where none is about to be."""
        with failing_together(self.comm):
            self._watch.check(self._fragments, UNCOUNTED)

    @_disable_dynamo
    def _note_part_of_step(self, *_: object) -> None:
        """Note that an optimizer before the last has moved: the last may step more seldom, or a scaler leave it out."""
        for fragment in self._fragments:
            fragment.is_apart = True

    @_disable_dynamo  # a compiled step would have the exchange compiled too
    def after_step(self) -> None:
        """Count a step of the optimizer, end the exchanges that are due and begin others; its hook calls this."""
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
                place = self._place(fragment.number)
                self._begin(fragment, partial(next_exchange, place, self.comm, self.device), self._lane)
                if not self.delay:
                    self._end(fragment, self.mix)

    def finish(self) -> None:
        """End what is under way, and exchange what has moved since; weights are equal on all ranks then.

        All ranks call this, and it returns when all have. Ranks may have taken different numbers of steps: one that has
        finished takes part in the exchanges of those that go on, with what it has moved since its own last one, as a
        rule nothing. The mean is over all ranks still.
        """
        self._check()
        ages = {fragment: each.age for fragment in self._fragments if (each := fragment.under_way) is not None}
        for fragment in sorted(ages, key=lambda fragment: -ages[fragment]):
            self._end(fragment, self.mix)
        while True:
            with failing_together(self.comm):
                number = next_exchange(self._place(-1), self.comm, self.device)
            if number is None:
                break
            self._begin(self._fragments[number], lambda: None, None)
            self._end(self._fragments[number], 1.0)
        self.steps_in_round = 0

    def _place(self, number: int) -> list[int]:
        """Return where this rank is that comes to the exchange of a fragment, as ``next_exchange`` takes it."""
        ended, moved = zip(*((each.num_rounds, int(each.is_apart)) for each in self._fragments), strict=True)
        return [number, *ended, *moved]

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Let the parameters be the weights that the last exchanges have given, the same on all ranks: to evaluate.

        Others, such as averages, may be loaded meanwhile. Afterwards the parameters are what they were.
        """
        self._check()
        kept = {v: v.own_weights() for each in self._fragments if each.is_apart for v in each.vectors}
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
        """Take the weights as they are now for the start of a round, on all ranks; what the reducer kept stays.

        What an exchange under way would have given is dropped.

        Raises:
            ValueError: they are not the same on all ranks.
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
        """Measure how far this rank has moved, and begin to reduce that: here and now, or on a lane."""
        started = time.perf_counter()
        with failing_together(self.comm):
            exchange = fragment.begin_exchange(self.buffers.copies() if fragment is self._fragments[-1] else {})
        reduce = partial(exchange.reduce, agree, self.reducer, self.comm, self.buffers.policy)
        exchange.start(failing_together(self.comm)(partial(reduce, keeps_own=lane is not None)), lane)
        exchange.exposed_s = time.perf_counter() - started

    def _end(self, fragment: Fragment, mix: float) -> None:
        """Wait for the exchange of a fragment, and take the outer step."""
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
        """Return to the global weights; a rank that had left the finite numbers forgets its inner state too."""
        if not all(vector.is_finite() for vector in self._vectors):
            for optimizer in self.optimizers:
                optimizer.state.clear()
        for fragment in self._fragments:
            fragment.go_back()
        self.buffers.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: global weights, residuals, outer optimizer, place in the round; save one per rank.

        In the middle of a round it holds this rank's own weights too. An exchange that is under way is waited for, and
        its update is saved with the step at which it is due. The inner optimizer and the model's buffers save
        themselves. Everything is plain data and tensors, which ``torch.load(weights_only=True)`` reads.
        """
        self._check()
        return {
            **self._header(self.num_steps),
            **{name: getattr(self, name) for name in STREAMING},
            "num_rounds": self.num_rounds,
            "steps_in_round": self.steps_in_round,
            "fragments": [fragment.save() for fragment in self._fragments],
            "buckets": [v.save(is_apart=each.is_apart) for each in self._fragments for v in each.vectors],
            "buffers": {name: kept.clone() for name, kept in self.buffers.kept.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned on the same rank, in the middle of a round too: parameters are set.

        Raises:
            ValueError: it is of another rank, world size or method, of other parameters or fragments, or of another
                ``every``, ``delay`` or ``mix``.
        """
        self.check_state(saved)
        for name in STREAMING:
            if saved[name] != (own := getattr(self, name)):
                raise ValueError(f"state was saved with {name}={saved[name]}, this has {name}={own}: use the same")
        if [saved_layout(bucket) for bucket in saved["buckets"]] != [vector.layout for vector in self._vectors]:
            raise ValueError("state is of other parameters or fragments than these: use the model that saved it")
        self._wait()  # what is under way would go on with the state that is loaded
        vectors = iter(saved["buckets"])
        for fragment, place in zip(self._fragments, saved["fragments"], strict=True):
            fragment.load(place, [next(vectors) for _ in fragment.vectors])
        self.buffers.kept = {name: kept.to(self.device) for name, kept in saved["buffers"].items()}
        self.num_steps, self.steps_in_round = saved["step"], saved["steps_in_round"]
        self._watch.forget_load()

    def close(self) -> None:
        """Let go of the optimizer: its steps exchange nothing any more. The model keeps this rank's weights."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self.optimizers:
            checks.IN_USE.discard(optimizer)
        if self._lane is not None:
            self._lane.close()
        if self._owns_comm and isinstance(self.comm, PrivateComm):
            self.comm.close()
