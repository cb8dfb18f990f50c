"""DGC: momentum correction by hand, and the public code's adaptation step by step."""

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.feedback import MomentumCorrection
from micro.randomness import generator
from micro.requests import carried_out
from micro.selectors.fits.dgc import DGC
from micro.sparse import SparseValues
from tests.gathered_choices import Vector, check_steps

CPU = torch.device("cpu")

# --- the feedback -----------------------------------------------------------------------------------------------------


def test_momentum_is_corrected_and_masked_by_hand() -> None:
    feedback = MomentumCorrection(momentum=0.5)
    memory = feedback.start(3, torch.float64, CPU)
    expected = [  # gradient, (v, u) after it, what is sent where, (v, u) after that
        ([1.0, 2.0, -4.0], ([1.0, 2.0, -4.0], [1.0, 2.0, -4.0]), {2: -4.0}, ([1.0, 2.0, 0.0], [1.0, 2.0, 0.0])),
        ([2.0, 0.0, 1.0], ([3.5, 3.0, 1.0], [2.5, 1.0, 1.0]), {0: 3.0}, ([0.5, 3.0, 1.0], [0.0, 1.0, 1.0])),
        ([0.0, 1.0, 0.0], ([0.5, 4.5, 1.5], [0.0, 1.5, 0.5]), {}, ([0.5, 4.5, 1.5], [0.0, 1.5, 0.5])),
    ]  # the second step sends 3 of 3.5, as a lossy codec would: the rest stays, the momentum goes
    for given, before, sent, after in expected:
        grad = torch.tensor(given, dtype=torch.float64)
        acc, bad = feedback.accumulate_(memory, grad, world_size=4)
        assert bad is None
        assert acc is memory["residual"]
        assert (acc.tolist(), memory["momentum"].tolist()) == before
        feedback.settle_(memory, values_of(sent), (), 1.0)
        assert (memory["residual"].tolist(), memory["momentum"].tolist()) == after
        assert not grad.any()


def values_of(sent: dict[int, float]) -> SparseValues:
    return SparseValues(
        torch.tensor(list(sent), dtype=torch.int32), torch.tensor(list(sent.values()), dtype=torch.float64)
    )


def test_nesterov_form_by_hand() -> None:
    feedback = MomentumCorrection(momentum=0.5, nesterov=True)
    memory = feedback.start(1, torch.float64, CPU)
    for given, u, v in [(2.0, 1.0, 3.0), (4.0, 2.5, 9.5)]:  # u = m (u + g), v += u + g
        grad = torch.tensor([given], dtype=torch.float64)
        feedback.accumulate_(memory, grad, world_size=1)
        assert memory["momentum"].item() == u
        assert memory["residual"].item() == v
        assert not grad.any()


def test_the_first_step_sent_whole_is_the_gradient_and_later_ones_are_momentum_sgd() -> None:
    feedback = MomentumCorrection(momentum=0.9)
    memory, velocity = feedback.start(5, torch.float64, CPU), np.zeros(5)
    grads = np.random.default_rng(0).normal(size=(6, 5))
    for row in grads:  # nothing is ever sent: v is the sum of all momentum steps
        feedback.accumulate_(memory, torch.tensor(row), world_size=2)
    total = np.zeros(5)
    for row in grads:
        velocity = 0.9 * velocity + row
        total += velocity
    np.testing.assert_allclose(memory["residual"].numpy(), total, rtol=1e-12)


@pytest.mark.parametrize(("world_size", "factor"), [(1, 0.5), (4, 0.25), (9, 0.5 / 3)])
def test_a_gradient_is_clipped_to_its_share_of_the_norm(world_size: int, factor: float) -> None:
    feedback = MomentumCorrection(momentum=0.5, clip=2.5)
    memory = feedback.start(2, torch.float64, CPU)
    acc, _ = feedback.accumulate_(memory, torch.tensor([3.0, -4.0], dtype=torch.float64), world_size=world_size)
    np.testing.assert_allclose(acc.numpy(), [3 * factor, -4 * factor], rtol=1e-15)
    small = torch.tensor([0.3, -0.4], dtype=torch.float64)
    again, _ = feedback.accumulate_(memory, small, world_size=world_size)
    np.testing.assert_allclose(again.numpy(), [4.5 * factor + 0.3, -6 * factor - 0.4], rtol=1e-15)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_nan_and_infinity_are_dropped_and_the_first_is_named(nesterov: bool, clip: float | None) -> None:
    feedback = MomentumCorrection(momentum=0.5, nesterov=nesterov, clip=clip)
    memory, clean = feedback.start(4, torch.float64, CPU), feedback.start(4, torch.float64, CPU)
    grad = torch.tensor([3.0, math.inf, math.nan, 4.0], dtype=torch.float64)
    acc, bad = feedback.accumulate_(memory, grad, world_size=1)
    assert bad == 1
    expected, _ = feedback.accumulate_(clean, torch.tensor([3.0, 0, 0, 4.0], dtype=torch.float64), world_size=1)
    assert torch.equal(acc, expected)
    assert torch.equal(memory["momentum"], clean["momentum"])
    assert (acc[[0, 3]] > 0).all()


def test_half_precision_gradients_are_accumulated_in_single_precision() -> None:
    feedback = MomentumCorrection(clip=100.0)
    memory = feedback.start(2, torch.bfloat16, CPU)
    for _ in range(2):
        acc, _ = feedback.accumulate_(memory, torch.tensor([1.0, 1e-3]).bfloat16(), world_size=1)
    assert acc.dtype == memory["momentum"].dtype == torch.float32
    small = float(torch.tensor(1e-3).bfloat16())
    np.testing.assert_allclose(acc.numpy(), [2.9, 2.9 * small], rtol=1e-6)


def test_the_momentum_is_saved_and_follows_its_parameters() -> None:
    layout = micro.Layout(("a", "b"), ((3,), (2,)))
    reducer = micro.SparseReducer(micro.TopK(), 0.2, feedback=MomentumCorrection())
    with closing(micro.Simulation(reducer, layout, 1, dtype=torch.float64)) as simulation:
        simulation.step(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64))
        assert simulation.memory("momentum")[0].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
        simulation.rebuild(micro.Layout(("b", "a"), ((2,), (3,))))
        assert simulation.memory("momentum")[0].tolist() == [4.0, 0.0, 1.0, 2.0, 3.0]
        saved = simulation.state_dict()
    with closing(micro.Simulation(reducer, layout, 1, dtype=torch.float64)) as resumed:
        resumed.load_state_dict(saved)
        assert resumed.memory("momentum")[0].tolist() == [4.0, 0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, r"momentum of the feedback must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, r"momentum of the feedback must be in \[0, 1\), got -0.1"),
        ({"momentum": math.nan}, r"momentum of the feedback must be in \[0, 1\), got nan"),
        ({"clip": 0.0}, "clip of the feedback must be positive, got 0.0"),
        ({"clip": math.nan}, "clip of the feedback must be positive, got nan"),
    ],
)
def test_settings_of_the_feedback_are_checked(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MomentumCorrection(**settings)  # type: ignore[arg-type]


# --- the published rule -----------------------------------------------------------------------------------------------


def published_choice(acc: Vector, k: int, phase_of: Any) -> tuple[list[int], set[str]]:
    """Return what the public code would send, and what it did for that."""
    d, rho = acc.size, k / acc.size
    least = max(math.ceil(0.01 * d), math.ceil(2 / rho))
    stride = 1
    if d > math.ceil(2 / rho):
        stride = 32 * math.ceil(d / least / 32) + 1
        while d // stride < least:
            stride -= 8
    magnitudes = abs(acc)
    sample = sorted(magnitudes[phase_of(stride) :: stride], reverse=True)
    threshold = sample[math.ceil(d // stride * rho) - 1]
    ways: set[str] = set()
    for _ in range(10 if stride > 1 else 0):
        found = [i for i in range(d) if magnitudes[i] >= threshold]
        if len(found) > 1.3 * k:
            return sorted(sorted(found, key=lambda i: -magnitudes[i])[:k]), ways | {"cut"}
        if len(found) >= 0.8 * k:
            break
        threshold *= 0.8
        ways.add("lowered")
    found = [i for i in range(d) if magnitudes[i] >= threshold]
    return found[:k], ways | ({"lowest"} if len(found) > k else {"all"})


def gradients(d: int, world_size: int, step: int) -> Vector:
    """Return (world_size, d) gradients, every third step with a heavy tail."""
    rng = np.random.default_rng(100 * world_size + step)
    return rng.standard_t(1.5 if step % 3 == 2 else 30, size=(world_size, d)) * (1 + step % 4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_published_rule_step_by_step(world_size: int) -> None:
    d, k, seed = 2000, 40, 1
    ways: set[str] = set()

    def choose(acc: Vector, step: int, rank: int) -> list[int]:
        chosen, did = published_choice(acc, k, phases(seed, step, rank))
        ways.update(did)
        return chosen

    reducer = micro.SparseReducer(micro.Estimated(fit="dgc_published"), k / d, exchange=micro.Gather(), seed=seed)
    check_steps(reducer, (gradients(d, world_size, step) for step in range(15)), choose)
    assert ways == {"cut", "lowered", "lowest", "all"}


def phases(seed: int, step: int, rank: int) -> Any:
    return lambda stride: int(torch.randint(stride, (1,), generator=generator(seed, step, rank)))


def test_the_published_rule_ends_after_ten_rounds() -> None:
    phase = phases(0, 0, 0)(97)
    acc = torch.full((4000,), 1e-6, dtype=torch.float64)
    acc[phase::97] = 1.0  # the sample sees nothing else: 0.8 ** 10 is far above the rest
    assert choose(micro.Estimated(fit="dgc_published"), acc, 200) == list(range(phase, 4000, 97))


# --- the repaired rule ------------------------------------------------------------------------------------------------


def choose(selector: DGC, acc: Tensor, k: int, *, seed: int = 0, step: int = 0) -> list[int]:
    comm = Comm()
    asked = micro.sparse.Step(step, k, seed, micro.Layout.flat(acc.numel()))
    indices: list[int] = carried_out(selector.select(selector.start(), acc, asked, comm), comm).indices.tolist()
    return indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_first_step_is_the_sampled_threshold_or_else_exact(dtype: torch.dtype) -> None:
    d, k = 20000, 100
    stride = d // (32 * d // k)  # 32 hits: 6400 samples, and the next odd stride below
    assert stride == 3
    ways = set()
    for seed in range(12):
        values = np.random.default_rng(seed).standard_t(3, size=d)
        acc = torch.tensor(values).to(dtype)
        magnitudes = abs(acc.double().numpy())
        sample = np.sort(magnitudes[phases(seed, 0, 0)(stride) :: stride])[::-1]
        found = np.nonzero(magnitudes >= sample[math.ceil(len(sample) * k / d) - 1])[0].tolist()
        exact = not 2 / 3 * k <= len(found) <= 4 / 3 * k
        ways.add(exact)
        expected = sorted(np.argsort(-magnitudes)[:k].tolist()) if exact else found
        assert choose(micro.Estimated(fit="dgc"), acc, k, seed=seed) == expected
    assert False in ways


def test_another_seed_samples_elsewhere() -> None:
    acc = torch.tensor(np.random.default_rng(0).normal(size=20000))
    for rule in ("repaired", "published"):
        selector = micro.Estimated(fit="dgc" if rule == "repaired" else "dgc_published")
        assert len({tuple(choose(selector, acc, 100, seed=seed)) for seed in range(6)}) > 1
        assert len({tuple(choose(selector, acc, 100, step=step)) for step in range(6)}) > 1
        assert choose(selector, acc, 100, seed=3) == choose(selector, acc, 100, seed=3)


def test_the_repaired_rule_stays_near_k_with_its_feedback() -> None:
    d, k = 10000, 100
    reducer = micro.SparseReducer(
        micro.Estimated(fit="dgc"), k / d, exchange=micro.Gather(), feedback=MomentumCorrection()
    )
    with closing(micro.Simulation(reducer, micro.Layout.flat(d), 2)) as simulation:
        counts = [simulation.step(torch.tensor(gradients(d, 2, step)).float()).stats[0].counts for step in range(20)]
    every = np.array(counts)
    assert every.max() <= 4 / 3 * k
    assert every.min() >= k / 2
    assert 0.8 * k <= every.mean() <= 1.1 * k
