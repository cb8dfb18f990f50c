"""Backwards without a step: what waits of them, how to keep them out, and the note about those thrown away."""

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import micro
from micro.drivers.gradient_watch import DISCARDED as NOTE
from tests.small_models import batch

pytestmark = pytest.mark.usefixtures("one_rank")

Attached = tuple[DistributedDataParallel, micro.Attachment, torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def attached(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> Attached:
    model = DistributedDataParallel(network(), **settings)
    reducer = micro.SparseReducer(micro.TopK(), density=0.2, nonfinite="skip")
    return model, micro.attach(model, reducer), optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]


def loss(model: nn.Module, step: int) -> Tensor:
    value: Tensor = model(batch(step)).square().mean()
    return value


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, to_none: bool = True) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=to_none)
        loss(model, step).backward()
        optimizer.step()


def notes(work: Callable[[], object]) -> int:
    """Return how many notes ``work`` makes; any other warning fails the test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    assert {str(warning.message) for warning in caught} <= {NOTE}
    return len(caught)


def thrown_away(model: nn.Module, optimizer: torch.optim.Optimizer, *, to_none: bool = True) -> None:
    """A step, a backward for nothing, and a step."""
    train(model, optimizer, range(2), to_none=to_none)
    loss(model, 2).backward()
    train(model, optimizer, range(3, 5), to_none=to_none)


# --- what paused() does -----------------------------------------------------------------------------------------------


def test_parameters_may_be_frozen_in_the_first_backward_as_in_turns_of_a_gan() -> None:
    model, attachment, optimizer = attached(find_unused_parameters=True)
    smallest = min(model.parameters(), key=Tensor.numel)
    smallest.requires_grad_(False)
    train(model, optimizer, range(1))
    smallest.requires_grad_(True)
    assert notes(lambda: train(model, optimizer, range(1, 3))) == 0
    assert notes(lambda: thrown_away(model, optimizer)) == 1
    attachment.close()


def in_no_sync(model: DistributedDataParallel, attachment: micro.Attachment) -> AbstractContextManager[None]:
    return model.no_sync()


def in_paused(model: DistributedDataParallel, attachment: micro.Attachment) -> AbstractContextManager[None]:
    return attachment.paused()


@pytest.mark.parametrize("within", [in_no_sync, in_paused])
@pytest.mark.parametrize("views", [False, True])
def test_a_backward_kept_out_leaves_no_trace(within: Callable[..., Any], views: bool) -> None:
    model, attachment, optimizer = attached(gradient_as_bucket_view=views)
    other, _, other_optimizer = attached(gradient_as_bucket_view=views)
    train(model, optimizer, range(2))
    train(other, other_optimizer, range(2))
    before = [residual.clone() for residual in attachment.residuals()]
    stats = attachment.stats
    optimizer.zero_grad()
    with within(model, attachment):
        loss(model, 7).backward()
    for residual, kept in zip(attachment.residuals(), before, strict=True):
        assert torch.equal(residual, kept)
    assert attachment.stats == stats
    assert notes(lambda: train(model, optimizer, range(2, 5))) == 0
    train(other, other_optimizer, range(2, 5))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_a_paused_backward_are_the_ranks_own() -> None:
    model, attachment, _ = attached()
    plain = network()
    with attachment.paused():
        with attachment.paused():
            pass
        loss(model, 0).backward()
    loss(plain, 0).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert attachment.stats == ()


def test_an_error_in_a_paused_block_ends_the_pause() -> None:
    model, attachment, optimizer = attached()
    with pytest.raises(KeyError), attachment.paused():
        raise KeyError
    train(model, optimizer, range(1))
    assert attachment.summary.density < 1


def test_without_it_the_thrown_away_gradients_come_back() -> None:
    model, attachment, optimizer = attached()
    train(model, optimizer, range(2))
    before = torch.cat(attachment.residuals()).clone()
    optimizer.zero_grad()
    loss(model, 7).backward()
    optimizer.zero_grad()
    assert not torch.equal(torch.cat(attachment.residuals()), before)


# --- the note ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("views", [False, True])
def test_a_backward_thrown_away_is_noted_once(views: bool, to_none: bool) -> None:
    model, _, optimizer = attached(gradient_as_bucket_view=views)
    assert notes(lambda: thrown_away(model, optimizer, to_none=to_none)) == 1
    assert notes(lambda: thrown_away(model, optimizer, to_none=to_none)) == 0


@pytest.mark.parametrize("is_paused", [True, False])
def test_the_discriminator_in_a_generators_step(is_paused: bool) -> None:
    discriminator, attachment, optimizer = attached()
    generator = nn.Linear(3, 6)
    generator_optimizer = torch.optim.Adam(generator.parameters())

    def run() -> None:
        for step in range(4):
            noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (discriminator(batch(step)) - discriminator(generator(noise).detach())).mean().backward()
            optimizer.step()
            generator_optimizer.zero_grad()
            with attachment.paused() if is_paused else nullcontext():
                discriminator(generator(noise)).mean().backward()
            generator_optimizer.step()

    assert notes(run) == (0 if is_paused else 1)


def test_a_step_that_a_scaler_skips_is_noted() -> None:
    model, _, optimizer = attached()

    def run() -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step).backward()
            if step != 1:
                optimizer.step()

    assert notes(run) == 1


@pytest.mark.parametrize("synced", [True, False])
def test_accumulated_gradients_are_not_noted(synced: bool) -> None:
    model, _, optimizer = attached()

    def run() -> None:
        for step in range(3):
            optimizer.zero_grad()
            for part in range(3):
                with nullcontext() if synced or part == 2 else model.no_sync():
                    loss(model, 3 * step + part).backward()
            optimizer.step()

    assert notes(run) == 0


def test_a_skipped_step_that_the_optimizer_leaves_out_too_is_not_noted() -> None:
    model, attachment, optimizer = attached()

    def run() -> None:
        for step in range(4):
            optimizer.zero_grad()
            (loss(model, step) * (float("nan") if step == 2 else 1)).backward()
            if not attachment.summary.skipped:
                optimizer.step()

    assert notes(run) == 0


def write_to_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.1)


def test_updates_of_data_are_not_noted() -> None:
    model, _, _ = attached()

    def run() -> None:
        for step in range(4):
            model.zero_grad()
            loss(model, step).backward()
            write_to_data(model)

    assert notes(run) == 0


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_every_form_of_an_optimizer_counts_as_a_step(settings: dict[str, bool]) -> None:
    model, _, _ = attached()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, **settings)
    assert notes(lambda: train(model, optimizer, range(4))) == 0
    loss(model, 5).backward()
    assert notes(lambda: train(model, optimizer, range(6, 8))) == 1


def test_frozen_and_unused_parameters_make_no_note() -> None:
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    micro.attach(model, micro.SparseReducer(micro.TopK(), density=0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                next(model.parameters()).requires_grad_(False)
            loss(model, step).backward()
            optimizer.step()

    assert notes(run) == 0


def test_gradients_by_autograd_grad_are_not_noted() -> None:
    model, _, optimizer = attached()

    def run() -> None:
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            torch.autograd.grad(loss(model.module, step), list(model.parameters()))

    assert notes(run) == 0


def test_what_stops_watching_in_the_middle_of_a_step_leaves_the_step_whole() -> None:
    model, _, optimizer = attached()
    other = attached()
    train(other[0], other[2], range(1))
    handle = register_optimizer_step_post_hook(lambda *_: other[1].close())  # as a garbage collection may
    try:
        assert notes(lambda: train(model, optimizer, range(3))) == 0
    finally:
        handle.remove()


def test_a_note_that_is_made_an_error_leaves_the_model_usable() -> None:
    model, attachment, optimizer = attached()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="removed without an optimizer step"):
            thrown_away(model, optimizer)
        train(model, optimizer, range(5, 7))
    assert attachment.summary.step == 5


def test_watching_neither_stays_after_close_nor_travels_with_copies() -> None:
    model, attachment, optimizer = attached()
    train(model, optimizer, range(2))
    watched = attachment._watch._watched
    assert len(watched._backward_hooks) == 1

    def copies() -> None:
        copied = copy.deepcopy(model.module)
        assert not any(parameter._backward_hooks for parameter in copied.parameters())
        torch.save(model.module, io.BytesIO())

    assert notes(copies) == 0
    attachment.close()
    assert not watched._backward_hooks


class WithEmptyParameter(nn.Sequential):
    """A network one of whose parameters has no elements: of its gradient nothing can be seen."""

    def __init__(self) -> None:
        super().__init__(*network())  # type: ignore[misc]
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        return outputs + self.empty.sum()


def test_gradients_set_to_zero_are_noticed_beside_a_parameter_without_elements() -> None:
    model = DistributedDataParallel(WithEmptyParameter())
    micro.attach(model, micro.SparseReducer(micro.TopK(), density=0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert notes(lambda: thrown_away(model, optimizer, to_none=False)) == 1
