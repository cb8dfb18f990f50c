"""Small models on a group of one rank: their batches, backwards and gradients, and what an attachment keeps."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Named = dict[str, Tensor]


class TwoHeads(nn.Module):
    """A model of 92 elements, 12 of them in biases, whose second head is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: Tensor, *, both: bool = True) -> Tensor:
        hidden = self.body(inputs).relu()
        return self.first(hidden) + (self.second(hidden) if both else 0.0)


def chain() -> nn.Module:
    """Return a model whose layers follow each other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def wrapped(module: nn.Module | None = None, **settings: Any) -> DistributedDataParallel:
    """Return a DDP model, TwoHeads by default, with about a bucket for each layer."""
    return DistributedDataParallel(TwoHeads() if module is None else module, **{"bucket_cap_mb": 1e-4} | settings)


def batch(step: int) -> Tensor:
    """Return the inputs (4, 6) of a step."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int, *, factor: float = 1.0, **settings: Any) -> None:
    """Add a step's gradients to those that are there."""
    (model(batch(step), **settings).square().sum() * factor).backward()


def gradient(model: nn.Module, step: int, **settings: Any) -> Tensor:
    """Return a step's gradient as one vector."""
    model.zero_grad()
    backward(model, step, **settings)
    return flat_gradient(model)


def train(model: nn.Module, steps: range, lr: float = 0.1, **settings: Any) -> list[Tensor]:
    """Take steps of SGD; return the gradients that were applied, one vector per step."""
    applied = []
    for step in steps:
        applied.append(gradient(model, step, **settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
    return applied


def flat_gradient(model: nn.Module) -> Tensor:
    """Return what the parameters have as gradient, one after the other; those without one are left out."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor if it is not sharded."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def gradients(model: nn.Module) -> Named:
    """Return copies of the present gradients by name: of shards, and complex ones as real numbers."""
    found = {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("module."): torch.view_as_real(g) if g.is_complex() else g for name, g in found.items()}


def given(model: nn.Module, *steps: int, **settings: Any) -> Named:
    """Return the sum of a plain model's gradients in some steps."""
    model.zero_grad()
    for step in steps:
        backward(model, step, **settings)
    return gradients(model)


def kept(attachment: Any) -> Named:
    """Return copies of the residuals by name."""
    return {
        name: piece.clone()
        for bucket in attachment.state_dict()["buckets"]
        for name, piece in bucket["memory"].get("residual", {}).items()
    }


def total(*parts: Named) -> Named:
    """Return the sum by name."""
    sums: Named = {}
    for part in parts:
        for name, tensor in part.items():
            sums[name] = sums[name] + tensor.view_as(sums[name]) if name in sums else tensor.clone()
    return sums


def assert_same(one: Named, other: Named, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name].view_as(tensor), rtol=rtol, atol=atol)
