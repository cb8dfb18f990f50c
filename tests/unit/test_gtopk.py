"""gTop-k against a tree of plain dictionaries: its update, and what it leaves behind."""

import torch
from torch import Tensor

from micro.zoo.gtopk import GTopK
from tests.exchanging import exchanged
from tests.parts import dense
from tests.products import grid

NUMEL = 23
RULES = ["repaired", "published"]
Entries = dict[int, float]


def accumulators(world_size: int, seed: int) -> Tensor:
    """Return (world_size, NUMEL) quarters: sums are exact in any order, and ties and zeros are many."""
    randomness = torch.Generator().manual_seed(100 * seed + world_size)
    return torch.randint(-6, 7, (world_size, NUMEL), generator=randomness).double() / 4


def top(row: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[:k])


class Oracle:
    """The tree, from its top down, on dictionaries."""

    def __init__(self, lists: list[Entries], k: int) -> None:
        self.lists, self.k = lists, k
        self.pruned: list[Entries] = [{} for _ in lists]
        self.total = self.held(0, 16)

    def held(self, rank: int, span: int) -> Entries:
        """What ``rank`` holds of the lists of ``span`` ranks from itself on."""
        if span == 1:
            return self.keep(rank, self.lists[rank])
        merged = dict(self.held(rank, span // 2))
        if rank + span // 2 < len(self.lists):
            for index, value in self.held(rank + span // 2, span // 2).items():
                merged[index] = merged.get(index, 0.0) + value
        return self.keep(rank, merged)

    def keep(self, rank: int, entries: Entries) -> Entries:
        order = sorted(entries, key=lambda index: (-abs(entries[index]), index))
        for index in order[self.k :]:
            self.pruned[rank][index] = self.pruned[rank].get(index, 0.0) + entries[index]
        return {index: entries[index] for index in order[: self.k]}

    def sent(self, rank: int, rule: str) -> list[float]:
        vector = [0.0] * NUMEL
        for index, value in self.lists[rank].items():
            vector[index] = value if rule == "repaired" or index in self.total else 0.0
        for index, value in self.pruned[rank].items() if rule == "repaired" else ():
            vector[index] -= value
        return vector


def assert_is_the_oracle(acc: Tensor, chosen: list[list[int]], k: int, rule: str) -> None:
    oracle = Oracle([{i: row[i] for i in own} for row, own in zip(acc.tolist(), chosen, strict=True)], k)
    update = [oracle.total.get(index, 0.0) / len(chosen) for index in range(NUMEL)]
    for rank, got in enumerate(exchanged(GTopK(rule=rule), acc, chosen, target_count=k)[0]):
        assert dense(NUMEL, *got.update).tolist() == update
        assert dense(NUMEL, got.sent).tolist() == oracle.sent(rank, rule)
        assert all(part.indices.diff().min(-1).values > 0 for part in got.update if part.indices.numel() > 1)
        assert (got.num_updated, got.counts, got.is_finite) == (len(oracle.total), tuple(map(len, chosen)), True)


@grid(world_size=range(1, 10), rule=RULES, k=[1, 4, NUMEL])
def test_lists_meet_as_in_the_tree(world_size: int, rule: str, k: int) -> None:
    """Lists of k, and of other lengths: rank 4 has none, some have too many."""
    for seed in range(3):
        acc = accumulators(world_size, seed)
        assert_is_the_oracle(acc, [top(row, k) for row in acc.tolist()], k, rule)
    other = [top(row, (5 * rank + 1) % 7) for rank, row in enumerate(acc.tolist())]
    for chosen, bound in ((other, 3), ([[] for _ in other], 3), ([[], *other[1:]], 50)):
        assert_is_the_oracle(acc, chosen, bound, rule)
