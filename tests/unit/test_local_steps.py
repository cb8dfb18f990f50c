"""Local steps: laws that tie them to training with an exchange at every step, and brute force."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import micro
from micro.comm import Comm
from micro.local import RoundStats
from micro.reducers.wrapping import innermost
from tests.local_training import ADAM, LR, SGD, SPARSE, Inner, backward, flat, network, on_ranks, trained
from tests.products import grid
from tests.refusals import refused
from tests.sparsifiers import TABLE, Row

NESTEROV = micro.Outer(lr=0.7, momentum=0.9, nesterov=True)
ROUNDED = "deft+published"  # its last piece depends on how a difference of norms is rounded


def is_of_gradients(row: Row) -> bool:
    """Tell whether a method refuses differences of weights."""
    feedback = getattr(innermost(row.make(0.2, 0)), "feedback", None)
    return "momentum" in row.name or getattr(feedback, "name", "") == "momentum"


METHODS = [row for row in TABLE if not is_of_gradients(row) and row.name != ROUNDED]


def take_steps(model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        backward(model, step, rank)
        optimizer.step()


# --- laws -------------------------------------------------------------------------------------------------------------


@grid(row=METHODS)
def test_one_step_a_round_is_training_with_the_learning_rate_at_the_gradient(row: Row) -> None:
    """Inner SGD, outer SGD with a rate of 1: whatever the method, the steps are those of reduced gradients."""
    world_size, num_steps, reducer = row.world_size(2), 3, row.make(0.3, 0)
    model, expected = network(), []
    layout = micro.Layout.of(model)
    with closing(micro.Simulation(reducer, layout, world_size, dtype=torch.float64)) as simulation:
        for step in range(num_steps):
            rows = torch.empty(world_size, layout.numel, dtype=torch.float64)
            for rank in range(world_size):
                backward(model, step, rank)
                rows[rank] = LR * torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            update = layout.views(simulation.step(rows).update)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter -= update[name]
            expected.append(flat(model))
    for seen in trained(world_size, num_steps, reducer, every=1):
        for weights, reference in zip(seen, expected, strict=True):
            torch.testing.assert_close(weights, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("every", "inner", "outer"),
    [
        (1, SGD, micro.Outer()),
        (1, ADAM, micro.Outer()),
        (3, SGD, micro.Outer()),
        (4, ADAM, micro.Outer()),
        (3, ADAM, NESTEROV),
    ],
)
def test_dense_rounds_are_an_outer_step_by_the_mean_difference(every: int, inner: Inner, outer: micro.Outer) -> None:
    """With the usual outer optimizer that is the mean of the weights, with Nesterov's it is DiLoCo."""
    models = [network() for _ in range(3)]
    optimizers = [inner(model.parameters()) for model in models]
    start, expected = flat(models[0]), []
    velocity = torch.zeros_like(start)
    for step in range(8):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            take_steps(model, optimizer, range(step, step + 1), rank)
        if (step + 1) % every == 0:
            update = torch.stack([start - flat(model) for model in models]).mean(0)
            velocity = outer.momentum * velocity + update
            start = start - outer.lr * (update + outer.momentum * velocity)
            for model in models:
                nn.utils.vector_to_parameters(start.clone(), model.parameters())
        expected.append(torch.stack([flat(model) for model in models]))
    found = trained(3, 8, micro.DenseReducer(), inner, every=every, outer=outer)
    for step, weights in enumerate(expected):
        torch.testing.assert_close(torch.stack([own[step] for own in found]), weights, rtol=1e-11, atol=1e-12)


@grid(row=METHODS[::5])
def test_weights_are_equal_bit_for_bit_after_each_round_and_apart_within(row: Row) -> None:
    found = trained(row.world_size(2), 4, row.make(0.2, 0), ADAM, every=2)
    equal = [all(torch.equal(found[0][step], other[step]) for other in found) for step in range(4)]
    assert equal == [False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_few_bits_and_of_two_dtypes_are_equal_after_each_round(dtype: torch.dtype) -> None:
    models = [network().to(dtype) for _ in range(3)]
    for model in models:
        model.a.double()

    def work(comm: Comm) -> Tensor:
        model = models[comm.rank]
        optimizer = SGD(model.parameters())
        with micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=comm):
            for step in range(4):
                noise = torch.Generator().manual_seed(step + 7 * comm.rank)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
                optimizer.step()
        return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])

    found = on_ranks(3, work)
    assert all(torch.equal(found[0], weights) for weights in found)


def test_a_round_says_what_it_did() -> None:
    seen: list[list[RoundStats]] = [[], []]

    def work(comm: Comm) -> int:
        model = network()
        optimizer, on_round = SGD(model.parameters()), seen[comm.rank].append
        with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2, comm=comm, on_round=on_round) as local:
            take_steps(model, optimizer, range(5), comm.rank)
            local.finish()
            local.finish()  # nothing is open
            assert local.num_rounds == 3
        return flat(model).numel()

    numel, _ = on_ranks(2, work)
    for rounds in seen:
        assert [stats.round for stats in rounds] == [0, 1, 2]
        assert [stats.num_steps for stats in rounds] == [2, 2, 1]
        assert [stats.bytes_sent for stats in rounds] == [8.0 * numel] * 3  # a ring of two ranks, float64
        assert rounds[0].bytes_per_step == rounds[0].bytes_sent / 2
        assert 0 < rounds[0].cosine < 1
        assert rounds[0].summary.density == 1
    assert seen[0][0].mean_norm == seen[1][0].mean_norm
    assert seen[0][0].own_norm != seen[1][0].own_norm


def test_several_optimizers_are_as_one_of_all_parameters() -> None:
    def work(comm: Comm, *, is_one: bool) -> Tensor:
        model = network()
        matrices, rest = [[p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False)]
        optimizers = [SGD([*matrices, *rest])] if is_one else [SGD(matrices), SGD(rest)]
        with micro.LocalSteps(model, optimizers, SPARSE, every=2, comm=comm) as local:
            for step in range(4):
                backward(model, step, comm.rank)
                for optimizer in optimizers:
                    optimizer.step()
            assert local.num_steps == 4
        return flat(model)

    one, two = (on_ranks(2, partial(work, is_one=is_one)) for is_one in (True, False))
    assert torch.equal(one[0], one[1])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def of_other_lengths(comm: Comm, lengths: tuple[int, ...], settings: dict[str, Any]) -> tuple[Tensor, int]:
    model = network()
    optimizer = SGD(model.parameters())
    local = micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=4, comm=comm, **settings)
    take_steps(model, optimizer, range(lengths[comm.rank]), comm.rank)
    local.finish()
    return flat(model), local.num_rounds


@grid(settings=[{}, {"fragments": 2}], lengths=[(8, 9), (9, 8), (8, 15), (0, 5), (3, 21)])
def test_ranks_that_take_other_numbers_of_steps_end_with_the_same_weights(
    settings: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    (first, rounds), (second, others) = on_ranks(2, partial(of_other_lengths, lengths=lengths, settings=settings))
    assert torch.equal(first, second)
    assert rounds == others == -(-max(lengths) // 4)


def test_a_rank_that_has_finished_counts_in_the_mean_as_one_that_stands_still() -> None:
    (found, _), _ = on_ranks(2, partial(of_other_lengths, lengths=(4, 5), settings={}))
    (before, _), _ = on_ranks(2, partial(of_other_lengths, lengths=(4, 4), settings={}))
    model = network()
    nn.utils.vector_to_parameters(before, model.parameters())
    backward(model, 4, 1)
    moved = LR * torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found, before - moved / 2)


# --- buffers, and what is not finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mean", "first", "own"])
def test_buffers_follow_their_policy(policy: str) -> None:
    before: dict[int, Tensor] = {}

    def work(comm: Comm) -> Tensor:
        model = network(has_norm=True)
        optimizer = SGD(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: before.__setitem__(comm.rank, model.norm.running_mean.clone()))
        with micro.LocalSteps(model, optimizer, SPARSE, every=2, buffers=policy, comm=comm):
            take_steps(model, optimizer, range(2), comm.rank)
        return model.norm.running_mean.clone()

    found = torch.stack(on_ranks(3, work))
    own = torch.stack([before[rank] for rank in range(3)])
    expected = {"mean": own.mean(0).expand(3, -1), "first": own[0].expand(3, -1), "own": own}[policy]
    torch.testing.assert_close(found, expected)
    assert policy == "own" or all(torch.equal(found[0], other) for other in found)


@grid(policy=["stop", "skip"], value=[float("nan"), float("inf")])
def test_a_round_that_is_not_finite_ends_where_it_began(policy: str, value: float) -> None:
    reducer = micro.SparseReducer(micro.TopK(), 0.2, nonfinite=policy)

    def work(comm: Comm) -> tuple[Tensor, str]:
        model = network(has_norm=True)
        optimizer, message = ADAM(model.parameters()), ""
        with micro.LocalSteps(model, optimizer, reducer, every=2, comm=comm) as local:
            take_steps(model, optimizer, range(2), comm.rank)
            start = flat(model)
            backward(model, 2, comm.rank)
            if comm.rank == 1:
                model.a.weight.grad[2, 3] = value
                model.norm.running_mean[0] = value
            optimizer.step()
            try:
                take_steps(model, optimizer, range(3, 4), comm.rank)
            except micro.NonFiniteGradient as error:
                message = str(error)
            assert torch.equal(flat(model), start)
            take_steps(model, optimizer, range(4, 6), comm.rank)
            assert local.num_rounds == 3
        assert torch.isfinite(model.norm.running_mean).all()
        return flat(model), message

    for end, message in (found := on_ranks(3, work)):
        assert torch.isfinite(end).all()
        assert torch.equal(end, found[0][0])
        assert bool(message) == (policy == "stop")
        assert not message or "'a.weight' on rank 1" in message


# --- what is refused --------------------------------------------------------------------------------------------------


def shifted(rank: int) -> nn.Module:
    model = network()
    with torch.no_grad():
        model.b.bias += rank * 1e-15
    return model


CORRECTION = micro.SparseReducer(micro.TopK(), 0.2, feedback=micro.MomentumCorrection())
WRONG: list[tuple[Callable[[int], dict[str, Any]], str]] = [  # the settings of a rank, and what all ranks say
    (lambda _: {"every": 0}, "every must be a number of steps, at least 1, got 0"),
    (lambda _: {"every": 1.5}, "every must be a number of steps, at least 1, got 1.5"),
    (lambda rank: {"every": 2 * rank}, "every must be a number of steps, at least 1"),
    (lambda rank: {"every": 2 + rank}, "rank 0 has every=2, rank 1 every=3"),
    (lambda rank: {"model": shifted(rank)}, "'b.bias' of rank 1 differs from rank 0's"),
    (lambda _: {"buffers": "some"}, "buffers must be one of mean, first, own, got 'some'"),
    (lambda _: {"reducer": "topk"}, "reducer must be"),
    (lambda _: {"optimizer": network()}, "optimizer must be a torch.optim.Optimizer"),
    (lambda _: {"optimizer": SGD(network().parameters())}, "optimizer holds no parameter of the model"),
    (lambda _: {"reducer": CORRECTION}, "feedback momentum needs the gradient of each step"),
    (lambda _: {"outer": NESTEROV}, "outer momentum and a residual both add up"),
    (lambda _: {"outer": partial(torch.optim.Adam, lr=0.1)}, "outer momentum and a residual"),
    (lambda _: {"outer": partial(torch.optim.SGD, lr=0.0)}, "lr of the outer optimizer must not be 0"),
    (lambda _: {"replicas": object()}, "replicas and comm both say who the ranks are"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_what_does_not_fit_is_refused_on_all_ranks(settings: Callable[[int], dict[str, Any]], message: str) -> None:
    def work(comm: Comm) -> None:
        given = {"model": network(), "reducer": SPARSE, "every": 2, "comm": comm} | settings(comm.rank)
        given = {"optimizer": SGD(given["model"].parameters())} | given
        refused(lambda: micro.LocalSteps(**given), message)

    on_ranks(2, work)


def test_a_parameter_that_is_unfrozen_later_ends_the_steps() -> None:
    model = network()
    model.b.requires_grad_(False)  # type: ignore[operator, union-attr]
    optimizer = SGD(model.parameters())
    micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=Comm())
    take_steps(model, optimizer, range(1), 0)
    model.b.requires_grad_(True)  # type: ignore[operator, union-attr]
    backward(model, 1, 0)
    refused(optimizer.step, "'b.weight' was frozen when the local steps were made", error=RuntimeError)


def test_weights_that_change_within_a_round_are_found() -> None:
    model = network()
    optimizer = SGD(model.parameters())
    with micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=Comm()) as local:
        take_steps(model, optimizer, range(1), 0)
        model.load_state_dict(network().state_dict())
        refused(optimizer.step, "weights were changed in the middle of a round", error=RuntimeError)
        local.restart()
        assert local.steps_in_round == 0
        optimizer.step()
        optimizer.step()
        assert local.stats is not None
        assert (local.num_rounds, local.stats.num_steps) == (1, 2)


@pytest.mark.usefixtures("one_rank")
def test_what_one_rank_alone_does_wrong_is_refused() -> None:
    model = network()
    optimizer = SGD(model.parameters())

    def make(of: Any = optimizer, **settings: Any) -> micro.LocalSteps:
        return micro.LocalSteps(model, of, SPARSE, **{"every": 1, "comm": Comm()} | settings)

    first = make()
    refused(make, "drives other local steps", "close()")
    first.close()
    take_steps(model, optimizer, range(1), 0)
    assert first.num_rounds == 0, "closed local steps leave the optimizer alone"
    with make() as second, make(SGD(model.parameters()), every=3) as other:
        refused(lambda: other.load_state_dict(second.state_dict()), "saved with every", 1)
    sending = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    refused(lambda: make(sending), "exchanges in each step", "ZeroRedundancyOptimizer")
    for setting, value in (("lr", 0.0), ("lr", -1.0), ("momentum", 1.0)):
        refused(lambda setting=setting, value=value: micro.Outer(**{setting: value}), setting, value)  # type: ignore[misc]
    refused(lambda: micro.Outer(nesterov=True), "nesterov", 0)
    dist.destroy_process_group()
    refused(lambda: make(comm=None), "need ranks", "init_process_group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
