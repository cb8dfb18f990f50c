"""Vectors of up to 2^31 - 1 elements and up to 2,048 ranks: no count, index or sum leaves its type.

Accumulators are one number that is seen at every place, or have no memory at all, so that length costs nothing.
"""

import itertools
import math

import pytest
import torch

import micro
from micro.codecs.indices import Int32
from micro.comm.loop import carried_out
from micro.comm.requests import AllGatherLists, AllReduce, AllToAll, Request
from micro.exchanges.base import Wire
from micro.exchanges.header import gather_header
from micro.predicted_traffic import volume_of
from micro.reducers.node_exchange import node_shards, numels_of
from micro.values.flat import MAX_NUMEL
from micro.values.norms import norm, norms_of, rows_of
from micro.values.sparse import cyclic_slice, equal_slice
from micro.zoo import exdyna
from micro.zoo.deft import layer_pieces
from micro.zoo.gtopk import GTopK
from tests.exchanging import exchanged
from tests.mirrored_ranks import MirroredComm
from tests.products import grid
from tests.sparsifiers import TABLE

MANY = 2048
PLACES = (0, 1, 2**24 + 1, MAX_NUMEL // 3, 2**30, 2 * (MAX_NUMEL // 3) + 1, MAX_NUMEL - 2, MAX_NUMEL - 1)
EXCHANGES = (
    micro.Union(),
    micro.Gather(),
    micro.DSA(),
    micro.DSA(rule="published"),
    GTopK(),
    GTopK(rule="published"),
    micro.Oktopk(),
    micro.Oktopk(rule="published"),
)


@grid(part=EXCHANGES, indices=[Int32(), micro.Packed(), micro.Shortest()], world_size=[2, 3, 5])
def test_exchanges_keep_every_index_of_the_longest_vector(
    part: micro.Exchange, indices: micro.IndexCodec, world_size: int
) -> None:
    """Ranks choose places that all share, and their own."""
    own = [{(place * 2654435761 + 97 * rank) % MAX_NUMEL for place in range(1, 30)} for rank in range(world_size)]
    chosen, expected = [sorted({*PLACES, *places}) for places in own], dict[int, float]()
    for rank, places in enumerate(chosen):
        for place in places:
            expected[place] = expected.get(place, 0.0) + (1.0 + rank) / world_size
    if part.name == "union":
        expected = dict.fromkeys(expected, (1 + world_size) / 2)
    if part == micro.DSA(rule="published"):
        expected = {}  # sends what is above the smallest magnitude of a choice: of equal ones nothing
    acc = torch.arange(1.0, world_size + 1)[:, None].expand(-1, MAX_NUMEL)
    for found in exchanged(part, acc, chosen, target_count=10_000, wire=Wire(indices=indices))[0]:
        update: dict[int, float] = {}
        for values in found.update:
            for place, value in zip(values.indices.tolist(), values.values.tolist(), strict=True):
                update[place] = update.get(place, 0.0) + value
        assert update == pytest.approx(expected)
        assert (found.counts, found.num_updated) == (tuple(map(len, chosen)), len(expected))
        assert min(found.sent.indices.tolist(), default=0) >= 0


def sent(request: Request) -> float:
    """Return the bytes that a request of one of many ranks counts as sent; it is not carried out."""
    request.comm = comm = MirroredComm(MANY)
    comm.begin_step()
    request.count()
    return sum(comm.traffic.num_bytes.values())


def test_bytes_and_counts_of_many_ranks_that_send_everything_are_exact() -> None:
    d, mine = MAX_NUMEL, torch.empty(MAX_NUMEL, dtype=torch.int32, device="meta")
    assert sent(AllGatherLists(mine=mine, counts=[d] * MANY)) == 4 * d * (MANY - 1)
    assert sent(AllReduce(mine=mine.double())) == 2 * 8 * d * (MANY - 1) / MANY
    sizes = [stop - start for start, stop in (equal_slice(d, MANY, part) for part in range(MANY))]
    assert sent(AllToAll(mine=mine, sizes=sizes, received=sizes)) == 4 * (d - sizes[0])
    indices = torch.zeros(1, dtype=torch.int32).expand(d)
    header = carried_out(gather_header(indices, is_finite=True, extra=torch.tensor([d])), MirroredComm(MANY))
    assert sum(header.counts) == MANY * d
    assert [row[0] for row in header.extras] == [d] * MANY


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, MANY])
def test_parts_of_the_longest_vector_cover_it(world_size: int) -> None:
    d, ranks, numels = MAX_NUMEL, range(world_size), (2**30, 2**30 - 2, 1)
    spans = [
        [equal_slice(d, world_size, rank) for rank in ranks],
        sorted(cyclic_slice(d, 10**9 + 7, rank, world_size) for rank in ranks),
        layer_pieces(numels, world_size),
    ]
    for balance in (exdyna.Repaired(), exdyna.AsPublished()):
        blocks = balance.grid(d, 1024, 32)
        shares = [stop - start for start, stop in (equal_slice(blocks.num_blocks, world_size, r) for r in ranks)]
        spans.append(exdyna.block_spans(shares, blocks.block_size, d))
    for each in spans:
        assert (each[0][0], each[-1][1]) == (0, d)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(each))
    first, *others = node_shards(micro.Layout(("a", "b", "c"), tuple((numel,) for numel in numels)), world_size)
    assert sum(numels_of([first, *others])) == d
    ends = torch.tensor([0, first.layout.numel - 1], dtype=torch.int32)
    assert first.positions(ends).tolist() == [0, d - 1]  # the last parameter's only element is the first rank's


def test_norms_of_long_vectors_do_not_stop_to_grow() -> None:
    """Single precision adds nothing to 2^24 that is not larger than 1."""
    numel = 2**25
    ones = torch.ones(1).expand(numel)
    assert float(norm(ones)) == pytest.approx(math.sqrt(numel), rel=1e-5)
    assert float(norm(ones, 1)) == pytest.approx(numel, rel=1e-5)
    assert norms_of(ones, rows_of([numel - 9, 9])).tolist() == pytest.approx([math.sqrt(numel - 9), 3.0], rel=1e-5)


@pytest.mark.parametrize("world_size", [2, MANY])
def test_predicted_bytes_of_the_longest_vector(world_size: int) -> None:
    layout = micro.Layout(("a", "b", "c"), ((2**15, 2**15), (2**15 - 1, 2**15), (2**15 - 1,)))
    for row in TABLE:
        volume = volume_of(row.make(0.05, 0), MAX_NUMEL, world_size, layout=layout)
        assert all(0 <= size < 2**53 for _, size in volume.calls), row.name
        assert 0 < volume.between_bytes < 2 * 8 * MAX_NUMEL * world_size or not volume.num_nodes > 1, row.name
        assert 0 < volume.num_updated <= MAX_NUMEL, row.name
