"""Published rules do what the authors' own code did: equal counts, thresholds and residuals, step by step."""

import pytest

from tests.fidelity import REDUCERS, deviations
from tests.products import TIER

NUM_STEPS = {"MicroReducer": 25, "ExDynaReducer": 25}  # their thresholds change from step to step


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_published_rule_is_the_recorded_one(reducer: str) -> None:
    for step, found in enumerate(deviations(reducer, 60 if TIER == "all" else NUM_STEPS.get(reducer, 8))):
        assert (found.selected, found.sent, found.threshold, found.residual) == (0, 0, 0.0, 0.0), (step, found)
        assert max(found.update, found.dot) < 1e-8, (step, found)
