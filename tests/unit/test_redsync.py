"""RedSync: the baseline of public code step by step, and between k and 2k whatever the gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.requests import carried_out
from micro.selectors.fits.redsync import MARGIN, RedSyncState, bisect
from tests.gathered_choices import Vector, check_steps
from tests.products import grid


def published_choice(acc: Vector, k: int) -> tuple[list[int], str]:
    """Return what the public code would send, and how it came to it."""
    magnitudes = abs(acc)
    mean, largest, low, high, rounds = magnitudes.mean(), magnitudes.max(), 0.0, 1.0, 0
    while high - low > 0.2:
        rounds += 1
        ratio = low + (high - low) / 2
        found = [i for i in range(acc.size) if magnitudes[i] > mean + ratio * (largest - mean)]
        if k < len(found) < 2 * k:
            return found, "found"
        if len(found) < k / 2:
            high = ratio
        else:
            low = ratio
    assert rounds == 3
    return found, "too few" if len(found) <= k else "too many"


def gradients(d: int, world_size: int, step: int) -> Vector:
    """Return (world_size, d) gradients: flat, normal and heavy-tailed in turn."""
    rng = np.random.default_rng(100 * world_size + step)
    kinds = [rng.uniform(-1, 1, (world_size, d)), rng.normal(size=(world_size, d)), rng.standard_t(2, (world_size, d))]
    return kinds[step % 3] * (1 + step % 4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_published_rule_step_by_step(world_size: int) -> None:
    d, k = 1000, 20
    ways: set[str] = set()

    def choose(acc: Vector, _step: int, _rank: int) -> list[int]:
        chosen, how = published_choice(acc, k)
        ways.add(how)
        return chosen

    reducer = micro.SparseReducer(micro.Estimated(fit="redsync_published"), k / d, exchange=micro.Gather())
    check_steps(reducer, (gradients(d, world_size, step) for step in range(15)), choose)
    assert ways == {"found", "too few", "too many"}


def test_the_published_rule_raises_the_threshold_where_it_found_too_few() -> None:
    acc = torch.zeros(100, dtype=torch.float64)
    acc[:7], acc[7:40] = 1.0, 0.3  # k = 10: the first round finds 7, between k / 2 and k; lowering would find 40
    assert chosen(micro.Estimated(fit="redsync_published"), micro.parts.NoState(), acc, 10) == list(range(7))
    assert published_choice(acc.numpy(), 10) == (list(range(7)), "too few")


def chosen(selector: micro.Selector[Any], state: Any, acc: Tensor, k: int) -> list[int]:
    step = micro.sparse.Step(0, k, 0, micro.Layout.flat(acc.numel()))
    solo = Comm()
    indices: list[int] = carried_out(selector.select(state, acc, step, solo), solo).indices.tolist()
    return indices


LAWS = {
    "normal": lambda rng, d: rng.normal(size=d),
    "Laplace": lambda rng, d: rng.laplace(size=d),
    "heavy-tailed": lambda rng, d: rng.standard_t(1, size=d),
    "log-normal": lambda rng, d: rng.lognormal(0, 3, size=d),
    "off centre": lambda rng, d: 1 + rng.normal(size=d),
    "spikes": lambda rng, d: rng.normal(size=d) * np.where(rng.random(d) < 0.01, 1e3, 1e-3),
    "levels": lambda rng, d: rng.integers(-30, 30, size=d).astype(float),
    "signs": lambda rng, d: rng.choice([-1.0, 1.0], size=d),
    "mostly zero": lambda rng, d: rng.normal(size=d) * (rng.random(d) < 0.002),
}


@grid(law=LAWS, dtype=[torch.float32, torch.float64], k=[1, 7, 40])
def test_the_largest_between_k_and_2k_are_sent_whatever_the_law(law: str, dtype: torch.dtype, k: int) -> None:
    rng, selector, state = np.random.default_rng(0), micro.Estimated(fit="redsync"), RedSyncState()
    for scale in (1, 1, 1, 1e4, 1, 1e-6):
        acc = torch.tensor(LAWS[law](rng, 3000) * scale).to(dtype)
        magnitudes = acc.abs().tolist()
        nonzero = sum(magnitude > 0 for magnitude in magnitudes)
        indices = chosen(selector, state, acc, k)
        assert min(k, nonzero) <= len(indices) <= 2 * k
        assert indices == sorted(set(indices))
        rest = set(range(3000)) - set(indices)
        assert min(magnitudes[i] for i in indices) >= max(magnitudes[i] for i in rest)
        assert min(magnitudes[i] for i in indices) > 0


def test_ties_across_2k_leave_the_lowest_k() -> None:
    acc = torch.tensor([0.5, -1.0, 1.0, 0.0, 1.0, -1.0, 1.0, 1.0])
    assert chosen(micro.Estimated(fit="redsync"), RedSyncState(), acc, 2) == [1, 2]


def test_the_floor_settles_where_a_few_times_k_pass() -> None:
    rng, selector, state, k = np.random.default_rng(0), micro.Estimated(fit="redsync"), RedSyncState(), 50
    shares = []
    for step in range(30):
        acc = torch.tensor(rng.laplace(size=20_000)).float()
        if step > 5:
            assert state.floor is not None
            shares.append(int((acc.abs() >= state.floor).sum()) / (MARGIN * k))
        chosen(selector, state, acc, k)
    assert min(shares) > 0.5  # a step goes without only below 1 / MARGIN
    assert max(shares) < 2.0


def test_zeros_are_never_sent_and_the_floor_is_forgotten() -> None:
    selector, state = micro.Estimated(fit="redsync"), RedSyncState()
    assert len(chosen(selector, state, torch.ones(100), 5)) == 5
    assert state.floor is not None
    assert chosen(selector, state, torch.zeros(100), 5) == []
    assert state.floor is None
    assert chosen(selector, state, torch.nn.functional.one_hot(torch.tensor(9), 100).double(), 5) == [9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bisection_ends_even_between_neighbours(dtype: torch.dtype) -> None:
    for above in (1.0, 1e-30, 0.1, 12345.678):
        low = torch.tensor(above, dtype=dtype)
        up_to = torch.nextafter(low, low + 1)
        found = bisect(0.0, 1e6, above=float(low), up_to=float(up_to), dtype=dtype)
        assert found == float(up_to)
    assert bisect(0.0, 8.0, above=0.5, up_to=3.0, dtype=dtype) == 2.0  # 4, then 2
