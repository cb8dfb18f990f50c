"""Blocks that are dealt out: each element is in one part, and MiCRO chooses as if parts were ranges."""

import pytest
import torch

import micro
from micro.codecs.indices import IndexCodec, Int32, Shortest
from micro.interleaving import DealtBlocks
from tests.products import grid

CASES = [(0, 1, 4), (10, 1, 3), (10, 3, 1), (3, 5, 2), (100, 4, 7), (112, 4, 7), (113, 4, 7), (6, 4, 100)]


@pytest.mark.parametrize(("numel", "num_parts", "block"), CASES)
def test_every_element_is_in_one_part(numel: int, num_parts: int, block: int) -> None:
    dealt, vector = DealtBlocks(numel, num_parts, block), torch.arange(numel, dtype=torch.int32)
    for step in range(num_parts + 1):
        spans = dealt.spans(step)
        parts = [dealt.slice(vector, step, rank) for rank in range(num_parts)]
        assert [part.numel() for part in parts] == [stop - start for start, stop in spans]
        assert max(part.numel() for part in parts) == dealt.longest
        assert sorted(torch.cat(parts).tolist()) == vector.tolist()
        for rank, part in enumerate(parts):
            expected = [i for i in range(numel) if i // block % num_parts == (step + rank) % num_parts]
            assert part.tolist() == expected
            numbers = torch.arange(*spans[rank], dtype=torch.int32)
            assert dealt.places(numbers, step, rank).tolist() == expected
        counts = [part.numel() for part in parts]
        numbers = torch.cat([torch.arange(*span, dtype=torch.int32) for span in spans])
        assert torch.equal(dealt.places_of_all(numbers, counts, step), torch.cat(parts))


@grid(world_size=[1, 2, 3], block=[1, 16, 200], slack_and_indices=[(None, Int32()), (0.2, Int32()), (None, Shortest())])
def test_it_chooses_as_from_ranges_of_the_dealt_vector(
    world_size: int, block: int, slack_and_indices: tuple[float | None, IndexCodec]
) -> None:
    slack, indices = slack_and_indices
    numel = 2400
    dealt, vector = DealtBlocks(numel, world_size, block), torch.arange(numel)
    order = torch.cat([dealt.slice(vector, 0, rank) for rank in range(world_size)])
    made = [micro.SparseReducer(micro.Micro(slack=slack, block=each), 0.05, indices=indices) for each in (block, None)]
    blocks, ranges = (micro.Simulation(reducer, micro.Layout.flat(numel), world_size) for reducer in made)
    for step in range(4):
        grads = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(step))
        got, expected = blocks.step(grads, residuals=True), ranges.step(grads[:, order], residuals=True)
        assert torch.equal(got.update[order], expected.update)
        assert torch.equal(got.residuals[:, order], expected.residuals)
