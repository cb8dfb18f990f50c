"""SparseLoCo's parts against brute force: two bits a value, and a residual that decays; see test_exchanges."""

import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.sign import Sign
from micro.codecs.two_means import TwoMeans
from micro.zoo.fft import FFTReducer
from tests.parts import kept, normal, simulated


def through(codec: micro.Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values, (0,)), values.numel(), values.dtype)


def lost(codec: micro.Codec, values: Tensor) -> float:
    return float((values - through(codec, values)).norm() / values.norm()) ** 2


def test_two_magnitudes_leave_the_least_of_all_cuts_of_a_block() -> None:
    values = normal(24).float()
    ordered = values.abs().sort().values
    splits = [(ordered[:cut], ordered[cut:]) for cut in range(1, 24)]
    errors = [sum(float(((half - half.mean()) ** 2).sum()) for half in split) for split in splits]
    assert lost(TwoMeans(), values) == pytest.approx(min(errors) / float(values.norm()) ** 2, rel=0.05)


def test_of_what_top_k_selects_the_published_levels_tell_little_more_than_a_sign() -> None:
    values = normal(200_000).float()
    largest = values[micro.kernels.largest(values, values.numel() // 64).long()]
    sign, ours, published = (lost(codec, largest) for codec in (Sign(), TwoMeans(), TwoMeans(rule="published")))
    assert published > 0.9 * sign
    assert ours < 0.5 * sign


def test_the_published_levels_are_those_of_the_public_code() -> None:
    values = [0.1, 0.2, -0.1, 3.0, -4.0, 0.5]
    mean = sum(values) / 6
    sigma = (sum((value - mean) ** 2 for value in values) / 5) ** 0.5
    levels = [min(max(round((value - mean) / (1.5 * sigma) + 2), 0), 3) for value in values]
    expected = [sum(v for v, other in zip(values, levels, strict=True) if other == own) for own in levels]
    expected = [total / levels.count(own) for total, own in zip(expected, levels, strict=True)]
    assert through(TwoMeans(rule="published"), torch.tensor(values)).tolist() == pytest.approx(expected)
    assert len(set(levels)) > 2


DECAY = micro.ErrorFeedback(decay=0.75)


@pytest.mark.parametrize(
    "reducer",
    [micro.SparseReducer(micro.TopK(), 0.1, feedback=DECAY), FFTReducer(density=0.1, bits=32, feedback=DECAY)],
    ids=["sparse", "fft"],
)
def test_what_decays_is_recorded(reducer: micro.Reducer) -> None:
    simulation = simulated(reducer, 40, 2)
    for index in range(3):
        before, grads = kept(simulation), normal(2, 40, seed=index)
        step = simulation.step(grads)
        forgotten = [stats.forgotten for stats in step.stats]
        assert forgotten == pytest.approx((0.25 * before.norm(dim=1)).tolist())
        torch.testing.assert_close((0.75 * before + grads - kept(simulation)).sum(0), 2 * step.update)
    assert all(forgotten)
