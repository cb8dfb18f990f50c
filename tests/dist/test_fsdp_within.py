"""attach_within() on two and four real ranks: the reduce-scatter of fully_shard, compressed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import micro
from micro.fsdp import WithinAttachment, attach_within
from micro.fsdp.within import UNUSED
from tests.dist.ddp_steps import words_of
from tests.dist.fsdp_steps import Net, backward, batch, build, same, train, update_
from tests.dist.on_ranks import on_ranks
from tests.refusals import refused

pytestmark = [
    pytest.mark.dist,
    pytest.mark.xdist_group("four ranks"),
    pytest.mark.skipif(
        not all(hasattr(FSDPModule, f"set_{name}") for name in ("custom_reduce_scatter", UNUSED)),
        reason="torch has no custom reduce-scatter",
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


def made(reducer: micro.Reducer | None = None, **settings: Any) -> tuple[Net, Any]:
    net = build(init_device_mesh("cpu", (dist.get_world_size(),)), **settings)
    return net, reducer and attach_within(net, reducer)


def even(reducer: micro.Reducer | None, **settings: Any) -> tuple[nn.Module, Any]:
    """Return a model whose shards are not padded: codes of few bits send something of zeros too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **settings)
    return net, reducer and attach_within(net, reducer)


def step_of(net: nn.Module, step: int, factor: float = 1.0, forwards: int = 1) -> Tensor:
    """Return the whole gradient of a step, in double precision."""
    net.zero_grad()
    inputs = batch(step).to(next(net.parameters()).dtype)
    (sum(net(inputs).square().sum() for _ in range(forwards)) * factor / forwards).backward()
    return whole(net)


def whole(net: nn.Module) -> Tensor:
    found = {name: p.grad.full_tensor() for name, p in net.named_parameters() if p.grad is not None}
    return torch.cat([piece.double().view(-1) for _, piece in sorted(found.items())])


def waiting(attachment: WithinAttachment) -> float:
    """Return the sum of all that waits, over all ranks; places do not matter."""
    kept = torch.stack([residual.double().sum() for residual in attachment.residuals()]).sum()
    dist.all_reduce(kept)
    return float(kept)


def beside_plain(world_size: int, name: str, **settings: Any) -> tuple[float, float, float]:
    """Return what was given, what was applied and waits, and how far the updates were from plain FSDP's."""
    (plain, _), (net, attachment) = even(None, **settings), even(REDUCERS[name], **settings)
    given, applied = (torch.stack([step_of(each, step) for step in range(4)]) for each in (plain, net))
    booked = world_size * float(applied.sum()) + waiting(attachment)
    return world_size * float(given.sum()), booked, float((given - applied).abs().max())


@pytest.mark.parametrize(
    ("name", "world_size"),
    [*((name, 2) for name in REDUCERS), *((name, 4) for name in ("all", "int8", "micro"))],
)
@on_ranks()
def test_nothing_of_a_gradient_is_lost(name: str, world_size: int) -> None:
    given, booked, distance = beside_plain(world_size, name)
    assert booked == pytest.approx(given, rel=1e-5, abs=1e-4)
    assert (distance < 1e-5) == (name == "all"), "all values are FSDP's own mean, and no other method's are"


@pytest.mark.parametrize("name", ["all", "topk+gather", "micro"])
@on_ranks(2)
def test_half_precision_loses_nothing_either(name: str) -> None:
    given, booked, _ = beside_plain(2, name, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    assert booked == pytest.approx(given, rel=0.1, abs=0.3)  # plain FSDP rounds, and is what is compared with


@pytest.mark.parametrize("name", ["topk+gather", "micro"])
@on_ranks(2)
def test_a_restored_run_equals_the_uninterrupted_one(name: str) -> None:
    (net, attachment), (again, second) = made(REDUCERS[name]), made(REDUCERS[name])
    train(net, range(3))
    with torch.no_grad():
        for mine, theirs in zip(again.parameters(), net.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())
    second.load_state_dict(attachment.state_dict())
    second.load_state_dict(second.state_dict())  # saved again before it goes on
    assert all(map(same, train(net, range(3, 6)), train(again, range(3, 6))))


@on_ranks(2)
def test_a_gradient_that_is_not_finite_stops_all_ranks() -> None:
    net, attachment = made(REDUCERS["topk+gather"])
    train(net, range(2))
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    words = words_of(micro.NonFiniteGradient, lambda: backward(net, 2, factor))
    assert "on rank 1 is not finite at step 2" in words
    assert not whole(net).any()
    assert attachment.skipped
    update_(net)
    train(net, range(3, 5))
    assert not attachment.skipped


@pytest.mark.parametrize(("name", "forwards"), [("topk+gather", 1), ("micro", 1), ("int8", 1), ("topk+gather", 2)])
@on_ranks(2)
def test_what_a_skipped_step_had_sent_waits(name: str, forwards: int) -> None:
    """Also the gradient of rank 0, which is finite; FSDP reduces a module once for each forward in a backward."""
    is_first = dist.get_rank() == 0
    (net, attachment), (alone, _) = even(replace(REDUCERS[name], nonfinite="skip")), even(None)
    step_of(net, 0)
    before = waiting(attachment)
    step_of(net, 1, 1.0 if is_first else float("nan"), forwards)
    assert attachment.skipped
    own = 2 * float(step_of(alone, 1, 1.0 if is_first else 0.0).sum())
    assert waiting(attachment) == pytest.approx(before + own, rel=1e-4, abs=1e-3)


@on_ranks(2)
def test_micro_batches_wait_and_a_closed_model_is_plain_fsdp() -> None:
    (net, attachment), (plain, _) = made(EVERYTHING), made()
    for each in (net, plain):
        each.set_requires_gradient_sync(False)  # type: ignore[operator]
        backward(each, 0)
        each.set_requires_gradient_sync(True)  # type: ignore[operator]
        backward(each, 1)
    assert torch.allclose(whole(net), whole(plain))
    attachment.close()
    assert torch.equal(step_of(net, 2), step_of(plain, 2))


@on_ranks(2)
def test_bytes_are_those_of_a_reduce_scatter() -> None:
    sizes = {}
    for name in ("all", "topk+gather", "int8"):
        net, attachment = made(REDUCERS[name])
        train(net, range(3))
        sums = [[s.bytes_sent, s.numel, s.target_count] for s in attachment.stats]
        sizes[name] = [sum(column) for column in zip(*sums, strict=True)]
    width, n = 8, 2
    all_bytes, numel, _ = sizes["all"]
    assert all_bytes == width * numel / n  # to the other rank, its half
    sparse_bytes, _, count = sizes["topk+gather"]
    assert sparse_bytes <= (4 + width) * count + 100
    assert sizes["int8"][0] < all_bytes / 5


FOLLOWING = micro.build(micro.Selector, {"name": "scaled_elements", "selector": "topk"})  # the update


def sparse(**parts: Any) -> micro.SparseReducer:
    return micro.SparseReducer(micro.TopK(), 0.1, **parts)


@on_ranks(2)
def test_what_cannot_be_scattered_is_refused_on_all_ranks() -> None:
    net, _ = made()
    half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    wrong: dict[str, Callable[[], object]] = {
        "powersgd": lambda: attach_within(net, micro.PowerSGD()),
        "oktopk": lambda: attach_within(net, sparse(exchange=micro.Oktopk())),
        "scaled_elements": lambda: attach_within(net, micro.SparseReducer(FOLLOWING, 0.1)),
        "fully_shard": lambda: attach_within(Net(), EVERYTHING),
        "replicas": lambda: attach_within(
            build(init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))), EVERYTHING
        ),
        "float16": lambda: backward(made(EVERYTHING, mp_policy=half)[0], 0),
        "already": lambda: attach_within(made(EVERYTHING)[0], EVERYTHING),
        "same on all ranks": lambda: attach_within(net, REDUCERS["micro" if dist.get_rank() else "topk+union"]),
    }
    for word, call in wrong.items():
        refused(call, word)
