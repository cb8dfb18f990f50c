"""What ranks request of each other is answered as promised, counted as promised, and an error names who differs."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from micro.comm import objects
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import carried_out
from micro.comm.objects import gather_objects, gather_objects_at_first
from micro.comm.peers import PeerError
from micro.comm.ranks import Comm
from micro.comm.requests import (
    AllGather,
    AllGatherLists,
    AllReduce,
    AllToAll,
    Broadcast,
    Fill,
    Once,
    Reduction,
    Request,
)

WORLDS = [1, 2, 3, 5, 8]
Row = list[float]


def own(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return (numel,) numbers that tell rank and place."""
    return (100 * rank + torch.arange(numel)).to(dtype)


def size_between(source: int, target: int) -> int:
    """How many numbers ``source`` sends to ``target`` in these tests: from 0 to 3, another number the other way."""
    return (2 * source + 3 * target + 1) % 4


class Case(NamedTuple):
    """A request, what each of n ranks is to get, and the bytes that rank r is to send."""

    request: Callable[[int, int], Request]
    answer: Callable[[int, int], Row]
    sent: Callable[[int, int], float]


def lists(counts: Callable[[int], list[int]]) -> Case:
    return Case(
        lambda rank, n: AllGatherLists(mine=own(rank, counts(n)[rank]), counts=counts(n)),
        lambda _, n: [v for rank in range(n) for v in own(rank, counts(n)[rank]).tolist()],
        lambda rank, n: 8.0 * (n - 1) * _longest(counts(n), rank),
    )


def _longest(counts: list[int], rank: int) -> int:
    """Lists of about one length travel as long as the longest; see travels_padded."""
    padded = len(counts) > 2 and 0 < len(counts) * max(counts) <= 1.25 * sum(counts)
    return max(counts) if padded else counts[rank]


def to_each(rank: int, n: int) -> AllToAll:
    pieces = [1000 * target + own(rank, size_between(rank, target)) for target in range(n)]
    received = [size_between(source, rank) for source in range(n)]
    return AllToAll(mine=torch.cat(pieces), sizes=[p.numel() for p in pieces], received=received)


CASES = {
    "rows": Case(
        lambda rank, _: AllGather(mine=own(rank, 3), kind="values"),
        lambda _, n: [v for rank in range(n) for v in own(rank, 3).tolist()],
        lambda _, n: 24.0 * (n - 1),
    ),
    "lists": lists(lambda n: [(3 * rank) % 4 for rank in range(n)]),  # rank 0 has nothing
    "lists of one length": lists(lambda n: [9] * n),
    "lists of about one length": lists(lambda n: [9 + rank % 3 for rank in range(n)]),
    "empty lists": lists(lambda n: [0] * n),
    "one to each": Case(
        to_each,
        lambda rank, n: [v for s in range(n) for v in (1000 * rank + own(s, size_between(s, rank))).tolist()],
        lambda rank, n: 8.0 * sum(size_between(rank, target) for target in range(n) if target != rank),
    ),
    "sum": Case(
        lambda rank, _: AllReduce(mine=own(rank, 5)),
        lambda _, n: (n * (torch.arange(5.0) + 50 * (n - 1))).tolist(),
        lambda _, n: 2 * 40 * (n - 1) / n,
    ),
    "copies": Case(
        lambda rank, n: Broadcast(mine=own(rank, 5), source=n - 1),
        lambda _, n: own(n - 1, 5).tolist(),
        lambda _, n: 40 * (n - 1) / n,
    ),
}


def one(request: Request) -> Reduction[Any]:
    answer = yield request
    return answer


def in_lockstep(ranks: SimulatedRanks, work: Callable[[int], Reduction[Any]]) -> list[Any]:
    return ranks.carry_out([work(comm.rank) for comm in ranks.comms])


def in_code(ranks: SimulatedRanks, work: Callable[[int], Reduction[Any]]) -> list[Any]:
    """Have synchronous code of each rank make the requests."""
    return ranks.run(lambda comm: carried_out(work(comm.rank), comm))


@pytest.mark.parametrize("ask", [in_lockstep, in_code])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_request_is_answered_and_counted(case: Case, n: int, shares: bool, ask: Callable[..., Any]) -> None:
    ranks = SimulatedRanks(n, shares=shares)
    answers = ask(ranks, lambda rank: one(case.request(rank, n)))
    traffic = [comm.traffic for comm in ranks.comms]
    assert [answer.view(-1).tolist() for answer in answers] == [case.answer(rank, n) for rank in range(n)]
    assert [sum(t.num_bytes.values()) for t in traffic] == pytest.approx([case.sent(rank, n) for rank in range(n)])
    assert [t.num_collectives for t in traffic] == [int(n > 1 and case is not CASES["empty lists"])] * n
    assert n > 1 or carried_out(one(case.request(0, 1)), Comm()).view(-1).tolist() == case.answer(0, 1)
    assert n == 1 or all(comm.clock.waited > 0 for comm in ranks.comms)


@pytest.mark.parametrize("numel", [1001, 2**17 + 3])
def test_a_sum_is_in_place_and_the_same_bits_on_all_ranks(numel: int) -> None:
    given = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) * 10.0 ** (3 * r) for r in range(7)]
    expected = given[0].clone()
    for vector in given[1:]:
        expected += vector
    mine = [vector.clone() for vector in given]
    answers = SimulatedRanks(7).carry_out([one(AllReduce(mine=vector)) for vector in mine], on_cores=True)
    assert all(answer is vector for answer, vector in zip(answers, mine, strict=True))
    assert all(torch.equal(vector, expected) for vector in mine)


@pytest.mark.parametrize("case", [name for name in CASES if name != "sum" and name != "copies"])
def test_an_answer_does_not_see_what_changes_later(case: str) -> None:
    def work(rank: int) -> Reduction[Row]:
        request: Any = CASES[case].request(rank, 3)
        answer = yield request
        request.mine.fill_(-1.0)
        yield AllReduce(mine=torch.zeros(1))  # all have overwritten theirs
        return answer.view(-1).tolist()

    assert in_lockstep(SimulatedRanks(3), work) == [CASES[case].answer(rank, 3) for rank in range(3)]


@pytest.mark.parametrize(("shares", "num_made"), [(True, 1), (False, 4)])
def test_what_follows_from_what_all_know_is_made_once_in_shared_memory(shares: bool, num_made: int) -> None:
    made: list[str] = []

    def work() -> Reduction[Row]:
        into = torch.zeros(3)
        yield Fill(into=into, work=lambda: (made.append("filled"), into.fill_(7.0)))
        yield Once(work=lambda: made.append("worked"))
        return into.tolist()

    assert SimulatedRanks(4, shares=shares).carry_out([work() for _ in range(4)]) == [[7.0] * 3] * 4
    assert made == ["filled"] * num_made + ["worked"] * num_made


# --- errors -----------------------------------------------------------------------------------------------------------


class FailedError(Exception):
    """What a rank of these tests dies of."""


def fails() -> Reduction[None]:
    yield from ()
    raise FailedError("of its own\nand more")


def ends() -> Reduction[None]:
    yield from ()


def other(work: Callable[[], Reduction[Any]]) -> Callable[[int], Reduction[Any]]:
    """Return what rank 1 does, where the others sum up two numbers."""
    return lambda rank: work() if rank == 1 else one(AllReduce(mine=torch.ones(2)))


def all_ask(request: Callable[[int], Request]) -> Callable[[int], Reduction[Any]]:
    return lambda rank: one(request(rank))


TWO = torch.ones(2)
DIFFER = {  # what the ranks do, and the words of the error
    "an end": (other(ends), "rank 1 ended without coming to AllReduce values.*rank 0"),
    "a call": (other(lambda: one(AllGather(mine=TWO))), "rank 0 calls AllReduce.*rank 1 AllGather"),
    "a shape": (other(lambda: one(AllReduce(mine=torch.ones(3)))), r"rank 0 .*\(2,\), rank 1 .*\(3,\)"),
    "a dtype": (other(lambda: one(AllReduce(mine=TWO.half()))), "rank 0 .*float32.*, rank 1 .*float16"),
    "a kind": (other(lambda: one(AllReduce(mine=TWO, kind="counts"))), "rank 0 .*values.*, rank 1 .*counts"),
    "a source": (all_ask(lambda rank: Broadcast(mine=TWO, source=rank)), "source 0, rank 1 .* source 1"),
    "the counts": (
        all_ask(lambda rank: AllGatherLists(mine=TWO, counts=[2, 2, 1 + rank])),
        r"counts \(2, 2, 1\), rank 1 .* counts \(2, 2, 2\)",
    ),
    "the own count": (
        all_ask(lambda rank: AllGatherLists(mine=TWO, counts=[2, 1, 2])),
        "rank 1 has 2 elements to gather, not 1",
    ),
    "what comes": (
        all_ask(lambda rank: AllToAll(mine=torch.ones(3), sizes=[1] * 3, received=[1, 1, min(rank, 1)])),
        r"expects \[1, 1, 0\]",
    ),
}


@pytest.mark.parametrize("ask", [in_lockstep, in_code])
@pytest.mark.parametrize(("work", "words"), DIFFER.values(), ids=DIFFER)
def test_ranks_that_differ_are_named(work: Callable[[int], Any], words: str, ask: Callable[..., Any]) -> None:
    ranks = SimulatedRanks(3)
    for _ in range(2):  # and nothing is left of it
        with pytest.raises(PeerError, match=words):
            ask(ranks, work)
        assert ranks.run(lambda comm: comm.answer(AllReduce(mine=torch.ones(2))).tolist()) == [[3.0, 3.0]] * 3


def test_an_error_of_one_rank_is_raised_and_waiting_ranks_name_that_rank() -> None:
    told: dict[int, str] = {}

    def waits(rank: int) -> Reduction[None]:
        try:
            yield AllReduce(mine=torch.ones(2))
        except PeerError as error:
            told[rank] = str(error)
            raise

    for ask in (in_lockstep, in_code):
        told.clear()
        with pytest.raises(FailedError, match="of its own"):
            ask(SimulatedRanks(3), lambda rank: fails() if rank == 1 else waits(rank))
        assert told == dict.fromkeys([0, 2], "rank 1 failed: FailedError: of its own")


def test_simulated_ranks_leave_the_number_of_torch_threads_alone() -> None:
    """Each computes on one thread; the caller, and threads begun later, have as many as before."""
    seen, before = list[int](), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert SimulatedRanks(6).run(lambda _: torch.get_num_threads()) == [1] * 6
        newcomer = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        newcomer.start()
        newcomer.join()
        assert [torch.get_num_threads(), *seen] == [3, 3]
    finally:
        torch.set_num_threads(before)


# --- items over torch.distributed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [gather_objects, gather_objects_at_first])
def test_items_are_gathered_a_part_at_a_time_and_without_numpy(
    one_rank: None, gather: Callable[[object], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an installation that has torch alone, where a tensor has no numpy()."""
    monkeypatch.setattr(Tensor, "numpy", None)
    monkeypatch.setattr(objects, "CHUNK_BYTES", 100)
    (item,) = gather({"rank": 0, "residual": torch.arange(5.0)})
    assert (item["rank"], item["residual"].tolist()) == (0, [0.0, 1.0, 2.0, 3.0, 4.0])
