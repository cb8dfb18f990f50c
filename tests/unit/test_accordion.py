"""Accordion's density: high where a layer's gradient changes, low elsewhere, the same on all ranks."""

from typing import Any

import pytest
import torch

import micro
from tests.parts import simulated

LAYOUT = micro.Layout(("steady", "wild"), ((50,), (30,)))
LOW, HIGH = 0.1, 0.5
SAME = (1.0, 1.0)


def accordion(**settings: Any) -> micro.Simulation:
    spec = {"name": "accordion", "density": LOW, "high": HIGH, "interval": 2, **settings}
    policy = micro.build(micro.Density, spec)
    return simulated(micro.TopK(scope="layer"), LAYOUT, 2, density=policy, exchange=micro.Gather())


def run(simulation: micro.Simulation, scales: list[tuple[float, float]]) -> list[list[float]]:
    """Return the density of each layer's update, step by step, where layers have these scales."""
    densities = []
    for steady, wild in scales:
        row = torch.cat([torch.linspace(1, 2, 50) * steady, torch.linspace(1, 2, 30) * wild]).double()
        pieces = LAYOUT.split(simulation.step(row.expand(2, -1)).update).values()
        densities.append([float((piece != 0).double().mean()) for piece in pieces])
    return densities


JUMPS = [SAME, SAME, SAME, (1, 9), SAME, (1, 3), (1, 3), (1, 3), (1, 3)]  # checks see every other
GROWTH = [SAME, SAME, (1.4, 1.6)]


@pytest.mark.parametrize(
    ("settings", "scales", "by_check"),  # the last: what a check every two steps decides
    [
        # a layer is critical at first and while its norm changes; the jump between two checks is not seen
        ({}, JUMPS, [[HIGH, HIGH], [LOW, LOW], [LOW, LOW], [LOW, HIGH], [LOW, LOW]]),
        ({"rule": "published"}, JUMPS, [[HIGH, HIGH], [LOW, LOW], [LOW, LOW], [LOW, HIGH], [LOW, LOW]]),
        # a change must be larger than asked
        ({"change": 0.5}, GROWTH, [[HIGH, HIGH], [LOW, HIGH]]),
        ({"change": 0.3}, GROWTH, [[HIGH, HIGH], [HIGH, HIGH]]),
        ({"change": 0.7}, GROWTH, [[HIGH, HIGH], [LOW, LOW]]),
        # a lower learning rate makes the next check critical
        ({"decays": (3,)}, [SAME] * 8, [[HIGH, HIGH], [LOW, LOW], [HIGH, HIGH], [LOW, LOW]]),
    ],
)
def test_a_layer_is_critical_while_its_norm_changes(settings: Any, scales: Any, by_check: list[list[float]]) -> None:
    assert run(accordion(**settings), scales) == [density for density in by_check for _ in range(2)][: len(scales)]


@pytest.mark.parametrize(("rule", "critical"), [("published", False), ("repaired", True)])
def test_published_looks_at_rank_0_alone(rule: str, critical: bool) -> None:
    simulation, ones = accordion(rule=rule), torch.ones(2, LAYOUT.numel, dtype=torch.float64)
    for other in (1.0, 1.0, 10.0):  # rank 1's gradient grows, rank 0's does not
        stats = simulation.step(ones * torch.tensor([[1.0], [other]])).stats
    assert {(s.target_density, s.target_count) for s in stats} == {(HIGH, 40) if critical else (LOW, 8)}
