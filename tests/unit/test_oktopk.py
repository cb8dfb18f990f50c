"""Ok-Topk against a simulation in plain Python: regions, sums, thresholds, residuals, and the volume on the wire."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.indices import Packed
from micro.comm import Comm
from micro.exchanges.base import Transport, Wire
from micro.exchanges.largest_sums import OktopkState
from micro.exchanges.oktopk import Oktopk
from micro.lockstep import SimulatedRanks
from micro.requests import carried_out
from micro.sparse import Exchanged, Overlap, Selection, Step
from tests.products import grid
from tests.sizes import gathered

# --- the oracle -------------------------------------------------------------------------------------------------------


def by_size(entries: dict[int, float], k: int) -> list[int]:
    return sorted(entries, key=lambda j: (-abs(entries[j]), j))[:k]


class Oracle:
    """n ranks as lists and dictionaries; ``words`` counts what each rank sent to others in the last step."""

    def __init__(
        self, rule: str, n: int, d: int, k: int, tau: int, tau_prime: int, balance: float | None = None
    ) -> None:
        self.rule, self.n, self.d, self.k = rule, n, d, k
        self.tau, self.tau_prime, self.balance = tau, tau_prime, balance
        self.residual = [[0.0] * d for _ in range(n)]
        self.local = [0.0] * n
        self.globally = 0.0
        self.bounds: list[int] = []
        self.words = [0] * n
        self.spread = False
        self.t = 0

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
        update = [0.0] * d
        for j in applied:
            update[j] = sums[j] / n
        for i in range(n):
            both = set(chosen[i]) & applied
            self.residual[i] = [0.0 if j in both else acc[i][j] for j in range(d)]
        self.t += 1
        return update

    def choose(self, i: int, acc: list[float]) -> list[int]:
        entries = {j: a for j, a in enumerate(acc) if a != 0}
        if self.rule == "repaired":
            return sorted(by_size(entries, self.k))
        if self.t % self.tau_prime == 0:
            self.local[i] = sorted((abs(a) for a in acc), reverse=True)[self.k - 1]
        else:
            for _ in range(5):
                if sum(abs(a) > self.local[i] for a in acc) <= 4 * self.k // 3:
                    break
                self.local[i] *= 1.03
        found = [j for j, a in enumerate(acc) if abs(a) > self.local[i]]
        if len(found) < 2 * self.k / 3:
            self.local[i] /= 1.012
        elif len(found) > 5 * self.k / 4:
            self.local[i] *= 1.012
        return found

    def repartition(self, chosen: list[list[int]]) -> None:
        self.bounds = [0]
        for part in range(1, self.n):
            total = 0
            for i in range(self.n):
                count = len(chosen[i])
                place = part * (count // self.n) if self.rule == "published" else part * count // self.n
                equal = part * (self.d // self.n) + min(part, self.d % self.n)
                total += chosen[i][place] if count else equal
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
        if len(above) < 2 * self.k / 3:
            self.globally /= 1.008
        elif len(above) > 4 * self.k / 3:
            self.globally *= 1.008
        return self.gather(above)

    def gather(self, applied: set[int]) -> set[int]:
        holders = [self.owner(j) for j in sorted(applied)]
        held = [holders.count(r) for r in range(self.n)]
        self.spread = self.balance is not None and max(held) * self.n > self.balance * len(holders)
        if self.spread:
            sizes = [len(holders) // self.n + (r < len(holders) % self.n) for r in range(self.n)]
            wanted = [r for r in range(self.n) for _ in range(sizes[r])]
            for have, want in zip(holders, wanted, strict=True):
                self.words[have] += 2 * (have != want)
            held = sizes
        for r in range(self.n):
            self.words[r] += 2 * int(gathered(held, r))
        return applied


# --- streams of gradients: (step, ranks, elements) -> (ranks, elements) -----------------------------------------------

Stream = Callable[[int, int, int], Tensor]


def normal(step: int, n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(7919 * step + n), dtype=torch.float64)


def layers(step: int, n: int, d: int) -> Tensor:
    scales = torch.tensor([0.2, 1.0, 5.0, 0.05], dtype=torch.float64).repeat_interleave(-(-d // 4))[:d]
    return normal(step, n, d) * scales


def shrinking(step: int, n: int, d: int) -> Tensor:
    drawn = normal(step, n + 1, d)
    return (2 * drawn[:1] + drawn[1:]) * (0.97**step)


def moving(step: int, n: int, d: int) -> Tensor:
    """Where the large gradients are changes with time, faster than regions do."""
    place = torch.arange(d, dtype=torch.float64) / d
    return normal(step, n, d) * (0.1 + 8 * torch.exp(-200 * (place - 0.1 - 0.8 * (step % 20) / 20) ** 2))


def tied(step: int, n: int, d: int) -> Tensor:
    return (4 * normal(step, n, d)).round() / 4


def built(**settings: Any) -> micro.Exchange[Any]:
    return micro.build(micro.Exchange, {"name": "oktopk", **settings})


def reducer(rule: Any, density: float, **settings: Any) -> micro.SparseReducer:
    if rule == "repaired":
        settings.pop("reevaluate", None)  # it is exact at every step
    period = {"reevaluate": settings["reevaluate"]} if "reevaluate" in settings else {}
    selector = micro.Estimated(fit={"name": "reused" if rule == "repaired" else "reused_published", **period})
    return micro.SparseReducer(selector, density, exchange=built(rule=rule, **settings))


def volume(stats: micro.StepStats) -> float:
    """Words of four bytes beside the traffic of control, values of eight bytes."""
    return stats.indices_bytes / 4 + stats.values_bytes / 8


# --- updates, residuals, volume ---------------------------------------------------------------------------------------


@grid(stream=[layers, shrinking, moving, tied], rule=["repaired", "published"], case=[(1, 4.0), (3, 1.0), (5, None)])
def test_every_step_is_the_oracles(stream: Stream, rule: str, case: tuple[int, float | None]) -> None:
    d, k, steps = 120, 9, 80
    n, balance = case
    oracle = Oracle(rule, n, d, k, tau=7, tau_prime=5, balance=balance)
    made = reducer(rule, k / d, repartition=7, reevaluate=5, balance=balance)
    spread = 0
    with closing(micro.Simulation(made, micro.Layout.flat(d), n, dtype=torch.float64)) as simulation:
        for step in range(steps):
            grads = stream(step, n, d)
            expected = oracle.step(grads.tolist())
            taken = simulation.step(grads, residuals=True)
            assert taken.residuals is not None
            torch.testing.assert_close(
                taken.update, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
            )
            residual = torch.tensor(oracle.residual, dtype=torch.float64)
            torch.testing.assert_close(taken.residuals, residual, rtol=1e-12, atol=1e-12)
            assert [volume(stats) for stats in taken.stats] == oracle.words
            assert taken.stats[0].global_count == sum(u != 0 for u in expected)
            spread += oracle.spread
    assert (spread > 0) == (balance == 1.0)


@pytest.mark.slow
@grid(stream=[normal, layers, shrinking, moving], n=[2, 5, 16])
def test_volume_stays_within_six_k(stream: Stream, n: int) -> None:
    d, k, steps = 3000, 60, 70  # the regions change at step 64
    layout, made = micro.Layout.flat(d), reducer("repaired", k / d)
    with closing(micro.Simulation(made, layout, n, dtype=torch.float64)) as simulation:
        for step in range(steps):
            stats = simulation.step_(stream(step, n, d))
            assert stats[0].global_count == k
            assert max(stats[0].counts) <= k
            assert stats[0].overfull or sum(map(volume, stats)) / n <= 6 * k * (n - 1) / n


@grid(stream=[layers, shrinking, moving, tied], n=[2, 4])
def test_rows_give_what_lists_give_in_fewer_messages(stream: Stream, n: int) -> None:
    """Packed indices travel as lists, by the histogram."""
    d, k, steps = 4000, 400, 24
    rows = reducer("repaired", k / d, repartition=20)
    calls, overfull = [], 0
    with (
        closing(micro.Simulation(rows, micro.Layout.flat(d), n)) as one,
        closing(micro.Simulation(replace(rows, indices=Packed()), micro.Layout.flat(d), n)) as other,
    ):
        for step in range(steps):
            grads = stream(step, n, d).float()
            got, expected = one.step(grads, residuals=True), other.step(grads, residuals=True)
            assert got.residuals is not None
            assert expected.residuals is not None
            assert torch.equal(got.update, expected.update)
            assert torch.equal(got.residuals, expected.residuals)
            assert len({(s.overfull, s.threshold is None, s.counts) for s in got.stats}) == 1
            calls.append(got.stats[0].num_collectives)
            overfull += got.stats[0].overfull
    assert calls[0] == calls[20] == 7  # the regions are new
    assert max(calls) == 7  # a row that is too small is in vain
    if stream is moving:
        assert 0 < overfull < steps / 3
    else:
        assert calls.count(3) >= steps - 4


# --- regions ----------------------------------------------------------------------------------------------------------


def exchanged(
    made: micro.Exchange[Any], accs: Tensor, chosen: list[list[int]], k: int, wire: Wire, threshold: float | None = None
) -> list[tuple[Any, Exchanged]]:
    """Return every rank's state and result of one step, the first unless there is a threshold already."""
    n, d = accs.shape
    step = Step(0 if threshold is None else 1, k, 0, micro.Layout.flat(d))

    def work(comm: Comm) -> tuple[Any, Exchanged]:
        state = OktopkState(threshold=threshold)
        selection = Selection(torch.tensor(chosen[comm.rank], dtype=torch.int32))
        own = replace(step, is_finite=comm.rank != n - 1)
        transport = Transport(comm=comm, step=own, overlap=Overlap.ANY, wire=wire)
        reduction = made.exchange(state, accs[comm.rank], selection, transport)
        return state, carried_out(reduction, comm)

    with closing(SimulatedRanks(n)) as group:
        return group.run(work)


@pytest.mark.parametrize("rule", ["repaired", "published"])
@pytest.mark.parametrize(
    ("d", "chosen", "repaired"),
    [
        (100, [[0, 10, 20, 30, 40, 50], [60, 61, 62, 63, 70, 80]], (0, 46, 100)),  # (30 + 63) // 2
        (100, [[], [60, 61]], (0, 55, 100)),  # equal regions where a rank chose nothing
        (100, [[], [], []], (0, 34, 67, 100)),
        (100, [[5], [90], []], (0, 43, 54, 100)),  # fewer chosen than ranks
        (2, [[0, 1], [1], [], [0]], None),  # fewer elements than ranks
        (1, [[0], [0], [0]], (0, 0, 0, 1)),
    ],
)
def test_regions_are_the_mean_of_the_quantiles(
    rule: Any, d: int, chosen: list[list[int]], repaired: tuple[int, ...] | None
) -> None:
    accs = normal(0, len(chosen), d)
    results = exchanged(built(rule=rule), accs, chosen, k=3, wire=Wire())
    states = [state for state, _ in results]
    assert all(state.boundaries == states[0].boundaries for state in states)
    bounds = states[0].boundaries
    assert isinstance(bounds, tuple)
    assert len(bounds) == len(chosen) + 1
    assert (bounds[0], bounds[-1]) == (0, d)
    assert all(start <= stop for start, stop in pairwise(bounds))
    assert rule == "published" or repaired is None or bounds == repaired
    for _, result in results:
        assert not result.is_finite  # the last rank was not
        assert result.counts == tuple(map(len, chosen))
        assert result.num_updated == min(3, len(set().union(*chosen)))


def test_packed_indices_travel_relative_to_their_region() -> None:
    n, d, k = 5, 5000, 100
    accs = normal(3, n, d)
    chosen = [sorted(row.abs().topk(k).indices.tolist()) for row in accs]
    made = Oktopk(balance=1.0)
    plain = exchanged(made, accs, chosen, k, Wire())
    packed = exchanged(made, accs, chosen, k, Wire(indices=Packed()))
    for (_, one), (_, other) in zip(plain, packed, strict=True):
        assert torch.equal(one.update[0].indices, other.update[0].indices)
        assert torch.equal(one.update[0].values, other.update[0].values)
        assert torch.equal(one.sent.indices, other.sent.indices)


def test_published_goes_on_where_the_authors_code_fails() -> None:
    """Nothing but zeros at a re-evaluation: the global threshold is found at the next step instead."""
    made = reducer("published", 0.1, balance=None)
    with closing(micro.Simulation(made, micro.Layout.flat(40), 3, dtype=torch.float64)) as simulation:
        assert not simulation.step(torch.zeros(3, 40, dtype=torch.float64)).update.any()
        later = simulation.step(normal(1, 3, 40))
        assert int(torch.count_nonzero(later.update)) == 4
