"""Vectors of up to 2^31 - 1 elements and up to 2,048 ranks: no count, index or sum leaves its type.

Accumulators are one number that is seen at every place, or have no memory at all, so that length costs nothing.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from experiments.studies.methods import build_methods, known_methods
from micro import kernels
from micro.clipping import clip_
from micro.codecs.indices import Int32
from micro.comm import Comm
from micro.exchanges.base import Transport, Wire
from micro.exchanges.gathering import gather_header
from micro.flat import MAX_NUMEL
from micro.kernels import table
from micro.lockstep import SimulatedRanks
from micro.norms import norm, norms_of
from micro.partition import cyclic_slice, equal_slice
from micro.planning.volumes import volume_of
from micro.reducers.node_exchange import node_shards, numels_of
from micro.requests import AllGatherLists, AllReduce, AllToAll, Request, carried_out
from micro.sparse import Exchanged, Overlap, Selection, Step
from micro.zoo import exdyna
from micro.zoo.deft import layer_pieces
from micro.zoo.gtopk import GTopK
from tests.mirrored_ranks import MirroredComm
from tests.products import TIER, grid

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
    micro.InPieces(ends=(2**30 + 7, MAX_NUMEL)),
    micro.InPieces(each=micro.Gather(), ends=(1, 2**31 - 2, MAX_NUMEL)),
)


def seen_everywhere(value: float, numel: int = MAX_NUMEL) -> Tensor:
    return torch.full((1,), value).expand(numel)


def choice(rank: int, world_size: int) -> list[int]:
    """Return what a rank chooses: places that all share, and its own."""
    own = [(place * 2654435761 + 97 * rank) % MAX_NUMEL for place in range(1, 30)]
    return sorted({*PLACES, *own})


def exchange(part: micro.Exchange, indices: micro.IndexCodec, world_size: int) -> list[Exchanged]:
    def work(comm: Comm) -> Exchanged:
        step = Step(0, 10_000, 0, micro.Layout.flat(MAX_NUMEL))
        transport = Transport(comm=comm, step=step, overlap=Overlap.ANY, wire=Wire(indices=indices))
        selection = Selection(torch.tensor(choice(comm.rank, world_size), dtype=torch.int32))
        reduction = part.exchange(part.start(), seen_everywhere(1.0 + comm.rank), selection, transport)
        return carried_out(reduction, comm)

    with closing(SimulatedRanks(world_size)) as group:
        return group.run(work)


@grid(part=EXCHANGES, indices=[Int32(), micro.Packed(), micro.Shortest()], world_size=[2, 3, 5])
def test_exchanges_keep_every_index_of_the_longest_vector(
    part: micro.Exchange, indices: micro.IndexCodec, world_size: int
) -> None:
    expected: dict[int, float] = {}
    chosen = [choice(rank, world_size) for rank in range(world_size)]
    for rank, places in enumerate(chosen):
        for place in places:
            expected[place] = expected.get(place, 0.0) + (1.0 + rank) / world_size
    if part.name == "union" or getattr(part, "each", part).name == "union":
        expected = dict.fromkeys(expected, (1 + world_size) / 2)
    if part == micro.DSA(rule="published"):
        expected = {}  # sends what is above the smallest magnitude of a choice: of equal ones nothing
    for found in exchange(part, indices, world_size):
        update: dict[int, float] = {}
        for values in found.update:
            for place, value in zip(values.indices.tolist(), values.values.tolist(), strict=True):
                update[place] = update.get(place, 0.0) + value
        assert update == pytest.approx(expected)
        assert found.counts == tuple(map(len, chosen))
        assert found.num_updated == len(expected)
        assert min(found.sent.indices.tolist(), default=0) >= 0


def sent(request: Request, comm: Comm) -> float:
    """Return the bytes that a request counts as sent, carried out or not."""
    request.comm = comm
    comm.begin_step()
    request.count()
    return sum(comm.traffic.num_bytes.values())


def test_bytes_of_many_ranks_that_send_everything_are_exact() -> None:
    comm, d = MirroredComm(MANY), MAX_NUMEL
    mine = torch.empty(d, dtype=torch.int32, device="meta")
    assert sent(AllGatherLists(mine=mine, counts=[d] * MANY), comm) == 4 * d * (MANY - 1)
    assert sent(AllReduce(mine=mine.double()), comm) == 2 * 8 * d * (MANY - 1) / MANY
    sizes = [stop - start for start, stop in (equal_slice(d, MANY, part) for part in range(MANY))]
    assert sent(AllToAll(mine=mine, sizes=sizes, received=sizes), comm) == 4 * (d - sizes[0])


def test_counts_of_many_ranks_are_added_up_beyond_int32() -> None:
    indices = torch.zeros(1, dtype=torch.int32).expand(MAX_NUMEL)
    header = carried_out(gather_header(indices, is_finite=True, extra=torch.tensor([MAX_NUMEL])), MirroredComm(MANY))
    assert sum(header.counts) == MANY * MAX_NUMEL
    assert [row[0] for row in header.extras] == [MAX_NUMEL] * MANY


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, MANY])
def test_parts_of_the_longest_vector_cover_it(world_size: int) -> None:
    d, ranks = MAX_NUMEL, range(world_size)
    assert_covers([equal_slice(d, world_size, rank) for rank in ranks])
    assert_covers(sorted(cyclic_slice(d, 10**9 + 7, rank, world_size) for rank in ranks))
    for balance in (exdyna.Repaired(), exdyna.AsPublished()):
        blocks = balance.grid(d, 1024, 32)
        shares = [stop - start for start, stop in (equal_slice(blocks.num_blocks, world_size, r) for r in ranks)]
        assert_covers(exdyna.block_spans(shares, blocks.block_size, d))
    numels = (2**30, 2**30 - 2, 1)
    assert_covers(layer_pieces(numels, world_size))
    shards = node_shards(micro.Layout(("a", "b", "c"), tuple((numel,) for numel in numels)), world_size)
    assert sum(numels_of(shards)) == d
    first = shards[0]
    assert first is not None
    last = first.layout.numel - 1
    ends = first.positions(torch.tensor([0, last], dtype=torch.int32)).tolist()
    assert ends == [0, d - 1]  # the last parameter's only element is the first rank's


def assert_covers(spans: Sequence[tuple[int, int]]) -> None:
    assert spans[0][0] == 0
    assert spans[-1][1] == MAX_NUMEL
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_packed_indices_reach_the_end_of_the_longest_vector(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(table, "TRIED", ())
    for first in (0, 2**30, MAX_NUMEL - 1000):
        indices = torch.arange(first, first + 1000, dtype=torch.int32)
        wire = micro.Packed().encode(indices, MAX_NUMEL)
        assert torch.equal(micro.Packed().decode(wire, 1000, MAX_NUMEL), indices)


def test_norms_of_long_vectors_do_not_stop_to_grow() -> None:
    """Single precision adds nothing to 2^24 that is not larger than 1."""
    numel = 2**25
    ones = seen_everywhere(1.0, numel)
    assert float(norm(ones)) == pytest.approx(math.sqrt(numel), rel=1e-5)
    assert float(norm(ones, 1)) == pytest.approx(numel, rel=1e-5)
    assert norms_of(ones, [numel - 9, 9]).tolist() == pytest.approx([math.sqrt(numel - 9), 3.0], rel=1e-5)


@pytest.mark.parametrize("sizes", [(0,), (7,), (781,) * 40 + (782,) * 24, (3, 3, 0, 0, 5, 3, 1, 1000, 1000)])
def test_norms_of_pieces_are_the_norms_that_they_have_alone(sizes: tuple[int, ...]) -> None:
    vector = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(5))
    assert norms_of(vector, sizes).tolist() == [float(norm(piece)) for piece in vector.split(list(sizes))]


def test_long_gradients_are_clipped_to_their_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: list[float] = []
    monkeypatch.setattr(Tensor, "mul_", lambda vector, factor: scaled.append(float(factor)) or vector)
    carried_out(clip_([seen_everywhere(1.0, 2**25)], 1.0), Comm())
    assert scaled == pytest.approx([2**-12.5], rel=1e-4)


def test_shapes_of_more_elements_than_any_integer_type_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"^numel of a layout must be in \[1, {MAX_NUMEL}\], got {2**64}$"):
        micro.Layout(("a",), ((2**32, 2**32),))


@pytest.mark.parametrize("world_size", [2, MANY])
def test_predicted_bytes_of_the_longest_vector(world_size: int) -> None:
    layout = micro.Layout(("a", "b"), ((2**15, 2**15), (2**30 - 1,)))
    for name, reducer in build_methods(known_methods(), 0.001).items():
        volume = volume_of(reducer, MAX_NUMEL, world_size, layout=layout)
        sizes = [size for _, size in volume.calls]
        assert all(0 <= size < 2**53 for size in sizes), name
        assert 0 < volume.between_bytes < 2 * 8 * MAX_NUMEL * world_size, name
        assert 0 < volume.num_updated <= MAX_NUMEL, name


def test_few_choices_in_the_longest_vector_are_not_lost_to_rounding() -> None:
    """Ranks that choose one element each choose as many in all, but for one in 2^20."""
    reducer = micro.SparseReducer(micro.TopK(), density=1e-10, exchange=micro.Gather())
    volume = volume_of(reducer, MAX_NUMEL, MANY)
    assert volume.num_updated == pytest.approx(MANY, rel=1e-6)
    assert volume.num_updated <= MANY


@pytest.mark.skipif(TIER != "all", reason="reads 8 GiB several times")
def test_compiled_loops_reach_the_end_of_the_longest_vector() -> None:
    """Memory that was never written to is zero and takes no space."""
    vector = np.zeros(MAX_NUMEL, dtype=np.float32)
    for number, place in enumerate(PLACES, start=1):
        vector[place] = -number
    x = torch.from_numpy(vector)
    if not kernels.compiled(x):
        pytest.skip("numba is not installed")
    assert kernels.above(x, 0.5).tolist() == list(PLACES)
    assert kernels.largest(x, 3).tolist() == list(PLACES[-3:])
    counts = kernels.magnitude_counts(x, first_bit_pattern=0, shift=20, num_bins=2040)
    assert int(counts.sum()) == len(PLACES)
