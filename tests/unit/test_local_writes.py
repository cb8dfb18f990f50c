"""Local steps where something else than a counted step writes weights: it is movement, or refused, never undone."""

import copy
import io
import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import micro
from micro.comm.ranks import Comm
from tests.local_training import SGD, SPARSE, Run, backward, flat, network, simulated
from tests.products import grid
from tests.refusals import refused

Change = Callable[[nn.Module], object]


def other_weights() -> dict[str, Any]:
    return {name: value + 1 for name, value in network().state_dict().items()}


def load(model: nn.Module) -> None:
    model.load_state_dict(other_weights())


def load_a_part(model: nn.Module) -> None:
    model.b.load_state_dict({name: value + 1 for name, value in model.b.state_dict().items()})  # type: ignore[operator, union-attr]


def initialise(model: nn.Module) -> None:
    model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)


def replace_data(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(flat(model) + 1, model.parameters())


CHANGES: list[Change] = [load, load_a_part, initialise, replace_data]


@grid(num_steps=[0, 2], change=CHANGES)
def test_weights_changed_between_rounds_are_refused_until_a_restart(num_steps: int, change: Change) -> None:
    """At the start too. After the restart a sparse round moves as far from them as one that began with them."""
    with Run(Comm(), SPARSE) as run:
        run.train(*range(num_steps))
        change(run.model)
        begun = copy.deepcopy(run.model)
        for call in (run.optimizer.step, run.local.finish, run.local.state_dict, run.local.global_weights().__enter__):
            refused(call, "was changed since the last exchange", "restart()", error=RuntimeError)
        assert torch.equal(flat(run.model), flat(begun))
        run.local.restart()
        for residual in run.local.residuals():
            residual.zero_()
        found = run.train(0, 1)
    with Run(Comm(), SPARSE, model=begun) as run:
        assert torch.equal(run.train(0, 1), found)


@pytest.mark.parametrize("change", [load, load_a_part])
def test_a_load_within_a_round_is_refused(change: Change) -> None:
    with Run(Comm()) as run:
        run.train(0)
        change(run.model)
        for call in (run.optimizer.step, run.local.finish, run.local.state_dict):
            refused(call, "was loaded", "restart()", "global_weights()", error=RuntimeError)
        run.local.restart()
        run.train(1, 2)
        assert (run.local.num_rounds, run.local.stats.num_steps) == (1, 2)


def swap_by_load(model: nn.Module, local: micro.LocalSteps) -> None:
    own = copy.deepcopy(model.state_dict())
    load(model)
    model.load_state_dict(own)


def swap_by_copy(model: nn.Module, local: micro.LocalSteps) -> None:
    own = flat(model)
    nn.utils.vector_to_parameters(own + 1, model.parameters())
    nn.utils.vector_to_parameters(own, model.parameters())


def swap_for_global_weights(model: nn.Module, local: micro.LocalSteps) -> None:
    with local.global_weights():
        load(model)


@grid(every=[2, 3], fragments=[1, 2], swap=[swap_by_load, swap_by_copy, swap_for_global_weights])
def test_weights_that_are_swapped_for_an_evaluation_change_nothing(every: int, fragments: int, swap: Any) -> None:
    def work(comm: Comm, *, swaps: bool) -> list[Tensor]:
        seen = list[Tensor]()
        with Run(comm, every=every, fragments=fragments) as run:
            for step in range(6):
                if swaps:
                    swap(run.model, run.local)
                seen.append(run.train(step))
        return seen

    expected, found = (simulated(2, partial(work, swaps=swaps)) for swaps in (False, True))
    for own, others in zip(expected, found, strict=True):
        assert all(map(torch.equal, own, others))


def test_weights_that_are_lent_are_neither_trained_nor_saved() -> None:
    with Run(Comm()) as run:
        own = run.train(0)
        with run.local.global_weights():
            for call in (run.optimizer.step, run.local.finish, run.local.state_dict, run.local.restart):
                refused(call, "global_weights()", error=RuntimeError)
        assert torch.equal(run.train(), own)
        run.local.state_dict()


# --- writes that are movement ----------------------------------------------------------------------------------------


def embedded(**settings: Any) -> nn.Module:
    torch.manual_seed(1)
    parts = {"table": nn.Embedding(8, 4, **settings), "out": nn.Linear(4, 2)}
    return nn.Sequential(OrderedDict(parts)).double()


def descend(model: nn.Module, step: int, rank: int) -> None:
    model.zero_grad()
    drawn = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randint(8, (5,), generator=drawn)).square().sum().backward()


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


def rounds(model: nn.Module, comm: Comm, after_step: Change, **settings: Any) -> list[Tensor]:
    """Return the weights of a rank after each of six steps, three rounds of two."""
    optimizer, seen = SGD(model.parameters()), list[Tensor]()
    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2, comm=comm, **settings) as local:
        for step in range(6):
            descend(model, step, comm.rank)
            optimizer.step()
            after_step(model)
            seen.append(flat(model))
        local.finish()
        seen.append(flat(model))
    return seen


def averaged(models: list[nn.Module], after_step: Change) -> list[Tensor]:
    """Return what ``rounds`` should: weights of all ranks are averaged after every second step."""
    optimizers, seen = [SGD(model.parameters()) for model in models], list[Tensor]()
    for step in range(6):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            descend(model, step, rank)
            optimizer.step()
        if step % 2:
            mean = torch.stack([flat(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        for model in models:
            after_step(model)
        seen.append(flat(models[0]))
    return seen


@pytest.mark.parametrize(
    ("make", "after_step", "settings"),
    [
        (partial(embedded, max_norm=0.5), lambda _: None, {}),
        (embedded, clamp, {"written": "*"}),
    ],
    ids=["max_norm", "clamp"],
)
def test_what_the_loop_writes_is_movement(make: Callable[[], nn.Module], after_step: Change, settings: Any) -> None:
    found = simulated(2, lambda comm: rounds(make(), comm, after_step, **settings))
    expected = averaged([make(), make()], after_step)
    for seen, weights in zip(found[0], expected, strict=False):
        torch.testing.assert_close(seen, weights)
    assert torch.equal(found[0][-1], found[1][-1])


def test_a_clamp_that_is_not_named_is_refused_and_written_names_parameters() -> None:
    refused(lambda: rounds(embedded(), Comm(), clamp), "written=", "'table.weight'", error=RuntimeError)
    refused(lambda: rounds(embedded(), Comm(), clamp, written="c.*"), "written", "c.*")


# --- steps that are not counted --------------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation with a call for each of its two steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = SGD(self.param_groups)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base_optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """A wrapper that takes over the groups of another optimizer, and calls no Optimizer.__init__."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class HookedLookahead(Lookahead):
    """One that has torch's dictionaries of hooks, and runs none."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()  # type: ignore[assignment]


def two_calls(model: nn.Module, optimizer: Any) -> None:
    optimizer.first_step()
    backward(model, 0, 0)
    optimizer.second_step()


def by_hand(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def anew(model: nn.Module, _: Any) -> None:
    SGD(model.parameters()).step()


def replaced(_: nn.Module, optimizer: Any) -> None:
    optimizer.step = types.MethodType(lambda self: type(self).step.__wrapped__(self), optimizer)
    optimizer.step()


@pytest.mark.parametrize(("make", "step"), [(SAM, two_calls), (SGD, by_hand), (SGD, anew), (SGD, replaced)])
def test_weights_that_moved_without_a_counted_step_are_refused(make: Any, step: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    with micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=Comm()) as local:
        backward(model, 0, 0)
        step(model, optimizer)
        for call in (local.finish, local.state_dict):
            refused(call, "not by a counted step", "base_optimizer", error=RuntimeError)
        with pytest.raises(RuntimeError, match="counted"):
            type(optimizer).step(optimizer)


def test_the_optimizer_inside_of_sam_counts() -> None:
    model = network()
    optimizer = SAM(model.parameters())
    with micro.LocalSteps(model, optimizer.base_optimizer, micro.DenseReducer(), every=2, comm=Comm()) as local:
        for step in range(4):
            backward(model, step, 0)
            two_calls(model, optimizer)
        assert (local.num_steps, local.num_rounds) == (4, 2)


def with_another_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = types.MethodType(lambda self: None, optimizer)  # type: ignore[assignment]
    return optimizer


@pytest.mark.parametrize("wrap", [Lookahead, HookedLookahead, with_another_step])
def test_an_optimizer_whose_step_runs_no_hooks_is_refused(wrap: Any) -> None:
    model = network()
    optimizer = wrap(SGD(model.parameters()))
    backward(model, 0, 0)
    before, grads = flat(model), [p.grad for p in model.parameters()]
    refused(lambda: micro.LocalSteps(model, optimizer, SPARSE, every=2, comm=Comm()), "runs no hooks")
    assert torch.equal(flat(model), before)
    assert [p.grad for p in model.parameters()] == grads


def passed_on(optimizer: torch.optim.Optimizer) -> None:
    inner = optimizer.step
    optimizer.step = lambda *args, **given: inner(*args, **given)  # type: ignore[method-assign]


def needs_a_closure(optimizer: torch.optim.Optimizer) -> None:
    inner = optimizer.step
    optimizer.step = lambda closure: inner(closure)  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    "wrap", [lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), passed_on, needs_a_closure]
)
def test_a_step_on_the_instance_that_runs_hooks_counts_and_trying_it_takes_none(wrap: Any) -> None:
    def closure() -> Tensor:
        backward(model, 0, 0)
        return torch.zeros(())

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrap(optimizer)
    before = flat(model)
    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2, comm=Comm()) as local:
        assert torch.equal(flat(model), before)
        assert not optimizer.state
        optimizer.step(closure)
        assert local.num_steps == 1


class Decaying(torch.optim.SGD):
    """Its step calls that of its parent, whose hooks torch runs too."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.9)
        return super().step(closure)


def test_a_step_within_a_step_is_one() -> None:
    model = network()
    optimizer = Decaying(model.parameters(), lr=0.01)
    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2, comm=Comm()) as local:
        for step in range(4):
            backward(model, 0, step)
            optimizer.step()
        assert (local.num_steps, local.num_rounds) == (4, 2)


def test_copies_of_the_model_are_loaded_as_they_like() -> None:
    with Run(Comm()) as run:
        run.train(0)
        written = io.BytesIO()
        torch.save(run.model, written)
        written.seek(0)
        assert b"micro" not in written.getvalue()
        for other in (copy.deepcopy(run.model), torch.load(written, weights_only=False)):
            load(other)
        run.train(1)
        assert run.local.num_rounds == 1
