"""A small model, batches and flat gradients for tests on a group of one rank."""

import torch
from torch import Tensor, nn


class TwoHeads(nn.Module):
    """A model whose second head is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: Tensor, *, both: bool = True) -> Tensor:
        hidden = self.body(inputs).relu()
        return self.first(hidden) + (self.second(hidden) if both else 0.0)


def batch(step: int) -> Tensor:
    """Return the inputs (4, 6) of a step."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def flat_gradient(model: nn.Module) -> Tensor:
    """Return what the parameters have as gradient, one after the other; those without one are left out."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
