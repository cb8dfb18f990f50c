"""Accordion's density: high where a layer's gradient changes, low elsewhere, the same on all ranks."""

from typing import Any

import pytest
import torch

import micro
from micro.zoo.accordion import Accordion

LAYOUT = micro.Layout(("steady", "wild"), ((50,), (30,)))
LOW, HIGH = 0.1, 0.5
SAME = (1.0, 1.0)


def accordion(**settings: Any) -> Accordion:
    return micro.build(Accordion, {"name": "accordion", "density": LOW, "high": HIGH, "interval": 2, **settings})


def simulated(policy: Accordion, **parts: Any) -> micro.Simulation:
    reducer = micro.SparseReducer(micro.TopK(scope="layer"), policy, exchange=micro.Gather(), **parts)
    return micro.Simulation(reducer, LAYOUT, 2, dtype=torch.float64)


def run(policy: Accordion, scales: list[tuple[float, float]]) -> list[list[float]]:
    """Return the density of each layer's update, step by step, where layers have these scales."""
    simulation, densities = simulated(policy), []
    for steady, wild in scales:
        row = torch.cat([torch.linspace(1, 2, 50) * steady, torch.linspace(1, 2, 30) * wild]).double()
        pieces = LAYOUT.split(simulation.step(row.expand(2, -1)).update).values()
        densities.append([float((piece != 0).double().mean()) for piece in pieces])
    return densities


@pytest.mark.parametrize("rule", ["repaired", "published"])
def test_a_layer_is_critical_at_first_and_while_its_norm_changes(rule: str) -> None:
    scales = [SAME, SAME, SAME, (1, 9), SAME, (1, 3), (1, 3), (1, 3), (1, 3)]  # checks see every other
    by_check = [[HIGH, HIGH], [LOW, LOW], [LOW, LOW], [LOW, HIGH], [LOW, LOW]]  # the jump between two is not seen
    assert run(accordion(rule=rule), scales) == [density for density in by_check for _ in range(2)][:9]


@pytest.mark.parametrize(("change", "expected"), [(0.5, [LOW, HIGH]), (0.3, [HIGH, HIGH]), (0.7, [LOW, LOW])])
def test_a_change_must_be_larger_than_asked(change: float, expected: list[float]) -> None:
    assert run(accordion(change=change), [SAME, SAME, (1.4, 1.6), SAME])[2] == expected


def test_a_lower_learning_rate_makes_the_next_check_critical() -> None:
    densities = run(accordion(decays=(3,)), [SAME] * 8)
    assert [row[0] for row in densities] == [HIGH, HIGH, LOW, LOW, HIGH, HIGH, LOW, LOW]


@pytest.mark.parametrize(("rule", "critical"), [("published", False), ("repaired", True)])
def test_published_looks_at_rank_0_alone(rule: str, critical: bool) -> None:
    simulation, ones = simulated(accordion(rule=rule)), torch.ones(2, LAYOUT.numel, dtype=torch.float64)
    for other in (1.0, 1.0, 10.0):  # rank 1's gradient grows, rank 0's does not
        stats = simulation.step(ones * torch.tensor([[1.0], [other]])).stats
    assert {(s.target_density, s.target_count) for s in stats} == {(HIGH, 40) if critical else (LOW, 8)}
