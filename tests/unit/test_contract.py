"""The contract: public names, words of yamls and the form of saved states are those of tests/golden/contract.yaml.

What is there stays, or goes into micro/retired.py or conf/retired.yaml, which say what to use instead; new names, words
and keys of states may be added to it.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import micro
from experiments.config.conf_files import choices_of
from experiments.planning.schedules.base import Schedule
from micro.checkpoints.saved_state import header
from micro.selectors.estimated import Fit
from tests.sparsifiers import TABLE

CONTRACT = yaml.safe_load((Path(__file__).parents[1] / "golden/contract.yaml").read_text())
KINDS: dict[str, type[Any]] = {
    "selector": micro.Selector,
    "exchange": micro.Exchange,
    "codec": micro.Codec,
    "indices": micro.IndexCodec,
    "feedback": micro.Feedback,
    "density": micro.Density,
    "reducer": micro.Reducer,
    "fit": Fit,
    "schedule": Schedule,
}
LAYOUT = micro.Layout(("a", "b"), ((8, 16), (120,)))
ROWS = {row.name: row for row in TABLE}


def form(value: Any) -> str:
    """Return the form of what a state holds: keys, and types of values; parameters are one, whatever their names."""
    if isinstance(value, dict):
        parts = {key if key not in LAYOUT.names else "*": form(each) for key, each in value.items()}
        return "{" + ", ".join(f"{key}: {each}" for key, each in sorted(parts.items())) + "}"
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return type(value).__name__ if not isinstance(value, list | tuple) else "list"


def saved(name: str) -> dict[str, Any]:
    """Return what one of three ranks saves of a bucket after three steps."""
    row, gradients = ROWS[name], torch.randn(3, 4, LAYOUT.numel, generator=torch.Generator().manual_seed(0))
    ranks = row.world_size(3)
    simulation = micro.Simulation(row.make(0.05, 0), LAYOUT, ranks, dtype=torch.float32)
    for grads in gradients:
        simulation.step(grads[:ranks])
    bucket: dict[str, Any] = simulation.state_dict()["ranks"][0]
    return bucket


@pytest.mark.parametrize("module", CONTRACT["names"])
def test_public_names_stay(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in CONTRACT["names"][module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("group", CONTRACT["choices"])
def test_choices_of_groups_stay(group: str) -> None:
    assert set(CONTRACT["choices"][group].split()) - set(choices_of(group)) == set()


@pytest.mark.parametrize("kind", CONTRACT["parts"])
def test_words_of_parts_stay(kind: str) -> None:
    assert set(CONTRACT["parts"][kind].split()) - set(micro.known(KINDS[kind])) == set()


@pytest.mark.parametrize("name", CONTRACT["states"])
def test_saved_states_keep_their_form(name: str) -> None:
    assert form(saved(name)) == CONTRACT["states"][name]


def test_an_attachment_s_state_has_the_keys_that_it_had() -> None:
    keys = header(rank=0, world_size=1, step=1, scope="bucket", method={})
    assert form(keys) == CONTRACT["header"]
