"""Folders of finished runs of a made-up study, with rows such as training writes."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.runs.run_folder import RunFolder
from tests.finished_runs import finished

Row = dict[str, Any]
NUMEL = 270_000
RULES = {"micro": "agreed", "micro_published": "published", "micro_repaired": "repaired"}
STAGES = ("compute_s", "select_s", "exchange_s", "rest_s")
# build-up, scatter of the density, and milliseconds of STAGES
TRAITS: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "dense": (1.0, 0.0, (41.0, 0.0, 62.0, 3.1)),
    "topk": (5.8, 0.02, (41.2, 18.5, 11.3, 4.0)),
    "cltk": (1.0, 0.0, (41.1, 19.0, 5.2, 3.7)),
    "threshold": (2.6, 0.3, (40.8, 2.1, 7.9, 3.8)),
    "micro": (1.0, 0.08, (41.0, 0.7, 4.9, 3.6)),
    "micro_published": (0.85, 0.12, (41.0, 0.7, 4.8, 3.6)),
    "micro_repaired": (1.0, 0.1, (41.0, 0.7, 4.9, 3.6)),
}
TASKS = {  # model, data set, and the measures of an epoch in which a run got so far, from 0 to 1
    "images": ("resnet18", "cifar10", lambda share: {"test_loss": 1 - share, "accuracy": share}),
    "text": ("lstm", "wikitext2", lambda share: {"test_loss": 9 - 5 * share, "perplexity": math.exp(9 - 5 * share)}),
    "interactions": ("neumf", "latent", lambda share: {"hit_rate": 0.7 * share, "ndcg": 0.4 * share}),
}


def write_run(
    root: Path,
    sparsifier: str,
    seed: int = 0,
    *,
    density: float = 0.01,
    epochs: int = 3,
    per_epoch: int = 20,
    lr: float = 0.1,
    task: str = "images",
    world_size: int = 8,
) -> Path:
    """Write the folder of a finished run and return it."""
    name = f"{sparsifier}-d{density:g}-n{world_size}-s{seed}-e{epochs}-lr{lr:g}-{task}"
    folder, (model, dataset, measures) = root / name, TASKS[task]
    folder.mkdir(parents=True)
    config = {
        "model": {"name": model},
        "dataset": {"name": dataset},
        "sparsifier": {"name": sparsifier, "selector": {"rule": RULES.get(sparsifier)}},
        "cluster": {"name": "local", "world_size": world_size},
        "density": density,
        "seed": seed,
        "epochs": epochs,
        "batch_size": 32,
        "lr": lr,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    randomness = np.random.default_rng([seed, list(TRAITS).index(sparsifier)])
    steps = _steps(randomness, sparsifier, density, epochs * per_epoch, per_epoch, sends=world_size > 1)
    ends, best = steps[per_epoch - 1 :: per_epoch], 0.93 - 0.01 * list(TRAITS).index(sparsifier)
    shares = [best * (1 - 0.8 * math.exp(-5 * (e + 1) / epochs)) + 0.008 * randomness.normal() for e in range(epochs)]
    rows = [
        {"epoch": epoch, "step": last["step"] + 1, "time_s": last["time_s"], "num_samples": 10_000, **measures(share)}
        for epoch, (last, share) in enumerate(zip(ends, shares, strict=True))
    ]
    write_rows(folder / "steps.jsonl", steps)
    write_rows(folder / "epochs.jsonl", rows)
    return finished(RunFolder(folder)).path


def _steps(
    randomness: np.random.Generator, sparsifier: str, density: float, num_steps: int, per_epoch: int, *, sends: bool
) -> list[Row]:
    build_up, scatter, stages = TRAITS[sparsifier]
    rows, clock, target = [], 0.0, 1.0 if sparsifier == "dense" else density
    for step in range(num_steps):
        settle = 1 + 2.5 * math.exp(-step / (0.05 * num_steps)) * (scatter > 0.05)
        drawn = target * build_up * settle * math.exp(scatter * randomness.normal())
        measured = min(1.0, round(NUMEL * drawn) / NUMEL)
        seconds = [1e-3 * ms * (1 + 0.1 * abs(randomness.normal()) + 3 * (step == 0)) for ms in stages]
        clock += sum(seconds)
        rows.append(
            {
                "step": step,
                "epoch": step // per_epoch,
                "loss": 2.3,
                "rule": RULES.get(sparsifier),
                "target_density": target,
                "density": measured,
                "density_error": abs(measured / target - 1),
                "build_up": build_up,
                "imbalance": 0.2,
                "num_collectives": 2,
                "threshold": 0.02 * (1 - math.exp(-(step + 1) / 20)) if sparsifier in RULES else None,
                "bytes_sent": int(8 * NUMEL * measured) * sends,
                **dict(zip(STAGES, seconds, strict=True)),
                "step_s": sum(seconds),
                "time_s": clock,
                "skipped": False,
            }
        )
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a record; of a finished run, DONE too."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = RunFolder(path.parent)
    if folder.is_done():
        finished(folder)


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a record."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def change_config(folder: Path, **changes: Any) -> None:
    """Give a finished run other settings."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    finished(RunFolder(folder))
