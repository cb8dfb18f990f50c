"""The steered threshold: what a search finds, how a track moves, and the density that it promises."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from micro.lockstep import SimulatedRanks
from micro.selectors.micro_rules.repaired import quantile
from micro.selectors.steering import SIGMAS, TOLERANCE, Track
from tests.parts import STREAMS

Gradient = Callable[[int], Tensor]
NUMEL = 16_000


def search(parts: list[Tensor], k: int) -> float | None:
    """Find the threshold of a vector that lies in parts on several ranks."""
    return SimulatedRanks(len(parts)).carry_out([quantile(part, k) for part in parts])[0]


def run(gradient: Gradient, k: int, steps: int) -> tuple[list[float], list[bool]]:
    """Run MiCRO with error feedback on gradients (world_size, numel); return count / k and which steps searched."""
    acc = torch.zeros_like(gradient(0))
    world_size, numel = acc.shape
    track, shares, searched = Track(), list[float](), list[bool]()
    for step in range(steps):
        acc += gradient(step)
        owners = (torch.arange(numel) * world_size // numel - step) % world_size
        own = acc.gather(0, owners[None])[0]
        track.aim(k)
        threshold = track.threshold
        searched.append(threshold is None)
        if threshold is None:
            threshold = search(list(own.tensor_split(world_size)), k)
        assert threshold is not None
        selected = own.abs() >= threshold
        count = int(selected.sum())
        tail = float((own[selected].abs().double() / threshold).log().mean()) if count else 0.0
        track.observe(threshold=threshold, count=count, tail=tail, k=k)
        acc[:, selected] = 0
        shares.append(count / k)
    return shares, searched


def stream(name: str, world_size: int, scale: Callable[[int], float] = lambda _: 1.0) -> Gradient:
    """Return a reproducible stream of gradients; of 'shared' ones all ranks have a part alike."""

    def gradient(step: int) -> Tensor:
        randomness = torch.Generator().manual_seed(step)
        if name == "shared":
            common, *own = STREAMS["normal"](randomness, world_size + 1, NUMEL).float()
            return scale(step) * (common + torch.stack(own))
        return scale(step) * STREAMS[name](randomness, world_size, NUMEL).float()

    return gradient


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
    shares, searched = run(stream(name, world_size), k, 80)
    errors = torch.tensor(shares[20:]) - 1
    assert errors.abs().max() <= bound(k)
    assert abs(errors.mean()) <= 0.02 + SIGMAS / math.sqrt(k * len(errors))
    assert not any(searched[20:])


@pytest.mark.parametrize(("factor", "world_size"), [(0.1, 1), (10.0, 4)])
def test_recovers_from_a_tenfold_jump_within_ten_steps(factor: float, world_size: int) -> None:
    shares, _ = run(stream("normal", world_size, lambda step: factor if step >= 50 else 1.0), 800, 90)
    assert max(abs(share - 1) for share in shares[60:]) <= bound(800)
