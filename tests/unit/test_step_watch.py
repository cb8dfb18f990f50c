"""An optimizer's step with gradients that nothing averaged is refused, by name; loops that are right are not."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.warn import warn
from tests.small_models import backward, batch, chain, wrapped

pytestmark = pytest.mark.usefixtures("one_rank")
SPARSE = micro.SparseReducer(micro.TopK(), density=0.5)
DENSE = micro.DenseReducer()


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def notes(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in caught]


@pytest.fixture(params=[0, 2, 22])
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[DistributedDataParallel, torch.optim.Optimizer]]:
    """Yield a model after so many steps, and its optimizer."""
    model = wrapped(chain(), find_unused_parameters=True)
    with micro.attach(model, SPARSE):
        optimizer = sgd(model)
        train(model, optimizer, request.param)
        optimizer.zero_grad()
        yield model, optimizer


def test_a_step_after_a_forgotten_no_sync_is_refused_and_zeros_are_not(trained: Any) -> None:
    model, optimizer = trained
    with model.no_sync():
        backward(model, 0)
    with pytest.raises(ValueError, match="nothing averaged"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    train(model, optimizer)


def test_a_step_after_a_forward_of_the_inner_model_is_refused(trained: Any) -> None:
    model, optimizer = trained
    backward(model.module, 0)
    with pytest.raises(ValueError, match="nothing averaged"):
        optimizer.step()


def replace(module: nn.Module) -> None:
    module[2] = nn.Linear(8, 2)  # type: ignore[operator]


def add(module: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(module[2], "weight", Scale())  # type: ignore[index]


def cast(module: nn.Module) -> None:
    module[2].double()  # type: ignore[index]
    module.insert(2, Double())  # type: ignore[operator]


def assign(module: nn.Module) -> None:
    module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)


def remove(module: nn.Module) -> None:
    module[2].bias = None  # type: ignore[index]


def tie(module: nn.Module) -> None:
    module[2].bias = nn.Parameter(torch.zeros(2))  # type: ignore[index]
    module[2].weight = module[2].weight


def unfreeze(module: nn.Module) -> None:
    module.requires_grad_(True)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


CHANGES = [replace, add, cast, assign, remove, tie, unfreeze]


def to_change(change: Callable[[nn.Module], None]) -> DistributedDataParallel:
    net = chain()
    if change is unfreeze:
        net[2].bias.requires_grad_(False)  # type: ignore[index]
    return wrapped(net, find_unused_parameters=True)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_after_it_was_wrapped_is_refused(change: Callable[[nn.Module], None]) -> None:
    model = to_change(change)
    backward(model, 0)
    change(model.module)
    with pytest.raises(ValueError, match="after the model was wrapped"):
        micro.attach(model, DENSE)
    assert not model._forward_hooks
    micro.attach(wrapped(model.module, find_unused_parameters=True), DENSE).close()


@pytest.mark.parametrize("change", [each for each in CHANGES if each not in (remove, cast)])  # DDP refuses cast
@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_that_no_bucket_holds_is_refused(change: Callable[[nn.Module], None], steps: int) -> None:
    model = to_change(change)
    with micro.attach(model, SPARSE):
        train(model, sgd(model), steps)
        change(model.module)
        optimizer = sgd(model)
        with pytest.raises(ValueError, match=r"'[023]\."):
            train(model, optimizer, 2)


def test_frozen_and_ignored_parameters_stay_legal() -> None:
    net = chain()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.bias"])
    model = wrapped(net, find_unused_parameters=True)
    net[0].requires_grad_(False)  # type: ignore[index]
    with micro.attach(model, SPARSE):
        optimizer = sgd(model)
        assert notes(lambda: train(model, optimizer, 2)) == []
        net[0].requires_grad_(True)  # type: ignore[index]
        assert notes(lambda: train(model, optimizer, 2)) == []


def test_a_wrapper_inside_another_is_refused() -> None:
    inner = wrapped(chain())
    outer = wrapped(inner)
    for model in (inner, outer):
        with pytest.raises(ValueError, match="wrap it once"):
            micro.attach(model, DENSE)


def test_an_optimizer_that_steps_in_the_middle_of_a_backward_is_refused() -> None:
    model = wrapped(chain())
    with micro.attach(model, DENSE):
        for parameter in model.parameters():
            one = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())  # type: ignore[misc]
        with pytest.raises(ValueError, match="nothing averaged"):
            backward(model, 0)


def twice(model: nn.Module) -> None:
    loss = model(batch(0)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def regularised(model: nn.Module) -> None:
    backward(model, 0)
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("losses", [twice, regularised])
def test_what_is_added_to_an_average_is_noted_once(losses: Callable[[nn.Module], None], static_graph: bool) -> None:
    model = wrapped(chain(), static_graph=static_graph)

    def loop() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            losses(model)
            optimizer.step()

    with micro.attach(model, DENSE):
        optimizer = sgd(model)
        (said,) = notes(loop)
        assert "'0.weight'" in said


def log_by_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer)
    optimizer.zero_grad()
    backward(model, 1)
    torch.autograd.grad(model(batch(1)).sum(), list(model.parameters()))
    optimizer.step()


def two_reduced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model, 0)
    backward(model, 1)
    optimizer.step()


def clip_and_mask(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * (torch.rand_like(parameter) > 0.5)  # type: ignore[operator]
    optimizer.step()


def unscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(model(batch(0)).square().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def closure(model: nn.Module, _: torch.optim.Optimizer) -> None:
    def loss() -> Tensor:
        lbfgs.zero_grad()
        found: Tensor = model(batch(0)).square().sum()
        found.backward()
        return found

    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    lbfgs.step(loss)
    lbfgs.step(closure=loss)


def zero(model: nn.Module, _: torch.optim.Optimizer) -> None:
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1), 2)


def several(model: nn.Module, _: torch.optim.Optimizer) -> None:
    first, *others = model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.Adam(others)]
    for step in range(2):
        backward(model, step)
        for each in optimizers:
            each.step()
            each.zero_grad()


def with_logging_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    seen: list[float] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(float(grad.norm())))
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.norm())))  # type: ignore[arg-type]
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(0.0))
    train(model, optimizer, 2)
    handle.remove()


def no_gradient(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


LEGAL = [log_by_autograd, two_reduced, clip_and_mask, unscale, closure, zero, several, with_logging_hooks, no_gradient]


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("loop", LEGAL)
def test_a_correct_loop_gets_no_warning(loop: Callable[..., None], static_graph: bool) -> None:
    model = wrapped(chain(), static_graph=static_graph)
    with micro.attach(model, DENSE):
        optimizer = sgd(model)
        assert notes(lambda: [loop(model, optimizer) for _ in range(2)]) == []


@pytest.mark.parametrize("is_attached", [False, True])
def test_two_networks_that_train_against_each_other_get_no_warning(is_attached: bool) -> None:
    generator, critic = wrapped(nn.Linear(6, 6)), wrapped(chain())
    two = micro.attach(critic, DENSE) if is_attached else nullcontext()

    def loop() -> None:
        for step in range(3):
            both[1].zero_grad()
            (critic(generator(batch(step)).detach()).sum() - critic(batch(step)).sum()).backward()
            both[1].step()
            both[0].zero_grad()
            with two.paused() if isinstance(two, micro.Attachment) else nullcontext():
                critic(generator(batch(step))).sum().backward()
            both[0].step()

    with micro.attach(generator, DENSE), two:
        both = sgd(generator), sgd(critic)
        assert notes(loop) == []
        joint = sgd(generator, critic)  # one optimizer of an attached and a plain model
        joint.zero_grad()
        critic(generator(batch(0))).sum().backward()
        assert notes(joint.step) == []


def test_adapters_alone_get_no_warning() -> None:
    net = chain().requires_grad_(False)
    add(net)
    model = wrapped(net)
    with micro.attach(model, DENSE):
        assert notes(lambda: train(model, sgd(model), 3)) == []


@pytest.mark.parametrize("wraps", [True, False])
def test_parameters_outside_of_the_model_are_noted_once(wraps: bool) -> None:
    model, head = wrapped(nn.Linear(6, 6)), wrapped(chain()) if wraps else chain()
    with micro.attach(model, DENSE):
        optimizer = sgd(model, head)

        def loop() -> None:
            for step in range(3):
                optimizer.zero_grad()
                head(model(batch(step))).sum().backward()
                optimizer.step()

        assert ["nn.ModuleList" in each for each in notes(loop)] == [True] * (not wraps)


def test_a_copy_of_an_attached_model_is_none_of_it() -> None:
    model = wrapped(chain())
    with micro.attach(model, DENSE):
        train(model, sgd(model), 2)
        other = copy.deepcopy(model.module)
        backward(other, 0)
        assert notes(sgd(other).step) == []


def test_a_warning_points_to_the_line_of_the_caller() -> None:
    with pytest.warns(UserWarning, match="here") as caught:
        torch.autograd.graph.saved_tensors_hooks(warn, warn).pack_hook("here")
    assert [each.filename for each in caught] == [__file__]
