"""Models, steps and comparisons that tests of ``attach_fsdp`` run on four ranks: two nodes of two."""

import copy
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import micro
from tests.small_models import kept

TOPK = micro.SparseReducer(micro.TopK(), density=0.1, exchange=micro.Gather())
MICRO = micro.SparseReducer(micro.Micro(), density=0.1)
LR = 0.1


class Net(nn.Module):
    """Layers, some of odd size and one frozen."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        sizes = [6, 9, 7, 5]
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(sizes))
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))
        self.frozen = nn.Linear(5, 3, dtype=dtype).requires_grad_(False)

    def forward(self, x: Tensor, *, last: bool = True) -> Tensor:
        for layer in self.layers if last else self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.frozen(x) * self.scale if last else x


def meshes(num_nodes: int = 2) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Return the mesh of all ranks, that of this node, and that of the ranks with this shard."""
    shape = (num_nodes, dist.get_world_size() // num_nodes)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
    return mesh, mesh["local"], mesh["node"]


def build(mesh: DeviceMesh, *, seed: int = 0, **settings: Any) -> Net:
    torch.manual_seed(seed)
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(net, mesh=mesh, **settings)


def batch(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def backward(net: nn.Module, step: int, factor: float = 1.0, **settings: Any) -> None:
    (net(batch(step), **settings).square().sum() * factor).backward()


def shards(net: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shards of the gradients."""
    return {name: p.grad.to_local().clone() for name, p in net.named_parameters() if p.grad is not None}


def with_zeros(net: nn.Module, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros where a trained parameter has no gradient."""
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    return {name: known[name] if name in known else torch.zeros_like(p.to_local()) for name, p in trained.items()}


def update_(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.to_local().sub_(LR * parameter.grad.to_local())
                parameter.grad = None


def weights(net: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shards of the weights."""
    return {name: p.to_local().detach().clone() for name, p in net.named_parameters()}


def train(net: nn.Module, steps: range) -> list[dict[str, Tensor]]:
    """Take steps of SGD; return this rank's shards of each gradient that was applied."""
    applied = []
    for step in steps:
        backward(net, step)
        applied.append(shards(net))
        update_(net)
    return applied


def summed(tensors: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return sums over the ranks of a mesh; micro's own group is not used for it."""
    total = copy.deepcopy(tensors)
    for tensor in total.values():
        dist.all_reduce(tensor, group=mesh.get_group())
    return total


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def attached(reducer: micro.Reducer, **settings: Any) -> tuple[Net, micro.ShardedAttachment]:
    _, local, node = meshes()
    net = build(local, **settings)
    return net, micro.attach_fsdp(net, reducer, replicas=node)


def check_books(reducer: micro.Reducer, num_nodes: int = 2) -> None:
    """Check that what was applied plus what waits is the sum over nodes of all gradients, and that replicas agree.

    Weights stay. Nodes use the last layer in turns, and none of them does in the last step.
    """
    _, local, node = meshes(num_nodes)
    alone, net = build(local), build(local)
    attachment = micro.attach_fsdp(net, reducer, replicas=node)
    given: dict[str, Tensor] = {}
    booked: dict[str, Tensor] = {}
    for step in range(5):
        uses_last = (step + node.get_local_rank()) % num_nodes == 0 and step < 4
        for model in (alone, net):
            backward(model, step, last=uses_last)
        assert (net.scale.grad is None) == (step == 4), "what any node uses all nodes update, and nothing else"
        applied = with_zeros(net, shards(net))
        for name, shard in summed(with_zeros(alone, shards(alone)), node).items():
            given[name] = given.get(name, 0) + shard
        for name, shard in summed(applied, node).items():
            booked[name] = booked.get(name, 0) + shard
            torch.testing.assert_close(shard, num_nodes * applied[name], rtol=1e-15, atol=0)
        alone.zero_grad()
        net.zero_grad()
    for name, piece in summed(kept(attachment), node).items():
        booked[name] = booked[name] + piece.view_as(booked[name])
    torch.testing.assert_close(booked, given, rtol=1e-11, atol=1e-13)
