"""The steered threshold: what a search finds, how a track moves, and the density that it promises."""

import math
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from micro.selectors.micro_rules.quantile import bins_inside, coarse_bin, magnitude_bins, threshold_from_bins
from micro.selectors.steering import SIGMAS, TOLERANCE, Track, Tracked, aim, observe

Gradient = Callable[[int], Tensor]
SETTLED = Track(log_threshold=0.5, tail=0.2, samples=1e5, age=1000, energy=0.01, streak=2)  # in its steady state
CUT = math.exp(0.5)


def search(parts: list[Tensor], k: int) -> float | None:
    """Find the threshold of a vector that lies in parts on several ranks."""
    counts = torch.stack([magnitude_bins(part) for part in parts]).sum(0)
    coarse = coarse_bin(counts, k)
    if coarse is None:
        return None
    return threshold_from_bins(counts, torch.stack([bins_inside(part, coarse) for part in parts]).sum(0), k)


def run(gradient: Gradient, *, k: Callable[[int], int], steps: int) -> tuple[list[float], list[bool]]:
    """Run MiCRO with error feedback on gradients (world_size, numel); return count / k and which steps searched."""
    acc = torch.zeros_like(gradient(0))
    world_size, numel = acc.shape
    track, shares, searched = Track(), [], []
    for step in range(steps):
        acc += gradient(step)
        owners = (torch.arange(numel) * world_size // numel - step) % world_size
        own = acc.gather(0, owners[None])[0]
        threshold = track.threshold
        searched.append(threshold is None)
        if threshold is None:
            threshold = search(list(own.tensor_split(world_size)), k(step))
        assert threshold is not None
        selected = own.abs() >= threshold
        count = int(selected.sum())
        tail = float((own[selected].abs().double() / threshold).log().mean()) if count else 0.0
        track = aim(observe(track, threshold=threshold, count=count, tail=tail, k=k(step)), k(step), k(step + 1))
        acc[:, selected] = 0
        shares.append(count / k(step))
    return shares, searched


def stream(name: str, world_size: int, numel: int, scale: Callable[[int], float] = lambda _: 1.0) -> Gradient:
    """Return a reproducible stream of gradients; the name is of a distribution, or 'layers' or 'shared'."""

    def gradient(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        normal = torch.randn(world_size, numel, generator=generator)
        if name == "laplace":
            normal *= torch.empty_like(normal).exponential_(generator=generator).sqrt()
        if name == "student3":
            normal /= torch.randn(3, world_size, numel, generator=generator).square().mean(0).sqrt()
        if name == "layers":
            normal *= torch.logspace(-2, 0, 8).repeat_interleave(numel // 8)
        if name == "shared":
            normal += torch.randn(numel, generator=generator)
        return normal * scale(step)

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


def test_search_ignores_what_is_no_magnitude_and_selects_all_where_there_are_fewer_than_k() -> None:
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 3.0, -5.0])
    assert 3.0 < search([x], 1) < 3.003  # type: ignore[operator]
    assert search([torch.zeros(4), torch.zeros(0)], 2) is None
    x = torch.tensor([0.0, 1e-40, 2.0, 3.0])
    assert (x >= search([x], 100)).tolist() == [False, True, True, True]  # type: ignore[operator]


@pytest.mark.parametrize(("tied", "k", "selected"), [(100, 1, 100), (10, 3, 3), (10, 6, 3), (10, 7, 13), (3, 2, 3)])
def test_search_takes_a_tie_whole_or_leaves_it(tied: int, k: int, selected: int) -> None:
    larger = torch.tensor([4.0, 5.0, 6.0]) if tied == 10 else torch.zeros(0)
    x = torch.cat([torch.full((tied,), -2.0), larger])
    assert int((x.abs() >= search([x], k)).sum()) == selected  # type: ignore[operator]


def test_counts_move_the_threshold_alike_in_both_directions_or_not_at_all() -> None:
    up, down, same = (observe(SETTLED, threshold=CUT, count=c, tail=0.2, k=1000) for c in (1050, 950, 1000))
    assert up.log_threshold - 0.5 == pytest.approx(0.5 - down.log_threshold)
    assert up.log_threshold > same.log_threshold == 0.5


@pytest.mark.parametrize(("count", "is_fresh"), [(100_000, True), (0, True), (1400, False), (700, False), (1050, None)])
def test_a_lost_count_restarts_and_a_bad_one_searches(count: int, is_fresh: bool | None) -> None:
    after = observe(SETTLED, threshold=CUT, count=count, tail=0.2, k=1000)
    assert (after == Track()) is bool(is_fresh)
    assert (after.threshold is None) is (is_fresh is not None)


def test_a_new_k_moves_the_threshold_along_the_tail() -> None:
    fewer = aim(SETTLED, 100, 95)
    assert fewer.log_threshold - 0.5 == pytest.approx(0.2 * math.log(100 / 95))
    assert fewer.threshold is not None
    assert aim(SETTLED, 100, 50).threshold is None


def test_nothing_selected_and_no_tail_stay_finite() -> None:
    track = SETTLED
    for _ in range(20_000):
        track = observe(track, threshold=track.threshold or 1e-38, count=0, tail=math.nan, k=1)
    assert 0 < math.exp(track.log_threshold) < math.inf
    odd = observe(SETTLED, threshold=CUT, count=5, tail=math.inf, k=5)
    assert (odd.tail, odd.samples) == (SETTLED.tail, SETTLED.samples)


@pytest.mark.parametrize(("counts", "lowest", "highest"), [([1100, 900] * 5, 0.0, 0.8), ([1100] * 10, 1.25, 2.0)])
def test_alternating_errors_lower_the_gain_and_lasting_ones_raise_it(
    counts: list[int], lowest: float, highest: float
) -> None:
    track = SETTLED
    for count in counts:
        track = observe(track, threshold=track.threshold or 0.0, count=count, tail=0.2, k=1000)
    assert lowest < track.gain <= highest


def test_a_track_goes_through_a_dict() -> None:
    kept = Tracked(observe(SETTLED, threshold=1.7, count=104, tail=0.21, k=100), 100)
    assert Tracked(**asdict(kept)) == kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal", "laplace", "student3", "layers", "shared"])
@pytest.mark.parametrize(("world_size", "density"), [(1, 0.1), (1, 0.01), (4, 0.02)])
def test_the_count_keeps_its_promise(name: str, world_size: int, density: float) -> None:
    k = int(density * 16_000)
    shares, searched = run(stream(name, world_size, 16_000), k=lambda _: k, steps=80)
    errors = torch.tensor(shares[20:]) - 1
    assert errors.abs().max() <= bound(k)
    assert abs(errors.mean()) <= 0.02 + SIGMAS / math.sqrt(k * len(errors))
    assert not any(searched[20:])


@pytest.mark.parametrize(("factor", "world_size"), [(0.1, 1), (10.0, 4)])
def test_recovers_from_a_tenfold_jump_within_ten_steps(factor: float, world_size: int) -> None:
    gradient = stream("normal", world_size, 16_000, lambda step: factor if step >= 50 else 1.0)
    shares, _ = run(gradient, k=lambda _: 800, steps=90)
    assert max(abs(share - 1) for share in shares[60:]) <= bound(800)


def test_follows_a_density_warm_up() -> None:
    def k(step: int) -> int:
        return max(200, 4000 >> step // 20)

    shares, searched = run(stream("normal", 2, 16_000), k=k, steps=120)
    assert max(abs(share - 1) / bound(k(step)) for step, share in enumerate(shares) if step % 20 > 5) <= 1
    assert sum(searched) < 30
