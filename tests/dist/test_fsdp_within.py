"""attach_within() on real ranks: codes in fully_shard's reduce-scatter, compared with plain FSDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import micro
from micro.fsdp import attach_within
from tests.dist.fsdp_steps import MICRO, Net, backward, build, same, shards, summed, train, with_zeros
from tests.dist.on_ranks import of_all, on_ranks
from tests.refusals import refused

pytestmark = [
    pytest.mark.dist,
    pytest.mark.xdist_group("four ranks"),
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="torch has no custom reduce-scatter"
    ),
]
BOUNDS = {"bfloat16": 2**-8, "int8": 1 / 254, "fp8": 1 / 16}  # errors, relative to a piece's largest magnitude


def sharded(codec: Any = None, *, nodes: int = 1, **settings: Any) -> tuple[Net, Any]:
    """Return a model, some of whose shards are padded, over ``nodes`` replicas of it that FSDP averages by itself."""
    size = dist.get_world_size()
    shape = (size,) if nodes == 1 else (nodes, size // nodes)
    net = build(init_device_mesh("cpu", shape, mesh_dim_names=("node", "local")[-len(shape) :]), **settings)
    return net, codec and attach_within(net, codec)


def largest(net: nn.Module) -> float:
    """Return the largest magnitude of all shards of all ranks' gradients."""
    return max(of_all(max(float(shard.abs().max()) for shard in shards(net).values() if shard.numel())))


def distance(one: nn.Module, other: nn.Module) -> float:
    both = zip(with_zeros(one, shards(one)).values(), with_zeros(other, shards(other)).values(), strict=True)
    return max(of_all(max(float((a - b).abs().max()) for a, b in both if a.numel())))


def own_gradient(step: int) -> float:
    """Return the largest magnitude of any rank's own gradient, which bounds what its codes lose."""
    torch.manual_seed(0)
    net = Net()
    backward(net, step)
    return max(of_all(max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)))


@pytest.mark.parametrize(
    ("codec", "world_size", "nodes"),
    [("bfloat16", 2, 1), ("int8", 2, 1), ("fp8", 2, 1), ("int8", 3, 1), ("int8", 4, 2)],
)
@on_ranks()
def test_the_update_is_fsdps_own_but_for_the_rounding(codec: str, world_size: int, nodes: int) -> None:
    """Also over replicas; and two micro-batches whose gradients wait are one."""
    (plain, _), (net, scatter) = sharded(nodes=nodes), sharded(codec, nodes=nodes)
    for step in range(2):
        for each in (plain, net):
            each.set_requires_gradient_sync(False)  # type: ignore[operator]
            backward(each, 2 * step)
            each.set_requires_gradient_sync(True)  # type: ignore[operator]
            backward(each, 2 * step + 1)
        lost, bound = distance(plain, net), BOUNDS[codec] * (own_gradient(2 * step) + own_gradient(2 * step + 1))
        assert 0 < lost <= bound
        net.zero_grad()
        plain.zero_grad()
    scatter.close()
    for each in (plain, net):
        backward(each, 4)
    assert same(shards(plain), shards(net)), "a closed one is FSDP's own"


@on_ranks(2)
def test_gradients_that_are_not_held_back_add_up() -> None:
    (plain, _), (net, _) = sharded(), sharded("int8")
    for each in (plain, net):
        backward(each, 0)
        backward(each, 1)
    assert 0 < distance(plain, net) <= BOUNDS["int8"] * (own_gradient(0) + own_gradient(1))


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(2)
def test_weights_in_bfloat16_are_reduced_in_the_policys_precision(reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    (plain, _), (net, scatter) = sharded(mp_policy=policy), sharded("bfloat16", mp_policy=policy)
    for each in (plain, net):
        backward(each, 0)
    assert distance(plain, net) <= 0.01 * largest(plain)
    width = reduce_dtype.itemsize
    assert scatter.bytes_sent == pytest.approx(scatter.fsdp_bytes * 2 / width, abs=4 * 4)  # four modules
    if reduce_dtype == torch.float32:
        assert distance(plain, net) == 0, "bfloat16 holds the gradients of bfloat16, and sums are in single precision"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_counted_bytes_are_the_bytes_of_the_codes(world_size: int) -> None:
    wide = nn.Linear(60, 64, bias=False)
    fully_shard(wide, mesh=init_device_mesh("cpu", (world_size,)))
    scatter = attach_within(wide, micro.Int8(block=64))
    wide(torch.ones(1, 60)).sum().backward()
    assert wide.weight.grad is not None
    assert torch.equal(wide.weight.grad.to_local(), torch.ones_like(wide.weight.grad.to_local()))
    rows = -(-64 // world_size)
    codes = 60 * rows + 4 * -(-60 * rows // 64)
    assert scatter.bytes_sent == (world_size - 1) * (codes + 4 - codes % 4)
    assert scatter.fsdp_bytes == (world_size - 1) * 4 * 60 * rows
    assert not scatter.bytes_sent or scatter.fsdp_bytes / scatter.bytes_sent > 3.7


@pytest.mark.parametrize("codec", BOUNDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@on_ranks(2)
def test_what_is_not_finite_on_one_rank_is_seen_by_every_owner(codec: str, bad: float) -> None:
    net, _ = sharded(codec)
    backward(net, 0, bad if dist.get_rank() == 1 else 1.0)
    assert all(not bool(shard.isfinite().any()) for shard in shards(net).values() if shard.numel())
    net.zero_grad()
    backward(net, 1)
    assert all(bool(shard.isfinite().all()) for shard in shards(net).values())


@on_ranks(2)
def test_a_loss_scaler_skips_a_step_that_overflows() -> None:
    net, _ = sharded("int8")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = net.layers[0].weight
    for step in range(2):
        before = weight.to_local().clone()
        loss = net(torch.ones(4, 6, dtype=torch.float64)).square().sum()
        scaler.scale(loss * (float("inf") if step == dist.get_rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weight.to_local()) == (step == 0)
        assert scaler.get_scale() == 4.0
        optimizer.zero_grad()


@on_ranks(4)
def test_it_works_together_with_an_exchange_between_nodes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    net = build(mesh["local"])
    with attach_within(net, "int8") as scatter, micro.attach_fsdp(net, MICRO, replicas=mesh["node"]) as attachment:
        (_, applied) = train(net, range(2))
        assert sum(each.global_count for each in attachment.stats) > 0
        for name, shard in summed(applied, mesh["node"]).items():
            torch.testing.assert_close(shard, 2 * applied[name], rtol=1e-15, atol=0)
        assert 0 < scatter.bytes_sent < scatter.fsdp_bytes / 2


@on_ranks(2)
def test_training_ends_where_fsdps_own_does() -> None:
    (plain, _), (net, _) = sharded(), sharded("int8")
    losses = []
    for each in (plain, net):
        train(each, range(10))
        losses.append(float(each(torch.ones(4, 6, dtype=torch.float64)).square().sum()))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def on_two_meshes() -> nn.Module:
    """Return a model with a module whose parameters are sharded over different meshes, or skip."""
    placement = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common").ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    meshes = [FSDPMeshInfo(DeviceMesh.from_group(dist.new_group(), "cpu"), shard_mesh_dim=0) for _ in range(2)]
    net = nn.Linear(4, 4)
    fully_shard(
        net,
        mesh=init_device_mesh("cpu", (2,)),
        shard_placement_fn=lambda p: placement(placement=Shard(0), mesh_info=meshes[p.ndim - 1]),
    )
    return net


@on_ranks(2)
def test_what_cannot_be_quantised_is_refused_on_all_ranks() -> None:
    net, _ = sharded()
    divided, _ = sharded("int8", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    divided.set_gradient_divide_factor(3.0)  # type: ignore[operator]
    wrong: dict[str, Callable[[], object]] = {
        "no longer takes a reducer": lambda: attach_within(net, MICRO),  # type: ignore[arg-type]
        "'sign', which needs a residual": lambda: attach_within(net, micro.Sign()),
        "fully_shard": lambda: attach_within(Net(), "int8"),
        "already": lambda: attach_within(sharded("int8")[0], "int8"),
        "several meshes": lambda: attach_within(on_two_meshes(), "int8"),
        "same on all ranks": lambda: attach_within(net, micro.Int8(block=64 << dist.get_rank())),
        "set_force_sum_reduction_for_comms": lambda: backward(divided, 0),
    }
    for word, call in wrong.items():
        refused(call, word)
    attach_within(net, "int8").close()
    attach_within(net, "int8"), "what was refused left nothing behind"
