"""Checkpoints of an attachment: their header, which are refused, and what continues from them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.checkpoints.description import describe, misfit
from micro.checkpoints.saved_state import VERSION
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Density, Target, target_count
from micro.drivers.step import BucketStates
from micro.drivers.wrappers import plain_names
from micro.selectors.scaled_elements import ScaledElements
from micro.zoo.exdyna import ExDyna
from tests.refusals import refused
from tests.saving import through_a_file
from tests.small_models import assert_same, backward, kept, train, wrapped
from tests.sparsifiers import TABLE

pytestmark = pytest.mark.usefixtures("one_rank")


class Crossed(nn.Module):
    """Three layers, used in another order than that in which they are defined: DDP's second buckets differ."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(8, 2), nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.middle(self.first(inputs).relu()).relu())
        return outputs


@dataclass(slots=True)
class Steps:
    done: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Falling(Density[Steps]):
    """A density that falls by a factor in each step that it has counted itself."""

    density: float
    factor: float
    name: ClassVar[str] = "falling"
    state: ClassVar[type[Steps]] = Steps

    def target(self, state: Steps, grad: Tensor, step: int, layout: micro.Layout, comm: Comm) -> Reduction[Target]:
        yield from ()
        state.done += 1
        density = self.density * self.factor**state.done
        return Target(density, target_count(density, layout.numel))


def composed(**parts: Any) -> micro.SparseReducer:
    return micro.SparseReducer(**{"selector": micro.TopK(), "density": 0.2} | parts)


TOPK = composed()
MOMENTUM, SLOWER = (composed(feedback=micro.MomentumCorrection(momentum=each)) for each in (0.9, 0.5))


def attached(reducer: micro.Reducer = TOPK, **settings: Any) -> tuple[DistributedDataParallel, micro.Attachment]:
    model = wrapped(Crossed(), bucket_cap_mb=2e-4)
    return model, micro.attach(model, reducer, **settings)


def saved_after_training(reducer: micro.Reducer = TOPK) -> dict[str, Any]:
    model, attachment = attached(reducer)
    train(model, range(2))
    return through_a_file(attachment.state_dict())


@pytest.mark.parametrize(
    ("selector", "scope", "rehearses"),
    [
        (micro.Micro(), "bucket", False),
        (micro.Micro(), "bucket", True),
        (micro.TopK(), "tensor", False),
        (micro.Micro(), "model", True),
        (ExDyna(), "bucket", False),
    ],
)
def test_a_run_continues_from_its_state_with_and_without_rehearsal(selector: Any, scope: str, rehearses: bool) -> None:
    (model, attachment), (resumed, second) = (attached(composed(selector=selector), scope=scope) for _ in range(2))
    train(model, range(3))
    resumed.load_state_dict(model.state_dict())
    if rehearses:
        with second.rehearsal():
            backward(resumed, 0)
    second.load_state_dict(through_a_file(attachment.state_dict()))
    assert rehearses or all(parameter.grad is None for parameter in resumed.parameters())
    for step in range(3, 6):
        ours, theirs = (train(each, range(step, step + 1))[0] for each in (resumed, model))
        assert torch.equal(ours, theirs)
        assert second.bucket_names == attachment.bucket_names


def test_a_density_continues_from_its_own_state() -> None:
    (model, attachment), (resumed, second) = (
        attached(composed(density=Falling(density=0.5, factor=0.7))) for _ in "12"
    )
    train(model, range(3))
    resumed.load_state_dict(model.state_dict())
    second.load_state_dict(through_a_file(attachment.state_dict()))
    assert torch.equal(*(train(each, range(3, 4))[0] for each in (model, resumed)))


def test_loading_leaves_gradients_and_hooks_alone() -> None:
    saved, (model, attachment) = saved_after_training(), attached()
    calls, watched = list[Tensor](), next(model.parameters())
    watched.register_post_accumulate_grad_hook(calls.append)
    watched.grad = gradient = torch.ones_like(watched)
    attachment.load_state_dict(saved)
    assert not calls
    assert watched.grad is gradient
    assert bool((gradient == 1).all())


def test_a_density_with_a_state_of_its_own_must_stay() -> None:
    def by_layer(density: Any) -> Any:
        return describe(composed(selector=micro.PerTensor(selector=micro.TopK()), density=density))

    falling, steadier = (Falling(density=0.2, factor=factor) for factor in (0.5, 0.9))
    assert misfit(by_layer(0.2), by_layer(falling)) == ("density=schedule", "density=falling")
    assert misfit(by_layer(falling), by_layer(steadier)) is None


@pytest.mark.slow
def test_names_are_those_without_wrappers() -> None:
    plain, inner = saved_after_training(), Crossed()
    inner.middle = checkpoint_wrapper(inner.middle)
    for module in (torch.compile(Crossed(), backend="eager"), inner, nn.ModuleDict({"module": Crossed()})):
        names = plain_names(name for name, _ in module.named_parameters())
        assert sorted(names.values()) == sorted(name for bucket in plain["buckets"] for name in bucket["shapes"])
    model: Any = torch.compile(wrapped(torch.compile(Crossed(), backend="eager"), bucket_cap_mb=25), backend="eager")
    attachment = micro.attach(model, TOPK)
    attachment.load_state_dict(plain)
    train(model, range(2, 3))
    assert attachment.state_dict()["step"] == 3


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["a._orig_mod.w", "a.w"], ["a._orig_mod.w", "a.w"]),
        (["module.module.a", "module.module.b"], ["a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
    ],
)
def test_names_that_would_be_equal_without_wrappers_stay(names: list[str], plain: list[str]) -> None:
    assert plain_names(names) == dict(zip(names, plain, strict=True))


def test_average_gives_a_state_to_every_new_rank_and_keeps_the_mean() -> None:
    model, attachment = attached()
    train(model, range(2))
    residual = kept(attachment)
    ranks = [through_a_file(attachment.state_dict()) | {"rank": rank, "world_size": 2} for rank in range(2)]
    for bucket in ranks[1]["buckets"]:
        for piece in bucket["memory"]["residual"].values():
            piece.mul_(3)
    assert [state["rank"] for state in micro.average(ranks, 3)] == [0, 1, 2]
    (only,) = micro.average(ranks, 1)
    _, attachment = attached()
    attachment.load_state_dict(through_a_file(only))
    for name, piece in kept(attachment).items():
        torch.testing.assert_close(piece, 2 * residual[name])
    assert attachment.state_dict()["step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_method_has_a_description_that_fits_itself_after_a_file(row: Any) -> None:
    described = describe(row.make(0.1, 0))
    assert misfit(through_a_file(described), describe(row.make(0.2, 7))) is None


def convolution(memory_format: torch.memory_format, reducer: micro.Reducer) -> micro.Attachment:
    """Return an attachment whose model has made one step."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=memory_format)  # type: ignore[call-overload]
    model = DistributedDataParallel(net)
    attachment = micro.attach(model, reducer)
    model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    return attachment


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("formats", [(0, 1), (1, 0), (1, 1)], ids=str)
def test_a_state_is_laid_out_in_the_memory_format_of_the_model_that_loads_it(
    formats: tuple[int, int], scaled: bool
) -> None:
    saving, loading = ([torch.contiguous_format, torch.channels_last][each] for each in formats)
    selector = ScaledElements(selector=micro.TopK()) if scaled else micro.TopK()
    reducer = composed(selector=selector, density=0.05, exchange=micro.Gather())
    saved, own = convolution(saving, reducer).state_dict(), convolution(loading, reducer)
    expected, residual = own.state_dict()["buckets"][0], own.residuals()[0].clone()
    own.load_state_dict(saved)
    torch.testing.assert_close(own.residuals()[0], residual)
    found = own.state_dict()["buckets"][0]
    torch.testing.assert_close(found["memory"], expected["memory"])
    torch.testing.assert_close(found["selector"], expected["selector"])


def test_a_part_of_a_parameter_goes_to_no_model_in_another_memory_format() -> None:
    own = convolution(torch.channels_last, composed(density=0.05))
    saved = own.state_dict()
    pieces = saved["buckets"][0]["memory"]["residual"]
    pieces["weight"] = pieces["weight"][:10]  # as in two levels, saved by a contiguous model
    refused(lambda: own.load_state_dict(saved), "memory format")


@pytest.mark.parametrize(
    ("saved_with", "loaded_into", "key", "given"),
    [
        (MOMENTUM, TOPK, "saved with feedback momentum", "feedback residual"),
        (MOMENTUM, SLOWER, "saved with feedback momentum momentum=0.9", "momentum=0.5"),
        (TOPK, composed(exchange=micro.Gather()), "saved with exchange union", "exchange gather"),
        (TOPK, composed(codec=micro.Half()), "saved with codec raw", "codec half"),
        (TOPK, composed(selector=micro.Micro()), "saved with selector topk", "selector micro"),
        (TOPK, micro.DenseReducer(), "saved with sparse", "dense"),
    ],
)
def test_the_state_of_another_method_is_refused_by_name_and_changes_nothing(
    saved_with: micro.Reducer, loaded_into: micro.Reducer, key: str, given: str
) -> None:
    saved, (model, attachment) = saved_after_training(saved_with), attached(loaded_into)
    train(model, range(3))
    before = kept(attachment)
    refused(lambda: attachment.load_state_dict(saved), key, given)
    assert_same(kept(attachment), before, rtol=0, atol=0)
    assert attachment.state_dict()["step"] == 3


def test_what_is_not_this_ranks_state_is_refused_with_the_remedy() -> None:
    saved, (_, attachment) = saved_after_training(), attached()
    (buckets, *others) = saved["buckets"]
    for state, key in (
        (saved | {"rank": 3}, "micro.RankStates"),
        (saved | {"world_size": 4}, "micro.average(states, 1)[rank]"),
        (saved | {"version": VERSION + 1}, "install a newer micro"),
        (saved | {"scope": "model"}, "saved with scope=model"),
        (saved | {"format": "other"}, "Attachment.state_dict()"),
        (saved | {"buckets": [buckets | {"shapes": {"third.weight": (2, 8)}}, *others]}, "third.weight"),
        (saved | {"buckets": [buckets | {"shapes": {"first.weight": (3, 8)}}, *others]}, "first.weight"),
        *((given, "Attachment.state_dict()") for given in (None, {}, {"model": 1})),
    ):
        refused(lambda state=state: attachment.load_state_dict(state), key, "state")  # type: ignore[misc]


def test_average_refuses_what_is_not_one_checkpoint() -> None:
    first = saved_after_training() | {"world_size": 2}
    second = first | {"rank": 1}
    for states, world_size, key, given in (
        ([first, first], 1, "ranks 0 to 1", [0, 0]),
        ([first], 1, "ranks 0 to 1", [0]),
        ([first, second | {"step": 7}], 1, "one step", [2, 7]),
        ([first, second], 0, "world_size", 0),
        ([], 1, "one state per rank", "none"),
    ):
        refused(lambda states=states, n=world_size: micro.average(states, n), key, given)  # type: ignore[misc]


@pytest.mark.parametrize("num_claimed", [1, 3])
def test_what_no_new_bucket_has_claimed_yet_is_kept(num_claimed: int) -> None:
    names = ("a", "b", "c", "d")
    states = BucketStates(TOPK, {name: torch.zeros(6) for name in names})
    whole = states.of(micro.Layout(names, ((6,),) * 4), torch.float32, torch.device("cpu"))
    whole.residual.copy_(torch.arange(24.0))
    for name in names[:num_claimed]:
        states.of(micro.Layout((name,), ((6,),)), torch.float32, torch.device("cpu"))
    found = {name: piece for bucket in states.save() for name, piece in bucket["memory"]["residual"].items()}
    assert torch.cat([found[name].flatten() for name in names]).tolist() == list(range(24))
