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
RULES = {"micro": "agreed", "micro_published": "published"}
STAGES = ("compute_s", "select_s", "exchange_s", "rest_s")
# build-up, scatter of the density, and milliseconds of STAGES
TRAITS: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "dense": (1.0, 0.0, (41.0, 0.0, 62.0, 3.1)),
    "topk": (5.8, 0.02, (41.2, 18.5, 11.3, 4.0)),
    "cltk": (1.0, 0.0, (41.1, 19.0, 5.2, 3.7)),
    "threshold": (2.6, 0.3, (40.8, 2.1, 7.9, 3.8)),
    "micro": (1.0, 0.08, (41.0, 0.7, 4.9, 3.6)),
    "micro_published": (0.85, 0.12, (41.0, 0.7, 4.8, 3.6)),
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
    task: str = "images",
    world_size: int = 8,
) -> Path:
    """Write the folder of a finished run and return it."""
    folder, (model, dataset, measures) = root / f"{sparsifier}-d{density:g}-n{world_size}-s{seed}-{task}", TASKS[task]
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
        "lr": 0.1,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    randomness = np.random.default_rng([seed, list(TRAITS).index(sparsifier)])
    target = 1.0 if sparsifier == "dense" else density
    steps, time_s = [], 0.0
    for step in range(epochs * per_epoch):
        row = _step(randomness, sparsifier, target, sends=world_size > 1)
        time_s += row["step_s"]
        steps.append({"step": step, "epoch": step // per_epoch, "time_s": time_s, **row})
    best, rows = 0.93 - 0.01 * list(TRAITS).index(sparsifier), []
    for epoch, last in enumerate(steps[per_epoch - 1 :: per_epoch]):
        share = best * (1 - 0.8 * math.exp(-5 * (epoch + 1) / epochs)) + 0.008 * randomness.normal()
        row = {"epoch": epoch, "step": last["step"] + 1, "time_s": last["time_s"], "num_samples": 10_000}
        rows.append({**row, **measures(share)})
    write_rows(folder / "steps.jsonl", steps)
    write_rows(folder / "epochs.jsonl", rows)
    return finished(RunFolder(folder)).path


def _step(randomness: np.random.Generator, sparsifier: str, target: float, *, sends: bool) -> Row:
    build_up, scatter, stages = TRAITS[sparsifier]
    density = min(1.0, round(NUMEL * target * build_up * math.exp(scatter * randomness.normal())) / NUMEL)
    seconds = [1e-3 * ms * (1 + 0.1 * abs(randomness.normal())) for ms in stages]
    return {
        "loss": 2.3,
        "rule": RULES.get(sparsifier),
        "target_density": target,
        "density": density,
        "density_error": abs(density / target - 1),
        "build_up": build_up,
        "imbalance": 0.2,
        "num_collectives": 2,
        "threshold": 0.02 if sparsifier in RULES else None,
        "bytes_sent": int(8 * NUMEL * density) * sends,
        **dict(zip(STAGES, seconds, strict=True)),
        "step_s": sum(seconds),
        "skipped": False,
    }


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
