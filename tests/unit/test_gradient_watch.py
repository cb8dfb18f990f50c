"""Loops that lose a part of an update get one warning that names the mistake; other loops get none."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import micro
from micro.drivers.gradient_watch import ACCUMULATED, DISCARDED
from tests.small_models import assert_same, backward, chain, given, gradients, wrapped

pytestmark = pytest.mark.usefixtures("one_rank")

SPARSE = micro.SparseReducer(micro.TopK(), density=0.2, nonfinite="skip")


class Trained(NamedTuple):
    """A model, its attachment and its optimizer."""

    model: Any
    attachment: micro.Attachment
    optimizer: torch.optim.Optimizer

    def run(self, loop: str, first: int = 0) -> None:
        """Do what the letters of a loop say, from batch number ``first``."""
        for place, letter in enumerate(loop.replace(" ", "")):
            DOES[letter](self, first + place)


def attached(reducer: micro.Reducer = SPARSE, **settings: Any) -> Trained:
    model = wrapped(chain(), bucket_cap_mb=25, **settings)
    return Trained(model, micro.attach(model, reducer), torch.optim.SGD(model.parameters(), lr=0.1))


def step_by_hand(of: Trained, _: int) -> None:
    with torch.no_grad():
        for parameter in of.model.parameters():
            parameter -= 0.1 * parameter.grad


def freeze_or_unfreeze(of: Trained, _: int) -> None:
    weight = next(of.model.parameters())
    weight.requires_grad_(not weight.requires_grad)


def train_a_generator(of: Trained, _: int) -> None:
    of.model(nn.Linear(3, 6)(torch.randn(4, 3))).mean().backward()


def drop_the_last_layer(of: Trained, _: int) -> None:
    for parameter in list(of.model.parameters())[-2:]:
        parameter.grad = None


def clip(limit: float) -> Callable[[Trained, int], object]:
    return lambda of, _: nn.utils.clip_grad_norm_(of.model.parameters(), limit)


DOES: dict[str, Callable[[Trained, int], object]] = {
    "z": lambda of, _: of.optimizer.zero_grad(),
    "Z": lambda of, _: of.optimizer.zero_grad(set_to_none=False),
    "b": lambda of, step: backward(of.model, step),
    "n": lambda of, step: backward(of.model, step, factor=float("nan")),
    "s": lambda of, _: of.optimizer.step(),
    "h": step_by_hand,
    "f": freeze_or_unfreeze,
    "g": train_a_generator,
    "d": drop_the_last_layer,
    "c": clip(1e-3),
    "C": clip(1e3),
}
DISCARDS = "zbs zbs b zbs zbs"
NOTED = {
    "discards": DISCARDS,
    "discards by zeros": DISCARDS.replace("z", "Z"),
    "leaves out a step": "zbs zb zbs zbs",
    "trains a generator": "zbsg zbsg zbsg",
}
FINE = {
    "plain": "zbs zbs zbs zbs",
    "leaves out a skipped step": "zbs zbs zn zbs",
    "steps by hand": "zbh zbh zbh zbh",
    "zeros": "Zbs Zbs Zbs Zbs",
    "zeros after a skipped step": "Zbs Zn Zbs Zbs",
    "freezes in turns": "fzbs fzbs fzbs fzbs",
}


def notes(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", NOTED | FINE)
def test_gradients_without_a_step_are_noted_once(name: str) -> None:
    loop = (NOTED | FINE)[name]
    trained = attached(gradient_as_bucket_view="zeros" in name, find_unused_parameters="f" in loop)
    assert notes(lambda: trained.run(loop)) == [DISCARDED] * (name in NOTED)
    assert notes(lambda: trained.run(loop)) == []


@pytest.mark.parametrize("loop", ["zbbbs", "Zbbs"])
def test_averaged_gradients_that_are_averaged_again_are_noted_once(loop: str) -> None:
    assert notes(lambda: attached().run(loop * 4)) == [ACCUMULATED]
    assert notes(lambda: attached(micro.DenseReducer()).run(loop * 4)) == []  # as in plain DDP


MOMENTUM = micro.SparseReducer(micro.TopK(), density=0.2, feedback=micro.MomentumCorrection(), nonfinite="skip")


@pytest.mark.parametrize(("reducer", "settings"), [(SPARSE, {"clip": 1.0}), (MOMENTUM, {})])
def test_averaged_gradients_that_would_be_clipped_or_gain_momentum_again_are_refused(
    reducer: micro.Reducer, settings: dict[str, Any]
) -> None:
    model = wrapped(chain())
    attachment = micro.attach(model, reducer, **settings)
    trained = Trained(model, attachment, torch.optim.SGD(model.parameters(), lr=0.1))
    trained.run("zbs Zbs zbs zn z")
    with model.no_sync():
        trained.run("bb")
    trained.run("bs")
    with pytest.raises(ValueError, match="no_sync"):
        trained.run("zbb")
    trained.run("zbs")


@pytest.mark.parametrize(
    ("loop", "reducer", "words"),
    [
        ("zbcs", SPARSE, "clip= of micro.attach"),  # clipped
        ("zbds", SPARSE, "'2.weight'"),  # taken away
        ("zbCs", SPARSE, None),  # a limit that is never reached
        ("zbcs", micro.DenseReducer(), None),  # a mean that keeps nothing
    ],
)
def test_what_is_taken_from_an_update_is_noted_once_with_the_remedy(
    loop: str, reducer: micro.Reducer, words: str | None
) -> None:
    said = notes(lambda: attached(reducer).run(loop * 4))
    assert [words in each for each in said if words] == [True] * (words is not None)
    assert words or not said


@pytest.mark.parametrize("within", [lambda of: of.model.no_sync(), lambda of: of.attachment.paused()])
def test_a_backward_kept_out_has_its_own_gradients_and_leaves_no_trace(within: Callable[[Trained], Any]) -> None:
    trained, other = attached(), attached()
    for each in (trained, other):
        each.run("zbs zbs")
    with within(trained), trained.attachment.paused():
        trained.run("zb")
    applied = gradients(trained.model)
    assert_same(applied, given(trained.model.module, 1), rtol=0, atol=0)
    for each in (trained, other):
        assert notes(lambda each=each: each.run("zbs zbs", first=9)) == []  # type: ignore[misc]
    assert all(map(torch.equal, trained.model.parameters(), other.model.parameters()))


def test_a_note_that_is_made_an_error_leaves_the_model_usable() -> None:
    trained = attached()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="removed without an optimizer step"):
            trained.run(DISCARDS)
        trained.run("zbs zbs")
    assert trained.attachment.summary.step == 5


def test_watching_neither_stays_after_close_nor_travels_with_copies() -> None:
    def hooked(module: nn.Module) -> int:
        return sum(len(parameter._backward_hooks or ()) for parameter in module.parameters())

    trained = attached()
    trained.run("zbs zbs")
    assert hooked(trained.model) > 0
    assert notes(lambda: torch.save(trained.model.module, io.BytesIO())) == []
    assert hooked(copy.deepcopy(trained.model.module)) == 0
    trained.attachment.close()
    assert hooked(trained.model) == 0
