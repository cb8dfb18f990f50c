"""Local steps: laws that tie them to training with an exchange at every step, and brute force."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import micro
from micro.comm.ranks import Comm
from micro.local import RoundStats
from micro.reducers.wrapping import innermost
from tests.local_training import (
    ADAM,
    LR,
    NESTEROV,
    SGD,
    SPARSE,
    Run,
    assert_same,
    backward,
    flat,
    network,
    simulated,
    trained,
)
from tests.products import grid
from tests.refusals import NOTHING, refused
from tests.sparsifiers import TABLE, Row

ROUNDED = "deft+published"  # its last piece depends on how a difference of norms is rounded


def is_of_gradients(row: Row) -> bool:
    """Tell whether a method refuses differences of weights."""
    feedback = getattr(innermost(row.make(0.2, 0)), "feedback", None)
    return "momentum" in row.name or getattr(feedback, "name", "") == "momentum"


METHODS = [row for row in TABLE if not is_of_gradients(row) and row.name != ROUNDED]


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@grid(row=METHODS)
def test_one_step_a_round_is_training_with_the_learning_rate_at_the_gradient(row: Row) -> None:
    """With inner SGD, and outer SGD at a rate of 1, steps equal those of reduced gradients for every method."""
    world_size, num_steps, reducer = row.world_size(2), 3, row.make(0.3, 0)
    model, expected = network(), []
    layout = micro.Layout.of(model)
    simulation = micro.Simulation(reducer, layout, world_size, dtype=torch.float64)
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
    found = trained(world_size, num_steps, reducer, every=1)
    for seen in found:
        assert all(map(torch.equal, seen, found[0])), "weights are not the same bits on all ranks"
        for weights, reference in zip(seen, expected, strict=True):
            torch.testing.assert_close(weights, reference, rtol=1e-6, atol=1e-7)


def test_a_rank_counts_in_proportion_to_the_steps_of_its_rounds() -> None:
    """Two rounds of three ranks by brute force; where all take as many steps, a list of them changes no bit."""
    paces, weights = [4, 1, 2], flat(network())
    models = [network() for _ in paces]
    for number in range(2):
        for rank, (pace, model) in enumerate(zip(paces, models, strict=True)):
            torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())
            optimizer = SGD(model.parameters())
            for step in range(pace):
                backward(model, number * pace + step, rank)
                optimizer.step()
        weights = sum(pace * flat(model) for pace, model in zip(paces, models, strict=True)) / sum(paces)

    def work(comm: Comm, every: Any, num_steps: int) -> Tensor:
        with Run(comm, micro.DenseReducer(), every=every) as run:
            return run.train(*range(num_steps))

    for found in simulated(3, lambda comm: work(comm, paces, 2 * paces[comm.rank])):
        torch.testing.assert_close(found, weights)
    expected, found = (simulated(3, lambda comm, every=every: work(comm, every, 6)) for every in (2, [2, 2, 2]))  # type: ignore[misc]
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_few_bits_and_of_two_dtypes_are_equal_after_each_round(dtype: torch.dtype) -> None:
    def work(comm: Comm) -> Tensor:
        model, noise = network().to(dtype), torch.Generator().manual_seed(comm.rank)
        model.a.double()
        with Run(comm, model=model) as run:
            for _ in range(4):
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
                run.optimizer.step()
        return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])

    found = simulated(3, work)
    assert all(torch.equal(found[0], weights) for weights in found)


def test_a_round_says_what_it_did() -> None:
    seen: list[list[RoundStats]] = [[], []]

    def work(comm: Comm) -> int:
        with Run(comm, micro.DenseReducer(), on_round=seen[comm.rank].append) as run:
            numel = run.train(*range(5)).numel()
            run.local.finish()
            run.local.finish()  # nothing is open
        return numel

    numel, _ = simulated(2, work)
    for rounds in seen:
        assert [(stats.round, stats.num_steps) for stats in rounds] == [(0, 2), (1, 2), (2, 1)]
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

    one, two = (simulated(2, partial(work, is_one=is_one)) for is_one in (True, False))
    assert torch.equal(one[0], one[1])
    assert all(map(torch.equal, one, two))


def of_other_lengths(lengths: tuple[int, ...], **settings: Any) -> list[tuple[Tensor, int]]:
    """Return each rank's weights and number of rounds where ranks take other numbers of steps."""

    def work(comm: Comm) -> tuple[Tensor, int]:
        with Run(comm, micro.DenseReducer(), every=4, **settings) as run:
            run.train(*range(lengths[comm.rank]))
            run.local.finish()
            return run.train(), run.local.num_rounds

    return simulated(2, work)


@grid(fragments=[1, 2], lengths=[(8, 9), (9, 8), (8, 15), (0, 5), (3, 21)])
def test_ranks_that_take_other_numbers_of_steps_end_with_the_same_weights(
    fragments: int, lengths: tuple[int, ...]
) -> None:
    (first, rounds), (second, others) = of_other_lengths(lengths, fragments=fragments)
    assert torch.equal(first, second)
    assert rounds == others == -(-max(lengths) // 4)


def test_a_rank_that_has_finished_counts_in_the_mean_as_one_that_stands_still() -> None:
    (found, _), _ = of_other_lengths((4, 5))
    (before, _), _ = of_other_lengths((4, 4))
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
        with Run(comm, has_norm=True, buffers=policy) as run:
            mean = run.model.norm.running_mean
            run.train(0)
            run.optimizer.register_step_pre_hook(lambda *_: before.__setitem__(comm.rank, mean.clone()))
            run.train(1)
        return mean.clone()

    found = torch.stack(simulated(3, work))
    own = torch.stack([before[rank] for rank in range(3)])
    expected = {"mean": own.mean(0).expand(3, -1), "first": own[0].expand(3, -1), "own": own}[policy]
    torch.testing.assert_close(found, expected)
    assert policy == "own" or all(torch.equal(found[0], other) for other in found)


@grid(policy=["stop", "skip"], value=[float("nan"), float("inf")])
def test_a_round_that_is_not_finite_ends_where_it_began(policy: Literal["stop", "skip"], value: float) -> None:
    def work(comm: Comm) -> Tensor:
        with Run(comm, replace(SPARSE, nonfinite=policy), ADAM, has_norm=True) as run:
            start, mean = run.train(0, 1), run.model.norm.running_mean
            backward(run.model, 2, comm.rank)
            if comm.rank == 1:
                run.model.a.weight.grad[2, 3] = mean[0] = value
            run.optimizer.step()
            stops = pytest.raises(micro.NonFiniteGradient, match=r"'a.weight' on rank 1")
            with stops if policy == "stop" else nullcontext():
                run.train(3)
            assert torch.equal(run.train(), start)
            end = run.train(4, 5)
            assert run.local.num_rounds == 3
        assert torch.isfinite(mean).all()
        return end

    found = simulated(3, work)
    assert all(torch.isfinite(end).all() and torch.equal(end, found[0]) for end in found)


# --- what is refused --------------------------------------------------------------------------------------------------


def shifted(rank: int) -> nn.Module:
    model = network()
    with torch.no_grad():
        model.b.bias += rank * 1e-15
    return model


CORRECTION = micro.SparseReducer(micro.TopK(), 0.2, feedback=micro.MomentumCorrection())
WRONG: list[tuple[Callable[[int], dict[str, Any]], str, Any]] = [  # the settings of a rank, and what all ranks say
    (lambda _: {"every": 0}, "every", 0),
    (lambda rank: {"every": 4 + rank}, "rank 0 has every=4", "rank 1 every=5"),
    (lambda rank: {"every": [4, 2 + rank]}, "rank 1", "every"),
    (lambda _: {"every": [4, 0]}, "every", [4, 0]),
    (lambda _: {"every": [4, 2, 2]}, "2 ranks", [4, 2, 2]),
    (lambda _: {"every": [4, 2], "fragments": 3}, "fragments", 3),
    (lambda rank: {"model": shifted(rank)}, "'b.bias' of rank 1 differs", NOTHING),
    (lambda _: {"buffers": "some"}, "buffers", "some"),
    (lambda _: {"reducer": "topk"}, "reducer", "topk"),
    (lambda _: {"optimizer": network()}, "optimizer must be a torch.optim.Optimizer", NOTHING),
    (lambda _: {"optimizer": SGD(network().parameters())}, "optimizer holds no parameter of the model", NOTHING),
    (lambda _: {"reducer": CORRECTION}, "feedback momentum", NOTHING),
    (lambda _: {"outer": NESTEROV}, "outer momentum and a residual", NOTHING),
    (lambda _: {"outer": partial(torch.optim.SGD, lr=0.0)}, "lr of the outer optimizer", 0),
    (lambda _: {"replicas": object()}, "replicas and comm", NOTHING),
    (lambda _: {"fragments": 0}, "fragments", 0),
    (lambda _: {"fragments": "layers"}, "fragments", "layers"),
    (lambda _: {"fragments": [["*"], ["c.*"]]}, "fragments", "c.*"),
    (lambda _: {"fragments": ["*", "b.*"]}, "fragments overlap", "b.weight"),
    (lambda _: {"fragments": ["a.*"]}, "fragments leave out", "b.bias"),
    (lambda _: {"fragments": 5, "every": 8}, "the 4 trained parameters", 5),
    (lambda _: {"delay": 4}, "delay", 4),
    (lambda _: {"mix": 0.0}, "mix", 0.0),
]


@pytest.mark.parametrize(("settings", "key", "value"), WRONG)
def test_what_does_not_fit_is_refused_on_all_ranks(
    settings: Callable[[int], dict[str, Any]], key: str, value: Any
) -> None:
    def work(comm: Comm) -> None:
        given = {"model": network(), "reducer": SPARSE, "every": 4, "comm": comm} | settings(comm.rank)
        given = {"optimizer": SGD(given["model"].parameters())} | given
        refused(lambda: micro.LocalSteps(**given), key, value)

    simulated(2, work)


def test_a_parameter_that_is_unfrozen_later_ends_the_steps() -> None:
    model = network()
    model.b.requires_grad_(False)  # type: ignore[operator, union-attr]
    with Run(Comm(), model=model) as run:
        run.train(0)
        model.b.requires_grad_(True)  # type: ignore[operator, union-attr]
        refused(lambda: run.train(1), "'b.weight' is trained now", error=RuntimeError)


def test_a_parameter_that_is_added_later_ends_the_steps_and_one_that_no_optimizer_has_does_not() -> None:
    model, other = network(), nn.Linear(2, 2).double()
    model.b.requires_grad_(False).weight.grad = torch.ones(2, 6).double()  # type: ignore[operator, union-attr]
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    with micro.LocalSteps(model, optimizer, SPARSE, every=4, comm=Comm()):
        optimizer.step()
        model.add_module("c", other)
        optimizer.add_param_group({"params": other.parameters()})
        other.weight.grad = torch.ones(2, 2).double()
        refused(optimizer.step, "'c.weight' is trained now", error=RuntimeError)


def test_a_model_may_have_parameters_without_elements() -> None:
    model = network()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    with Run(Comm(), model=model, fragments=2) as run:
        run.train(0, 1)
        assert run.local.num_rounds == 1


def test_an_optimizer_before_the_last_may_step_alone() -> None:
    """As that of a critic, or where a scaler leaves out the step of the last."""

    def work(comm: Comm) -> tuple[Tensor, int]:
        model = network()
        first, last = SGD(model.a.parameters()), SGD(model.b.parameters())  # type: ignore[union-attr]
        with micro.LocalSteps(model, [first, last], micro.DenseReducer(), every=2, comm=comm) as local:
            for optimizers in ([first, last], [first], [first, last], [first]):
                backward(model, comm.rank, comm.rank)
                for optimizer in optimizers:
                    optimizer.step()
            assert not local.is_equal
            local.finish()
            return flat(model), local.num_rounds

    (one, rounds), (other, _) = simulated(2, work)
    assert torch.equal(one, other)
    assert rounds == 2


def test_rounds_go_on_after_an_error_of_on_round() -> None:
    def raise_once(stats: Any) -> None:
        if stats.round == 0:
            raise KeyError("logger")

    with Run(Comm(), on_round=raise_once) as run:
        with pytest.raises(KeyError, match="logger"):
            run.train(0, 1)
        run.train(2, 3)
        assert run.local.num_rounds == 2


def test_restarted_steps_go_back_to_the_buffers_that_were_loaded() -> None:
    with Run(Comm(), micro.DenseReducer(nonfinite="skip"), has_norm=True) as run:
        loaded = {name: value + 5 for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(loaded)
        run.local.restart()
        backward(run.model, 0, 0)
        run.model.a.bias.grad.fill_(torch.nan)  # type: ignore[union-attr]
        run.optimizer.step()
        run.train(1)
        assert_same(dict(run.model.state_dict()), loaded)


@pytest.mark.usefixtures("one_rank")
def test_what_one_rank_alone_does_wrong_is_refused() -> None:
    model = network()
    optimizer = SGD(model.parameters())

    def make(of: Any = optimizer, **settings: Any) -> micro.LocalSteps:
        return micro.LocalSteps(model, of, SPARSE, **{"every": 1, "comm": Comm()} | settings)

    first = make()
    refused(make, "used by other local steps", "close()")
    first.close()
    optimizer.step()
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
