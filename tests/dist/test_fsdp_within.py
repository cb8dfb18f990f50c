"""attach_within() on two and four real ranks: the reduce-scatter of fully_shard, compressed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import micro
from micro.fsdp import WithinAttachment, attach_within
from tests.dist.ddp_steps import words_of
from tests.dist.fsdp_steps import Net, backward, batch, build, train, update_
from tests.dist.processes import ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.xdist_group("four ranks"),
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="torch has no custom reduce-scatter"
    ),
]
EVERYTHING = micro.SparseReducer(micro.Everything(), 1.0)
REDUCERS = {
    "all": EVERYTHING,
    "int8": micro.SparseReducer(micro.Everything(), 1.0, codec=micro.build(micro.Codec, "int8")),
    "sign": micro.SparseReducer(micro.Everything(), 1.0, codec=micro.build(micro.Codec, "sign")),
    "topk+gather": micro.SparseReducer(micro.TopK(), 0.1, exchange=micro.Gather()),
    "topk+gather+half": micro.SparseReducer(micro.TopK(), 0.1, exchange=micro.Gather(), codec=micro.Half()),
    "topk+union": micro.SparseReducer(micro.TopK(), 0.1),
    "micro": micro.SparseReducer(micro.Micro(), 0.1),
    "micro+half": micro.SparseReducer(micro.Micro(), 0.1, codec=micro.Half()),
    "randomk": micro.SparseReducer(micro.RandomK(), 0.1),
}


def made(reducer: micro.Reducer | None = None, **settings: Any) -> tuple[Net, WithinAttachment | None]:
    net = build(init_device_mesh("cpu", (dist.get_world_size(),)), **settings)
    return net, None if reducer is None else attach_within(net, reducer)


def even(
    reducer: micro.Reducer | None, *, sharded: bool = True, **settings: Any
) -> tuple[nn.Module, WithinAttachment | None]:
    """Return a model whose shards are not padded: codes of few bits send something of zeros too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
    for module in (net[0], net[2], net) if sharded else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **settings)
    return net, None if reducer is None else attach_within(net, reducer)


def whole(net: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients, in double precision."""
    return {name: p.grad.full_tensor().double() for name, p in net.named_parameters() if p.grad is not None}


def total(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([piece.view(-1) for _, piece in sorted(gradients.items())])


def waiting(attachment: WithinAttachment) -> float:
    """Return the sum of all that waits, over all ranks; places do not matter."""
    kept = torch.stack([residual.double().sum() for residual in attachment.residuals()]).sum()
    dist.all_reduce(kept)
    return float(kept)


# What runs on the ranks


def beside_plain(name: str, settings: dict[str, Any]) -> tuple[float, float, float]:
    """Return what was given, what was applied and waits, and how far the updates were from plain FSDP's."""
    make = partial(even, **settings)
    plain, _ = make(None)
    net, attachment = make(REDUCERS[name])
    assert attachment is not None
    given = applied = distance = 0.0
    n = dist.get_world_size()
    for step in range(4):
        for each in (plain, net):
            each.zero_grad()
            each(batch(step).float()).square().sum().backward()
        mine, theirs = total(whole(net)), total(whole(plain))
        given, applied = given + n * float(theirs.sum()), applied + n * float(mine.sum())
        distance = max(distance, float((mine - theirs).abs().max()))
    return given, applied + waiting(attachment), distance


def resumed(name: str) -> bool:
    """Return whether a restored run takes the steps of one that went on."""
    net, attachment = made(REDUCERS[name])
    again, second = made(REDUCERS[name])
    assert attachment is not None
    assert second is not None
    train(net, range(3))
    with torch.no_grad():
        for mine, theirs in zip(again.parameters(), net.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())
    second.load_state_dict(attachment.state_dict())
    second.load_state_dict(second.state_dict())  # saved again before it goes on
    one, two = train(net, range(3, 6)), train(again, range(3, 6))
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)


def nan_here() -> tuple[str, bool, bool, bool]:
    """Return the error; whether gradients are zero; whether that step was skipped, and the last one."""
    net, attachment = made(REDUCERS["topk+gather"])
    assert attachment is not None
    train(net, range(2))
    words = words_of(micro.NonFiniteGradient, lambda: backward(net, 2, float("inf") if dist.get_rank() == 1 else 1.0))
    are_zero, was_skipped = not any(piece.any() for piece in whole(net).values()), attachment.skipped
    update_(net)
    train(net, range(3, 5))
    return words, are_zero, was_skipped, attachment.skipped


def kept_of_a_skipped_step(name: str) -> tuple[float, float]:
    """Return what waits after a step that is skipped; what waited before, with rank 0's gradient, which is finite."""
    net, attachment = even(replace(REDUCERS[name], nonfinite="skip"))
    alone, _ = even(None, sharded=False)
    assert attachment is not None
    net(batch(0).float()).square().sum().backward()
    net.zero_grad()
    before = waiting(attachment)
    (net(batch(1).float()).square().sum() * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
    assert attachment.skipped
    alone(batch(1, rank=0).float()).square().sum().backward()
    return waiting(attachment), before + sum(float(p.grad.sum()) for p in alone.parameters() if p.grad is not None)


def accumulated() -> bool:
    """Return whether two backwards of which the first waits are one of the sum."""
    (net, _), (plain, _) = made(EVERYTHING), made()
    for each in (net, plain):
        each.set_requires_gradient_sync(False)  # type: ignore[operator]
        backward(each, 0)
        each.set_requires_gradient_sync(True)  # type: ignore[operator]
        backward(each, 1)
    return torch.allclose(total(whole(net)), total(whole(plain)))


def bytes_sent(name: str) -> tuple[float, int, int]:
    net, attachment = made(REDUCERS[name])
    assert attachment is not None
    for step in range(3):
        backward(net, step)
    return (
        sum(s.bytes_sent for s in attachment.stats),
        sum(s.numel for s in attachment.stats),
        sum(s.target_count for s in attachment.stats),
    )


def refusals() -> list[str]:
    net, _ = made()
    cases: list[Callable[[], object]] = [
        lambda: attach_within(net, micro.PowerSGD()),
        lambda: attach_within(net, micro.SparseReducer(micro.TopK(), 0.1, exchange=micro.Oktopk())),
        lambda: attach_within(
            net, micro.SparseReducer(micro.TopK(), 0.1, feedback=micro.EF21(), exchange=micro.Gather())
        ),
        lambda: attach_within(Net(), EVERYTHING),
        lambda: attach_within(build(init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))), EVERYTHING),
        lambda: backward(made(EVERYTHING, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))[0], 0),
        lambda: attach_within(made(EVERYTHING)[0], EVERYTHING),
        lambda: attach_within(net, REDUCERS["micro" if dist.get_rank() else "topk+union"]),
    ]
    return [words_of(ValueError, case) for case in cases]


def closed() -> bool:
    (net, attachment), (plain, _) = made(REDUCERS["micro"]), made()
    assert attachment is not None
    with attachment:
        backward(net, 0)
    net.zero_grad()
    for each in (net, plain):
        backward(each, 1)
    return torch.equal(total(whole(net)), total(whole(plain)))


# The tests


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", REDUCERS)
def test_nothing_of_a_gradient_is_lost(name: str, world_size: int) -> None:
    for given, booked, distance in ranks(world_size).run(beside_plain, name, {}):
        assert booked == pytest.approx(given, rel=1e-5, abs=1e-4)
        assert (distance < 1e-5) == (name == "all"), "all values are FSDP's own mean, and no other method's are"


@pytest.mark.parametrize("name", ["all", "topk+gather", "micro"])
def test_half_precision_loses_nothing_either(name: str) -> None:
    settings = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    for given, booked, _ in ranks(2).run(beside_plain, name, settings):
        assert booked == pytest.approx(given, rel=0.1, abs=0.3)  # plain FSDP rounds, and is what is compared with


@pytest.mark.parametrize("name", ["topk+gather", "micro"])
def test_a_restored_run_equals_the_uninterrupted_one(name: str) -> None:
    assert all(ranks(2).run(resumed, name))


def test_a_gradient_that_is_not_finite_stops_all_ranks() -> None:
    for words, are_zero, was_skipped, is_skipped in ranks(2).run(nan_here):
        assert "on rank 1 is not finite at step 2" in words
        assert are_zero
        assert (was_skipped, is_skipped) == (True, False)


@pytest.mark.parametrize("name", ["topk+gather", "micro", "int8"])
def test_what_a_skipped_step_had_sent_waits(name: str) -> None:
    for kept, expected in ranks(2).run(kept_of_a_skipped_step, name):
        assert kept == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_micro_batches_wait() -> None:
    assert all(ranks(2).run(accumulated))


def test_bytes_are_those_of_a_reduce_scatter() -> None:
    width, n = 8, 2
    (all_bytes, numel, _), *_ = ranks(n).run(bytes_sent, "all")
    assert all_bytes == width * numel / n  # to the other rank, its half
    (sparse_bytes, _, count), *_ = ranks(n).run(bytes_sent, "topk+gather")
    assert sparse_bytes <= (4 + width) * count + 100
    (int8_bytes, _, _), *_ = ranks(n).run(bytes_sent, "int8")
    assert int8_bytes < all_bytes / 5


def test_what_cannot_be_scattered_is_refused_on_all_ranks() -> None:
    named = ("powersgd", "oktopk", "ef21", "fully_shard", "replicas", "float16", "already", "same on all ranks")
    for words in ranks(2).run(refusals):
        for given, expected in zip(words, named, strict=True):
            assert expected in given


def test_a_closed_model_is_plain_fsdp() -> None:
    assert all(ranks(2).run(closed))
