"""Local steps on real ranks: the rounds of threads, bit for bit; rounds between replicas that DDP trains."""

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm import Comm
from micro.lockstep import SimulatedRanks
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
EVERY, STEPS = 3, 7


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def backward(model: nn.Module, step: int, rank: int) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    model.zero_grad()
    model(inputs).square().mean().backward()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in model.state_dict().values()])


STREAMING: dict[str, Any] = {"fragments": 2, "delay": 2, "mix": 0.5}


def rounds(comm: Comm | None, model: nn.Module, rank: int, streaming: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """Return weights and buffers within a round and after its end, and the bytes of the last round."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reducer = micro.SparseReducer(micro.Micro(), 0.2, feedback=micro.ErrorFeedback(decay=0.95))
    with micro.LocalSteps(model, optimizer, reducer, every=EVERY, comm=comm, **streaming) as local:
        for step in range(STEPS):
            backward(model, step, rank)
            optimizer.step()
        within = weights(model)
        local.finish()
        assert local.stats is not None
        return within, weights(model), local.stats.bytes_sent


def on_this_rank(streaming: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    return rounds(None, network(), dist.get_rank(), streaming)


@pytest.mark.parametrize("streaming", [{}, STREAMING], ids=["at once", "streaming"])
def test_real_ranks_take_the_steps_of_threads_bit_for_bit(streaming: dict[str, Any]) -> None:
    models = [network(), network()]
    with closing(SimulatedRanks(2)) as group:
        expected = group.run(lambda comm: rounds(comm, models[comm.rank], comm.rank, streaming))
    found = ranks(2).run(on_this_rank, streaming)
    for (within, after, sent), (own_within, own_after, own_sent) in zip(found, expected, strict=True):
        assert torch.equal(within, own_within)
        assert torch.equal(after, own_after)
        assert sent == own_sent
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def steps_beside_an_exchange() -> bool:
    """Let rank 1 begin an exchange only when rank 0 has taken a step after beginning it."""
    rank, model, word = dist.get_rank(), network(), torch.zeros(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2, delay=1) as local:
        for step in range(3):
            backward(model, step, rank)
            if rank == 1 and step == 1:
                dist.recv(word, 0)
            if rank == 0 and step == 2:
                dist.send(torch.ones(1), 1)
            optimizer.step()
        assert local.stats is not None
        return local.num_rounds == 1


def test_training_goes_on_beside_an_exchange() -> None:
    assert ranks(2).run(steps_beside_an_exchange) == [True, True]


def between_replicas() -> Tensor:
    """Train two replicas of two ranks each: DDP within, rounds between."""
    rank = dist.get_rank()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.Linear(6, 3)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    wrapped = DistributedDataParallel(model, process_group=nodes[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with micro.LocalSteps(wrapped, optimizer, micro.DenseReducer(), every=2, replicas=peers[rank % 2]):
        for step in range(2):
            backward(wrapped, step, rank)
            optimizer.step()
            seen.append(weights(model))
    return torch.stack(seen)


def test_ddp_may_go_on_within_a_replica() -> None:
    found = ranks(4).run(between_replicas)
    within, after = zip(*found, strict=True)
    assert torch.equal(within[0], within[1])
    assert torch.equal(within[2], within[3])
    assert not torch.equal(within[0], within[2])
    assert all(torch.equal(after[0], other) for other in after)
