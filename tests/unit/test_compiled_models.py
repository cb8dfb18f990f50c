"""torch.compile around a model with an attachment, on a group of one rank: the same bits as without it."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.small_models import batch, flat_gradient

BACKEND = "aot_eager"  # traces the model and its gradient, and generates no code


@pytest.fixture(autouse=True)
def nothing_compiled(one_rank: None) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def applied(model: DistributedDataParallel, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Attach MiCRO, take steps through ``forward``, and return the gradients (steps, numel) that were applied."""
    gradients = []
    with micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.2)) as attachment:
        for step in range(4):
            model.zero_grad()
            forward(batch(step)).square().sum().backward()
            gradients.append(flat_gradient(model))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * (parameter.grad if parameter.grad is not None else 0.0)
            assert [stats.step for stats in attachment.stats] == [step] * len(attachment.stats)
    return torch.stack(gradients)


def uncompiled() -> Tensor:
    model = DistributedDataParallel(network())
    return applied(model, model)


def test_a_model_compiled_before_ddp_gives_the_same_bits() -> None:
    model = DistributedDataParallel(torch.compile(network(), backend=BACKEND))
    assert torch.equal(applied(model, model), uncompiled())
    assert counters["stats"]["unique_graphs"]


def test_ddp_compiled_with_its_model_gives_the_same_bits() -> None:
    model = DistributedDataParallel(network())
    assert torch.equal(applied(model, torch.compile(model, backend=BACKEND)), uncompiled())
    assert counters["frames"]["ok"]


def test_compiled_autograd_is_refused_by_torch_at_the_first_call() -> None:
    """In one line: DDP's buckets, and with them any communication hook, do not go with it."""
    model = DistributedDataParallel(network())
    micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.2))
    loss = model(torch.ones(4, 6)).sum()
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND))
    with compiled, pytest.raises(RuntimeError, match="not compatible with C\\+\\+ DDP Reducer"):
        loss.backward()
