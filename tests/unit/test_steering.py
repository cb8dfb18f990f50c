"""MiCRO's steered threshold: what a search finds, and the density that it promises and comes back to."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import micro
from micro.lockstep import SimulatedRanks
from micro.selectors.micro_rules.repaired import quantile
from micro.selectors.steering import SIGMAS, TOLERANCE
from tests.parts import STREAMS, simulated

NUMEL = 16_000


def search(parts: list[Tensor], k: int) -> float | None:
    """Find the threshold of a vector that lies in parts on several ranks."""
    return SimulatedRanks(len(parts)).carry_out([quantile(part, k) for part in parts])[0]


def shares(
    stream: str, world_size: int, k: int, steps: int, scale: Callable[[int], float] = lambda _: 1.0
) -> list[float]:
    """Return count / k of each step on a stream of gradients; of a shared one all ranks have a part alike."""
    simulation = simulated(micro.Micro(rule="repaired"), NUMEL, world_size, density=k / NUMEL, dtype=torch.float32)
    found = []
    for step in range(steps):
        randomness = torch.Generator().manual_seed(step)
        grads = STREAMS["normal" if stream == "shared" else stream](randomness, world_size, NUMEL).float()
        if stream == "shared":
            grads += torch.randn(NUMEL, generator=randomness)
        found.append(simulation.step(scale(step) * grads).stats[0].global_count / k)
    return found


def bound(k: int) -> float:
    return TOLERANCE + SIGMAS / math.sqrt(k)


@pytest.mark.parametrize("k", [1, 2, 10, 1000, 9999])
@pytest.mark.parametrize("parts", [1, 3])
def test_search_finds_k_of_a_pareto_sample(k: int, parts: int) -> None:
    uniform = torch.rand(10_000, generator=torch.Generator().manual_seed(k)).clamp_min(1e-6)
    x = uniform.pow(-0.3) * torch.where(torch.arange(10_000) % 2 == 0, 1e-12, -1e-12)
    threshold = search(list(x.tensor_split(parts)), k)
    assert threshold is not None
    assert torch.tensor(threshold, dtype=torch.float32).item() == threshold
    assert int((x.abs() >= threshold).sum()) == pytest.approx(k, rel=2e-3)


@pytest.mark.parametrize(
    ("values", "k", "selected"),  # ties are taken whole or left
    [
        ([0.0, -0.0, math.nan, math.inf, -math.inf, 3.0, -5.0], 1, 3),  # 5, and what is no number but compares
        ([0.0, 1e-40, 2.0, 3.0], 100, 3),
        ([-2.0] * 100, 1, 100),
        ([-2.0] * 10 + [4.0, 5.0, 6.0], 6, 3),
        ([-2.0] * 10 + [4.0, 5.0, 6.0], 7, 13),
    ],
)
def test_search_ignores_what_is_no_magnitude_and_does_not_cut_ties(values: list[float], k: int, selected: int) -> None:
    x = torch.tensor(values)
    assert int((x.abs() >= search([x], k)).sum()) == selected
    assert search([torch.zeros(4), torch.zeros(0)], k) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STREAMS, "shared"])
@pytest.mark.parametrize(("world_size", "k"), [(1, 1600), (1, 160), (4, 320)])
def test_the_count_keeps_its_promise(name: str, world_size: int, k: int) -> None:
    errors = torch.tensor(shares(name, world_size, k, 80)[20:]) - 1
    assert errors.abs().max() <= bound(k)
    assert abs(errors.mean()) <= 0.02 + SIGMAS / math.sqrt(k * len(errors))


@pytest.mark.parametrize(("factor", "world_size"), [(0.1, 1), (10.0, 4)])
def test_recovers_from_a_tenfold_jump_within_ten_steps(factor: float, world_size: int) -> None:
    found = shares("normal", world_size, 800, 90, lambda step: factor if step >= 50 else 1.0)
    assert max(abs(share - 1) for share in found[60:]) <= bound(800)
