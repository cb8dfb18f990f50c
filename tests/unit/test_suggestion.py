"""Which method is suggested on a link."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import micro
from micro.planning.suggestion import EMBEDDINGS, WEIGHTS, Evidence
from tests.refusals import refused

CONVOLUTIONS = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(20)))
TABLES = nn.Sequential(nn.Embedding(50_000, 64), nn.Linear(64, 8))


@pytest.mark.parametrize(
    ("model", "settings", "name"),
    [
        (CONVOLUTIONS, {"link_mbit": 100, "world_size": 4}, "micro"),
        (CONVOLUTIONS, {"link_mbit": 1e5, "world_size": 4}, "bf16"),
        (CONVOLUTIONS, {"link_mbit": 100, "world_size": 1}, "bf16"),
        (TABLES, {"link_mbit": 100, "world_size": 4}, "powersgd"),
    ],
)
def test_a_slow_link_wants_few_bytes_and_a_fast_one_dense(
    model: nn.Module, settings: dict[str, Any], name: str
) -> None:
    found = micro.suggest(model, **settings)
    assert found.why.startswith(f"{name}: ")
    assert len(found.why.splitlines()) == 2
    assert found.reducer.full_name == ("powersgd" if name == "powersgd" else "sparse")


def test_dense_comes_first_from_the_seconds_of_computation_that_it_says() -> None:
    on_link: dict[str, Any] = {"link_mbit": 100.0, "world_size": 4}
    border = micro.suggest(CONVOLUTIONS, **on_link).dense_from_s
    names = [micro.suggest(CONVOLUTIONS, compute_s=at * border, **on_link).why.split(":")[0] for at in (0.99, 1.01)]
    assert names == ["micro", "bf16"]


def test_seconds_are_those_of_a_ring() -> None:
    found = micro.suggest(CONVOLUTIONS, link_mbit=80, world_size=4, latency_us=100)
    numel = sum(p.numel() for p in CONVOLUTIONS.parameters())
    gathered = 2 * numel * 3 / 4 * 2 / 1e7 + 6e-4  # bfloat16: half the bytes of 2 (n-1)/n of a sum, at 10 MB/s
    assert found.exchange_s["bf16"] == pytest.approx(gathered, rel=0.01)


@pytest.mark.parametrize("evidence", [WEIGHTS, EMBEDDINGS])
def test_the_evidence_is_that_of_the_published_table(evidence: Evidence) -> None:
    page = Path(evidence.source.split(", ")[1]).read_text()

    def row(method: str) -> list[str]:
        found = re.search(rf"^\| {method} +\|(.*)\|$", page, re.MULTILINE)
        assert found is not None
        return [cell.strip() for cell in found[1].split("|")]

    at = [name.strip() for name in page.split("| method")[1].splitlines()[0].split("|")[1:]].index("epochs")
    dense = float(row("Dense, DDP")[at])
    assert float(row("PowerSGD")[at]) / dense == pytest.approx(evidence.epochs["powersgd"])
    assert float(row("MiCRO")[at]) / dense == pytest.approx(evidence.epochs["micro"])
    assert float(row("MiCRO")[0]) == evidence.density


@pytest.mark.parametrize(
    ("model", "settings", "key", "given"),
    [
        (CONVOLUTIONS, {"link_mbit": 0.0}, "link_mbit", "0.0"),
        (CONVOLUTIONS, {"world_size": -2}, "world_size", "-2"),
        (CONVOLUTIONS, {"memory_gb_s": float("nan")}, "memory_gb_s", "nan"),
        (CONVOLUTIONS, {"compute_s": -1.0}, "compute_s", "-1.0"),
        (nn.ReLU(), {}, "model", "none"),
    ],
)
def test_what_is_out_of_range_is_refused(model: nn.Module, settings: dict[str, Any], key: str, given: str) -> None:
    refused(lambda: micro.suggest(model, **{"link_mbit": 100.0, "world_size": 4, **settings}), key, given)
