"""The quantised reduce-scatter on simulated ranks: against a dense one, and where a gradient is not finite."""

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.fsdp.within import scattered_sum
from tests.parts import normal
from tests.products import grid

BLOCK, SHARD = 64, 150
CODECS = {
    "bfloat16": micro.BFloat16(),
    "int8": micro.Int8(block=BLOCK),
    "int8 at random": micro.Int8(block=BLOCK, stochastic=True),
    "fp8": micro.FP8(block=BLOCK),
}
SIZES = {"bfloat16": 2 * SHARD, **dict.fromkeys(("int8", "int8 at random", "fp8"), SHARD + 4 * 3)}  # three blocks


def summed(codec: micro.Codec, grads: Tensor, key: int = 0) -> tuple[Tensor, float]:
    """Return the owners' sums, one shard after the other, and the bytes that each rank sent."""
    ranks = SimulatedRanks(len(grads))
    given = grads.clone()
    work = [scattered_sum(own, codec, (key, comm.rank), comm) for own, comm in zip(grads, ranks.comms, strict=True)]
    sums = torch.cat(ranks.carry_out(work))
    assert torch.equal(grads.nan_to_num(), given.nan_to_num()), "it changes the gradients"
    (sent,) = {comm.traffic.num_bytes["values"] for comm in ranks.comms}
    return sums, sent


def bound(name: str, piece: Tensor) -> Tensor:
    """Return the most that the code of a piece (shard,) loses of each value."""
    if name == "bfloat16":
        return piece.abs() / 2**8
    scales = torch.cat([block.abs().max().expand(block.numel()) for block in piece.split(BLOCK)])
    if name == "fp8":
        return torch.maximum(piece.abs() / 16, scales / 448 / 2**10)
    return scales / 127 * (1.0 if "random" in name else 0.5)


@grid(name=CODECS, world_size=[1, 2, 3], dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_a_dense_one_but_for_what_codes_lose(name: str, world_size: int, dtype: torch.dtype) -> None:
    grads = normal(world_size, world_size * SHARD, dtype=dtype)
    sums, sent = summed(CODECS[name], grads)
    assert sums.dtype == torch.promote_types(dtype, torch.float32)
    exact = grads.double()
    pieces = exact.view(world_size, world_size, SHARD)
    lost = [sum(bound(name, p) for r, p in enumerate(pieces[:, owner]) if r != owner) for owner in range(world_size)]
    allowed = torch.cat([torch.as_tensor(each).expand(SHARD) for each in lost])
    assert ((sums.double() - exact.sum(0)).abs() <= allowed * 1.001 + 1e-6).all()
    message = SIZES[name] + 4 - SIZES[name] % 4
    assert sent == (world_size - 1) * message


@grid(name=CODECS, world_size=[2, 3])
def test_values_that_a_code_has_arrive_exactly(name: str, world_size: int) -> None:
    steps = torch.tensor([0, 1, -2, 3, 4, -8, 16, 48]).repeat(SHARD * world_size // 8 + 1)[: SHARD * world_size]
    grads = torch.stack([steps.roll(rank).float() for rank in range(world_size)])
    largest = {"bfloat16": 48.0, "fp8": 448.0}.get(name, 127.0)
    grads.view(world_size, world_size, SHARD)[..., ::20] = largest  # one in every block, so that its scale is 1
    sums, _ = summed(CODECS[name], grads)
    assert torch.equal(sums, grads.sum(0))


def test_random_rounding_is_right_on_average_and_other_draws_are_others() -> None:
    grads = normal(2, 2 * SHARD, dtype=torch.float32)
    draws = torch.stack([summed(CODECS["int8 at random"], grads, key)[0] for key in range(200)])
    assert draws.std(0).max() > 0
    torch.testing.assert_close(draws.mean(0), grads.sum(0), rtol=0, atol=0.01)


@grid(name=CODECS, bad=[torch.nan, torch.inf, -torch.inf, 2.0**127], place=[0, SHARD // 2, 2 * SHARD - 1])
def test_what_is_not_finite_reaches_the_owner_and_no_other(name: str, bad: float, place: int) -> None:
    grads = normal(3, 3 * SHARD, dtype=torch.float32)
    grads[2, place] = bad
    sums, _ = summed(CODECS[name], grads)
    owner = place // SHARD
    assert sums.view(3, SHARD)[owner].isnan().all()
    assert sums.view(3, SHARD)[[rank for rank in range(3) if rank != owner]].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_owners_own_value_stays_where_it_was(bad: float) -> None:
    grads = normal(2, 2 * SHARD, dtype=torch.float32)
    grads[0, 3] = bad
    sums, _ = summed(micro.Int8(), grads)
    assert (~sums.isfinite()).nonzero().tolist() == [[3]]


def test_nothing_of_an_empty_gradient() -> None:
    assert summed(micro.Int8(), torch.zeros(2, 0))[0].shape == (0,)
