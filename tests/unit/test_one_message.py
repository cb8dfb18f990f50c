"""MiCRO whose indices travel with its counts: the same bits as by exact lists, in two collectives."""

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.lockstep import SimulatedRanks
from micro.partition import cyclic_slice
from micro.requests import carried_out
from micro.sparse import Step
from tests.parts import kept, normal, simulated
from tests.products import grid

NUMEL = 12_000


def simulation(world_size: int, slack: float | None, density: micro.Density | float = 0.05) -> micro.Simulation:
    return simulated(micro.Micro(slack=slack), NUMEL, world_size, density=density, dtype=torch.float32)


def drawn(world_size: int, step: int) -> Tensor:
    return normal(world_size, NUMEL, seed=step, dtype=torch.float32)


def both(world_size: int, grads: list[Tensor], density: micro.Density | float = 0.05) -> list[micro.StepStats]:
    """Return what rank 0 reports of each step with a slack; updates and residuals are those of exact lists."""
    found, one, exact = [], simulation(world_size, 0.2, density), simulation(world_size, None, density)
    for grad in grads:
        got, expected = one.step(grad), exact.step(grad)
        assert torch.equal(got.update, expected.update)
        assert torch.equal(kept(one), kept(exact))
        assert got.stats[0].counts == expected.stats[0].counts
        assert len({stats.overfull for stats in got.stats}) == 1
        found.append(got.stats[0])
    return found


@grid(world_size=[1, 2, 3, 8], scale=[1.0, 1e-3, 50.0])
def test_updates_are_those_of_exact_lists(world_size: int, scale: float) -> None:
    stats = both(world_size, [(scale if step > 4 else 1.0) * drawn(world_size, step) for step in range(10)])
    assert world_size == 1 or min(s.num_collectives for s in stats) == 2


@pytest.mark.parametrize("values", [[1.0], [1.0, -1.0, 2.0], [0.0, 3.0, 3.0]])
def test_ties_are_shared_as_by_exact_lists(values: list[float]) -> None:
    both(3, [torch.tensor(values).repeat(NUMEL // len(values)).expand(3, -1).clone() for _ in range(6)])


def test_a_growing_density_scales_the_room() -> None:
    stats = both(4, [drawn(4, step) for step in range(8)], micro.WarmUp(density=0.05, start_density=0.01, steps=6))
    assert [s.overfull for s in stats[3:]] == [False] * 5


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_settled_step_takes_two_collectives_and_no_more_bytes(n: int) -> None:
    stats, k = both(n, [drawn(n, step) for step in range(16)])[6:], NUMEL // 20
    assert [s.num_collectives for s in stats] == [2] * len(stats)
    exact = 128 * (n - 1) + 4 * k * (n - 1) / n + 8 * (k + 1) * (n - 1) / n
    assert sum(s.bytes_sent for s in stats) / len(stats) <= exact


@pytest.mark.parametrize("factor", [5.0, 0.02], ids=["more than there is room for", "less than is sure"])
def test_a_slice_beyond_its_room_takes_one_collective_more(factor: float) -> None:
    world_size, odd = 4, 8
    grads, exact = [drawn(world_size, step) for step in range(odd + 4)], simulation(world_size, None)
    start, stop = cyclic_slice(NUMEL, odd, 2, world_size)
    for grad in grads[:odd]:  # so that nothing but this one slice is unusual
        exact.step(grad)
    grads[odd][:, start:stop] *= factor
    grads[odd][2, start:stop] -= exact.residuals()[2][start:stop] * (1 - factor)
    stats = both(world_size, grads)
    assert [s.overfull for s in stats[5 : odd + 1]] == [False] * (odd - 5) + [True]
    assert [op for op, _ in stats[odd].calls].count("gather_lists") == 1
    assert stats[odd].density_error == 0.0
    assert not stats[-1].overfull


def test_counts_of_another_number_of_ranks_are_no_use() -> None:
    """They are of other slices: the first step after a change of ranks sends exact lists."""
    selector, step = micro.Micro(slack=0.2), Step(1, 600, 0, micro.Layout.flat(NUMEL))

    def work(comm: Comm) -> tuple[str, float]:
        state = selector.start()
        state.last = [200, 200, 200]
        carried_out(selector.select(state, drawn(2, 0)[comm.rank], step, comm), comm)
        assert len(state.last) == 2
        return comm.traffic.calls[-1]

    assert SimulatedRanks(2).run(work) == [("gather_rows", 128)] * 2
