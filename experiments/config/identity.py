"""The identity of a run: its name, which is a hash of all settings but the neutral ones."""

import dataclasses
import hashlib
import json

from experiments.config.schema import TrainConfig

NEUTRAL = frozenset(  # settings of where and how a run is carried out; they do not change its result
    {
        *("output", "dataset.root", "cluster.rdzv_endpoint", "cluster.max_restarts", "cluster.slurm"),
        *("cluster.num_threads", "cluster.timeout_s"),
        *("checkpoint", "save_weights", "tracking", "measure_residual_every", "from_"),
        "scale",  # the values that it chooses are in the hash themselves
    }
)


ADDED = {"optimizer.clip_norm": "rank"}
"""Settings that are newer than runs that are kept. With these values, which those had, they are not in the hash."""


def is_neutral(key: str) -> bool:
    """Return whether a dotted key is a neutral setting, or part of one."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in NEUTRAL for length in range(1, len(parts) + 1))


def run_name(config: TrainConfig) -> str:
    """Return the run's folder name: readable, and ending in a hash of all settings but the neutral ones."""
    plain = dataclasses.asdict(config)
    for path in [*NEUTRAL, *ADDED]:
        *groups, key = path.split(".")
        holder = plain
        for group in groups:
            holder = holder[group]
        if path in NEUTRAL or holder[key] == ADDED[path]:
            del holder[key]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
    method = f"{config.sparsifier.name}-d{config.density:g}"
    return f"{config.model.name}-{config.dataset.name}-{method}-w{config.world_size}-s{config.seed}-{digest}"
