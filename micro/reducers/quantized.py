"""The reducer quantized: sends all values with a codec (fp16, int8, QSGD) and no indices; also for density 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs.base import Codec
from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.exchanges.averaging import gathered_calls, mean_calls, mean_encoded_, mean_gathered_, message_bytes
from micro.exchanges.base import Transport, Wire
from micro.feedback.base import Feedback
from micro.feedback.residual import ErrorFeedback
from micro.kernels import preparing
from micro.parts import as_part
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.base import BucketState, Reducer
from micro.reducers.outcome import Outcome, checked, cut_, write_
from micro.reducers.stats import Start, stats_of
from micro.values.finite import Finite, FirstBad, Policy, check_policy, is_finite_by, is_zero, negated
from micro.values.flat import Layout
from micro.values.sparse import AllLeaving, AllValues, Overlap, SparseValues, Step

Observe = Callable[[Tensor, Step, Sequence[SparseValues] | None], None]
"""Learns what an update became; see `Selector.observe`."""


def _learn_nothing(update: Tensor, step: Step, parts: Sequence[SparseValues] | None) -> None:
    """Learn nothing."""


@dataclass(frozen=True, slots=True)
class Quantized(Reducer):
    """The mean of all values, which travel in fewer bits; what that rounds is fed back.

    Args:
        codec: the form of the values on the wire. With Raw the accumulators are all-reduced as they are.
        to_all: each rank sends its values to all others, as QSGD and TernGrad are published: their mean is not rounded
            again, for (world_size - 1) / 2 times the bytes. Otherwise each rank averages a part of the vector and sends
            its mean to all.
        feedback: what becomes of what was not sent; ErrorFeedback by default.
        nonfinite: 'stop' raises on all ranks when a gradient or the update holds NaN or Inf, 'skip' makes the update of
            that step zero.
        seed: for codecs that round at random.

    Raises:
        ValueError: codec and feedback do not go together, or ``to_all`` with Raw, which is added up on its way.
    """

    codec: Codec
    to_all: bool = False
    feedback: Feedback = field(default_factory=ErrorFeedback)
    nonfinite: Policy = "stop"
    seed: int = 0
    name: ClassVar[str] = "quantized"

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", as_part(Codec, self.codec))
        object.__setattr__(self, "feedback", as_part(Feedback, self.feedback))
        check_policy(self.nonfinite)
        if self.to_all and self.codec.lossless:
            raise ValueError(f"to_all is for codecs that round, {self.codec.name} is added up on its way: leave it out")
        check_codec(self.codec, self.feedback)

    @property
    def rule_name(self) -> str | None:
        """Which published behaviour codec or feedback follow, or None where there is only one."""
        rules = [part.rule_name for part in (self.feedback, self.codec)]
        return "+".join(dict.fromkeys(rule for rule in rules if rule)) or None

    @property
    def full_name(self) -> str:
        """The name, and the codec's."""
        return f"{self.name} {self.codec.full_name}"

    @property
    def method(self) -> str:
        """The codec and its rule; see Reducer."""
        return self.full_name + (f" ({self.rule_name})" if self.rule_name else "")

    def prepare(self, comm: Comm, device: torch.device) -> None:
        """Compile what a step runs, before the first one: ranks that compile in it make the others wait."""
        preparing.prepare(device)

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state with nothing kept."""
        return BucketState(layout, 0, self.feedback.start(layout.numel, dtype, device))

    def volume(self, bucket: Bucket) -> Volume:
        """Return what the mean of all values takes; see Reducer."""
        calls = gathered_calls if self.to_all else mean_calls
        return bucket.volume(calls(self.codec, bucket.numel, bucket.world_size, bucket.dtype), bucket.numel)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        return (yield from self.mean(state, grad, comm, rule=self.rule_name))

    def mean(
        self, state: BucketState, grad: Tensor, comm: Comm, *, rule: str | None, observe: Observe = _learn_nothing
    ) -> Reduction[Outcome]:
        """Do what `reduction` does, for a method whose statistics have another rule, or that learns from the update."""
        start, numel = Start.of(comm, grad.device), grad.numel()
        forgotten = self.feedback.forgotten(state.memory)
        acc, bad, to_add = self._accumulate_(state, grad, comm.world_size)
        step = Step(state.step, numel, self.seed, state.layout, is_finite=is_finite_by(bad, numel))
        mean, sent, is_finite, fits, late = yield from self._send(state, acc, grad, step, comm, to_add)
        made = yield from checked(mean, forgotten, is_finite=is_finite, fits=fits, num_updated=numel)
        if made.overflow is not None:
            cut_(acc, made.overflow, comm.world_size)
        findings = made.findings(state.layout, late if bad is None else bad)
        unsent = write_(mean, grad) if mean is not grad and not findings else None
        state.step += 1

        def on_deliver() -> None:
            if isinstance(sent, AllLeaving):
                state.spare = state.residual.detach()  # which gets the memory of the rest
            if sent is not None:
                self.feedback.settle_(state.memory, sent, (), 1.0)
            if unsent is not None:
                self.keep_(state, AllValues(unsent))
            observe(grad, step, None)

        lost = made.records[0]
        stats = stats_of(start, comm, grad.device, step=step.index, numel=numel, rule=rule, forgotten=lost)
        on_drop = partial(observe, grad, step, ())
        return Outcome(stats=stats, grad=grad, findings=findings, on_deliver=on_deliver, on_drop=on_drop)

    def _accumulate_(self, state: BucketState, grad: Tensor, n: int) -> tuple[Tensor, FirstBad, Tensor | None]:
        """Add the gradient to what was kept.

        Returns:
            the accumulator (numel,); where its first sum is that is not finite; the gradient, where the pass that
            encodes has still to add it.
        """
        if not self.codec.lossless and grad.device.type == "cpu":
            acc = self.feedback.without_grad_(state.memory)
            if acc is not None:
                return acc, None, grad
        return *self.feedback.accumulate_(state.memory, grad, world_size=n), None

    def _send(
        self, state: BucketState, acc: Tensor, grad: Tensor, step: Step, comm: Comm, to_add: Tensor | None
    ) -> Reduction[tuple[Tensor, AllValues | None, Finite, Finite | None, FirstBad]]:
        """Average ``acc`` (numel,).

        The memory of the messages is kept, and with a code it and the residual's change places: after a few steps
        nothing of the vector's length is allocated but what is received.

        Returns:
            the mean (numel,), in ``grad`` where that has its dtype; what was sent of ``acc``, None where nothing is
            kept; whether all gradients were finite, and whether the mean is, where that is known; the first bad sum
            with ``to_add``.
        """
        message = _memory(state, acc)
        is_same = grad.dtype == acc.dtype
        if self.codec.lossless:
            total = state.spare = message[:-1]
            total.copy_(acc)
            message[-1] = negated(step.is_finite)
            yield AllReduce(mine=message)
            mean = torch.div(total, comm.world_size, out=grad if is_same else total)
            return mean, AllValues(acc), is_zero(message[-1]), None, None
        transport = Transport(comm=comm, step=step, overlap=Overlap.SAME, wire=Wire(self.codec))
        rest = state.spare = message[:-1] if state.residual.numel() else None
        mean = grad if is_same else torch.empty_like(acc)
        wire = _wire(state, message_bytes(acc.numel(), transport, acc.dtype), acc.device)
        average_ = mean_gathered_ if self.to_all else mean_encoded_
        found = yield from average_(acc, transport, rest=rest, mean=mean, memory=wire, grad=to_add)
        return mean, None if rest is None else AllLeaving(rest), *found


def check_codec(codec: Codec, feedback: Feedback) -> None:
    """Raise ValueError where a residual would grow."""
    if codec.diverges_with_feedback and feedback.name != "none":
        raise ValueError(f"codec {codec.name} as published makes residuals grow: set feedback=none or rule=repaired")


def _memory(state: BucketState, acc: Tensor) -> Tensor:
    """Return memory for a message (numel + 1,): that of the step before, where it has room."""
    spare, size = state.spare, acc.numel() + 1
    if spare is None or spare.dtype != acc.dtype or spare.untyped_storage().nbytes() < size * spare.element_size():
        return acc.new_empty(size)
    return spare.as_strided((size,), (1,))


def _wire(state: BucketState, num_bytes: int, device: torch.device) -> Tensor:
    """Return at least so many bytes for encoded values: those of the step before, where they are enough."""
    if state.wire is None or state.wire.numel() < num_bytes or state.wire.device != device:
        state.wire = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return state.wire
