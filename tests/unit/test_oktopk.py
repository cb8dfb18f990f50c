"""Ok-Topk against a simulation in plain Python: regions, sums, thresholds, residuals, and the volume on the wire."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.indices import Packed
from tests.parts import normal, simulated
from tests.products import grid
from tests.sizes import gathered

# --- the oracle -------------------------------------------------------------------------------------------------------


def by_size(entries: dict[int, float], k: int) -> list[int]:
    return sorted(entries, key=lambda j: (-abs(entries[j]), j))[:k]


def steered(threshold: float, count: int, lowest: float, highest: float, factor: float) -> float:
    return threshold / factor if count < lowest else threshold * factor if count > highest else threshold


class Oracle:
    """n ranks as lists and dictionaries; ``words`` counts what each rank sent to others in the last step."""

    def __init__(self, rule: str, n: int, d: int, k: int, tau: int, tau_prime: int, balance: float | None) -> None:
        self.rule, self.n, self.d, self.k = rule, n, d, k
        self.tau, self.tau_prime, self.balance = tau, tau_prime, balance
        self.residual = [[0.0] * d for _ in range(n)]
        self.local, self.globally = [0.0] * n, 0.0
        self.bounds, self.words = list[int](), [0] * n
        self.t, self.spread = 0, 0

    def step(self, grads: list[list[float]]) -> list[float]:
        n, d = self.n, self.d
        acc = [[e + g for e, g in zip(self.residual[i], grads[i], strict=True)] for i in range(n)]
        chosen = [self.choose(i, acc[i]) for i in range(n)]
        if self.t % self.tau == 0:
            self.repartition(chosen)
        self.words = [0] * n
        sums: dict[int, float] = {}
        for i in range(n):
            for j in chosen[i]:
                self.words[i] += 2 * (self.owner(j) != i)
                sums[j] = sums.get(j, 0.0) + acc[i][j]
        applied = self.apply(sums)
        for i in range(n):
            both = set(chosen[i]) & applied
            self.residual[i] = [0.0 if j in both else acc[i][j] for j in range(d)]
        self.t += 1
        return [sums[j] / n if j in applied else 0.0 for j in range(d)]

    def choose(self, i: int, acc: list[float]) -> list[int]:
        if self.rule == "repaired":
            return sorted(by_size({j: a for j, a in enumerate(acc) if a != 0}, self.k))
        if self.t % self.tau_prime == 0:
            self.local[i] = sorted((abs(a) for a in acc), reverse=True)[self.k - 1]
        else:
            for _ in range(5):
                if sum(abs(a) > self.local[i] for a in acc) <= 4 * self.k // 3:
                    break
                self.local[i] *= 1.03
        found = [j for j, a in enumerate(acc) if abs(a) > self.local[i]]
        self.local[i] = steered(self.local[i], len(found), 2 * self.k / 3, 5 * self.k / 4, 1.012)
        return found

    def repartition(self, chosen: list[list[int]]) -> None:
        self.bounds = [0]
        for part in range(1, self.n):
            total = 0
            for own in chosen:
                count = len(own)
                place = part * (count // self.n) if self.rule == "published" else part * count // self.n
                total += own[place] if count else part * (self.d // self.n) + min(part, self.d % self.n)
            self.bounds.append(total // self.n)
        self.bounds.append(self.d)

    def owner(self, j: int) -> int:
        return next(r for r in range(self.n) if self.bounds[r] <= j < self.bounds[r + 1])

    def apply(self, sums: dict[int, float]) -> set[int]:
        if self.rule == "repaired":
            return self.gather(set(by_size(sums, self.k)))
        if self.t % self.tau_prime == 0:
            largest = by_size({j: u for j, u in sums.items() if u != 0}, self.k)
            self.globally = abs(sums[largest[-1]])
            return set(largest)
        above = {j for j, u in sums.items() if abs(u) > self.globally}
        self.globally = steered(self.globally, len(above), 2 * self.k / 3, 4 * self.k / 3, 1.008)
        return self.gather(above)

    def gather(self, applied: set[int]) -> set[int]:
        holders = [self.owner(j) for j in sorted(applied)]
        held = [holders.count(r) for r in range(self.n)]
        if self.balance is not None and max(held) * self.n > self.balance * len(holders):
            self.spread += 1
            held = [len(holders) // self.n + (r < len(holders) % self.n) for r in range(self.n)]
            wanted = [r for r in range(self.n) for _ in range(held[r])]
            for have, want in zip(holders, wanted, strict=True):
                self.words[have] += 2 * (have != want)
        self.words = [words + 2 * int(gathered(held, r)) for r, words in enumerate(self.words)]
        return applied


# --- streams of gradients: (step, ranks, elements) -> (ranks, elements) -----------------------------------------------

Stream = Callable[[int, int, int], Tensor]


def plain(step: int, n: int, d: int) -> Tensor:
    return normal(n, d, seed=7919 * step + n)


def layers(step: int, n: int, d: int) -> Tensor:
    scales = torch.tensor([0.2, 1.0, 5.0, 0.05], dtype=torch.float64).repeat_interleave(-(-d // 4))[:d]
    return plain(step, n, d) * scales


def shrinking(step: int, n: int, d: int) -> Tensor:
    drawn = plain(step, n + 1, d)
    return (2 * drawn[:1] + drawn[1:]) * (0.97**step)


def moving(step: int, n: int, d: int) -> Tensor:
    """Where the large gradients are changes with time, faster than regions do."""
    place = torch.arange(d, dtype=torch.float64) / d
    return plain(step, n, d) * (0.1 + 8 * torch.exp(-200 * (place - 0.1 - 0.8 * (step % 20) / 20) ** 2))


def tied(step: int, n: int, d: int) -> Tensor:
    return (4 * plain(step, n, d)).round() / 4


def reducer(rule: Any, density: float, reevaluate: int | None = None, **settings: Any) -> micro.SparseReducer:
    period = {"reevaluate": reevaluate} if rule == "published" and reevaluate else {}  # else it is exact at every step
    selector = micro.Estimated(fit={"name": "reused" if rule == "repaired" else "reused_published", **period})
    return micro.SparseReducer(selector, density, exchange=micro.Oktopk(rule=rule, **period, **settings))


def volume(stats: micro.StepStats) -> float:
    """Words of four bytes without control traffic; values have eight bytes."""
    return stats.indices_bytes / 4 + stats.values_bytes / 8


# --- updates, residuals, volume ---------------------------------------------------------------------------------------


@grid(stream=[layers, shrinking, moving, tied], rule=["repaired", "published"], case=[(1, 4.0), (3, 1.0), (5, None)])
def test_every_step_is_the_oracles(stream: Stream, rule: str, case: tuple[int, float | None]) -> None:
    d, k, (n, balance) = 120, 9, case
    oracle = Oracle(rule, n, d, k, tau=7, tau_prime=5, balance=balance)
    simulation = simulated(reducer(rule, k / d, repartition=7, reevaluate=5, balance=balance), d, n)
    for step in range(60):
        grads = stream(step, n, d)
        expected = torch.tensor(oracle.step(grads.tolist()), dtype=torch.float64)
        taken = simulation.step(grads, residuals=True)
        torch.testing.assert_close(taken.update, expected, rtol=1e-12, atol=1e-14)
        residual = torch.tensor(oracle.residual, dtype=torch.float64)
        torch.testing.assert_close(taken.residuals, residual, rtol=1e-12, atol=1e-12)
        assert [volume(stats) for stats in taken.stats] == oracle.words
        assert taken.stats[0].global_count == int(expected.count_nonzero())
    assert (oracle.spread > 0) == (balance == 1.0)


@pytest.mark.slow
@grid(stream=[plain, layers, shrinking, moving], n=[2, 5, 16])
def test_volume_stays_within_six_k(stream: Stream, n: int) -> None:
    d, k = 3000, 60
    simulation = simulated(reducer("repaired", k / d), d, n)
    for step in range(70):  # the regions change at step 64
        stats = simulation.step(stream(step, n, d)).stats
        assert stats[0].global_count == k
        assert max(stats[0].counts) <= k
        assert stats[0].overfull or sum(map(volume, stats)) / n <= 6 * k * (n - 1) / n


@grid(stream=[layers, shrinking, moving, tied], n=[2, 4])
def test_rows_give_what_lists_give_in_fewer_messages(stream: Stream, n: int) -> None:
    """Packed indices travel as lists, by the histogram."""
    d, steps, calls, overfull = 4000, 24, [], 0
    rows = reducer("repaired", 0.1, repartition=20)
    one, other = (simulated(each, d, n, dtype=torch.float32) for each in (rows, replace(rows, indices=Packed())))
    for step in range(steps):
        grads = stream(step, n, d).float()
        got, expected = one.step(grads, residuals=True), other.step(grads, residuals=True)
        assert torch.equal(got.update, expected.update)
        assert torch.equal(got.residuals, expected.residuals)
        assert len({(s.overfull, s.threshold is None, s.counts) for s in got.stats}) == 1
        calls.append(got.stats[0].num_collectives)
        overfull += got.stats[0].overfull
    assert calls[0] == calls[20] == max(calls) == 7  # the regions are new, or a row that is too small is in vain
    assert 0 < overfull < steps / 3 if stream is moving else calls.count(3) >= steps - 4


# --- regions ----------------------------------------------------------------------------------------------------------


def test_published_continues_where_the_authors_code_fails() -> None:
    """Nothing but zeros at a re-evaluation: the global threshold is found at the next step instead."""
    simulation = simulated(reducer("published", 0.1, balance=None), 40, 3)
    assert not simulation.step(torch.zeros(3, 40, dtype=torch.float64)).update.any()
    assert int(torch.count_nonzero(simulation.step(plain(1, 3, 40)).update)) == 4
