"""Accordion's density: high where a layer's gradient changes, low elsewhere, the same on all ranks."""

import pytest
import torch
from torch import Tensor

import micro
from micro.parts import Rule
from micro.zoo.accordion import Accordion

LAYOUT = micro.Layout(("steady", "wild"), ((50,), (30,)))


def run(policy: Accordion, scales: list[tuple[float, float]], world_size: int = 2) -> list[list[float]]:
    """Return the density of each layer's update, step by step, where layers have these scales."""
    reducer = micro.SparseReducer(micro.TopK(scope="layer"), policy, exchange=micro.Gather())
    simulation = micro.Simulation(reducer, LAYOUT, world_size, dtype=torch.float64)
    densities = []
    for steady, wild in scales:
        row = torch.cat([torch.linspace(1, 2, 50) * steady, torch.linspace(1, 2, 30) * wild]).double()
        update = simulation.step(row.expand(world_size, -1)).update
        pieces = LAYOUT.split(update).values()
        densities.append([float((piece != 0).double().mean()) for piece in pieces])
    simulation.close()
    return densities


def accordion(**settings: object) -> Accordion:
    return micro.build(Accordion, {"name": "accordion", "density": 0.1, "high": 0.5, "interval": 2, **settings})


LOW, HIGH = 0.1, 0.5


@pytest.mark.parametrize("rule", ["repaired", "published"])
def test_a_layer_is_critical_at_first_and_while_its_norm_changes(rule: Rule) -> None:
    scales = [(1, 1), (1, 1), (1, 1), (1, 9), (1, 1), (1, 3), (1, 3), (1, 3), (1, 3)]  # checks see every other
    densities = run(accordion(rule=rule), scales)
    assert densities[0] == densities[1] == [HIGH, HIGH]
    assert densities[2] == densities[3] == [LOW, LOW]  # the jump between two checks is not seen
    assert densities[4] == densities[5] == [LOW, LOW]
    assert densities[6] == densities[7] == [LOW, HIGH]
    assert densities[8] == [LOW, LOW]


def test_a_change_must_be_larger_than_asked() -> None:
    scales = [(1, 1), (1, 1), (1.4, 1.6), (1, 1)]
    assert run(accordion(), scales)[2] == [LOW, HIGH]
    assert run(accordion(change=0.3), scales)[2] == [HIGH, HIGH]
    assert run(accordion(change=0.7), scales)[2] == [LOW, LOW]


def test_a_lower_learning_rate_makes_the_next_check_critical() -> None:
    densities = run(accordion(decays=(3,)), [(1, 1)] * 8)
    assert [row[0] for row in densities] == [HIGH, HIGH, LOW, LOW, HIGH, HIGH, LOW, LOW]


@pytest.mark.parametrize(("rule", "critical"), [("published", False), ("repaired", True)])
def test_published_looks_at_rank_0_alone(rule: Rule, critical: bool) -> None:
    reducer = micro.SparseReducer(micro.TopK(scope="layer"), accordion(rule=rule), exchange=micro.Gather())
    simulation = micro.Simulation(reducer, LAYOUT, 2, dtype=torch.float64)
    ones = torch.ones(2, LAYOUT.numel, dtype=torch.float64)
    for other in (1.0, 1.0, 10.0):  # rank 1's gradient grows, rank 0's does not
        stats = simulation.step(ones * torch.tensor([[1.0], [other]])).stats
    simulation.close()
    assert {s.target_density for s in stats} == {HIGH if critical else LOW}
    assert {s.target_count for s in stats} == {40 if critical else 8}


def test_a_gradient_that_is_not_finite_is_told_as_ever() -> None:
    reducer = micro.SparseReducer(micro.TopK(scope="layer"), accordion(), exchange=micro.Gather(), nonfinite="skip")
    simulation = micro.Simulation(reducer, LAYOUT, 2, dtype=torch.float64)
    bad = torch.ones(2, LAYOUT.numel, dtype=torch.float64)
    bad[1, 3] = float("nan")
    assert simulation.step(bad).stats[0].skipped
    assert not simulation.step(Tensor.clone(bad).nan_to_num_()).stats[0].skipped
    simulation.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"high": 0.05}, "high density of accordion must be at least density 0.1, got 0.05"),
        ({"high": 1.5}, r"high density of accordion must be in \(0, 1\], got 1.5"),
        ({"interval": 0}, "interval of accordion must be at least 1 step, got 0"),
        ({"change": 0.0}, "change of accordion must be above 0, got 0.0"),
        ({"rule": "best"}, "rule of accordion must be one of repaired, published, got 'best'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accordion(**settings)


def test_a_density_by_layer_needs_a_selector_by_layer() -> None:
    with pytest.raises(ValueError, match="density accordion differs by layer, micro does not: use topk, scope=layer"):
        micro.SparseReducer(micro.Micro(), accordion())
