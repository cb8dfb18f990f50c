"""Local steps whose fragments are exchanged in turn, during the next steps: laws and brute force."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import Comm
from micro.local.splitting import split
from tests.local_training import (
    ADAM,
    NESTEROV,
    SGD,
    SPARSE,
    Inner,
    Run,
    assert_same,
    backward,
    flat,
    network,
    simulated,
    trained,
)
from tests.saving import through_a_file

BY_NAME = ["a.*", ["b.weight", "b.bias"]]
STEPS = 11


class Reference:
    """The rounds of one fragment, spelled out: parameters of all workers side by side, the step outside."""

    def __init__(self, parameters: list[list[Tensor]], settings: dict[str, Any], phase: int) -> None:
        self.parameters, self.settings, self.phase = parameters, settings, phase
        self.start = [p.detach().clone() for p in parameters[0]]
        self.velocity = [torch.zeros_like(p) for p in self.start]
        self.due: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def after(self, step: int) -> None:
        every, outer, mix = (self.settings[key] for key in ("every", "outer", "mix"))
        if step % every == self.phase % every:
            own = [torch.stack([worker[i] for worker in self.parameters]) for i in range(len(self.start))]
            due = [start - rows.mean(0) for start, rows in zip(self.start, own, strict=True)]
            self.due[step + self.settings["delay"]] = due
        for i, update in enumerate(self.due.pop(step, [])):
            self.velocity[i] = outer.momentum * self.velocity[i] + update
            self.start[i] = self.start[i] - outer.lr * (update + outer.momentum * self.velocity[i])
            for worker in self.parameters:
                worker[i].copy_((1 - mix) * worker[i] + mix * self.start[i])


@pytest.mark.parametrize(
    ("inner", "every", "outer", "fragments", "delay", "mix"),
    [
        (SGD, 1, micro.Outer(), 1, 0, 1.0),
        (ADAM, 1, micro.Outer(), 1, 0, 1.0),
        (SGD, 3, micro.Outer(), 1, 0, 1.0),
        (ADAM, 4, micro.Outer(), 1, 0, 1.0),
        (ADAM, 3, NESTEROV, 1, 0, 1.0),
        (ADAM, 4, NESTEROV, 1, 2, 1.0),
        (ADAM, 4, NESTEROV, BY_NAME, 0, 1.0),
        (ADAM, 4, NESTEROV, BY_NAME, 1, 0.5),
        (ADAM, 4, NESTEROV, BY_NAME, 3, 0.25),
    ],
)
def test_rounds_are_the_outer_step_of_each_fragment_late_and_mixed(
    inner: Inner, every: int, outer: micro.Outer, fragments: Any, delay: int, mix: float
) -> None:
    """At once and with the usual outer optimizer that is the mean of the weights, with Nesterov's it is DiLoCo."""
    settings = {"every": every, "outer": outer, "fragments": fragments, "delay": delay, "mix": mix}
    models = [network() for _ in range(3)]
    optimizers = [inner(model.parameters()) for model in models]
    pieces = [list(model.parameters()) for model in models]
    of_each = [(0, 4)] if fragments == 1 else [(0, 2), (2, 4)]
    references = [
        Reference([p[slice(*ends)] for p in pieces], settings, (number + 1) * every // len(of_each))
        for number, ends in enumerate(of_each)
    ]
    expected = []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, step, rank)
            optimizer.step()
        for reference in references:
            reference.after(step + 1)
        expected.append(torch.stack([flat(model) for model in models]))
    found = trained(3, STEPS, micro.DenseReducer(), inner, **settings)
    for step, weights in enumerate(expected):
        torch.testing.assert_close(torch.stack([own[step] for own in found]), weights, rtol=1e-11, atol=1e-12)


def test_each_fragment_is_exchanged_at_its_own_step_and_sends_its_share() -> None:
    begun = list[tuple[int, int, float]]()

    def work(comm: Comm) -> tuple[list[bool], float]:
        with Run(comm, micro.DenseReducer(), every=6, fragments=3, delay=1) as run:
            local, due = run.local, []
            local.on_round = None if comm.rank else lambda s: begun.append((local.num_steps, s.fragment, s.bytes_sent))
            for step in range(13):
                due.append(local.ranks_meet_next)
                run.train(step)
            assert local.num_rounds == 2
            local.finish()
            return due, local.steps_in_round

    due, place = simulated(2, work)[0]
    assert due == [False] + [True] * 12  # each exchange ends with the step after the one in which it began
    assert place == 0
    assert [(step, fragment) for step, fragment, _ in begun[:6]] == [(3, 0), (5, 1), (7, 2), (9, 0), (11, 1), (13, 2)]
    assert [fragment for _, fragment, _ in begun[6:]] == [0, 1], "the last moved with the step that ended its exchange"
    sizes = [sum(p.numel() for p in part.values()) for part in split(dict(network().named_parameters()), 3)]
    assert sum(sizes) == flat(network()).numel()
    assert max(sizes) == 30, "of 50 elements 30 are in one matrix"
    assert [sent for *_, sent in begun[:3]] == [8.0 * size for size in sizes]  # a ring of two ranks, float64


def test_weights_are_equal_after_the_end_whatever_was_under_way() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        with Run(comm, SPARSE, ADAM, every=4, fragments=2, delay=3, mix=0.5) as run:
            own = run.train(*range(5))
            with run.local.global_weights():
                within = run.train()
            run.local.finish()
            return within, own, run.train()

    found = simulated(3, work)
    assert not torch.equal(found[0][1], found[1][1])
    for within, _, end in found:
        assert torch.equal(within, found[0][0])
        assert torch.equal(end, found[0][2])


STREAMING: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 2, "mix": 0.5}
AT_ONCE: dict[str, Any] = {"every": 3, "outer": micro.Outer(lr=0.9)}
KEPT = ("memory", "start", "weights", "moved", "outer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reducer", "settings"),
    [
        (SPARSE, STREAMING),
        (micro.DenseReducer(), STREAMING),
        (micro.SparseReducer(micro.Micro(), 0.2), AT_ONCE),
        (micro.DenseReducer(), AT_ONCE | {"outer": NESTEROV}),
        (micro.PowerSGD(rank=1), AT_ONCE),
    ],
)
def test_a_resumed_run_continues_bit_for_bit_also_during_an_exchange(
    reducer: micro.Reducer, settings: dict[str, Any]
) -> None:
    def states(saved: list[Any] | None, steps: range) -> list[Any]:
        def work(comm: Comm) -> Any:
            ended = list[Any]()
            with Run(comm, reducer, ADAM, has_norm=True, **settings) as run:
                run.local.on_round = lambda s: ended.append((s.fragment, s.bytes_sent))
                parts: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "local": run.local}
                for name, part in parts.items() if saved else ():
                    part.load_state_dict(saved[comm.rank][name])  # type: ignore[index]
                run.train(*steps)
                return through_a_file({name: part.state_dict() for name, part in parts.items()} | {"ended": ended})

        return simulated(2, work)

    whole = states(None, range(9))
    for stop in range(2, 8):
        begun = states(None, range(stop))
        for one, first, other in zip(whole, begun, states(begun, range(stop, 9)), strict=True):
            assert one["ended"] == first["ended"] + other["ended"]
            assert_same(one["model"], other["model"])
            for a, b in zip(one["local"]["buckets"], other["local"]["buckets"], strict=True):
                assert_same({key: a[key] for key in KEPT}, {key: b[key] for key in KEPT})


def test_what_is_not_finite_takes_all_fragments_back() -> None:
    def work(comm: Comm) -> tuple[Tensor, list[bool]]:
        skipped = list[bool]()
        with Run(comm, replace(SPARSE, nonfinite="skip"), ADAM, every=4, fragments=2, delay=1) as run:
            run.local.on_round = lambda stats: skipped.append(stats.skipped)
            run.train(0)
            backward(run.model, 1, comm.rank)
            run.model.a.weight.grad[0, 0] = float("nan") if comm.rank == 1 else 0.0
            run.optimizer.step()
            run.train(*range(2, 8))
            run.local.finish()
            return run.train(), skipped

    (one, skipped), (other, too) = simulated(2, work)
    assert any(skipped)
    assert skipped == too
    assert torch.isfinite(one).all()
    assert torch.equal(one, other)
