"""SparseLoCo's parts against brute force: two bits a value, the mean over senders, a residual that decays."""

import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.sign import Sign
from micro.codecs.two_means import TwoMeans
from micro.zoo.fft import FFTReducer


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lost(codec: micro.Codec, values: Tensor) -> float:
    decoded = codec.decode(codec.encode(values, (0,)), values.numel(), values.dtype)
    return float((values - decoded).norm() / values.norm()) ** 2


def test_two_magnitudes_leave_the_least_of_all_cuts_of_a_block() -> None:
    values = drawn(24).float()
    ordered = values.abs().sort().values
    splits = [(ordered[:cut], ordered[cut:]) for cut in range(1, 24)]
    errors = [sum(float(((half - half.mean()) ** 2).sum()) for half in split) for split in splits]
    assert lost(TwoMeans(), values) == pytest.approx(min(errors) / float(values.norm()) ** 2, rel=0.05)


def test_of_what_top_k_selects_the_published_levels_tell_little_more_than_a_sign() -> None:
    values = drawn(200_000).float()
    largest = values[micro.kernels.largest(values, values.numel() // 64).long()]
    sign, ours, published = (lost(codec, largest) for codec in (Sign(), TwoMeans(), TwoMeans(rule="published")))
    assert published > 0.9 * sign
    assert ours < 0.5 * sign


def test_the_published_levels_are_those_of_the_public_code() -> None:
    values = [0.1, 0.2, -0.1, 3.0, -4.0, 0.5]
    mean = sum(values) / 6
    sigma = (sum((value - mean) ** 2 for value in values) / 5) ** 0.5
    levels = [min(max(round((value - mean) / (1.5 * sigma) + 2), 0), 3) for value in values]
    expected = [
        sum(v for v, other in zip(values, levels, strict=True) if other == own) / levels.count(own) for own in levels
    ]
    codec = TwoMeans(rule="published")
    decoded = codec.decode(codec.encode(torch.tensor(values), (0,)), 6, torch.float32)
    assert decoded.tolist() == pytest.approx(expected)
    assert len(set(levels)) > 2


def test_the_mean_is_over_those_who_sent() -> None:
    reducer = micro.SparseReducer(micro.TopK(), 0.2, micro.Gather(rule="senders"))
    grads = drawn(4, 30)
    simulation = micro.Simulation(reducer, micro.Layout.flat(30), 4, dtype=torch.float64)
    update = simulation.step(grads).update
    places = [set(micro.kernels.largest(row, 6).tolist()) for row in grads]
    for place in range(30):
        senders = [rank for rank in range(4) if place in places[rank]]
        expected = sum(float(grads[rank, place]) for rank in senders) / max(len(senders), 1)
        assert float(update[place]) == pytest.approx(expected)


def test_decay_is_a_share() -> None:
    for decay in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="decay"):
            micro.ErrorFeedback(decay=decay)


@pytest.mark.parametrize(
    "reducer",
    [
        micro.SparseReducer(micro.TopK(), 0.1, feedback=micro.ErrorFeedback(decay=0.75)),
        FFTReducer(density=0.1, bits=32, feedback=micro.ErrorFeedback(decay=0.75)),
    ],
    ids=["sparse", "fft"],
)
def test_what_decays_is_recorded(reducer: micro.Reducer) -> None:
    simulation = micro.Simulation(reducer, micro.Layout.flat(40), 2, dtype=torch.float64)
    for index in range(3):
        before = [residual.clone() for residual in simulation.residuals()]
        grads = drawn(2, 40, seed=index)
        stats = simulation.step_(updates := grads.clone())
        for rank in range(2):
            assert stats[rank].forgotten == pytest.approx(0.25 * float(before[rank].norm()))
        kept = 0.75 * sum(before) + grads.sum(0) - sum(simulation.residuals())
        torch.testing.assert_close(kept, 2 * updates[0])
    assert stats[0].forgotten
