"""Fits: published ones equal re-writes of their public code at each step; repaired ones select about k for any law."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import micro
from micro.selectors.fits.correction import strictly_above
from micro.selectors.fits.gaussiank import folded_quantile, normal_quantile
from micro.selectors.fits.laws import Law, gamma_quantile, log_moments, pareto_quantile
from micro.selectors.fits.sidco import fit, stage_shares
from micro.values.randomness import generator
from tests.parts import kept, select, simulated
from tests.products import grid

LAWS: tuple[Law, ...] = ("exponential", "gamma", "pareto")
Array = np.ndarray[Any, np.dtype[np.float64]]

STREAMS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, d: rng.standard_normal(d),
    "laplace": lambda rng, d: rng.laplace(size=d),
    "student": lambda rng, d: rng.standard_t(3, d),
    "lognormal": lambda rng, d: rng.lognormal(sigma=1.5, size=d) * rng.choice([-1.0, 1.0], d),
    "mixture": lambda rng, d: np.where(rng.random(d) < 0.01, 1.0, 1e-3) * rng.standard_normal(d),
    "mean 1": lambda rng, d: 1 + rng.standard_normal(d),
    "layered": lambda rng, d: np.repeat([0.01, 0.1, 1.0, 10.0], d // 4) * rng.standard_normal(d),
}


def once(fit: str, acc: Tensor, k: int) -> list[int]:
    return select(micro.Estimated(fit=fit), acc, k).indices.tolist()


# --- the public codes, written again: what one rank sends; in ``ways`` how it came to it ----------------------------

Oracle = Callable[[Array, int], list[int]]


def gaussiank(k: int, ways: set[Any], seed: int, rank: int) -> Oracle:
    def choose(acc: Array, step: int) -> list[int]:
        threshold = acc.mean() + acc.std(ddof=1) * stats.norm.isf(k / acc.size / 2)
        for scan in range(3):
            ways.add(scan)
            found = np.flatnonzero(abs(acc) > threshold).tolist()
            if 2 * k / 3 <= len(found) <= 4 * k / 3:
                break
            threshold *= 0.5 if len(found) < 2 * k / 3 else 1.5
        return found

    return choose


def dgc(k: int, ways: set[Any], seed: int, rank: int) -> Oracle:
    def choose(acc: Array, step: int) -> list[int]:
        d, magnitudes, stride = acc.size, abs(acc), 1
        least = max(math.ceil(0.01 * d), math.ceil(2 * d / k))
        if d > math.ceil(2 * d / k):
            stride = 32 * math.ceil(d / least / 32) + 1
            while d // stride < least:
                stride -= 8
        sample = sorted(magnitudes[phase(stride, seed, step, rank) :: stride], reverse=True)
        threshold = sample[math.ceil(d // stride * k / d) - 1]
        for _ in range(10 if stride > 1 else 0):
            found = np.flatnonzero(magnitudes >= threshold)
            if len(found) > 1.3 * k:
                ways.add("cut")
                return sorted(sorted(found.tolist(), key=lambda i: -magnitudes[i])[:k])
            if len(found) >= 0.8 * k:
                break
            threshold *= 0.8
            ways.add("lowered")
        found = np.flatnonzero(magnitudes >= threshold)
        ways.add("lowest" if len(found) > k else "all")
        return found[:k].tolist()

    return choose


def phase(stride: int, *parts: int) -> int:
    return int(torch.randint(stride, (1,), generator=generator(*parts)))


def sidco(law: Law, num_stages: int, k: int, acc: Array) -> float:
    """Return SIDCo's threshold: peaks over threshold with scipy's laws."""
    density, x, floor, threshold = k / acc.size, abs(acc), 0.0, 0.0
    further = (density / 0.25) ** (1 / max(num_stages - 1, 1))
    for stage, share in enumerate([density] if num_stages == 1 else [0.25, *[further] * (num_stages - 1)]):
        excess = x
        if stage:
            floor = x[x > threshold].min()
            excess = x[x > threshold] - floor
        here = law if stage == 0 or law == "exponential" else "pareto"
        threshold = floor + fitted(here, excess).isf(share)
    return threshold


def fitted(law: Law, x: Array) -> Any:
    if law == "exponential":
        return stats.expon(scale=x.mean())
    if law == "pareto":
        ratio = x.mean() ** 2 / x.var(ddof=1)
        return stats.genpareto((1 - ratio) / 2, scale=x.mean() * (1 + ratio) / 2)
    s = np.log(x.mean()) - np.log(x).mean()
    alpha = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return stats.gamma(alpha, scale=x.mean() / alpha)


PUBLISHED: dict[str, tuple[Any, Callable[..., Oracle], float, set[Any]]] = {  # fit, its oracle, scale, ways to see
    "gaussiank": ("gaussiank_published", gaussiank, 1.0, {0, 1, 2}),
    "dgc": ("dgc_published", dgc, 1.0, {"cut", "lowered", "lowest", "all"}),
}


@pytest.mark.slow
@grid(method=PUBLISHED, world_size=[1, 3])
def test_a_published_fit_is_the_public_code_step_for_step(method: str, world_size: int) -> None:
    fit, oracle, scale, expected = PUBLISHED[method]
    d, k, seed, ways = 2000, 40, 5, set[Any]()
    selector = micro.Estimated(fit=fit)
    simulation = simulated(selector, d, world_size, density=k / d, exchange=micro.Gather(), seed=seed)
    choose = [oracle(k, ways, seed, rank) for rank in range(world_size)]
    rng, residuals = np.random.default_rng(world_size), np.zeros((world_size, d))
    kinds = [STREAMS["laplace"], STREAMS["normal"], lambda rng, d: rng.standard_t(1.5, d)]
    if method.startswith(("gaussiank", "dgc")):
        kinds.insert(0, lambda rng, d: rng.uniform(-1, 1, d))
    for step in range(20):
        residuals += [kinds[step % len(kinds)](rng, d) * scale * (1 + step % 4) for _ in range(world_size)]
        update, before = np.zeros(d), residuals - kept(simulation).numpy()
        for rank in range(world_size):
            chosen = choose[rank](residuals[rank], step)
            update[chosen] += residuals[rank, chosen] / world_size
            residuals[rank, chosen] = 0
        found = simulation.step(torch.tensor(before)).update
        np.testing.assert_allclose(found.numpy(), update, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(kept(simulation).numpy(), residuals, rtol=1e-9, atol=1e-12)
    assert ways >= expected


@grid(law=LAWS, num_stages=[1, 2, 3], stream=["laplace", "normal", "student"])
def test_the_threshold_of_sidco_is_that_of_the_laws_that_it_names(law: Law, num_stages: int, stream: str) -> None:
    acc, k = STREAMS[stream](np.random.default_rng(0), 2000), 40
    found, _ = fit(torch.tensor(acc), law, stage_shares(k / acc.size, num_stages), None)
    assert found == pytest.approx(sidco(law, num_stages, k, acc), rel=1e-9)


def test_what_public_codes_do_in_rare_cases() -> None:
    at = phase(97, 0, 0, 0)
    acc = torch.full((4000,), 1e-6, dtype=torch.float64)
    acc[at::97] = 1.0  # the sample sees nothing else: 0.8 ** 10 is far above the rest
    assert once("dgc_published", acc, 200) == list(range(at, 4000, 97))
    assert once("gaussiank_published", torch.zeros(100), 1) == once("gaussiank_published", torch.tensor([5.0]), 1) == []
    assert len(once("gaussiank_published", torch.full((64,), -3.0), 1)) == 64


# --- the repaired fits ------------------------------------------------------------------------------------------------

REPAIRED: dict[str, tuple[Any, float, float]] = {  # fit, and the least and the most that it selects, in k
    "gaussiank": ("gaussiank", 1 / 2, 4 / 3),
    "dgc": ("dgc", 1 / 2, 4 / 3),
    "reused": ("reused", 1.0, 1.0),
    **{
        f"sidco, {law}, {stages}": ({"name": "sidco", "law": law, "stages": stages}, 1 / 2, 4 / 3)
        for law in LAWS
        for stages in (None, 1, 3)
    },
}


@grid(fit=REPAIRED, stream=STREAMS)
def test_the_largest_are_sent_near_k_with_error_feedback(fit: str, stream: str) -> None:
    rng, d, k, shares = np.random.default_rng(0), 20_000, 200, []
    made, lowest, highest = REPAIRED[fit]
    selector = micro.Estimated(fit=made)
    state, acc = selector.start(), np.zeros(d)
    for index in range(20):
        acc += STREAMS[stream](rng, d)
        found = select(selector, torch.from_numpy(acc), k, state, index)
        indices, magnitudes = found.indices.numpy(), abs(acc)
        assert found.indices.dtype == torch.int32
        assert (np.diff(indices) > 0).all()
        assert lowest * k <= indices.size <= highest * k
        assert magnitudes[indices].min() >= np.partition(magnitudes, -indices.size)[-indices.size]
        assert magnitudes[indices].min() >= found.threshold
        shares.append(indices.size / k)
        acc[indices] = 0
    assert 0.8 <= np.mean(shares[5:]) <= 1.1


@grid(fit=REPAIRED, scales=[(1.0, 10.0, 100.0), (1.0, 1e-2), (1e-12,), (1e12,)], dtype=[torch.float32, torch.float64])
def test_scales_and_their_jumps_make_no_difference(fit: str, scales: tuple[float, ...], dtype: torch.dtype) -> None:
    rng, (made, lowest, highest) = np.random.default_rng(0), REPAIRED[fit]
    selector = micro.Estimated(fit=made)
    state = selector.start()
    for index in range(12):
        acc = torch.from_numpy(rng.laplace(size=5000) * scales[index % len(scales)]).to(dtype)
        assert lowest * 50 <= select(selector, acc, 50, state, index).indices.numel() <= highest * 50


AWKWARD = {  # beside those of the laws
    "two values": torch.tensor([1.0] * 60 + [2.0] * 40),
    "one element": torch.tensor([3.0]),
    "tiny": torch.linspace(1e-38, 2e-38, 100),
    "subnormal": torch.linspace(1e-44, 1e-42, 100),
    "large": torch.linspace(-1e38, 1e38, 100),
}


@grid(fit=REPAIRED, kind=AWKWARD)
def test_awkward_vectors_have_an_outcome(fit: str, kind: str) -> None:
    made, _, most = REPAIRED[fit]
    selector, acc = micro.Estimated(fit=made), AWKWARD[kind]
    state, k = selector.start(), max(1, acc.numel() // 20)
    for index in range(12):
        count = select(selector, acc, k, state, index).indices.numel()
        assert 0 < count <= most * k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_above_a_cut_is_larger_than_it(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, -0.1, 0.100001, 0.0], dtype=dtype)
    assert [strictly_above(x, cut)[0].tolist() for cut in (0.1, 0.0, math.nan)] == [[2], [0, 1, 2], []]


# --- quantiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.2, 0.01, 0.001, 1e-6])
def test_the_quantile_of_a_folded_normal_law_counts_both_tails(density: float) -> None:
    """Those of the other laws are the public codes' too."""
    for mean, deviation in [(0.0, 2.0), (1.0, 1.0), (-3.0, 0.5), (1e-4, 1e-3)]:
        expected = stats.foldnorm.isf(density, abs(mean) / deviation, scale=deviation)
        assert folded_quantile(mean, deviation, density) == pytest.approx(expected, rel=1e-6)


def test_quantiles_have_limits_where_their_formula_has_none() -> None:
    assert normal_quantile(1.0) == pytest.approx(0.0, abs=1e-9)
    assert folded_quantile(-2.0, 0.0, 0.1) == 2.0
    assert math.isnan(folded_quantile(1.0, math.nan, 0.1))
    assert pareto_quantile(2.0, 4.0, 0.01) == pytest.approx(stats.expon.isf(0.01, scale=2.0))  # shape 0
    assert pareto_quantile(2.0, 0.0, 0.01) == pareto_quantile(2.0, 1e-320, 0.01) == 2.0
    assert gamma_quantile(2.0, math.log(2.0), 0.01) == gamma_quantile(2.0, math.log(2.0) + 1e-15, 0.01) == 2.0


@pytest.mark.parametrize("numel", [1, 1000, 600_000])
def test_moments_leave_zeros_out(numel: int) -> None:
    x = np.random.default_rng(0).standard_t(3, numel) * 1e30
    x[1::7] = 0
    kept = abs(x[x != 0])
    assert log_moments(torch.from_numpy(x)) == pytest.approx((kept.size, kept.mean(), np.log(kept).mean()))
    assert log_moments(torch.zeros(numel)) == (0, 0.0, 0.0)
