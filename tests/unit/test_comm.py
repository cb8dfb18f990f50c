"""Collectives do what they say, cost what they say, and one rank's error ends the wait of the others."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from micro.comm import Comm, Kind, SoloComm, Traffic, gather_objects, gather_objects_at_first
from micro.peer_failures import PeerError
from micro.thread_ranks import SimulatedGroup

T = TypeVar("T")
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])


def run(world_size: int, work: Callable[[Comm], T]) -> tuple[list[T], list[Traffic]]:
    """Return what ranks that share memory give, which is what ranks give that only pass it on."""
    apart, traffic_apart = _run(world_size, work, shares=False)
    together, traffic = _run(world_size, work, shares=True)
    assert repr(apart) == repr(together)
    assert [t.num_bytes for t in traffic_apart] == [t.num_bytes for t in traffic]
    return together, traffic


def _run(world_size: int, work: Callable[[Comm], T], *, shares: bool) -> tuple[list[T], list[Traffic]]:
    def counted(comm: Comm) -> tuple[T, Traffic]:
        comm.begin_step()
        return work(comm), comm.traffic

    with closing(SimulatedGroup(world_size, shares=shares)) as group:
        results = group.run(counted)
    return [result for result, _ in results], [traffic for _, traffic in results]


def own(comm: Comm, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return (numel,) numbers that tell rank and place."""
    return (100 * comm.rank + torch.arange(numel)).to(dtype)


def assert_sent(traffic: list[Traffic], kind: Kind, num_bytes: list[float]) -> None:
    expected = 1 if len(traffic) > 1 else 0
    assert [t.num_bytes[kind] for t in traffic] == pytest.approx(num_bytes)
    assert [sum(t.num_bytes.values()) for t in traffic] == pytest.approx(num_bytes)
    assert [t.num_collectives for t in traffic] == [expected] * len(traffic)
    assert all((float(t.elapsed) > 0) == (expected > 0) for t in traffic)


@WORLDS
def test_gather_rows(world_size: int) -> None:
    rows, traffic = run(world_size, lambda comm: comm.gather_rows(own(comm, 3, torch.int32)))
    for got in rows:
        assert got.dtype == torch.int32
        assert got.tolist() == [[100 * rank, 100 * rank + 1, 100 * rank + 2] for rank in range(world_size)]
    assert_sent(traffic, "counts", [12 * (world_size - 1)] * world_size)


@WORLDS
def test_gather_lists_of_different_lengths(world_size: int) -> None:
    counts = [(3 * rank) % 4 for rank in range(world_size)]  # rank 0 has nothing
    lists, traffic = run(
        world_size, lambda comm: comm.gather_lists(own(comm, counts[comm.rank], torch.int32), counts, "indices")
    )
    for got in lists:
        assert [part.tolist() for part in got] == [[100 * r + i for i in range(counts[r])] for r in range(world_size)]
    assert_sent(traffic, "indices", [4.0 * count * (world_size - 1) for count in counts])


@WORLDS
@pytest.mark.parametrize("spread", [0, 2])
def test_lists_of_about_one_length_travel_as_long_as_the_longest(world_size: int, spread: int) -> None:
    counts = [9 + rank % (spread + 1) for rank in range(world_size)]
    lists, traffic = run(
        world_size, lambda comm: comm.gather_lists(own(comm, counts[comm.rank], torch.int32), counts, "indices")
    )
    for got in lists:
        assert [part.tolist() for part in got] == [[100 * r + i for i in range(counts[r])] for r in range(world_size)]
    sent = counts if world_size <= 2 else [max(counts)] * world_size
    assert_sent(traffic, "indices", [4.0 * count * (world_size - 1) for count in sent])


@WORLDS
def test_gather_lists_that_are_all_empty(world_size: int) -> None:
    lists, traffic = run(world_size, lambda comm: comm.gather_lists(own(comm, 0), [0] * world_size, "values"))
    assert all(part.numel() == 0 for got in lists for part in got)
    assert [len(got) for got in lists] == [world_size] * world_size
    assert_sent(traffic, "values", [0.0] * world_size)


@WORLDS
def test_scatter_parts(world_size: int) -> None:
    sizes = [(rank + 1) % 4 for rank in range(world_size)]  # rank 3 owns nothing
    parts, traffic = run(world_size, lambda comm: comm.scatter_parts(own(comm, sum(sizes)), sizes, "values"))
    for rank, got in enumerate(parts):
        first = sum(sizes[:rank])
        assert got.tolist() == [[100.0 * r + first + i for i in range(sizes[rank])] for r in range(world_size)]
        assert got.shape == (world_size, sizes[rank])
    assert_sent(traffic, "values", [8.0 * (sum(sizes) - size) for size in sizes])


def size_between(source: int, target: int) -> int:
    """How many numbers ``source`` sends to ``target`` in these tests: from 0 to 3, another number the other way."""
    return (2 * source + 3 * target + 1) % 4


def scattered(comm: Comm, pieces: list[Tensor], received: list[int], kind: Kind) -> list[Tensor]:
    sizes = [piece.numel() for piece in pieces]
    return list(comm.scatter_lists(torch.cat(pieces), sizes, received, kind).split(received))


@WORLDS
def test_scatter_lists_of_different_lengths(world_size: int) -> None:
    ranks = range(world_size)

    def work(comm: Comm) -> list[Tensor]:
        pieces = [1000 * target + own(comm, size_between(comm.rank, target)) for target in ranks]
        return scattered(comm, pieces, [size_between(source, comm.rank) for source in ranks], "values")

    lists, traffic = run(world_size, work)
    for target, got in enumerate(lists):
        expected = [[1000 * target + 100 * s + i for i in range(size_between(s, target))] for s in ranks]
        assert [part.tolist() for part in got] == expected
    sent = [8.0 * sum(size_between(source, target) for target in ranks if target != source) for source in ranks]
    assert_sent(traffic, "values", sent)


@WORLDS
@pytest.mark.parametrize("distance", [1, 2])
def test_scatter_lists_to_one_rank_each_that_does_not_see_what_changes_later(world_size: int, distance: int) -> None:
    """What is sent may change as soon as the call has returned, also where one list is all that leaves."""

    def work(comm: Comm) -> list[float]:
        target, source = ((comm.rank + sign * distance) % world_size for sign in (1, -1))
        mine = own(comm, 3)
        sizes, received_sizes = (
            [3 if rank == there else 0 for rank in range(world_size)] for there in (target, source)
        )
        received = comm.scatter_lists(mine, sizes, received_sizes, "values").clone()
        mine.fill_(-1.0)
        comm.gather_rows(torch.zeros(1))
        return received.tolist()

    lists, _ = run(world_size, work)
    for rank, got in enumerate(lists):
        assert got == [100 * ((rank - distance) % world_size) + i for i in range(3)]


@WORLDS
def test_scatter_lists_that_are_all_empty(world_size: int) -> None:
    def work(comm: Comm) -> list[Tensor]:
        return scattered(comm, [own(comm, 0)] * world_size, [0] * world_size, "indices")

    lists, traffic = run(world_size, work)
    assert [[part.numel() for part in got] for got in lists] == [[0] * world_size] * world_size
    assert_sent(traffic, "indices", [0.0] * world_size)


@WORLDS
@pytest.mark.parametrize("numel", [1, 4, 11])
def test_all_reduce(world_size: int, numel: int) -> None:
    sums, traffic = run(world_size, lambda comm: comm.all_reduce_(own(comm, numel)))
    expected = world_size * (torch.arange(numel, dtype=torch.float64) + 50 * (world_size - 1))
    assert all(torch.equal(got, expected) for got in sums)
    assert_sent(traffic, "values", [2 * 8 * numel * (world_size - 1) / world_size] * world_size)


def test_all_reduce_is_in_place_and_the_same_bits_on_all_ranks() -> None:
    def work(comm: Comm) -> tuple[bool, Tensor]:
        x = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank)) * 10.0 ** (3 * comm.rank)
        return comm.all_reduce_(x) is x, x

    results, _ = run(7, work)
    assert all(in_place for in_place, _ in results)
    assert all(torch.equal(x, results[0][1]) for _, x in results)


@WORLDS
def test_broadcast(world_size: int) -> None:
    source = world_size - 1
    copies, traffic = run(world_size, lambda comm: comm.broadcast_(own(comm, 5, torch.int32), source, "indices"))
    assert [got.tolist() for got in copies] == [[100 * source + i for i in range(5)]] * world_size
    assert_sent(traffic, "indices", [20 * (world_size - 1) / world_size] * world_size)


def test_results_do_not_share_memory_with_what_others_sent() -> None:
    def work(comm: Comm) -> list[float]:
        mine = own(comm, 2)
        rows = comm.gather_rows(mine)
        lists = comm.gather_lists(mine, [2] * 3, "values")
        kept = [*rows.view(-1).tolist(), *torch.cat(lists).tolist()]
        mine.fill_(-1.0)
        comm.all_reduce_(torch.zeros(1))  # all have overwritten theirs
        assert [*rows.view(-1).tolist(), *torch.cat(lists).tolist()] == kept
        return kept

    run(3, work)


def test_traffic_adds_up_by_kind_until_a_new_step_begins() -> None:
    def work(comm: Comm) -> list[tuple[dict[Kind, float], int]]:
        seen = []
        for _ in range(2):
            comm.begin_step()
            comm.gather_rows(own(comm, 1))
            comm.gather_rows(own(comm, 2))
            comm.all_reduce_(own(comm, 4), "indices")
            seen.append((dict(comm.traffic.num_bytes), comm.traffic.num_collectives))
        return seen

    results, _ = run(2, work)
    assert results == [[({"counts": 24.0, "indices": 32.0, "values": 0.0}, 3)] * 2] * 2


def test_collectives_of_many_steps_never_mix() -> None:
    def work(comm: Comm) -> None:
        for step in range(200):
            rows = comm.gather_rows(torch.tensor([step * 10 + comm.rank]))
            assert rows.view(-1).tolist() == [step * 10 + rank for rank in range(4)]
            assert comm.all_reduce_(torch.tensor([step])).item() == 4 * step

    run(4, work)


def test_one_rank_alone_talks_to_nobody() -> None:
    comm = SoloComm()
    x = torch.arange(3.0)
    assert (comm.rank, comm.world_size) == (0, 1)
    assert comm.gather_rows(x).tolist() == [[0.0, 1.0, 2.0]]
    assert [part.tolist() for part in comm.gather_lists(x, [3], "values")] == [[0.0, 1.0, 2.0]]
    assert comm.scatter_parts(x, [3], "values").tolist() == [[0.0, 1.0, 2.0]]
    assert comm.scatter_lists(x, [3], [3], "values").tolist() == [0.0, 1.0, 2.0]
    assert comm.all_reduce_(x) is x
    assert comm.broadcast_(x, 0, "values") is x
    assert comm.traffic == Traffic()


class FailedError(Exception):
    """What a rank of these tests dies of."""


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_error_of_one_rank_frees_the_others_and_is_the_one_that_is_told(bad_rank: int) -> None:
    def work(comm: Comm) -> None:
        comm.all_reduce_(torch.ones(3))
        if comm.rank == bad_rank:
            time.sleep(0.01)  # the others wait by now
            raise FailedError(f"rank {comm.rank}")
        comm.all_reduce_(torch.ones(3))

    with closing(SimulatedGroup(4)) as group:
        for _ in range(3):
            with pytest.raises(FailedError, match=f"rank {bad_rank}"):
                group.run(work)
            assert group.run(lambda comm: comm.all_reduce_(torch.ones(2)).tolist()) == [[4.0, 4.0]] * 4


def test_an_error_of_all_ranks_is_told_once() -> None:
    def work(comm: Comm) -> None:
        comm.gather_rows(torch.ones(1))
        raise FailedError("all")

    with closing(SimulatedGroup(3)) as group:
        for _ in range(20):
            with pytest.raises(FailedError, match="all"):
                group.run(work)
        assert group.run(lambda comm: comm.rank) == [0, 1, 2]


def outcomes(group: SimulatedGroup, work: Callable[[Comm], object]) -> tuple[str, list[str]]:
    """Return what ``run`` raises, and how each rank ended, in words."""
    ended = [""] * len(group.comms)

    def recorded(comm: Comm) -> None:
        try:
            ended[comm.rank] = f"{work(comm)}"
        except Exception as error:
            ended[comm.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises((FailedError, PeerError)) as caught:
        group.run(recorded)
    return f"{caught.type.__name__}: {caught.value}", ended


def sum_of_ones(comm: Comm) -> list[float]:
    return comm.all_reduce_(torch.ones(2)).tolist()


def test_the_ranks_that_wait_say_whose_failure_ended_them() -> None:
    def work(comm: Comm) -> object:
        if comm.rank == 1:
            raise FailedError("of its own\nand more")
        return sum_of_ones(comm)

    with closing(SimulatedGroup(3)) as group:
        peer = "PeerError: rank 1 failed: FailedError: of its own"
        own = "FailedError: of its own\nand more"
        assert outcomes(group, work) == (own, [peer, own, peer])
        assert group.run(sum_of_ones) == [[3.0, 3.0]] * 3


def test_the_first_error_is_told_though_it_leads_to_others() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 2:
            raise FailedError("the cause")
        try:
            sum_of_ones(comm)
        except PeerError:
            raise FailedError("what follows from it") from None

    with closing(SimulatedGroup(3)) as group:
        assert outcomes(group, work)[0] == "FailedError: the cause"


def test_a_rank_that_ends_without_a_collective_ends_those_that_wait_in_it() -> None:
    with closing(SimulatedGroup(3)) as group:
        reported, ended = outcomes(group, lambda comm: comm.rank == 1 or sum_of_ones(comm))
        assert reported == "PeerError: rank 1 ended without coming to all_reduce"
        assert ended == [reported, "True", reported]
        assert group.run(sum_of_ones) == [[3.0, 3.0]] * 3


def test_ranks_that_call_different_collectives_at_once_are_told() -> None:
    def work(comm: Comm) -> object:
        return comm.gather_rows(torch.ones(2)) if comm.rank == 1 else sum_of_ones(comm)

    with closing(SimulatedGroup(2)) as group:
        reported, ended = outcomes(group, work)
        assert sorted(reported.removeprefix("PeerError: ").removesuffix(" at the same time").split(", ")) in (
            ["rank 0 all_reduce", "rank 1 calls gather_rows"],
            ["rank 0 calls all_reduce", "rank 1 gather_rows"],
        )
        assert ended == [reported] * 2


def test_a_rank_that_stays_away_is_named_when_the_time_is_over() -> None:
    may_go = threading.Event()

    def work(comm: Comm) -> object:
        if comm.rank == 1:
            may_go.wait()
        return sum_of_ones(comm)

    group = SimulatedGroup(3, timeout_s=2.0)
    with patch("micro.thread_ranks.GRACE_S", 0.1):
        reported, ended = outcomes(group, work)
    assert reported == "PeerError: rank 1 did not come to all_reduce within 2 s"
    assert ended == [reported, "", reported]
    with pytest.raises(RuntimeError, match=r"^rank 1 is still at work since .*: make a new group$"):
        group.run(sum_of_ones)
    may_go.set()
    group.close()
    for thread in group._threads:
        thread.join(300)
        assert not thread.is_alive()


def test_a_rank_at_work_may_take_longer_than_the_time_to_wait_where_nobody_waits_for_it() -> None:
    with closing(SimulatedGroup(1, timeout_s=0.01)) as group:
        assert group.run(lambda _: time.sleep(0.1)) == [None]


def test_an_interrupted_run_ends_its_ranks() -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with closing(SimulatedGroup(2)) as group:
        with patch.object(group, "_wait_for", interrupted), pytest.raises(KeyboardInterrupt):
            group.run(lambda comm: comm.rank or sum_of_ones(comm))
        assert group.run(sum_of_ones) == [[2.0, 2.0]] * 2


def test_a_rank_that_fails_after_a_collective_takes_it_from_nobody() -> None:
    """Those that it woke, or that are still to be woken, have what the collective gave them."""
    done: list[int] = []

    def work(comm: Comm) -> None:
        sum_of_ones(comm)
        if comm.rank == 1:
            raise FailedError
        done.append(comm.rank)

    with closing(SimulatedGroup(4)) as group:
        for _ in range(50):
            done.clear()
            with pytest.raises(FailedError):
                group.run(work)
            assert sorted(done) == [0, 2, 3]


def test_a_group_that_nobody_has_any_more_ends_its_threads() -> None:
    group = SimulatedGroup(2)
    threads = group._threads
    del group
    gc.collect()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_time_to_wait_is_positive(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=f"^timeout_s must be positive, got {timeout_s}$"):
        SimulatedGroup(2, timeout_s=timeout_s)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_group_has_members(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
        SimulatedGroup(world_size)


def test_a_group_leaves_the_number_of_torch_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with closing(SimulatedGroup(6)) as group:
            assert group.run(lambda _: torch.get_num_threads()) == [1] * 6
            assert torch.get_num_threads() == 3
            seen: list[int] = []
            newcomer = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            newcomer.start()
            newcomer.join()
            assert seen == [3]
    finally:
        torch.set_num_threads(before)


# --- picklable items over torch.distributed ---------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [gather_objects, gather_objects_at_first])
def test_items_are_gathered_without_numpy(
    one_rank: None, gather: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an installation that has torch alone: there, a tensor has no numpy()."""

    def unavailable(_tensor: Tensor, **_settings: bool) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(Tensor, "numpy", unavailable)
    (item,) = gather({"rank": 0, "residual": torch.arange(5.0)})  # type: ignore[misc]
    assert item["rank"] == 0
    assert item["residual"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
