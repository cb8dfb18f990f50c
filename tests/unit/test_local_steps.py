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
from tests.local_training import ADAM, LR, SGD, SPARSE, Inner, assert_same, backward, flat, network, on_ranks, trained
from tests.products import grid
from tests.refusals import refused as refused_in_line
from tests.saving import through_a_file
from tests.sparsifiers import TABLE, Row


def needs_gradients(row: Row) -> bool:
    """Tell whether a method refuses differences of weights."""
    return (
        "momentum" in row.name
        or getattr(getattr(innermost(row.make(0.2, 0)), "feedback", None), "name", "") == "momentum"
    )


# The public code of DEFT gives the last piece what is left, or one less, by the rounding of a difference of norms.
ROUNDED = "deft+published"
METHODS = [row for row in TABLE if not needs_gradients(row) and row.name != ROUNDED]


# --- laws -------------------------------------------------------------------------------------------------------------


@grid(row=METHODS)
def test_one_step_a_round_is_training_with_the_learning_rate_at_the_gradient(row: Row) -> None:
    """Inner SGD, outer SGD with a rate of 1: whatever the method, the steps are those of reduced gradients."""
    world_size, num_steps, reducer = row.world_size(2), 3, row.make(0.3, 0)
    model = network()
    layout = micro.Layout.of(model)
    with closing(micro.Simulation(reducer, layout, world_size, dtype=torch.float64)) as simulation:
        expected = []
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


@pytest.mark.parametrize(("every", "inner"), [(1, SGD), (1, ADAM), (3, SGD), (4, ADAM)])
def test_dense_rounds_average_the_weights(every: int, inner: Inner) -> None:
    world_size, num_steps = 3, 8
    models = [network() for _ in range(world_size)]
    optimizers = [inner(model.parameters()) for model in models]
    expected = []
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, step, rank)
            optimizer.step()
        if (step + 1) % every == 0:
            mean = torch.stack([flat(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        expected.append([flat(model) for model in models])
    found = trained(world_size, num_steps, micro.DenseReducer(), inner, every=every)
    for step in range(num_steps):
        for rank in range(world_size):
            torch.testing.assert_close(found[rank][step], expected[step][rank], rtol=1e-12, atol=1e-12)


def test_diloco_is_nesterov_on_the_mean_difference() -> None:
    world_size, every, num_rounds = 2, 3, 4
    models = [network() for _ in range(world_size)]
    optimizers = [ADAM(model.parameters()) for model in models]
    start = flat(models[0])
    velocity = torch.zeros_like(start)
    for round_ in range(num_rounds):
        for step in range(round_ * every, (round_ + 1) * every):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                backward(model, step, rank)
                optimizer.step()
        update = torch.stack([start - flat(model) for model in models]).mean(0)
        velocity = 0.9 * velocity + update
        start = start - 0.7 * (update + 0.9 * velocity)
        for model in models:
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
    outer = micro.Outer(lr=0.7, momentum=0.9, nesterov=True)
    found = trained(world_size, every * num_rounds, micro.DenseReducer(), ADAM, every=every, outer=outer)
    torch.testing.assert_close(found[0][-1], start, rtol=1e-11, atol=1e-12)


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

    def work(comm: Comm) -> tuple[Tensor, int]:
        model = models[comm.rank]
        optimizer = SGD(model.parameters())
        with micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=comm) as local:
            for step in range(4):
                for parameter in model.parameters():
                    noise = torch.Generator().manual_seed(step + 7 * comm.rank)
                    parameter.grad = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
                optimizer.step()
            assert local.stats is not None
            return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]), len(local.stats.vectors)

    found = on_ranks(3, work)
    assert all(torch.equal(found[0][0], weights) for weights, _ in found)
    assert all(num_vectors == 2 for _, num_vectors in found)


def test_a_round_says_what_it_did() -> None:
    models = [network() for _ in range(2)]
    seen: list[list[RoundStats]] = [[], []]

    def work(comm: Comm) -> None:
        optimizer = SGD(models[comm.rank].parameters())
        reducer = micro.DenseReducer()
        with micro.LocalSteps(
            models[comm.rank], optimizer, reducer, every=2, comm=comm, on_round=seen[comm.rank].append
        ) as local:
            start = flat(models[comm.rank])
            for step in range(5):
                backward(models[comm.rank], step, comm.rank)
                optimizer.step()
            local.finish()
            local.finish()  # nothing is open
            assert local.residuals()[0].numel() == 0
            assert local.num_rounds == 3
        del start

    on_ranks(2, work)
    for rounds in seen:
        assert [stats.round for stats in rounds] == [0, 1, 2]
        assert [stats.num_steps for stats in rounds] == [2, 2, 1]
        numel = flat(models[0]).numel()
        assert [stats.bytes_sent for stats in rounds] == [8.0 * numel] * 3  # a ring of two ranks, float64
        assert rounds[0].bytes_per_step == rounds[0].bytes_sent / 2
        assert 0 < rounds[0].cosine < 1
        assert rounds[0].summary.density == 1
    assert seen[0][0].mean_norm == seen[1][0].mean_norm
    assert seen[0][0].own_norm != seen[1][0].own_norm
    assert torch.equal(flat(models[0]), flat(models[1]))


# --- states -----------------------------------------------------------------------------------------------------------


@grid(
    reducer=[SPARSE, micro.SparseReducer(micro.Micro(), 0.2), micro.DenseReducer(), micro.PowerSGD(rank=1)],
    stop=[2, 3, 4],
)
def test_a_run_resumed_in_the_middle_of_a_round_goes_on_bit_for_bit(reducer: micro.Reducer, stop: int) -> None:
    world_size, num_steps, every = 2, 7, 3
    outer = micro.Outer(lr=0.9) if reducer.name != "dense" else micro.Outer(lr=0.7, momentum=0.9, nesterov=True)

    def run(saved: list[Any] | None, first: int, last: int) -> list[Any]:
        models = [network(has_norm=True) for _ in range(world_size)]

        def work(comm: Comm) -> Any:
            model = models[comm.rank]
            optimizer = ADAM(model.parameters())
            with micro.LocalSteps(model, optimizer, reducer, every=every, outer=outer, comm=comm) as local:
                if saved:
                    state = saved[comm.rank]
                    model.load_state_dict(state["model"])
                    optimizer.load_state_dict(state["optimizer"])
                    local.load_state_dict(state["local"])
                for step in range(first, last):
                    backward(model, step, comm.rank)
                    optimizer.step()
                names = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "local": local.state_dict()}
                return through_a_file(names)

        return on_ranks(world_size, work)

    whole = run(None, 0, num_steps)
    resumed = run(run(None, 0, stop), stop, num_steps)
    for one, other in zip(whole, resumed, strict=True):
        torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)
        for a, b in zip(one["local"]["buckets"], other["local"]["buckets"], strict=True):
            for key in ("memory", "start", "outer"):
                assert_same(a[key], b[key])
        assert_same(one["local"]["fragments"], other["local"]["fragments"])
        assert one["local"]["num_rounds"] == other["local"]["num_rounds"] == 2


@pytest.mark.parametrize(("policy", "is_equal"), [("mean", True), ("first", True), ("own", False)])
def test_buffers_follow_their_policy(policy: str, *, is_equal: bool) -> None:
    models = [network(has_norm=True) for _ in range(3)]
    before: dict[int, Tensor] = {}

    def work(comm: Comm) -> Tensor:
        model = models[comm.rank]
        optimizer = SGD(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: before.__setitem__(comm.rank, model.norm.running_mean.clone()))
        with micro.LocalSteps(model, optimizer, SPARSE, every=2, buffers=policy, comm=comm):
            for step in range(2):
                backward(model, step, comm.rank)
                optimizer.step()
        return model.norm.running_mean.clone()

    found = on_ranks(3, work)
    assert all(torch.equal(found[0], other) for other in found) == is_equal
    if policy != "own":
        means = torch.stack([before[rank] for rank in range(3)])
        torch.testing.assert_close(found[2], means.mean(0) if policy == "mean" else means[0])


# --- what is not finite -----------------------------------------------------------------------------------------------


@grid(policy=["stop", "skip"], value=[float("nan"), float("inf")])
def test_a_round_that_is_not_finite_ends_where_it_began(policy: str, value: float) -> None:
    models = [network(has_norm=True) for _ in range(3)]
    reducer = micro.SparseReducer(micro.TopK(), 0.2, nonfinite=policy)

    def work(comm: Comm) -> tuple[Tensor, Tensor, Tensor, str, int]:
        model = models[comm.rank]
        optimizer, message = ADAM(model.parameters()), ""
        with micro.LocalSteps(model, optimizer, reducer, every=2, comm=comm) as local:
            for step in range(4):
                backward(model, step, comm.rank)
                if step == 2 and comm.rank == 1:
                    model.a.weight.grad[2, 3] = value
                    model.norm.running_mean[0] = value
                start = flat(model) if step == 2 else torch.empty(0)
                if step == 2:
                    kept = start
                try:
                    optimizer.step()
                except micro.NonFiniteGradient as error:
                    message = str(error)
            after = flat(model)
            for step in range(4, 6):
                backward(model, step, comm.rank)
                optimizer.step()
            assert local.stats is not None
            return kept, after, flat(model), message, local.num_rounds

    for kept, after, end, message, num_rounds in (found := on_ranks(3, work)):
        assert torch.equal(kept, after)
        assert torch.isfinite(end).all()
        assert torch.equal(end, found[0][2])
        assert bool(message) == (policy == "stop")
        assert not message or "'a.weight' on rank 1" in message
        assert num_rounds == 3
    assert torch.isfinite(models[1].norm.running_mean).all()


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(world_size: int = 2, **settings: Any) -> list[str]:
    """Return what each rank raises; a setting may be a function of the rank."""

    def work(comm: Comm) -> str:
        given = {
            key: value(comm.rank) if getattr(value, "by_rank", False) else value for key, value in settings.items()
        }
        model = given.pop("model", None) or network()
        optimizer = given.pop("optimizer", None) or SGD(model.parameters())
        reducer = given.pop("reducer", SPARSE)
        with pytest.raises(ValueError, match=r".") as caught:
            micro.LocalSteps(model, optimizer, reducer, comm=comm, **{"every": 2, **given})
        return str(caught.value)

    return on_ranks(world_size, work)


def by_rank(choose: Callable[[int], Any]) -> Callable[[int], Any]:
    choose.by_rank = True  # type: ignore[attr-defined]
    return choose


def shifted(rank: int) -> nn.Module:
    model = network()
    with torch.no_grad():
        model.b.bias += rank * 1e-15
    return model


MOMENTUM = micro.Outer(lr=0.7, momentum=0.9, nesterov=True)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"every": 0}, "every must be a number of steps, at least 1, got 0"),
    "half a step": ({"every": 1.5}, "every must be a number of steps, at least 1, got 1.5"),
    "buffers": ({"buffers": "some"}, "buffers must be one of mean, first, own, got 'some'"),
    "no reducer": ({"reducer": "topk"}, "reducer must be"),
    "a model in place of the optimizer": ({"optimizer": network()}, "optimizer must be a torch.optim.Optimizer"),
    "another model's optimizer": ({"optimizer": SGD(network().parameters())}, "optimizer holds no parameter of the mo"),
    "momentum of gradients": (
        {"reducer": micro.SparseReducer(micro.TopK(), 0.2, feedback=micro.MomentumCorrection())},
        "feedback momentum needs the gradient of each step",
    ),
    "outer momentum with a residual": ({"outer": MOMENTUM}, "outer momentum and a residual both add up"),
    "Adam outside with a residual": ({"outer": partial(torch.optim.Adam, lr=0.1)}, "outer momentum and a residual"),
    "an outer rate of 0": ({"outer": partial(torch.optim.SGD, lr=0.0)}, "lr of the outer optimizer must not be 0"),
    "other settings on a rank": (
        {"every": by_rank(lambda rank: 2 + rank)},
        "rank 0 has every=2, rank 1 every=3",
    ),
    "other weights on a rank": ({"model": by_rank(shifted)}, "'b.bias' of rank 1 differs from rank 0's"),
    "a range of the first rank": (
        {"every": by_rank(lambda rank: 2 * rank)},
        "every must be a number of steps, at least 1",
    ),
    "replicas and comm": ({"replicas": object()}, "replicas and comm both say who the ranks are"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_on_all_ranks(case: str) -> None:
    settings, message = WRONG[case]
    for said in refused(**settings):
        assert message in said
        assert "\n" not in said


def test_a_parameter_that_is_unfrozen_later_ends_the_steps() -> None:
    model = network()
    model.b.requires_grad_(False)  # type: ignore[operator, union-attr]
    optimizer = SGD(model.parameters())
    micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=Comm())
    backward(model, 0, 0)
    optimizer.step()
    model.b.requires_grad_(True)  # type: ignore[operator, union-attr]
    backward(model, 1, 0)
    with pytest.raises(RuntimeError, match=r"'b.weight' was frozen when the local steps were made"):
        optimizer.step()


def several(comm: Comm, *, is_one: bool) -> Tensor:
    model = network()
    matrices, rest = [[p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False)]
    optimizers = [SGD([*matrices, *rest])] if is_one else [SGD(matrices), SGD(rest)]
    local = micro.LocalSteps(model, optimizers, SPARSE, every=2, comm=comm)
    for step in range(5):
        backward(model, step, comm.rank)
        for optimizer in optimizers:
            optimizer.step()
    local.finish()
    assert local.num_steps == 5
    return flat(model)


def test_several_optimizers_are_as_one_of_all_parameters() -> None:
    one, two = (on_ranks(2, partial(several, is_one=is_one)) for is_one in (True, False))
    assert torch.equal(one[0], one[1])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def of_other_lengths(comm: Comm, steps: tuple[int, ...], settings: dict[str, Any]) -> tuple[Tensor, int]:
    model = network()
    optimizer = SGD(model.parameters())
    local = micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=4, comm=comm, **settings)
    for step in range(steps[comm.rank]):
        backward(model, step, comm.rank)
        optimizer.step()
    local.finish()
    return flat(model), local.num_rounds


@pytest.mark.parametrize("settings", [{}, {"fragments": 2}], ids=["whole", "fragments"])
@pytest.mark.parametrize("steps", [(8, 9), (8, 10), (9, 8), (8, 15), (0, 5), (3, 21)])
def test_ranks_that_take_other_numbers_of_steps_end_with_the_same_weights(
    steps: tuple[int, ...], settings: dict[str, Any]
) -> None:
    (first, rounds), (second, others) = on_ranks(2, partial(of_other_lengths, steps=steps, settings=settings))
    assert torch.equal(first, second)
    assert rounds == others == -(-max(steps) // 4)


def test_a_rank_that_has_finished_counts_in_the_mean_as_one_that_stands_still() -> None:
    (found, _), _ = on_ranks(2, partial(of_other_lengths, steps=(4, 5), settings={}))
    (before, _), _ = on_ranks(2, partial(of_other_lengths, steps=(4, 4), settings={}))
    model = network()
    nn.utils.vector_to_parameters(before, model.parameters())
    backward(model, 4, 1)
    moved = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]) * LR
    torch.testing.assert_close(found, before - moved / 2)


def test_weights_that_change_within_a_round_are_found() -> None:
    model = network()
    optimizer = SGD(model.parameters())
    with micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=Comm()) as local:
        backward(model, 0, 0)
        optimizer.step()
        model.load_state_dict(network().state_dict())
        with pytest.raises(RuntimeError, match="weights were changed in the middle of a round"):
            optimizer.step()
        local.restart()
        assert local.steps_in_round == 0
        optimizer.step()
        optimizer.step()
        assert local.num_rounds == 1


@pytest.mark.usefixtures("one_rank")
def test_what_one_rank_alone_does_wrong_is_refused() -> None:
    model = network()
    optimizer = SGD(model.parameters())

    def make(of: Any = optimizer, **settings: Any) -> micro.LocalSteps:
        return micro.LocalSteps(model, of, SPARSE, **{"every": 1, "comm": Comm()} | settings)

    first = make()
    refused_in_line(make, "drives other local steps", "close()")
    first.close()
    backward(model, 0, 0)
    optimizer.step()
    assert first.num_rounds == 0, "closed local steps leave the optimizer alone"
    with make() as second, make(SGD(model.parameters()), every=3) as other:
        refused_in_line(lambda: other.load_state_dict(second.state_dict()), "saved with every", 1)
    sending = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    refused_in_line(lambda: make(sending), "exchanges in each step", "ZeroRedundancyOptimizer")
    for setting, value in (("lr", 0.0), ("lr", -1.0), ("momentum", 1.0)):
        refused_in_line(lambda setting=setting, value=value: micro.Outer(**{setting: value}), setting, value)  # type: ignore[misc]
    refused_in_line(lambda: micro.Outer(nesterov=True), "nesterov", 0)
    dist.destroy_process_group()
    refused_in_line(lambda: make(comm=None), "need ranks", "init_process_group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
