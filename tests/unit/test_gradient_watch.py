"""Loops that lose a part of an update are told so once, by what they do wrong; others are told nothing."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.drivers.gradient_watch import DISCARDED
from tests.small_models import batch

pytestmark = pytest.mark.usefixtures("one_rank")

SPARSE = micro.SparseReducer(micro.TopK(), density=0.2, nonfinite="skip")
Loop = Callable[[DistributedDataParallel, micro.Attachment, torch.optim.Optimizer], object]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def attached(reducer: micro.Reducer = SPARSE, **settings: Any) -> tuple[Any, micro.Attachment, torch.optim.Optimizer]:
    model = DistributedDataParallel(network(), **settings)
    return model, micro.attach(model, reducer), torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model: nn.Module, step: int) -> Tensor:
    value: Tensor = model(batch(step)).square().mean()
    return value


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int, to_none: bool = True) -> None:
    for step in numbers:
        optimizer.zero_grad(set_to_none=to_none)
        loss(model, step).backward()
        optimizer.step()


def notes(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in caught]


# Loops, each with how many notes it gets


def plain(model: Any, _: Any, optimizer: Any) -> None:
    steps(model, optimizer, *range(4))


def discards(model: Any, _: Any, optimizer: Any, *, to_none: bool = True) -> None:
    steps(model, optimizer, 0, 1, to_none=to_none)
    loss(model, 2).backward()
    steps(model, optimizer, 3, 4, to_none=to_none)


def discards_by_zeros(model: Any, attachment: Any, optimizer: Any) -> None:
    discards(model, attachment, optimizer, to_none=False)


def leaves_out_a_step(model: Any, _: Any, optimizer: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        if step != 1:
            optimizer.step()


def leaves_out_a_skipped_step(model: Any, attachment: Any, optimizer: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        (loss(model, step) * (float("nan") if step == 2 else 1)).backward()
        if not attachment.summary.skipped:
            optimizer.step()


def accumulates(model: Any, _: Any, optimizer: Any) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            loss(model, 3 * step + part).backward()
        optimizer.step()


def steps_by_hand(model: Any, _: Any, __: Any) -> None:
    for step in range(4):
        model.zero_grad()
        loss(model, step).backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)


def trains_a_generator(model: Any, _: Any, optimizer: Any) -> None:
    generator = nn.Linear(3, 6)
    for step in range(4):
        steps(model, optimizer, step)
        model(generator(torch.randn(4, 3))).mean().backward()


def freezes_in_turns(model: Any, _: Any, optimizer: Any) -> None:
    weight = next(model.parameters())
    for step in range(4):
        weight.requires_grad_(step % 2 == 1)
        steps(model, optimizer, step)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (plain, 0),
        (discards, 1),
        (discards_by_zeros, 1),
        (leaves_out_a_step, 1),
        (leaves_out_a_skipped_step, 0),
        (accumulates, 0),
        (steps_by_hand, 0),
        (trains_a_generator, 1),
        (freezes_in_turns, 0),
    ],
)
@pytest.mark.parametrize("views", [False, True])
def test_gradients_without_a_step_are_noted_once(loop: Loop, expected: int, views: bool) -> None:
    settings = {"gradient_as_bucket_view": views, "find_unused_parameters": loop is freezes_in_turns}
    model, attachment, optimizer = attached(**settings)
    assert notes(lambda: loop(model, attachment, optimizer)) == [DISCARDED] * expected
    assert notes(lambda: loop(model, attachment, optimizer)) == []


def drop_last_layer(model: nn.Module) -> None:
    for parameter in list(model.parameters())[-2:]:
        parameter.grad = None


def clip_to(limit: float) -> Callable[[nn.Module], object]:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), limit)


@pytest.mark.parametrize(
    ("change", "reducer", "words"),
    [
        (clip_to(1e-3), SPARSE, ("clip= of micro.attach",)),
        (drop_last_layer, SPARSE, ("'2.weight'", "dense=")),
        (clip_to(1e3), SPARSE, ()),
        (clip_to(1e-3), micro.DenseReducer(), ()),
    ],
    ids=["clipped", "removed", "a limit that is never reached", "a mean that keeps nothing"],
)
def test_what_is_taken_from_an_update_is_noted_once_with_the_remedy(
    change: Callable[[nn.Module], object], reducer: micro.Reducer, words: tuple[str, ...]
) -> None:
    model, _, optimizer = attached(reducer)

    def loop() -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step).backward()
            change(model)
            optimizer.step()

    said = notes(loop)
    assert len(said) == (1 if words else 0)
    assert all(word in said[0] for word in words)


@contextmanager
def nested(attachment: micro.Attachment) -> Iterator[None]:
    with attachment.paused():
        with attachment.paused():
            pass
        yield


@pytest.mark.parametrize("within", [lambda model, _: model.no_sync(), lambda _, attachment: nested(attachment)])
def test_a_backward_kept_out_has_its_own_gradients_and_leaves_no_trace(
    within: Callable[..., AbstractContextManager[None]],
) -> None:
    (model, attachment, optimizer), (other, _, other_optimizer) = attached(), attached()
    steps(model, optimizer, 0, 1)
    steps(other, other_optimizer, 0, 1)
    before, stats = [residual.clone() for residual in attachment.residuals()], attachment.stats
    optimizer.zero_grad()
    with within(model, attachment):
        loss(model, 7).backward()
    own = torch.autograd.grad(loss(model.module, 7), list(model.parameters()))
    assert all(torch.equal(p.grad, mine) for p, mine in zip(model.parameters(), own, strict=True))
    assert all(map(torch.equal, attachment.residuals(), before))
    assert attachment.stats == stats
    assert notes(lambda: steps(model, optimizer, 2, 3)) == []
    steps(other, other_optimizer, 2, 3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_note_that_is_made_an_error_leaves_the_model_usable() -> None:
    model, attachment, optimizer = attached()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="removed without an optimizer step"):
            discards(model, attachment, optimizer)
        steps(model, optimizer, 5, 6)
    assert attachment.summary.step == 5


def test_watching_neither_stays_after_close_nor_travels_with_copies() -> None:
    model, attachment, optimizer = attached()
    steps(model, optimizer, 0, 1)

    def hooked(module: nn.Module) -> int:
        return sum(len(parameter._backward_hooks or ()) for parameter in module.parameters())

    assert hooked(model) == 1
    assert notes(lambda: torch.save(model.module, io.BytesIO())) == []
    assert hooked(copy.deepcopy(model.module)) == 0
    attachment.close()
    assert hooked(model) == 0
